"""A colocated step of one or more engines, in the five calls that a training loop makes:

    drain      no request in flight reads the weights any more; the cache is flushed, every worker proves that it rests
    release    kv_cache and weights give their memory to the trainer, and it is measured that they did
    publish    weights get their memory back, a version arrives, is verified, and is committed on all ranks; answers
               report it from then on
    resume     kv_cache gets its memory back
    continue_  requests go on; refused while an engine is torn, fenced or not whole

States of an engine, and what may follow:

    SERVING -> drain -> DRAINED -> release, publish, resume, in any order that its memory allows -> continue_ -> SERVING

Memory tags have states of their own (`MemoryTags`), because SGLang ends its scheduler where they are violated. A
publish that fails leaves the engines DRAINED: paused by SGLang, fenced by their receivers if a byte was written; the
next complete publish opens them. An engine that was restarted joins by `rejoin` and stays out until it was published
to.

With several sender ranks each makes a `ColocatedEngine` and makes the same calls. Rank 0 alone has the handles; or,
with engines on several hosts (`spread`), a rank of each host has those of its own. Then all of them act at the same
time, once all ranks have come, and what becomes of one is everybody's outcome.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weftpub.errors import ConfigError, DeadlineError, StateError, WeftpubError
from weftpub.publisher import FailurePolicy, Publisher, PublishReport, RankGroup, SoloGroup, SourceBuffers
from weftpub.publisher.agreement import agree
from weftpub.publisher.report import PhaseClock
from weftpub.wire.messages import StatusReport
from weftpub_adapters.sglang.driver.handle import DriverDeadlines, EngineHandle, Mode, work_of
from weftpub_adapters.sglang.driver.member import EnginePhase, EngineStanding, Member, parameter_bytes, refuse
from weftpub_adapters.sglang.driver.memory import MemoryTags, TagState, free_bytes, wait_for_free

__all__ = ["ColocatedEngine", "EnginePhase", "EngineStanding"]

_FLUSH_AGAIN_S = 0.2
_LOOK_AGAIN_S = 0.01
_FREED_SHARE = 0.95  # of the weights' bytes that must be seen to become free: other processes use the GPU, too


class ColocatedEngine:
    """Engines that share GPUs with a trainer, driven through its steps.

    Args:
        handles: the engine or engines that this rank drives; None where it drives none, as ranks other than 0 unless
            `spread`.
        publisher: publishes to all ranks of all engines.
        group: the sender ranks, as the publisher has them.
        deadlines: for every wait.
        on_engine_failure: "abort" ends a call for all when one engine fails, "continue" leaves that engine out until
            `rejoin`; give the publisher the same.
        measure: free bytes of a GPU by UUID; None where that cannot be measured, and then nothing is waited for.
        spare_bytes: that must be free beyond what an engine's tag needs.
        spread: whether ranks of other hosts drive their own engines; the same on all ranks.
    """

    def __init__(
        self,
        handles: EngineHandle | Sequence[EngineHandle] | None,
        publisher: Publisher,
        *,
        group: RankGroup | None = None,
        deadlines: DriverDeadlines | None = None,
        on_engine_failure: FailurePolicy = "abort",
        measure: Callable[[str], int | None] = free_bytes,
        spare_bytes: int = 64 << 20,
        spread: bool = False,
    ) -> None:
        self._group: RankGroup = SoloGroup() if group is None else group
        given = () if handles is None else (handles,) if isinstance(handles, EngineHandle) else tuple(handles)
        names = [handle.name for handle in given]
        wrong = not spread and (self._group.rank == 0) != bool(given)
        if wrong or len(set(names)) != len(names):
            raise ConfigError(
                f"sender rank {self._group.rank} has handles of engines {names}; rank 0 needs all of them, each with a "
                "name of its own, and the other ranks none (or, with spread, those of their own hosts)"
            )
        self._spread = spread
        self._session = ""
        self._publisher = publisher
        self._deadlines = DriverDeadlines() if deadlines is None else deadlines
        self._policy: FailurePolicy = on_engine_failure
        self._measure = measure
        self._spare = spare_bytes
        self._members = {handle.name: Member(handle, MemoryTags(handle.name)) for handle in given}
        self._engine_of: dict[int, str] = {}
        self._rounds = 0
        self._clock = PhaseClock()

    @property
    def standing(self) -> dict[str, EngineStanding]:
        """Every engine that this rank drives, as it knows them."""
        return {
            name: EngineStanding(m.phase, {tag: str(m.tags[tag]) for tag in m.tags}, m.version, m.fenced, m.out)
            for name, m in self._members.items()
        }

    @property
    def ms(self) -> dict[str, float]:
        """Milliseconds of each call since the last `drain` began."""
        return dict(self._clock.ms)

    def drain(self, mode: Mode = "retract") -> None:
        """Bring every engine to rest. On drained engines it only makes sure that they are; one that another driver let
        go on meanwhile is paused again. Which memory is away is read anew from engines that did not serve.

        Args:
            mode: what becomes of requests in flight, see `EngineHandle.pause`.

        Raises:
            DeadlineError: requests do not end, or the cache cannot be flushed.
            StateError: a worker says that it does not rest, or a later driver has taken over (every call raises that,
                with nothing done).
        """
        self._clock = PhaseClock()
        with self._clock.phase("drain"):
            self._require_present()
            d = self._deadlines
            idle = self._together(
                "drain", d.drain + d.flush + 4 * d.control, lambda member: self._drain_one(member, mode)
            )
            self._publisher.pause()
            # What has not served all the while may have been released or brought back by another driver.
            if idle or not self._engine_of:
                self._describe()

    def release(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        """Give the memory behind tags to the trainer; on return it is measured to be free.

        Raises:
            StateError: an engine is serving, or a tag is not resident. ConfigError: the engine cannot release memory.
            DeadlineError: memory did not become free; names the bytes.
        """
        with self._clock.phase("release"):
            self._require_present()
            d = self._deadlines
            self._together("release", len(tags) * (d.release + d.memory), lambda m: self._release_one(m, tags))

    def publish(
        self,
        version: int,
        sources: Mapping[str, torch.Tensor] | SourceBuffers,
        checksums: Mapping[str, int] | None = None,
        *,
        verify_sha256: bool = False,
        allow_rollback: bool = False,
    ) -> PublishReport:
        """Put a version into every engine; answers report it from the next `continue_` on.

        Weights that were released get their memory back first. Arguments and errors as in `Publisher.publish`. After an
        error the engines stay paused; publish again, in full.

        Raises:
            DeadlineError: the memory for the weights does not become free; names the bytes.
        """
        with self._clock.phase("resume_weights"):
            self._require_present()
            d = self._deadlines
            self._together("resume weights", d.flush + d.memory + d.resume, self._resume_weights)
        with self._clock.phase("publish"):
            try:
                report = self._publisher.publish(
                    version,
                    sources,
                    checksums,
                    verify_sha256=verify_sha256,
                    allow_rollback=allow_rollback,
                    resume=False,
                )
            except WeftpubError as error:
                for member in self._members.values():
                    member.fenced = f"version {version} was not committed: {error}"
                raise
        arrived = {name for name, outcome in report.engines.items() if not outcome.error}
        if arrived - set(self._engine_of.values()):  # engines that were not there when the others were described
            self._describe()
        with self._clock.phase("weight_version"):
            self._together(
                "weight version", self._deadlines.control, lambda member: self._committed(member, version, report)
            )
        return report

    def resume(self) -> None:
        """Give engines back whatever else they have released.

        Raises:
            StateError: the weights are still away; publish first.
            DeadlineError: the memory does not become free; names the bytes.
        """
        with self._clock.phase("resume"):
            self._require_present()
            d = self._deadlines
            self._together("resume", 2 * (d.memory + d.resume), self._resume_one)

    def continue_(self) -> None:
        """Let engines serve; on return every worker has gone on. Engines that serve already are left alone: others may
        have rejoined beside them, or a call before this one failed half way.

        Raises:
            TornError: an engine is torn or fenced; publish a complete version. StateError: all of them serve already,
                memory is still away, or a worker refuses to go on; names it, with its reason. DeadlineError: a worker
                has not gone on.
        """
        with self._clock.phase("continue"):
            d = self._deadlines
            if not self._together("drained", d.control, lambda m: m.phase is EnginePhase.DRAINED):
                names = ", ".join(sorted({*self._members, *self._engine_of.values()}))
                raise StateError(f"engine {names}: continue_ refused while it is serving; call drain first")
            if not self._engine_of:  # a drain that failed did not come to it
                self._describe()
            self._together("memory", d.control, _if_drained(Member.require_resident))
            self._publisher.resume()
            ranks = self._ranks()
            # Nobody goes on before all may.
            self._together(
                "readiness", d.control, _if_drained(lambda member: member.require_ready(ranks.get(member.name, {})))
            )
            self._together("continue", 5 * d.control, _if_drained(self._continue_one))

    def rejoin(self, handle: EngineHandle) -> None:
        """Take in an engine that was restarted, under the name of the one it replaces; on the rank that drives it.

        Its receivers have been started, at the addresses of the old ones. It stays out until the next publish, unless
        it was loaded with the version that was committed last, and its receivers say so.
        """
        if handle.name not in self._members:
            raise ConfigError(f"engine {handle.name} replaces none of {', '.join(self._members)}; keep its name")
        handle.pause("retract")
        committed = [member.version for member in self._members.values() if member.version is not None]
        self._members[handle.name] = Member(
            handle,
            MemoryTags(handle.name),
            phase=EnginePhase.DRAINED,
            fenced="it was restarted and has not been published to",
            weights=self._members[handle.name].weights,
            behind=max(committed, default=None),
        )

    def _require_present(self) -> None:
        """StateError, before an engine is touched, if receivers listen to a later driver by now: what this one paused,
        released or resumed would be the other one's.

        The schedulers are asked to whom their receivers listen: a receiver beside a scheduler at work waits for the
        interpreter, and each of its answers took tens of milliseconds on an H200. Where it is somebody else, or nobody
        yet, the receivers themselves are asked.
        """
        if self._together("presence", self._deadlines.control, self._listens_elsewhere):
            self._publisher.status()

    def _listens_elsewhere(self, member: Member) -> bool:
        member.workers = member.handle.workers()
        return any(worker.publisher != self._session for worker in member.workers)

    def _drain_one(self, member: Member, mode: Mode) -> bool:
        """Whether it did not serve all the while: then this driver may not know what became of it."""
        idle = any(worker.resting or worker.why_not for worker in member.workers)
        drained = member.phase is EnginePhase.DRAINED
        if not drained or not member.workers or not all(worker.resting for worker in member.workers):
            member.handle.pause(mode)
            member.phase = EnginePhase.DRAINED
        self._flush(member)
        return drained or idle

    def _flush(self, member: Member) -> None:
        """Empty the cache of a paused engine: what is in it was computed with the weights that it has now."""
        until = time.monotonic() + self._deadlines.flush
        while not member.handle.flush():
            if time.monotonic() >= until:
                doing = work_of(member.handle)
                raise DeadlineError(
                    f"engine {member.name}: its cache could not be flushed within {self._deadlines.flush:g} s, "
                    f"requests still hold it{f' ({doing})' if doing else ''}; it is paused, continue_ lets it go on"
                )
            time.sleep(_FLUSH_AGAIN_S)
        member.flushed = True

    def _describe(self) -> None:
        """Learn where weights lie, how large they are, and which memory is away already."""
        found: dict[str, dict[str, int]] = {}
        away: dict[str, set[str]] = {}
        engine_of: dict[int, str] = {}
        for one in self._publisher.describe():
            engine_of[one.rank] = one.engine
            sizes = found.setdefault(one.engine, {})
            if one.device != "cpu":
                sizes[one.device] = sizes.get(one.device, 0) + parameter_bytes(one)
            plugin = one.settings.get("plugin")
            if isinstance(plugin, Mapping):  # another driver may have ended in between, or done more than this one
                released: Any = plugin.get("released", ())
                away.setdefault(one.engine, set()).update(released)
        for name, member in self._members.items():
            member.weights = found.get(name, member.weights or {})
            if name in away:
                member.tags.read(away[name])
        self._engine_of = engine_of

    def _release_one(self, member: Member, tags: Sequence[str]) -> None:
        member.require_drained("release")
        member.tags.check_release(tags)
        if member.saves is None:
            member.saves = not member.devices or bool(member.handle.server_info().get("enable_memory_saver"))
        if not member.saves:
            raise ConfigError(
                f"engine {member.name} runs without a memory saver and would free nothing; start it with "
                "enable_memory_saver=True (--enable-memory-saver)"
            )
        for tag in tags:
            before = {device: self._measure(device) for device in member.devices}
            if tag == "weights":
                member.fenced = "its weights' memory was released and nothing was published since"
            self._move(member, tag, TagState.RELEASED, member.handle.release)
            member.freed[tag] = {
                device: self._freed(member, tag, device, free) for device, free in before.items() if free is not None
            }

    def _freed(self, member: Member, tag: str, device: str, before: int) -> int:
        """Bytes that a release gave back; waits for those of the weights, whose size is known."""
        if tag != "weights":
            after = self._measure(device)
        else:
            after = wait_for_free(
                before + int(_FREED_SHARE * (member.weights or {}).get(device, 0)),
                device,
                f"release of {tag} of engine {member.name}",
                self._deadlines.memory,
                measure=self._measure,
                remedy="something else took the memory meanwhile, or the memory saver does not work",
            )
        return 0 if after is None else max(0, after - before)

    def _resume_weights(self, member: Member) -> None:
        member.require_drained("publish")
        if not member.flushed:  # it went on since it was drained, or has just joined
            self._flush(member)
        if member.tags["weights"] is not TagState.RESIDENT:
            self._bring_back(member, "weights")

    def _resume_one(self, member: Member) -> None:
        member.require_drained("resume")
        if member.tags["weights"] is not TagState.RESIDENT:
            raise StateError(f"engine {member.name}: its weights are {member.tags['weights']}; publish before resume")
        for tag in member.tags.released:
            self._bring_back(member, tag)

    def _bring_back(self, member: Member, tag: str) -> None:
        """Resume one tag, once the memory for it is there: an engine that runs out of memory ends."""
        member.tags.check_resume([tag])
        freed = member.freed.get(tag, {})  # empty if an earlier driver released it
        for device, weights in (member.weights or {}).items():
            needed = max(freed.get(device, 0), weights if tag == "weights" else 0) + self._spare
            wait_for_free(
                needed,
                device,
                f"resume of {tag} of engine {member.name}",
                self._deadlines.memory,
                measure=self._measure,
                remedy="release the trainer's gradients, slots and activations first, then torch.cuda.empty_cache()",
            )
        self._move(member, tag, TagState.RESIDENT, member.handle.resume)

    def _move(self, member: Member, tag: str, target: TagState, call: Callable[[Sequence[str]], None]) -> None:
        member.tags.move([tag], TagState.UNKNOWN)
        call([tag])
        member.tags.move([tag], target)

    def _committed(self, member: Member, version: int, report: PublishReport) -> None:
        outcome = report.engines.get(member.name)
        if outcome is None or outcome.error or outcome.version != version:
            member.fenced = "the publish left it out" if outcome is None else outcome.error or outcome.state
            return
        member.version, member.fenced, member.behind = version, "", None
        member.handle.set_weight_version(str(version))

    def _ranks(self) -> dict[str, dict[int, StatusReport | None]]:
        """What every rank of every engine says of itself; None for one that says nothing."""
        reports = self._publisher.status()
        found: dict[str, dict[int, StatusReport | None]] = {}
        for rank, engine in self._engine_of.items():
            found.setdefault(engine, {})[rank] = reports.get(rank)
        return found

    def _continue_one(self, member: Member) -> None:
        if member.version is not None and member.handle.weight_version() != str(member.version):
            member.handle.set_weight_version(str(member.version))
        member.flushed = False
        member.handle.continue_()
        self._await_going(member)
        member.phase, member.fenced = EnginePhase.SERVING, ""

    def _await_going(self, member: Member) -> None:
        """Return when every worker of an engine that was told to go on computes requests.

        SGLang does not answer `continue_generation`, and a worker that may not serve does not obey it: requests would
        wait for ever, with nobody the wiser. The schedulers are asked, not the receivers: beside a scheduler at work a
        receiver waits for the interpreter, and each of its answers took tens of milliseconds on an H200.
        """
        began = time.monotonic()
        while resting := {w.rank: w.why_not for w in member.handle.workers() if w.resting}:
            refusing = {rank: reason for rank, reason in resting.items() if reason}
            elapsed = time.monotonic() - began
            if refusing or elapsed >= self._deadlines.control:
                with contextlib.suppress(WeftpubError):  # it may yet hear that it was told to go on
                    member.handle.pause("retract")
                refuse(member.name, refusing)
                raise DeadlineError(
                    f"engine {member.name}, receiver ranks {sorted(resting)}: still at rest {elapsed:.1f} s after "
                    f"continue_, of {self._deadlines.control:g} s allowed; has somebody else paused it?"
                )
            time.sleep(_LOOK_AGAIN_S)

    def _together(self, phase: str, seconds: float, action: Callable[[Member], object]) -> bool:
        """Act on every engine: rank 0, or each rank on its own, once all have come. The other ranks wait, and all learn
        how it went.

        Returns:
            on every rank, whether the action answered True for an engine.
        """

        def act() -> dict[str, Any]:
            found = False
            for member in self._members.values():
                if member.out:
                    continue
                try:
                    found |= action(member) is True
                except WeftpubError as error:
                    if self._policy == "abort":
                        raise
                    member.out = f"{phase}: {error}"
            out = {member.name: member.out for member in self._members.values() if member.out}
            return {"found": found, "present": len(self._members) - len(out), "out": out}

        def conclude(acted: list[dict[str, Any]]) -> bool:
            if not any(one["present"] for one in acted):
                out = [f"{name}: {reason}" for one in acted for name, reason in one["out"].items()]
                raise StateError(f"no engine takes part any more: {'; '.join(out)}")
            return any(one["found"] for one in acted)

        self._rounds += 1
        self._group.begin(f"colocated-{self._rounds}")
        control, allowance = self._deadlines.control, seconds * max(1, len(self._members))
        if not self._spread:
            self._session = self._publisher.session
            return agree(self._group, phase, control, lambda: None, lambda _: conclude([act()]), allowance=allowance)
        # An engine takes memory on the GPUs of all ranks of its host, and they take theirs when it has gone.
        self._session = agree(
            self._group,
            f"{phase}: all ranks",
            control,
            lambda: None,
            lambda _: self._publisher.session,
            allowance=control,
        )
        # Rank 0 may drive no engine as slow as another rank's.
        return agree(self._group, phase, control + allowance, act, conclude, allowance=control + allowance)


def _if_drained(action: Callable[[Member], object]) -> Callable[[Member], object]:
    """The action for engines that are drained; nothing for those that serve."""
    return lambda member: action(member) if member.phase is EnginePhase.DRAINED else None
