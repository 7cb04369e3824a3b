"""Section `publish` of eight_gpus.py: the trainer's experts and dense weights into SGLang engines on the same GPUs.

Rank 0 starts the engine, as a colocated training loop does; every rank publishes what it holds. Each engine gets one
whole colocated step with sha256 of every tensor, then timed publishes whose phases stand beside what the moves of the
plan cost at the speed of this machine's copies and links.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from eight_gpus_config import hf_config
from eight_gpus_limits import Limits, least_ms, measure_limits, traffic_of
from eight_gpus_ranks import RankReport, broadcast, meet
from eight_gpus_trainer import batch, build
from engine_settings import ENGINE
from megatron_adapter import DEVICE, Trainer, clean

from weftpub.channel import Deadlines
from weftpub.publisher import Publisher, PublishReport, TorchGroup

__all__ = ["section_publish"]

GPU = DEVICE.type == "cuda"
WAITS = Deadlines.all(60.0)
# What torchrun tells its workers, and what trainers alone want: an engine that finds it joins them, or crawls.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "ROLE_", "GROUP_", "TORCHELASTIC_", "CUDA_DEVICE_MAX_")
_SAMPLING = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}


class Source:
    """The trainer, and where its tensors lie."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from weftpub_adapters.awex import SourceMapping, trainer_shards

        self.hf_config = hf_config(settings)
        self.trainer: Trainer = build(settings, "muon", "fp8")
        self._settings = settings
        self._steps = 0
        # While its weights are resident: an offloaded parameter has no memory to be viewed.
        self.shards = trainer_shards(self._model, self.store, self.hf_config)
        self._mapping = SourceMapping(self._model, self.store, self.hf_config)

    @property
    def _model(self) -> Any:
        return self.trainer.ddp.module.module

    @property
    def store(self) -> Any:
        return self.trainer.attachment.store

    def step(self) -> None:
        """One update: the store holds the next generation."""
        self._steps += 1
        self.trainer.train(batch(self._settings, self._steps))

    @contextlib.contextmanager
    def sources(self, *, in_place: bool) -> Iterator[tuple[Any, dict[str, int]]]:
        """What this rank publishes, and the checksums that the quantizer made."""
        with self.trainer.attachment.reading("publish"):
            yield self._mapping.buffers(in_place=in_place, keep=in_place), dict(self.store.checksums)

    def offload(self) -> None:
        """Give the GPUs to the engine. On a CPU a publish reads through numpy, which fixes the size of a storage."""
        if GPU:
            self._mapping.release()
            self.trainer.attachment.offload()
            clean()

    def reload(self) -> None:
        if GPU:
            self.trainer.attachment.reload()


def section_publish(report: RankReport, settings: dict[str, Any]) -> None:
    """Every layout in turn."""
    settings = {**settings, "shape": {**settings["shape"], "layers": settings["publish_layers"]}}
    rank, out = torch.distributed.get_rank(), Path(settings["out"])
    making = make_model_directory(out, hf_config(settings)) if rank == 0 else None
    limits = measure_limits()
    report.note("limits", limits.as_dict())
    source = Source(settings)
    report.say(f"trainer built, {len(source.store.layout.matrices)} expert matrices here")
    if making is not None and making.wait(180):
        raise RuntimeError(f"the engine's model directory could not be written: status {making.returncode}")
    source.offload()
    for layout in settings["layouts"]:
        began = time.monotonic()
        into_engine(report, settings, source, limits, layout)
        report.note(f"{layout}_seconds", round(time.monotonic() - began, 1))


