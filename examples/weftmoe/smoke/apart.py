"""Makes a smoke's model in a process of its own, which has ended when the model is there.

The rank that asks for it goes on to start an engine and a trainer. A warm-up in its own process would leave there a
CUDA context and cached memory, beside which the engine measures what is free, and a part of torch's cuDNN: where the
system has another one, TransformerEngine, whose library asks the loader for all parts by name, then gets some of each
and cannot be loaded.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weftmoe.schema import Smoke
from weftmoe.smoke.note import Warmup, read_note
from weftpub_demo.peer import ReceiverProcess

__all__ = ["make_model_apart"]

# Between two words of the maker. The first one comes when torch is loaded, the others after each step.
_SILENT_S = 600.0
_COMMAND = (sys.executable, "-m", "weftmoe.smoke.maker")


def make_model_apart(
    directory: Path,
    smoke: Smoke,
    *,
    seed: int,
    tokens: int,
    device: str,
    architecture: str = "Qwen3MoeForCausalLM",
    progress: Callable[[int, int], None] = lambda done, total: None,
    silent_s: float = _SILENT_S,
) -> Warmup:
    """As `weftmoe.smoke.model.make_model`, with the same bytes, which see; or take what an earlier start made there.

    Args:
        silent_s: seconds without a word after which the process is taken for hung.

    Raises:
        PeerError: the process died or failed; with its reason, and its last words, which are all in DIRECTORY.log.
        DeadlineError: it was silent for too long.
    """
    found = read_note(directory, smoke, seed=seed, tokens=tokens, architecture=architecture)
    if found is not None:
        return found
    # What the warm-up's bits depend on, as it is set here.
    import torch

    def heard(word: Mapping[str, Any]) -> None:
        if "done" in word:
            progress(word["done"], word["total"])

    log = directory.with_suffix(".log")
    with ReceiverProcess("the maker of the smoke's model", _COMMAND, log=log, environment=_environment()) as maker:
        made = maker.call(
            "make",
            limit_s=silent_s,
            progress=heard,
            directory=str(directory),
            smoke=smoke.model_dump(mode="json"),
            seed=seed,
            tokens=tokens,
            device=device,
            architecture=architecture,
            threads=torch.get_num_threads(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return Warmup(**made)


def _environment() -> dict[str, str]:
    """This process's, and where it found its packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(entry for entry in sys.path if entry))}
