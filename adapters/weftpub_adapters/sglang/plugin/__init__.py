"""What runs inside every SGLang worker: a receiver over its live model, and the hooks that keep it from serving what
was not committed.

`register` is the entry point of group ``sglang.srt.plugins``. Importing this package imports no SGLang; no planner ever
enters a worker.
"""

from weftpub_adapters.sglang.plugin.hooks import register
from weftpub_adapters.sglang.plugin.settings import BACKEND, ReceiverSettings

__all__ = ["BACKEND", "ReceiverSettings", "register"]
