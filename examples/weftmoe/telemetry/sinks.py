"""TensorBoard and Weights & Biases, where they are installed; a run needs neither.

A resumed run makes again what was made after its checkpoint. TensorBoard is told to forget those steps. Weights &
Biases goes on with the run that the first start began, and knows no such thing: it keeps what it was told first of a
step.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from weftmoe.telemetry.record import RunHeader, StepRecord
from weftpub.errors import ConfigError

__all__ = ["Sink", "Sinks", "WandbMode", "open_sinks"]

WandbMode = Literal["off", "offline", "online"]
_WANDB_ID = "weftmoe-run-id"


class Sink(Protocol):
    """Takes the numbers of each step."""

    def write(self, record: StepRecord) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        with self._named():
            self._writer = SummaryWriter(str(directory), purge_step=first_step)

    def write(self, record: StepRecord) -> None:
        with self._named():
            for name, value in record.scalars():
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        with self._named():
            self._writer.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """TensorBoard's thread passes errors on, which do not say where they come from."""
        try:
            yield
        except OSError as error:
            if error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(self._directory)) from None


class _Wandb:
    def __init__(self, directory: Path, header: RunHeader, mode: WandbMode, project: str, name: str | None) -> None:
        import wandb

        identity = _wandb_identity(directory / "wandb" / _WANDB_ID, header)
        self._run = wandb.init(
            project=project,
            id=identity,
            resume="allow",
            name=f"{header.variant}-{header.seed}-{identity}" if name is None else name,
            dir=str(directory),
            mode=mode,
            config=header.settings,
            allow_val_change=True,  # a resumed run may have more steps
        )

    def write(self, record: StepRecord) -> None:
        self._run.log(dict(record.scalars()), step=record.step)

    def close(self) -> None:
        self._run.finish()


def _wandb_identity(path: Path, header: RunHeader) -> str:
    """Of the first start, kept beside what Weights & Biases writes: where that is set aside, the identity goes along. A
    start that resumes nothing begins a run of its own.
    """
    if header.resumed_from is not None and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(header.run_id + "\n", encoding="utf-8")
    return header.run_id


class Sinks:
    """Several sinks as one. Use it as a context manager.

    Attributes:
        missing: what was left out, and why, in words.
    """

    def __init__(self, sinks: list[Sink], missing: tuple[str, ...]) -> None:
        self._sinks = sinks
        self.missing = missing

    def write(self, record: StepRecord) -> None:
        """Give the record to all of them."""
        for sink in self._sinks:
            sink.write(record)

    def close(self) -> None:
        """Close all of them."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_sinks(
    directory: Path,
    header: RunHeader,
    *,
    tensorboard: bool = True,
    wandb: WandbMode = "off",
    project: str = "weftmoe",
    name: str | None = None,
) -> Sinks:
    """Open the wanted sinks.

    Args:
        directory: the run's; sinks get a folder each in it.
        header: of this start; steps begin after the one that it resumed from.
        tensorboard: wanted if it is installed; its absence is only noted.
        wandb: "offline" and "online" are explicit wishes.
        project, name: of Weights & Biases; by default the name is made of variant, seed and the first start's run id.

    Raises:
        ConfigError: Weights & Biases is asked for and not installed.
    """
    sinks: list[Sink] = []
    missing: list[str] = []
    if tensorboard:
        if importlib.util.find_spec("tensorboard") is not None:
            sinks.append(_TensorBoard(directory / "tensorboard", (header.resumed_from or 0) + 1))
        else:
            missing.append("TensorBoard is not installed: no event files")
    if wandb != "off":
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError(f"telemetry.wandb={wandb!r}, but wandb is not installed; install wandb or set 'off'")
        made: Any = _Wandb(directory, header, wandb, project, name)
        sinks.append(made)
    return Sinks(sinks, tuple(missing))
