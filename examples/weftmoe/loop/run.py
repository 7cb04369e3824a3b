"""One run, from settings to the last step: start or resume, then colocated steps, each with its record.

Order of a start, the same for a fresh run and after a crash:

    engine     started, brought to rest, its memory released
    trainer    built; a checkpoint is read now, before communicators and engine hold memory
    publish    the version that the trainer holds: 0, or the checkpoint's step
    steps      as in `weftmoe.loop.step`; told to end, the run saves and stops, as in `weftmoe.loop.stop`
"""

import math
import os
import platform
import subprocess
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from weftmoe.data import PromptSampler
from weftmoe.endings import tell_ending
from weftmoe.loop import checkpoint
from weftmoe.loop.collect import Collected, Collector
from weftmoe.loop.engines import make_rollout
from weftmoe.loop.inputs import MADE, Inputs, await_file, find_inputs
from weftmoe.loop.memory import DeviceMemory, allocator_memory
from weftmoe.loop.model import join_world, longest_wait, prepare_process
from weftmoe.loop.prompts import encode_prompts, load_tokenizer, stop_tokens
from weftmoe.loop.ranks import Place, Ranks
from weftmoe.loop.shape import shape_of
from weftmoe.loop.step import FixedTokens, Trained, publish_version, train_step
from weftmoe.loop.stop import CutShort, Pace, StopNotice, run_until
from weftmoe.loop.trainer import MegatronGrpo, describe_settings
from weftmoe.reward import Rewarder
from weftmoe.rollout import Published, Rollout
from weftmoe.rundir import apart, forget_changes, going_path, note_stop, unsaid_changes
from weftmoe.schema import Settings
from weftmoe.telemetry import (
    Counters,
    KlByPrompt,
    PhaseProgress,
    RunHeader,
    RunLog,
    StepRecord,
    Timers,
    open_sinks,
    training_flops,
    turn_lengths,
)
from weftpub.errors import ConfigError, StateError, WeftpubError
from weftpub.plan import Shard
from weftpub.publisher.agreement import as_data, as_error

__all__ = ["RunResult", "run"]