def into_engine(report: RankReport, settings: dict[str, Any], source: Source, limits: Limits, layout: str) -> None:
    """One engine: a colocated step that is checked, then timed publishes."""
    from weftpub_adapters.awex import build_plan, engine_shards
    from weftpub_adapters.sglang.driver import ColocatedEngine, DriverDeadlines, free_bytes

    rank, out = torch.distributed.get_rank(), Path(settings["out"])
    run, deadlines = f"eight-gpus-{layout}", DriverDeadlines(start=120, drain=60, flush=30, control=60)
    began = time.monotonic()
    engine = start_engine(settings, layout, deadlines) if rank == 0 else None
    with contextlib.ExitStack() as stack:
        peers: Any = None
        if engine is not None:
            stack.callback(engine.shutdown)
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wp8-"))  # a socket's path has 107 bytes
            peers = engine.start_receivers(run, folder)
            report.say(f"{layout}: engine up, receivers of {len(peers)} workers, {time.monotonic() - began:.1f} s")
        peers = broadcast(peers)
        group, commit = TorchGroup(run_id=run), out / f"commit-{layout}.json"
        if rank == 0:
            commit.unlink(missing_ok=True)
        publisher = stack.enter_context(Publisher(run, None, peers, commit_path=commit, group=group, deadlines=WAITS))
        step = ColocatedEngine(engine, publisher, group=group, deadlines=deadlines, measure=free_bytes)
        step.drain()
        began = time.monotonic()
        plan = build_plan(source.shards, engine_shards(publisher.describe()))
        publisher.set_plan(plan)
        traffic = traffic_of(plan)
        report.note(f"{layout}_traffic", {"plan_s": round(time.monotonic() - began, 2), **traffic.as_dict()})
        checked_step(report, source, step, layout)
        last = timed_publishes(report, source, step, layout, settings["cycles"], least_ms(traffic, limits))
        publisher.release_sources()
        source.offload()
        step.resume()
        step.continue_()
        if engine is not None:
            version = engine.weight_version()
            report.check(f"{layout}/the engine reports the last version", version == str(last), version)
            if GPU or layout == "tp":  # what a CPU has for attention cannot be data parallel
                answers(report, engine, layout)
        meet()


def checked_step(report: RankReport, source: Source, step: Any, layout: str) -> None:
    """Release, train, publish; sha256 of every tensor as served against those that this rank computes with."""
    step.release()
    source.reload()
    source.step()
    own = source.store.sha256()
    with source.sources(in_place=False) as (sources, checksums):
        published: PublishReport = step.publish(1, sources, checksums, verify_sha256=True)
    # Tensors whole on one engine rank keep their names; all others are compared piece by piece by the publisher.
    differing = [name for name, digest in own.items() if published.sha256.get(name) != digest]
    detail = f"{len(own)} expert tensors of this rank, {len(published.sha256)} pieces of all" + (
        f"; {differing[:3]} differ" if differing else ""
    )
    report.check(f"{layout}/served sha256 is this rank's", not differing and bool(own), detail)
    report.check(f"{layout}/every worker committed", outcomes(published) == {"committed"}, sorted(outcomes(published)))
    if GPU:
        kinds = set(published.transports.values())
        report.check(
            f"{layout}/no byte passes through the host", kinds == {"cuda_ipc"}, published.reasons or sorted(kinds)
        )
    report.note(f"{layout}_transports", {**published.transports, **published.reasons})
    report.note(f"{layout}_first_ms", {**published.ms, **{f"driver {call}": ms for call, ms in step.ms.items()}})


