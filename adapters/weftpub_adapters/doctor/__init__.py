"""The doctor: whether trainer, engine and publish would work on this machine, and what to change.

`facts` looks, `rules` and `environment` judge, `command` is `weftpub doctor`. Versions are judged by each adapter's own
table; nothing foreign is imported, only asked for its version. Importing this package imports no torch: the command
line loads it for every command.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weftpub_adapters.doctor.findings import Finding, Level, worst

if TYPE_CHECKING:
    from weftpub_adapters.doctor.facts import Facts, Gpu, gather
    from weftpub_adapters.doctor.rules import Wanted, judge

__all__ = ["Facts", "Finding", "Gpu", "Level", "Wanted", "gather", "judge", "worst"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in ("facts", "rules"):
            module = import_module(f"{__name__}.{home}")
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