_GIT_S = 60.0  # it looks at every file, perhaps over a network
_PACKAGES = ("weftpub", "torch", "triton", "megatron-core", "transformer-engine", "sglang", "awex", "transformers")


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        steps: finished, those of earlier starts included.
        version: what the engine serves.
        resumed_from: step of the checkpoint that this start went on from; None for a fresh one.
        reward: mean task reward of the last step; None if no step was made.
        first: whether this is rank 0.
        stopped: whether it was told to end before its last step, and is to be started again.
    """

    steps: int
    version: int
    resumed_from: int | None
    reward: float | None
    first: bool
    stopped: bool = False


def run(settings: Settings) -> RunResult:
    """Run all steps that are left; every rank calls it.

    Raises:
        WeftpubError: with what failed and what to do. The engine's processes have ended when this returns or raises.
        StateError: it was told to end, and may not save.
    """
    with StopNotice(settings.checkpoint.grace) as notice, ExitStack() as stack:
        device = prepare_process(settings)
        try:
            return _Run(settings, device, stack, notice).steps()
        except Exception as error:  # told before anything is closed, which takes an engine's end
            tell_ending(error, settings.out)
            raise


class _Run:
    """Everything that lives as long as the process."""

    def __init__(self, settings: Settings, device: torch.device, stack: ExitStack, notice: StopNotice) -> None:
        self._settings, self._device, self._ranks = settings, device, Ranks()
        self._notice, self._pace, self._stopping = notice, Pace(), False
        self._memory = DeviceMemory(device)
        self._timers = Timers(torch.cuda.synchronize if device.type == "cuda" else lambda: None, self._memory.look)
        first = _rank_of_launch() == 0
        title = f"weftmoe {settings.variant}" if settings.telemetry.name is None else settings.telemetry.name
        self._progress = stack.enter_context(
            PhaseProgress(title, settings.steps, enabled=first and settings.telemetry.progress)
        )
        self._inputs = self._make_inputs(first)
        self._path = self._find_checkpoint()
        self._tokenizer = load_tokenizer(self._inputs.model)
        self._shared = self._make_meeting(stack)
        self._rollout = self._start_engine(stack)
        self._trainer = self._build_trainer(stack)
        self._state = self._load()
        self._began = self._saved = self._state.step  # a fresh run can make its step 0 again
        self._connect()
        self._collector = self._make_collector(stack)
        self._open_telemetry(stack)
        self._fixed = FixedTokens(self._state.fixed) if self._state.fixed else None

    def steps(self) -> RunResult:
        """Make the steps that are left."""
        settings, first, last = self._settings, self._state.step, None
        resumed = first if self._path is not None else None
        if self._ranks.first:  # what is lost from here on was no fault of the settings
            going_path(settings.out).touch()
        for step in range(first + 1, settings.steps + 1):
            made = self._step(step)
            if made is None:
                self._progress.note("told to end" if self._stopping else "data.epochs has ended")
                break
            last = made
            if self._stopping:
                break
        stopped = self._stopping and self._state.step < settings.steps
        if stopped:
            self._leave_note()
        reward = None if last is None else last.reward
        return RunResult(self._state.step, self._state.step, resumed, reward, self._ranks.first, stopped)

    def _leave_note(self) -> None:
        """What the process that started the ranks looks for. They have all saved when it is there."""
        if self._settings.checkpoint.save == "off":
            raise StateError(
                f"told to end after step {self._state.step}, and checkpoint.save is 'off': nothing was saved, and the "
                "next start begins at the beginning; give it a number of steps"
            )
        if not self._settings.checkpoint.resume:
            raise StateError(
                f"told to end after step {self._state.step}, and checkpoint.resume is false: the next start would set "
                "aside what was saved and begin at the beginning; start it again with checkpoint.resume=true"
            )
        if self._ranks.first:
            note_stop(self._settings.out, self._state.step)
        self._ranks.barrier()

    # The start.

    def _make_inputs(self, first: bool) -> Inputs:
        """Rank 0 makes or downloads; the others wait for its files and find them."""
        self._progress.stage("inputs")

        def advance(done: int, total: int) -> None:
            if done == 1:
                self._progress.phase("warm-up", total)
            self._progress.advance()

        if first:
            inputs = find_inputs(self._settings, self._device, advance)
            for note in inputs.notes:
                self._progress.note(note)
        self._hold_ranks()
        if first:
            return inputs
        if self._settings.model.path == MADE:
            await_file(self._settings.out / "model" / "config.json")
        return find_inputs(self._settings, self._device, prompts=False)

    def _find_checkpoint(self) -> Path | None:
        """What rank 0 finds, all ranks read: another node may see a new file later, or none."""
        if not self._settings.checkpoint.resume:
            return None
        path: Path | None = self._ranks.broadcast(checkpoint.latest(self._settings.out))
        if path is not None:
            await_file(checkpoint.state_path(path))
        return path

    def _hold_ranks(self) -> None:
        """The first meeting of the ranks: those that a launcher started wait here for rank 0's files."""
        if torch.distributed.is_torchelastic_launched():
            join_world(self._settings, self._device)
            self._require_one_start()

    def _require_one_start(self) -> None:
        """Nodes are started one by one. What one was told otherwise it would train otherwise, and nobody would see it;
        or the others would wait for it in vain. Collective.
        """
        first: Settings = self._ranks.broadcast(self._settings)
        for rank, words in enumerate(self._ranks.gather(apart(first, self._settings))):
            if words:
                raise ConfigError(
                    f"rank {rank} was started with other settings than rank 0: {'; '.join(words)}; start run.sh on all "
                    "nodes with the same options, but for --node-rank"
                )

    def _make_meeting(self, stack: ExitStack) -> str | None:
        """Where trainer and engine of a node meet to share the experts' memory: a folder of this start alone, mode
        0700, short enough for the path of a socket. Memory that an earlier start left to a process of its own is never
        found.
        """
        if self._settings.publish.experts != "shared":
            return None
        place, folder = Place.here(self._settings.cluster.nodes), None
        if place.leads:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weftmoe-"))
        found: list[str] = self._ranks.gather(folder)
        return found[place.hosts[place.node].start]

    def _start_engine(self, stack: ExitStack) -> Rollout:
        self._progress.stage("starting the engine")
        run_id = self._ranks.broadcast(f"weftmoe-{uuid.uuid4().hex[:12]}")
        self._run_id: str = run_id
        stops = stop_tokens(self._tokenizer, self._inputs.hf_config, self._inputs.model)
        resumed = 0 if self._path is None else checkpoint.step_of(self._path)
        rollout = make_rollout(
            self._settings, self._inputs.model, self._inputs.hf_config, stops, run_id, self._shared, resumed=resumed
        )
        stack.callback(rollout.close)
        rollout.start()
        return rollout

    def _build_trainer(self, stack: ExitStack) -> MegatronGrpo:
        self._progress.stage("building the trainer")
        trainer = MegatronGrpo(
            self._settings, self._inputs.model, self._device, read_weights=self._path is None, shared=self._shared
        )
        stack.push(partial(_leave, trainer, self._ranks.world))
        return trainer

    def _load(self) -> checkpoint.LoopState:
        settings = self._settings
        self._identity = {
            "variant": settings.variant,
            "optimizer": settings.optimizer.name,
            "seed": str(settings.seed),
            "model": settings.model.name,
        }
        if self._path is None:
            return checkpoint.LoopState(0, {}, Counters(), self._identity)
        self._progress.stage(f"reading {self._path.name}")
        return checkpoint.load(self._path, self._trainer, self._identity)

    def _connect(self) -> None:
        self._progress.stage("planning")
        self._rollout.connect(self._trainer.plan, self._shards)
        self._progress.stage(f"publishing version {self._state.step}")
        published = publish_version(self._trainer, self._rollout, self._state.step, self._timers)
        if self._shared is not None:
            held = sum(self._ranks.gather(self._trainer.expert_bytes))
            in_place = self._ranks.broadcast(published.check.in_place)
            if in_place != held:
                raise ConfigError(
                    f"publish.experts='shared': {in_place} of the experts' {held} bytes lie in memory that trainer and "
                    "engine both map, the others were copied; the warnings of both say why. Set publish.experts='copy'"
                )

    def _shards(self) -> tuple[Shard, ...]:
        """What every rank of the trainer holds of each canonical tensor; collective."""
        from weftpub_adapters.awex import trainer_shards

        trainer = self._trainer
        return trainer_shards(trainer.model, trainer.attachment.store, trainer.hf_config).shards

    def _make_collector(self, stack: ExitStack) -> Collector | None:
        """Of rank 0, which draws for all ranks; collective, so that what is wrong with the prompts is raised on all."""
        made, told = None, None
        error: WeftpubError | None = None
        if self._ranks.first:
            try:
                made = self._make_collector_here(stack)
            except WeftpubError as raised:
                told, error = as_data(raised), raised
        told = self._ranks.broadcast(told)
        if error is not None:
            raise error
        if told is not None:
            raise as_error(0, told)
        return made

    def _make_collector_here(self, stack: ExitStack) -> Collector:
        settings = self._settings
        assert self._inputs.prompts is not None, "rank 0 has read them"
        encoded, left_out = encode_prompts(
            self._inputs.prompts,
            self._tokenizer,
            longest=settings.data.max_prompt_tokens,
            enable_thinking=settings.data.enable_thinking,
        )
        if left_out:
            self._progress.note(
                f"{left_out} prompts are longer than {settings.data.max_prompt_tokens} tokens: left out"
            )
        data = settings.data
        sampler = PromptSampler(
            [one.prompt for one in encoded], seed=settings.seed, epochs=data.epochs, shuffle=data.shuffle
        )
        if self._state.data:
            sampler.restore(self._state.data)
        self._sampler = sampler
        rewarder = stack.enter_context(Rewarder(workers=settings.reward.workers, seconds=settings.reward.timeout))
        by_index = {one.prompt.index: one for one in encoded}
        return Collector(settings, sampler, by_index, self._tokenizer, rewarder)

    def _open_telemetry(self, stack: ExitStack) -> None:
        settings = self._settings
        self._shape = shape_of(self._trainer.fields)
        if not self._ranks.first:
            return
        header = RunHeader(
            run_id=self._run_id,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            variant=settings.variant,
            seed=settings.seed,
            model=settings.model.name,
            resumed_from=self._state.step if self._path is not None else None,
            rollout=self._rollout.description,
            device=_device_name(self._device),
            notes=(*self._rollout.notes, *self._inputs.notes, *_dispatcher_notes(settings), *_change_notes(settings)),
            settings=describe_settings(settings),
            versions=_versions(),
        )
        telemetry = settings.telemetry
        self._log = stack.enter_context(RunLog(settings.out)) if telemetry.jsonl else None
        self._sinks = stack.enter_context(
            open_sinks(
                settings.out,
                header,
                tensorboard=telemetry.tensorboard,
                wandb=telemetry.wandb,
                project=telemetry.wandb_project,
                name=telemetry.name,
            )
        )
        for missing in self._sinks.missing:
            self._progress.note(missing)
        if self._log is not None:
            self._log.write(header)
        forget_changes(settings.out)

    # A step.

    def _step(self, step: int) -> StepRecord | None:
        settings, progress, timers = self._settings, self._progress, self._timers
        began = time.perf_counter()
        timers.take()
        served = self._state.step
        progress.phase(f"step {step}: rollout", settings.algorithm.prompts * settings.algorithm.completions)
        collected = self._collect(step)
        self._memory.look()  # the engine is at its largest; only rank 0 times it
        if isinstance(collected, CutShort):
            self._stopping = True
            progress.note(f"step {step}: told to end, and there is no time for the rest of it")
            collected = None
        if collected is None:
            self._save_step_before(step)
            return None
        self._require_version(collected, served)
        with timers.phase("drain"):
            self._rollout.drain()
            self._rollout.release()
        away = allocator_memory(self._device)
        with timers.phase("reload"):
            self._trainer.reload()
        parts = settings.algorithm.epochs * settings.algorithm.minibatches
        progress.phase(f"step {step}: training", parts)
        trained = train_step(
            settings,
            self._trainer,
            collected.sequences,
            step,
            self._ranks,
            timers,
            measure_after=step % settings.telemetry.measure_every == 0,
            advance=progress.advance,
        )
        counters = _counters(collected)
        drawn = self._ranks.broadcast(self._sampler.state() if self._ranks.first else None)
        if settings.optimizer.lr == 0.0 and self._fixed is None:
            self._fixed = FixedTokens.of(collected)
        fixed = () if self._fixed is None else self._fixed.sequences
        self._state = checkpoint.LoopState(step, drawn, self._state.total.plus(counters), self._identity, fixed)
        # Decided here by all ranks, and nowhere else: a signal reaches each of them at another moment.
        self._stopping = any(self._ranks.gather(self._notice.given))
        self._save_if_due(step)
        progress.phase(f"step {step}: publishing version {step}")
        published = publish_version(self._trainer, self._rollout, step, timers)
        digest = None if self._fixed is None else self._fixed.digest(self._rollout)
        timers.add("total", time.perf_counter() - began)
        used = self._memory.take(self._ranks)
        record = self._record(step, served, collected, counters, trained, published, away, used, digest)
        if self._ranks.first:
            if self._log is not None:
                self._log.write(record)
            self._sinks.write(record)
        progress.step(record)
        self._pace.learn(record.seconds)
        return record

    def _collect(self, step: int) -> Collected | CutShort | None:
        """The step's data, None if there is none left, or word that its rollout is not waited for. Other nodes answer
        what rank 0 asks of their engines.

        Raises:
            WeftpubError: rank 0's, on all ranks; but a rank whose engine failed raises that error itself, which says
                more than its words.
        """

        def collect() -> Collected | None:
            published = range(self._began, step)  # a version a step
            return self._collector.collect(
                step, self._rollout, self._timers, self._progress.advance, published=published
            )

        told: Collected | CutShort | dict[str, Any] | None = None
        error: BaseException | None = None
        own: BaseException | None = None
        if self._ranks.first:
            try:
                told = run_until(collect, lambda elapsed: self._pace.enough(self._notice, elapsed))
            except BaseException as raised:  # told to the others, then raised below
                told, error = as_data(raised), raised
            self._rollout.dismiss()
        else:
            own = self._rollout.attend(longest_wait(self._settings).total_seconds())
        told = self._ranks.broadcast(told)
        if error is not None:
            raise error
        if isinstance(told, dict):
            raise as_error(0, told) if own is None else own
        return told

    def _save_step_before(self, step: int) -> None:
        """End the run in a step's rollout. The engine is ended first: what it has begun would hold memory, and nobody
        waits for it. Nothing has changed since the step before, so a checkpoint is as good as one that was written
        there.
        """
        try:
            self._rollout.close()
        except WeftpubError as error:  # a step that can be saved is worth the try
            self._progress.note(f"the engine did not end: {error}")
        self._ranks.barrier()
        if self._saved != self._state.step and self._settings.checkpoint.save != "off":
            self._trainer.reload()
            self._save(step - 1)

    def _require_version(self, collected: Collected, served: int) -> None:
        if collected.versions != {served}:
            raise StateError(
                f"completions came from versions {sorted(collected.versions)}, the engine should serve {served} alone; "
                "was another publisher at work?"
            )

    def _save_if_due(self, step: int) -> None:
        every = self._settings.checkpoint.save
        if every == "off" or (step % every and step != self._settings.steps and not self._stopping):
            return
        self._save(step)

    def _save(self, step: int) -> None:
        self._progress.phase(f"step {step}: saving")
        with self._timers.phase("save"):
            checkpoint.save(self._settings.out, self._trainer, self._state, self._ranks)
            if self._ranks.first:
                checkpoint.delete_old(self._settings.out, self._settings.checkpoint.keep)
        self._saved = step

    def _record(
        self,
        step: int,
        served: int,
        collected: Collected,
        counters: Counters,
        trained: Trained,
        published: Published,
        away: dict[str, int],
        used: dict[str, int],
        digest: str | None,
    ) -> StepRecord:
        seconds = self._timers.take()
        rewards, lengths = collected.rewards, collected.completion_lengths
        mean = math.fsum(rewards) / len(rewards)
        whole = [len(sequence.tokens) for sequence in collected.sequences]
        flops = training_flops(self._shape, whole) * self._settings.algorithm.epochs
        now = allocator_memory(self._device) | used
        return StepRecord(
            step=step,
            epoch=collected.epoch,
            served_version=served,
            published_version=published.version,
            byte_check=published.check,
            counters=counters,
            total=self._state.total,
            reward=mean,
            reward_std=math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)),
            prompt_lengths=turn_lengths(collected.turns),
            completion_mean=sum(lengths) / len(lengths),
            completion_longest=max(lengths),
            cut=collected.cut / len(lengths),
            before=trained.before.plain(),
            after=None if trained.after is None else trained.after.plain(),
            by_prompt=KlByPrompt(
                kl=tuple(one.kl for one in trained.prompts), tokens=tuple(one.tokens for one in trained.prompts)
            ),
            grad_norm=trained.grad_norm,
            learning_rate=trained.learning_rate,
            groups_kept=collected.kept,
            groups_dropped=collected.dropped,
            rounds=collected.rounds,
            verdicts=collected.verdicts,
            seconds={name: round(spent, 6) for name, spent in seconds.items()},
            publish_ms=dict(published.ms),
            flops_per_s=flops / seconds["train"],
            memory=now | ({"offloaded": away["allocated"]} if away else {}),
            generation=self._trainer.generation,
            changed_share=self._trainer.changed_share,
            fixed_logp_sha256=digest,
        )


