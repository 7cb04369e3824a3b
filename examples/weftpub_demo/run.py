"""One run of the demo: train, lose the engine's memory, publish, check, and again; then the report.

This process is the trainer and the driver. Per step:

    receivers   drop their weight memory, make it anew and fill it with NaN        (while the trainer computes)
    trainer     forward, backward, staged step: the next generation is in the store
    publish     into the receivers' live parameters; committed on both, or on none
    checks      no poison left, the same bytes on both sides, one layer computed by both, both serve the version
"""

import platform
import time
import traceback
import uuid
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from weftpub.errors import ConfigError, WeftpubError
from weftpub.store import check_preset
from weftpub_demo import cpu_megatron
from weftpub_demo.checkpoint import read_shape, write_checkpoint
from weftpub_demo.checks import CheckBook
from weftpub_demo.config import DemoConfig, Device, ModelShape, Variant, require_packages, shipped_text
from weftpub_demo.corpus import ByteCorpus
from weftpub_demo.job import Job
from weftpub_demo.peer import explain
from weftpub_demo.probe import compare, probe_request, probe_tokens
from weftpub_demo.progress import Progress
from weftpub_demo.receivers import Receivers, start_receivers
from weftpub_demo.report import Report, StepRecord, draw, write_report
from weftpub_kernels import KernelError

__all__ = ["run"]

_PACKAGES = ("weftpub", "torch", "triton", "megatron-core", "sglang", "awex", "transformers", "safetensors")


class _Record:
    """What is known about the run so far."""

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        self.run_id = f"demo-{uuid.uuid4().hex[:12]}"
        self.started = datetime.now(UTC)
        self.clock = time.monotonic()
        self.book = CheckBook()
        self.steps: list[StepRecord] = []
        self.shape: ModelShape | None = None
        self.device = "cpu"
        self.committed = 0

    def report(self, error: str | None) -> Report:
        checks = self.book.total
        result = (
            f"DEMO OK version={self.committed} checks={checks}"
            if error is None
            else f"DEMO FAILED after version {self.committed}: {error.splitlines()[0]}"
        )
        return Report(
            ok=error is None,
            result=result,
            error=error,
            run_id=self.run_id,
            started=self.started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self.clock, 3),
            settings=self.config.plain() | {"computes_on": self.device},
            model={} if self.shape is None else asdict(self.shape),
            versions=_versions(),
            checks=self.book.listing(),
            committed_version=self.committed,
            steps=tuple(self.steps),
        )


def run(config: DemoConfig, progress: Progress) -> Report:
    """Run the whole demo and write its report; a run that fails is reported too, with its reason.

    Every receiver process that was started has ended when this returns or raises.

    Raises:
        ConfigError, KernelError: what is asked for cannot be run here. Nothing was started, and the report of an
            earlier run is still there.
    """
    record = _Record(config)
    corpus = _prepare(record)
    error: str | None = None
    try:
        with ExitStack() as stack:
            _steps(record, corpus, progress, stack)
    except Exception as caught:  # whatever ended the run, the report and the last line must say so
        if not isinstance(caught, WeftpubError | KernelError):
            traceback.print_exc()
        error = f"{type(caught).__name__}: {caught}"
    report = record.report(error)
    write_report(report, config.out)
    draw(report, config.out / "report.png")
    return report


def _prepare(record: _Record) -> ByteCorpus:
    """Find out now what would fail after the minute that the systems take to load."""
    config = record.config
    require_packages(config.variant, config.optimizer)
    record.device = _device(config.device)
    if config.variant is Variant.FP8:
        check_preset(config.preset, torch.device(record.device))
    record.shape = config.shape if config.model is None else read_shape(config.model)
    text = shipped_text() if config.text is None else config.text.read_bytes()
    corpus = ByteCorpus(text, batch=config.batch, sequence=config.sequence, seed=config.seed)
    try:
        config.work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {config.out}: {config.work} cannot be made: {error.strerror}; give another one"
        ) from None
    return corpus


def _steps(record: _Record, corpus: ByteCorpus, progress: Progress, stack: ExitStack) -> None:
    config, book, device = record.config, record.book, record.device
    model = config.model
    if model is None:
        progress.phase("writing a Qwen3-MoE checkpoint")
        model = write_checkpoint(config.work / "model", config.shape, seed=config.seed)
    shape = read_shape(model)
    receivers = stack.enter_context(
        start_receivers(
            model,
            format="fp8" if config.variant is Variant.FP8 else "bf16",
            device=device,
            logs=config.work,
            limit_s=config.limit_s,
        )
    )
    with explain(receivers.peers) as phase:
        phase("start-up")
        progress.phase("loading the checkpoint into Megatron-core, and SGLang's layers into two receivers")
        cpu_megatron.install()
        stack.callback(_leave_process_group)
        job = _job(record, model, receivers, progress, stack)
        for step in range(1, config.steps + 1):
            phase(f"step {step}")
            progress.phase(f"step {step}: training")
            receivers.require_alive(f"step {step}")
            job.pause()
            offloaded = receivers.ask("offload")
            tokens, labels = corpus.next()
            start = time.perf_counter()
            loss = job.train(tokens, labels)
            trained = time.perf_counter()
            job.update()
            updated = time.perf_counter()
            receivers.require_offloaded(offloaded(), book)
            phase(f"publish of version {step}")
            progress.phase(f"step {step}: publishing version {step}")
            receivers.require_alive(f"publish of version {step}")
            published = job.publish(step)
            record.committed = step
            phase(f"checks of version {step}")
            progress.phase(f"step {step}: checking version {step}")
            receivers.require_served(step, book)
            layer = (step - 1) % shape.layers
            hidden = probe_tokens(shape.hidden, config.seed + step)
            probe = job.probe(layer, hidden)
            compare(layer, probe, receivers.call("probe", **probe_request(layer, hidden, probe)), book)
            record.steps.append(
                StepRecord(
                    step=step,
                    loss=loss,
                    changed=published.changed,
                    publish_ms=published.ms,
                    version=step,
                    sha256=published.sha256,
                    train_ms=(trained - start) * 1e3,
                    update_ms=(updated - trained) * 1e3,
                    phases_ms=dict(published.phases_ms),
                    bytes=published.nbytes,
                    transport=published.transport,
                )
            )
            progress.step(record.steps[-1])


def _job(record: _Record, model: Path, receivers: Receivers, progress: Progress, stack: ExitStack) -> Job:
    # Each brings in what only it needs: the baseline runs without the planner, the others without Megatron's optimizer.
    if record.config.variant is Variant.BASELINE:
        from weftpub_demo.baseline import BaselineJob

        return BaselineJob(record.config, model, receivers)
    from weftpub_demo.published import PublishedJob

    return PublishedJob(record.config, model, receivers, record.book, record.run_id, progress, stack)


def _leave_process_group() -> None:
    # Megatron made it; left open, NCCL complains after the last line.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _device(wanted: Device) -> str:
    if wanted is Device.CPU:
        return "cpu"
    found = torch.cuda.is_available()
    if wanted is Device.CUDA and not found:
        raise ConfigError("--device cuda, but torch finds no CUDA GPU; use --device cpu")
    return "cuda" if found else "cpu"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed as a distribution"
    return found
