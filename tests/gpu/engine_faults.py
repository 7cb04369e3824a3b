"""A plugin for engines under test: a worker raises in the middle of a publish while a file exists."""

import os
from pathlib import Path

__all__ = ["register"]


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    path = os.environ.get("WEFTPUB_TEST_RAISE", "")
    if not path:
        return
    from weftpub_adapters.sglang.plugin.live import LiveEngine

    original = LiveEngine.post_process

    def post_process(self: LiveEngine) -> None:
        if Path(path).exists():
            raise RuntimeError("asked to raise, as a rank of an engine")
        original(self)

    LiveEngine.post_process = post_process  # type: ignore[method-assign]
