"""Drives a serving SGLang engine through colocated steps: drain, release, publish, resume, continue.

`LocalEngine` reaches an engine of this process, `HttpEngine` a running server; `ColocatedEngine` makes the five calls
safe. Importing this package imports neither SGLang nor a planner.
"""

from weftpub_adapters.sglang.driver.colocated import ColocatedEngine, EnginePhase, EngineStanding
from weftpub_adapters.sglang.driver.handle import (
    MODES,
    Completion,
    DriverDeadlines,
    EngineHandle,
    Mode,
    TcpAccess,
    VersionSpan,
    WorkerStanding,
)
from weftpub_adapters.sglang.driver.http import HttpEngine
from weftpub_adapters.sglang.driver.local import LocalEngine, note_death
from weftpub_adapters.sglang.driver.memory import MemoryTags, TagState, free_bytes

__all__ = [
    "MODES",
    "ColocatedEngine",
    "Completion",
    "DriverDeadlines",
    "EngineHandle",
    "EnginePhase",
    "EngineStanding",
    "HttpEngine",
    "LocalEngine",
    "MemoryTags",
    "Mode",
    "TagState",
    "TcpAccess",
    "VersionSpan",
    "WorkerStanding",
    "free_bytes",
    "note_death",
]
