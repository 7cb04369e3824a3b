"""The adapter on a real Megatron trainer: DistributedDataParallel, Megatron's optimizers, TransformerEngine.

`prepare` before the model is wrapped, `attach` after its optimizer is built, `Attachment.close` to leave. Importing
this package does not
import Megatron.
"""

from typing import TYPE_CHECKING, Any

from weftpub_adapters.megatron.attached.dispatchers import DISPATCHERS, check_dispatcher
from weftpub_adapters.megatron.attached.prepare import Prepared, prepare
from weftpub_adapters.megatron.attached.variants import AttachSettings, ScaleRule, Variant

if TYPE_CHECKING:
    from weftpub_adapters.megatron.attached.attachment import Attachment, StepSummary, attach

__all__ = [
    "DISPATCHERS",
    "AttachSettings",
    "Attachment",
    "Prepared",
    "ScaleRule",
    "StepSummary",
    "Variant",
    "attach",
    "check_dispatcher",
    "prepare",
]

_LAZY = ("Attachment", "StepSummary", "attach")


def __getattr__(name: str) -> Any:
    # The submodule `attach` would shadow the function of the same name on the package.
    if name in _LAZY:
        from weftpub_adapters.megatron.attached import attachment

        return getattr(attachment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
