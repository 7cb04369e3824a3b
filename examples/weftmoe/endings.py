"""How a rank's end is told to whoever starts the run again: what another start cures, and what it would meet again.

A rank or an engine that was killed, a peer that fell silent, a lost connection: the next start goes on from the newest
checkpoint. Settings that cannot work, data that teach nothing, a full disk: the next start would end as this one did.

OUT/going stands for the first kind. It is there from the first step on, because what ends a start before that is most
likely the fault of its settings; and a rank that ends by an error of the second kind removes it, at once: its engine
takes seconds to end, and the others leave as soon as they hear of the error or lose this rank.
"""

from contextlib import suppress
from pathlib import Path

from weftmoe.rundir import EXIT_LOST, going_path
from weftpub.errors import ChannelError, DeadlineError, TransportError

__all__ = ["curable", "exit_code", "lost", "tell_ending"]

# Gloo's errors are plain RuntimeErrors, which name its files.
_GLOO = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


def curable(error: BaseException) -> bool:
    """Whether an error of a rank says that somebody else was lost."""
    if isinstance(error, DeadlineError | ChannelError | TransportError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}  # torch is loaded where such an error comes from
    return "DistError" in names or any(words in str(error) for words in _GLOO)


def tell_ending(error: BaseException, out: Path) -> None:
    """Tell the agents of all ranks of an error that another start would meet again."""
    if not curable(error):
        with suppress(OSError):  # none there, or its disk is what went wrong
            going_path(out).unlink()


def exit_code(error: BaseException, out: Path) -> int:
    """Of a rank that ends by an error: 1, or `EXIT_LOST`. Tells the other ranks' agents, too."""
    tell_ending(error, out)
    return EXIT_LOST if curable(error) else 1


def lost(code: int, out: Path) -> bool:
    """Whether another start would cure what ended a rank with this code; negative is a signal's number."""
    return (code < 0 or code == EXIT_LOST) and going_path(out).exists()