def timed_publishes(
    report: RankReport, source: Source, step: Any, layout: str, cycles: int, least: dict[str, float]
) -> int:
    """The same bytes under new versions: packed into buffers, and shown where the trainer's memory lies. The last
    version."""
    version = 1
    for way in ("packed", "in place"):
        rows: list[PublishReport] = []
        for _ in range(cycles + 2):  # the first two plan, map memory and launch kernels for the first time
            version += 1
            with source.sources(in_place=way == "in place") as (sources, checksums):
                meet()
                rows.append(step.publish(version, sources, checksums))
        warm = rows[2:]
        phases = {phase: statistics.median(row.ms.get(phase, 0.0) for row in warm) for phase in warm[0].ms}
        # Phases are rank 0's own; what is left is agreement, and waiting for ranks whose transfer takes longer.
        phases["others"] = statistics.median(2 * row.ms["total"] - sum(row.ms.values()) for row in warm)
        row = {
            "publishes": len(warm),
            "bytes": warm[0].nbytes,
            "chunks": warm[0].chunks,
            "staging_bytes": warm[0].staging_bytes,
            "ms": {phase: round(ms, 3) for phase, ms in phases.items()},
            "total_ms": [round(row.ms["total"], 2) for row in rows],
            "least_ms": {limit: round(ms, 4) for limit, ms in least.items()},
            "share_of_limits": {
                phase: {limit: round(ms / phases[phase], 4) for limit, ms in least.items()}
                for phase in ("transfer", "total")
            },
        }
        report.note(f"{layout}_{way.replace(' ', '_')}", row)
        if torch.distributed.get_rank() == 0:
            report.say(f"{layout}, {way}: {json.dumps(row)}")
        states = set().union(*map(outcomes, rows))
        report.check(f"{layout}/{way}: every publish was committed", states == {"committed"}, sorted(states))
    return version


def outcomes(published: PublishReport) -> set[str]:
    """States in which engines came out; a failed one by its error."""
    return {outcome.error or outcome.state for outcome in published.engines.values()}


def answers(report: RankReport, engine: Any, layout: str) -> None:
    """Requests enough for every attention group, answered from the last version."""
    prompts = [[3, 5, 7, number + 1] for number in range(2 * torch.distributed.get_world_size())]
    began = time.monotonic()
    found = engine.generate(prompts, _SAMPLING, seconds=240.0)
    versions = {span.version for answer in found for span in answer.versions}
    whole = all(len(answer.tokens) == _SAMPLING["max_new_tokens"] for answer in found)
    last = whole and versions == {engine.weight_version()}
    detail = {"requests": len(found), "versions": sorted(versions), "seconds": round(time.monotonic() - began, 1)}
    report.check(f"{layout}/answers come from the last version", last, detail)


def start_engine(settings: dict[str, Any], layout: str, deadlines: Any) -> Any:
    """An SGLang engine over all GPUs, with attention data parallel ("dp") or tensor parallel ("tp")."""
    from weftpub_adapters.sglang.driver import LocalEngine

    world = torch.distributed.get_world_size()
    arguments: dict[str, Any] = {
        # Sums by NCCL alone: SGLang's own may go over NVLink multicast, which a host may forbid.
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "ep_size": world,
        "model_path": str(Path(settings["out"]) / "model"),
        "tp_size": world,
        **(gpu_arguments() if GPU else cpu_arguments()),
    }
    if layout == "dp":
        arguments |= {"dp_size": world, "enable_dp_attention": True}
    before = dict(os.environ)
    try:
        os.environ.update(engine_environment())
        for name in before.keys() - engine_environment().keys():
            del os.environ[name]
        return LocalEngine.start(name=f"sglang-{layout}", deadlines=deadlines, **arguments)
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpu_arguments() -> dict[str, Any]:
    """What is tried here is bytes, not generation: no graphs, and a small cache."""
    return {**ENGINE, "disable_cuda_graph": True, "max_running_requests": 64, "max_total_tokens": 16384}


def cpu_arguments() -> dict[str, Any]:
    """The engine of the tests, whose forward pass a CPU can run."""
    from cpu_engine import ENGINE as CPU_ENGINE

    return dict(CPU_ENGINE)


def engine_environment() -> dict[str, str]:
    """This process's environment without what makes it a rank of the trainer."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    if not GPU:
        from cpu_engine import environment

        kept |= environment(torch.distributed.get_world_size())
    return kept


def make_model_directory(out: Path, config: dict[str, Any]) -> "subprocess.Popen[bytes]":
    """Write the engine's model directory, in a process of its own."""
    path = out / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    module = "weftpub_adapters.sglang.driver.model_directory"
    command = [sys.executable, "-m", module, str(path), str(out / "model"), "--overwrite"]
    return subprocess.Popen(command, env=engine_environment())
