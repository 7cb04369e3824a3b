"""Every error that weftpub raises on purpose.

An error names the tensor or peer, what was expected, what was found and the remedy. Errors about what a user passed in
are also ``ValueError``; deadlines are also ``TimeoutError``, so that callers who know only the standard library can
catch them.
"""

__all__ = [
    "ChannelError",
    "CheckpointError",
    "ChecksumError",
    "ConfigError",
    "DeadlineError",
    "GenerationError",
    "ManifestError",
    "NonFiniteGradientError",
    "PlanError",
    "StaleError",
    "StateError",
    "TornError",
    "TransportError",
    "WeftpubError",
]


class WeftpubError(Exception):
    """Base of all errors of this package."""


class ConfigError(WeftpubError, ValueError):
    """A setting or argument cannot work; the message names the setting that would."""


class StateError(WeftpubError, RuntimeError):
    """A move that the slot, store, channel or version protocol forbids from its present state."""


class GenerationError(StateError):
    """W, W^T and scales do not carry one sealed generation, or a matrix is missing from it."""


class StaleError(StateError):
    """A later publisher has taken over; whatever this one began is not its own any more."""


class TornError(StateError):
    """Masters, store or engine were left half-written; only a complete recovery opens them again."""


class NonFiniteGradientError(WeftpubError, ValueError):
    """A gradient holds NaN or Inf; nothing was written."""


class PlanError(WeftpubError, ValueError):
    """Two layouts cannot be joined: names, shapes, dtypes, block alignment or coverage disagree."""


class ManifestError(WeftpubError, ValueError):
    """What arrived is not what the manifest announced."""


class ChecksumError(ManifestError):
    """Bytes arrived changed."""


class TransportError(WeftpubError, RuntimeError):
    """Bytes could not be offered, opened or copied."""


class ChannelError(WeftpubError, RuntimeError):
    """A control message could not be sent, or the peer refused or misunderstood it."""


class DeadlineError(WeftpubError, TimeoutError):
    """A wait outlived its deadline; names peer, phase, elapsed and allowed seconds, and the likely cause."""


class CheckpointError(WeftpubError, OSError):
    """A checkpoint or export could not be written or read; the target is untouched."""
