"""Ranks of a small world as forked processes of one that has imported everything: what takes seconds is done once."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["fork_ranks"]


def fork_ranks(name: str, world: int, work: Callable[[int], dict[str, Any]], folder: Path) -> bool:
    """Run ``work(rank)`` for every rank and wait for all; ``folder/NAME.RANK.json`` holds what each returned.

    Returns:
        whether all of them ended well; what one raised is on its standard error.
    """
    children: list[int] = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            try:
                (folder / f"{name}.{rank}.json").write_text(json.dumps(work(rank)), encoding="utf-8")
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) for child in children) == 0