def _leave(trainer: MegatronGrpo, world: int, kind: type[BaseException] | None, *_: object) -> None:
    """Leave the process groups, but not by an error that other ranks have not: they would end at once, by the lost
    connection, and torchrun would end this rank before it has said why. Its process is about to end as well.
    """
    if kind is None or world == 1:
        trainer.close()


def _counters(collected: Collected) -> Counters:
    return Counters(
        prompt=collected.prompt_tokens,
        completion=collected.completion_tokens,
        trained=sum(sequence.trained for sequence in collected.sequences),
        completions=collected.completions,
    )


def _dispatcher_notes(settings: Settings) -> tuple[str, ...]:
    """The baseline's own dispatcher is flex; a run that cannot use it says so."""
    if settings.variant == "baseline" and settings.train.dispatcher != "flex":
        return (f"the baseline ran with the {settings.train.dispatcher} dispatcher; flex did not run here",)
    return ()


def _change_notes(settings: Settings) -> tuple[str, ...]:
    return tuple(f"resumed with another setting, {words}" for words in unsaid_changes(settings.out))


def _rank_of_launch() -> int:
    """This process's rank before there is a process group."""
    return int(os.environ["RANK"]) if torch.distributed.is_torchelastic_launched() else 0


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = _commit(Path(__file__).parents[3])
    return found if commit is None else found | {"commit": commit}


def _commit(root: Path) -> str | None:
    """The checkout's commit, with "-dirty" where its files are not what was committed; None outside of one, or without
    git.
    """
    if not (root / ".git").exists():  # a file in a worktree; and one that is further up is somebody else's
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
