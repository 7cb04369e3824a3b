"""What a colocated run needs, by arithmetic alone: GPU memory of each phase, pinned host memory, bytes over PCIe and
bytes of a publish, from a Hugging Face config, the parallel layouts, the optimizer and the variant.

`Request` says what is asked, `make_budget` counts it, `weftpub plan` prints it. Layouts that the adapters refuse are
refused here, too, with the legal ones. Importing this package imports no torch: the command line loads it for every
command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weftpub.budget.budget import Budget, make_budget
    from weftpub.budget.counts import GIB, usable_bytes
    from weftpub.budget.memory import PHASES, Phase, Row
    from weftpub.budget.request import Engine, Limits, Request, Rule, Trainer, Variant
    from weftpub.budget.shape import Group, LinearAttention, ModelShape, known_models, load_shape
    from weftpub.budget.traffic import Flow

__all__ = [
    "GIB",
    "PHASES",
    "Budget",
    "Engine",
    "Flow",
    "Group",
    "Limits",
    "LinearAttention",
    "ModelShape",
    "Phase",
    "Request",
    "Row",
    "Rule",
    "Trainer",
    "Variant",
    "known_models",
    "load_shape",
    "make_budget",
    "usable_bytes",
]


_HOMES = ("budget", "counts", "memory", "request", "shape", "traffic")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = import_module(f"{__name__}.{home}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
