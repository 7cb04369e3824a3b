"""What a run starts from: a checkpoint directory, prompts, and, for the smoke mode, both made on the spot."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weftmoe.data import read_prompts, write_arithmetic
from weftmoe.data.prompts import MADE, PromptSet, names_a_path
from weftmoe.schema import Settings
from weftmoe.smoke import make_model_apart
from weftpub.errors import ConfigError

__all__ = ["MADE", "Inputs", "await_file", "find_inputs"]

_VISIBLE_S = 120.0  # a shared disk may show a new file as late as its clients' caches allow, a minute by default
_LOOK_S = 0.2


@dataclass(frozen=True)
class Inputs:
    """Where a run's inputs lie.

    Attributes:
        model: checkpoint directory.
        hf_config: its config.json.
        prompts: the data set, for whom it was read.
        notes: what was made or found out, in words.
    """

    model: Path
    hf_config: dict[str, Any]
    prompts: PromptSet | None
    notes: tuple[str, ...]


def find_inputs(
    settings: Settings,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    prompts: bool = True,
) -> Inputs:
    """Find, download or make the inputs; called by rank 0 first, the others find what it has found or made.

    Args:
        settings: the run's. A smoke run makes the model and data whose path is "made".
        device: where a made model is warmed up.
        progress: of the warm-up: finished and planned steps.
        prompts: whether to read them: millions of rows, and only rank 0 draws.

    Raises:
        ConfigError: the checkpoint is of another architecture than the settings say, or not to be found.
        PeerError, DeadlineError: a model could not be made.
    """
    notes: list[str] = []
    smoke = settings.smoke
    if smoke.enabled and settings.model.path == MADE:
        model = settings.out / "model"
        warmup = make_model_apart(
            model,
            smoke,
            seed=settings.seed,
            tokens=settings.length.context,
            device=device.type,
            architecture=settings.model.architecture,
            progress=progress,
        )
        notes.append(
            f"warm-up: {warmup.steps} supervised steps, {warmup.seconds:.0f} s, probability of a right answer "
            f"{warmup.probability:.3f}"
        )
    else:
        model = _directory(settings.model.path)
    hf_config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = (hf_config.get("architectures") or [None])[0]
    if found != settings.model.architecture:
        raise ConfigError(
            f"{model}: architectures[0] is {found!r}, model.architecture is {settings.model.architecture!r}; choose "
            "the configuration of this model"
        )
    found_prompts = _prompts(settings) if prompts else None
    notes += [str(found_prompts)] if prompts else []
    return Inputs(model, hf_config, found_prompts, tuple(notes))


def _prompts(settings: Settings) -> PromptSet:
    smoke = settings.smoke
    if smoke.enabled and settings.data.path == MADE:
        data = settings.out / f"arithmetic-{settings.seed}-{smoke.problems}-{smoke.digits}.jsonl"
        if not data.is_file():
            write_arithmetic(data, smoke.problems, seed=settings.seed, digits=smoke.digits)
        return read_prompts(data)
    path = settings.data.path
    return read_prompts(path if names_a_path(path) else f"{path}:{settings.data.split}")


def await_file(path: Path, seconds: float = _VISIBLE_S) -> None:
    """Return once a file that rank 0 has seen, or made, is to be seen here; ConfigError if it never is."""
    until = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() >= until:
            raise ConfigError(
                f"{path}: rank 0 has it, and this rank does not see it after {seconds:g} s; --out has to lie on a disk "
                "that all nodes share"
            )
        time.sleep(_LOOK_S)


def _directory(path: str) -> Path:
    """A checkpoint directory, or the local snapshot of a repository."""
    local = Path(path)
    if (local / "config.json").is_file():
        return local
    if local.exists():
        raise ConfigError(f"model.path={path} holds no config.json; give a Hugging Face checkpoint directory")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"model.path={path!r} is no directory, and cannot be downloaded: {error}") from error
