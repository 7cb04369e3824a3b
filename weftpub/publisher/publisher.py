"""Publish a version: from the trainer's tensors into every engine, verified, on all ranks or on none.

The steps, each agreed on by all sender ranks:

    open       all ranks have one plan and speak as one publisher
    announce   every rank computes checksums of what it sends; replicas are proven equal; rank 0 greets every receiver,
               gives it its part of the plan, pauses it, and begins everywhere
    send       every rank sends its pieces; rank 0 has every receiver verify
    deliver    every rank computes its pieces' sha256 if asked to, while receivers do; rank 0 takes their answers,
               writes the commit record, commits, resumes

A failure before the commit record aborts on every receiver: those that lost nothing serve their old version again, the
others are torn and fenced. After the record nothing is aborted; `recover` finishes.
"""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import zmq

from weftpub.channel import Deadlines
from weftpub.errors import CheckpointError, ConfigError, PlanError, StaleError, StateError, WeftpubError
from weftpub.plan import PieceTable, Plan, cut_pieces
from weftpub.publisher.agreement import agree, as_data, as_error
from weftpub.publisher.coordinator import Coordinator, FailurePolicy
from weftpub.publisher.epoch import take_epoch
from weftpub.publisher.evidence import assemble, check_replicas, compare_sha256
from weftpub.publisher.groups import RankGroup, SoloGroup
from weftpub.publisher.peers import Peer, PeerLink, check_peers, exchange
from weftpub.publisher.record import RecordKeeper
from weftpub.publisher.recover import finish_commit
from weftpub.publisher.report import PhaseClock, PublishReport, RecoveryReport
from weftpub.publisher.sender import Sender, new_nonce
from weftpub.publisher.sources import SourceBuffers, as_buffers
from weftpub.transport import TransportWish
from weftpub.version import CommitRecord
from weftpub.wire import messages as m
from weftpub.wire.description import EngineDescription
from weftpub.wire.identity import local_identity
from weftpub.wire.manifest import Manifest

__all__ = ["Publisher"]

_LEAST_STAGING = 1 << 16


class Publisher:
    """Publishes versions of one run. Every sender rank makes one, with the same arguments, and calls the same methods
    in the same order.

    Args:
        run_id: name of the run; receivers listen to their run only.
        plan: who sends what to whom; None until `set_plan`, as describing the engines comes before planning.
        peers: every receiver, those of all engines. Rank 0 has to reach all of them, another rank those that it sends
            to: an engine on another host may listen on TCP (`Peer.keys`).
        commit_path: file of the commit record, on storage that outlives the driver; every run has its own. Rank 0
            writes it, and beside it a file that counts the publishers of the run.
        transport: "auto" takes the best that works with each receiver.
        group: the sender ranks; one alone by default.
        deadlines: seconds for every wait.
        max_staging_bytes: most extra memory of this rank for packing, whatever the sizes of the tensors.
        on_engine_failure: "abort" ends a publish for all engines when one fails, "continue" leaves it out.

    Raises:
        ConfigError: a setting cannot work.
    """

    def __init__(
        self,
        run_id: str,
        plan: Plan | None,
        peers: Sequence[Peer],
        *,
        commit_path: str | os.PathLike[str],
        transport: TransportWish = "auto",
        group: RankGroup | None = None,
        deadlines: Deadlines | None = None,
        max_staging_bytes: int = 256 << 20,
        on_engine_failure: FailurePolicy = "abort",
    ) -> None:
        _check_settings(run_id, peers, max_staging_bytes, on_engine_failure)
        self._run_id = run_id
        self._plan = plan
        self._peers = tuple(peers)
        self._commit_path = commit_path
        self._group: RankGroup = SoloGroup() if group is None else group
        self._deadlines = Deadlines() if deadlines is None else deadlines
        self._policy: FailurePolicy = on_engine_failure
        self._here = local_identity()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._session = new_nonce()
        self._links: dict[int, PeerLink] = {}
        self._coordinator: Coordinator | None = None
        self._sender = Sender(self._group.rank, run_id, transport, self._deadlines, max_staging_bytes, self._here)
        self._tables: tuple[str, dict[int, PieceTable]] | None = None
        self._records = RecordKeeper(commit_path)
        self._rounds = 0
        self._closed = False

    @property
    def plan(self) -> Plan | None:
        """The present plan."""
        return self._plan

    @property
    def session(self) -> str:
        """By which receivers know that it is this publisher that they listen to; on rank 0."""
        return self._session

    def set_plan(self, plan: Plan) -> None:
        """Use another plan from the next publish on; receivers get their parts then."""
        self._plan = plan

    def describe(self) -> list[EngineDescription]:
        """What every engine rank says about itself, ordered by rank: the input of a planner.

        Returns on every sender rank.
        """

        def ask(coordinator: Coordinator) -> Any:
            return [reply.description.model_dump(mode="json") for reply in coordinator.describe()]

        found = [EngineDescription.model_validate(data) for data in self._lead("describe", ask)]
        return sorted(found, key=lambda description: description.rank)

    def status(self) -> dict[int, m.StatusReport]:
        """Where every receiver stands, by rank."""

        def ask(coordinator: Coordinator) -> Any:
            return {k.peer.rank: k.status.model_dump(mode="json") for k in coordinator.alive if k.status is not None}

        return {int(rank): m.StatusReport.model_validate(data) for rank, data in self._lead("status", ask).items()}

    def pause(self) -> None:
        """Stop every engine serving. `publish` does it too; a driver that offloads engines first calls this."""
        self._lead("pause", lambda coordinator: coordinator.pause())

    def resume(self) -> None:
        """Let every engine serve what it holds: what was committed, or the old version if its weights are whole."""
        self._lead("resume", lambda coordinator: coordinator.resume())

    def recover(self, *, resume: bool = True) -> RecoveryReport:
        """After a restart of the driver: finish the commit that the record names, on every engine whose ranks all hold
        it.

        Args:
            resume: let finished engines serve.

        Returns:
            which engines were finished, and which need a complete publish, with the reason.

        Raises:
            StateError: the record is damaged, or of another run.
        """

        def finish(coordinator: Coordinator) -> Any:
            return finish_commit(coordinator, self._run_id, self._commit_path, self._deadlines, resume=resume).as_dict()

        return RecoveryReport.from_dict(self._lead("recover", finish, tolerant=True))

    def publish(
        self,
        version: int,
        sources: Mapping[str, torch.Tensor] | SourceBuffers,
        checksums: Mapping[str, int] | None = None,
        *,
        verify_sha256: bool = False,
        resume: bool = True,
        allow_rollback: bool = False,
    ) -> PublishReport:
        """Put a version into every engine.

        Args:
            version: its number from 0, not below the version that an engine holds, or lost.
            sources: this rank's tensors, by canonical name. Nothing may write to them until this returns.
            checksums: checksums that are known already (the quantizer emits them), by canonical name, of whole local
                tensors, all of them in `sources`. The others are computed.
            verify_sha256: also compare sha256 of every piece, read on the host on both sides. Slow.
            resume: let the engines serve at the end; False leaves them committed and paused for the driver.
            allow_rollback: accept a version below the one an engine holds, for a trainer that went back to an older
                checkpoint.

        Returns:
            the report, equal on every rank.

        Raises:
            WeftpubError: of the class that fits (PlanError, ManifestError, ChecksumError, TransportError,
                DeadlineError, ...), naming rank and phase, with notes that say where the engines stand. What an engine
                itself raised arrives as ChannelError.
        """
        plan = self._required_plan()
        clock = PhaseClock()
        progress = _Progress()
        self._begin_round()
        try:
            self._open(plan)
            nonce = self._announce(plan, sources, version, checksums or {}, clock, progress, allow_rollback)
            sent = self._send_all(plan, nonce, clock, progress, sha256=verify_sha256)
            return self._deliver(plan, sent, clock, progress, sha256=verify_sha256, resume=resume)
        except BaseException as error:
            self._after_failure(error, version, progress)
            raise
        finally:
            self._sender.end_publish()

    def take_over(self) -> None:
        """Count as a publisher that has just come in: receivers that listen to one which came later than this one
        listen to this one again, and refuse that one. On rank 0, between publishes.
        """
        self._coordinator = None

    def release_sources(self) -> None:
        """Have receivers close memory of this rank that they kept open across publishes (`SourceBuffers.keep`). Call it
        before such memory is freed, resized or offloaded: what somebody still has mapped is not free.

        Raises:
            WeftpubError: a receiver that is alive could not be told; do not free the memory.
        """
        self._sender.release_sources()

    def close(self) -> None:
        """Say goodbye to every receiver and free all memory. May be called twice."""
        if self._closed:
            return
        self._closed = True
        # Every rank says goodbye before it frees its buffers: receivers may have them mapped.
        told = [link for link in self._links.values() if link.known]
        exchange({link: (m.Bye, {}) for link in told}, "bye", min(5.0, self._deadlines.hello))
        self._sender.close()
        self._records.close()
        for link in self._links.values():
            link.close()
        self._context.term()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _announce(
        self,
        plan: Plan,
        sources: Mapping[str, torch.Tensor] | SourceBuffers,
        version: int,
        known: Mapping[str, int],
        clock: PhaseClock,
        progress: "_Progress",
        allow_rollback: bool,
    ) -> str:
        """Compute checksums, prove replicas equal; then greet, plan, pause and begin on every receiver. The nonce of
        the publish.
        """

        def work() -> Any:
            _check_version(version)
            if self._group.rank == 0:
                self._lead_links().greet_early()
                if not self._records.proven:
                    self._require_commit_path()
            with clock.phase("checksum"):
                self._sender.bind(plan, as_buffers(sources), version)
                return self._sender.checksums(known, travels=self._group.size > 1)

        def conclude(values: list[Any]) -> Any:
            check_replicas(plan, [value["replicas"] for value in values])
            checksums = assemble(self._piece_tables(plan), [value["pieces"] for value in values])
            manifest = Manifest(self._run_id, version, new_nonce(), plan.digest, self._sender.limit, checksums)
            coordinator = self._lead_links()
            with clock.phase("hello"):
                coordinator.meet()
            with clock.phase("plan"):
                coordinator.set_plan(plan)
            with clock.phase("pause"):
                coordinator.pause()
            progress.manifest = manifest
            with clock.phase("begin"):
                if self._group.size > 1 or not coordinator.begin_ahead(manifest, allow_rollback=allow_rollback):
                    coordinator.begin(manifest, allow_rollback=allow_rollback, meanwhile=self._sender.prepare)
            self._records.prepare(self._record_of(coordinator, manifest))
            return {"nonce": manifest.nonce, "failed": list(coordinator.failed)}

        d = self._deadlines
        announced = self._agree("announce", work, conclude, 2 * d.hello + d.plan + d.pause + d.begin)
        self._left_out = set(announced["failed"])
        return str(announced["nonce"])

    def _open(self, plan: Plan) -> None:
        """All ranks agree on plan and session.

        PlanError unless they have one plan, and are as many as it needs.
        """

        def conclude(digests: list[Any]) -> Any:
            if len(set(digests)) != 1:
                shown = ", ".join(digest[:12] for digest in digests)
                raise PlanError(f"sender ranks have different plans ({shown}); make the plan once and hand it to all")
            if max(plan.senders) >= self._group.size:
                raise PlanError(
                    f"the plan has sender ranks up to {max(plan.senders)}, the group has {self._group.size} ranks"
                )
            return self._session

        session = self._agree("open", lambda: plan.digest, conclude, 0.0)
        mine = None if self._group.rank == 0 else {move.recv_rank for move in plan.for_sender(self._group.rank)}
        self._link(session, mine)

    def _send_all(
        self, plan: Plan, nonce: str, clock: PhaseClock, progress: "_Progress", *, sha256: bool
    ) -> list[dict[str, Any]]:
        """Send, and ask receivers to verify; what every rank sent.

        Receivers are asked as soon as the last rank has sent, not when it has computed sha256 of what it sent: one that
        hears nothing for so long in the middle of a publish would take its publisher for dead.
        """

        def work() -> Any:
            with clock.phase("transfer"):
                left_out = self._send(plan, nonce, progress, sha256=sha256)
            return {"left_out": left_out, "sent": self._sender.totals()}

        def conclude(values: list[Any]) -> Any:
            coordinator, manifest = self._lead_links(), progress.required()
            for value in values:
                self._settle(coordinator, value["left_out"])
            coordinator.ask_to_verify(manifest, sha256=sha256)
            return [value["sent"] for value in values]

        return self._agree("send", work, conclude, self._deadlines.hello)

    def _deliver(
        self,
        plan: Plan,
        sent: list[dict[str, Any]],
        clock: PhaseClock,
        progress: "_Progress",
        *,
        sha256: bool,
        resume: bool,
    ) -> PublishReport:
        """Verify, commit, resume."""

        def work() -> Any:
            if not sha256:
                return {}
            with clock.phase("sha256"):  # while the receivers compute theirs
                return self._sender.sha256()

        def conclude(values: list[Any]) -> Any:
            coordinator, manifest = self._lead_links(), progress.required()
            with clock.phase("verify"):
                served = coordinator.verify(manifest, sha256=sha256)
            tables = self._piece_tables(plan)
            digests = compare_sha256(tables, served, values) if sha256 else {}
            with clock.phase("record"):
                self._record(coordinator, manifest)
            progress.committed = True
            with clock.phase("commit"):
                coordinator.commit(manifest.version, manifest.digest)
            if resume:
                with clock.phase("resume"):
                    coordinator.resume()
            pieces = sum(len(table.pieces) for table in tables.values())
            return PublishReport.of(manifest, clock.total(), pieces, coordinator.outcomes(), sent, digests).as_dict()

        d = self._deadlines
        return PublishReport.from_dict(self._agree("deliver", work, conclude, d.verify + d.commit + d.resume + d.hello))

    def _send(self, plan: Plan, nonce: str, progress: "_Progress", *, sha256: bool) -> dict[str, Any]:
        """Send this rank's pieces, and see to it that the announcement before them was taken."""
        coordinator = self._coordinator
        try:
            left_out = self._transfer(plan, nonce, progress, sha256=sha256)
        except WeftpubError as error:
            refusal = None if coordinator is None else coordinator.refusal()
            if refusal is not None:
                raise refusal from error  # chunks are refused where the announcement was
            raise
        if coordinator is not None:
            coordinator.settle_begin()
        return left_out

    def _transfer(self, plan: Plan, nonce: str, progress: "_Progress", *, sha256: bool) -> dict[str, Any]:
        """Send this rank's pieces; receivers whose engines were left out on the way, with their errors."""
        left_out: dict[str, Any] = {}

        def failed(link: PeerLink, error: WeftpubError) -> list[PeerLink]:
            if self._policy == "abort" or isinstance(error, StaleError):
                raise error
            left_out[str(link.peer.rank)] = as_data(error)
            self._left_out.add(link.engine)
            return [other for other in self._links.values() if other.engine == link.engine]

        def finished(link: PeerLink) -> None:
            """Nobody else sends to it: it can verify as soon as it has copied."""
            if self._group.size == 1:
                self._lead_links().ask_to_verify(progress.required(), [link], sha256=sha256)

        if self._group.rank != 0:
            self._greet(plan, failed)
        links = {rank: link for rank, link in self._links.items() if link.engine not in self._left_out}
        self._sender.transfer(links, nonce, failed, finished)
        return left_out

    def _greet(self, plan: Plan, failed: Callable[[PeerLink, WeftpubError], object]) -> None:
        """A rank other than 0 introduces itself to the receivers that it sends to."""
        mine = {move.recv_rank for move in plan.for_sender(self._group.rank)}
        fields = {"role": "sender", "identity": self._here}
        asked = {link: (m.Hello, fields) for rank, link in self._links.items() if rank in mine}
        _, faults = exchange(asked, "hello", self._deadlines.hello)
        for link, error in faults.items():
            if link.engine not in self._left_out:
                failed(link, error)

    def _settle(self, coordinator: Coordinator, left_out: Mapping[str, Any]) -> None:
        """Take engines out that a sender rank had to leave out."""
        faults = {self._links[int(rank)]: as_error(0, data) for rank, data in left_out.items()}
        coordinator.settle({link: error for link, error in faults.items() if link.engine not in coordinator.failed})

    def _require_commit_path(self) -> None:
        """Before anybody is paused: a record that cannot be written at the end would tear every engine, and one that is
        written over another run's takes that run's recovery away.
        """
        try:
            CommitRecord.require_writable(self._commit_path)
        except OSError as error:
            raise CheckpointError(
                f"{self._commit_path}: a commit record could not be written there ({error}); nothing was sent, choose "
                "another commit_path"
            ) from error
        CommitRecord.read_own(self._commit_path, self._run_id)

    def _record(self, coordinator: Coordinator, manifest: Manifest) -> None:
        """The commit point."""
        try:
            self._records.commit(self._record_of(coordinator, manifest))
        except OSError as error:
            raise CheckpointError(
                f"{self._commit_path}: the commit record cannot be written ({error}); version {manifest.version} is "
                "not committed"
            ) from error

    def _record_of(self, coordinator: Coordinator, manifest: Manifest) -> CommitRecord:
        engines = sorted({link.engine for link in coordinator.alive})
        return CommitRecord(run_id=self._run_id, version=manifest.version, digest=manifest.digest, engines=engines)

    def _after_failure(self, error: BaseException, version: int, progress: "_Progress") -> None:
        """Abort on every receiver, unless the version is committed; say in notes where things stand."""
        coordinator = self._coordinator
        self._records.discard()
        if coordinator is None or not coordinator.met:
            return  # nobody has been told anything
        if progress.committed:
            error.add_note(
                f"version {version} is committed, its record is {self._commit_path}; call recover() to finish it on "
                "the other ranks"
            )
        else:
            for note in coordinator.abort(f"version {version} failed: {error}"):
                error.add_note(note)
        for engine, outcome in coordinator.outcomes().items():
            error.add_note(f"engine {engine} is {outcome.state}, version {outcome.version}")

    def _lead(self, phase: str, action: Callable[[Coordinator], Any], *, tolerant: bool = False) -> Any:
        """Something that rank 0 does with all receivers after greeting them; its result on every rank.

        Args:
            tolerant: receivers that cannot be reached are left out, whatever the policy.
        """
        self._begin_round()

        def conclude(_: list[Any]) -> Any:
            coordinator = self._lead_links()
            coordinator.meet(tolerant=tolerant)
            return action(coordinator)

        d = self._deadlines
        return self._agree(phase, lambda: None, conclude, 2 * d.hello + d.plan + d.pause + d.commit + d.resume)

    def _agree(
        self, phase: str, work: Callable[[], Any], conclude: Callable[[list[Any]], Any], allowance: float
    ) -> Any:
        return agree(self._group, phase, self._deadlines.group, work, conclude, allowance=allowance)

    def _begin_round(self) -> None:
        if self._closed:
            raise StateError("this publisher is closed; make another")
        self._rounds += 1
        self._left_out: set[str] = set()
        if self._coordinator is not None:
            self._coordinator.begin_round()
        self._group.begin(f"{self._run_id}-{self._rounds}")

    def _lead_links(self) -> Coordinator:
        """Rank 0's coordinator, linked to every receiver."""
        if self._coordinator is None:
            self._link(self._session)
            links = list(self._links.values())
            take = partial(take_epoch, self._commit_path)
            quiet = self._deadlines.group if self._group.size > 1 else 0.0  # how long ranks wait for each other
            self._coordinator = Coordinator(links, self._policy, self._deadlines, self._here, take, quiet)
        return self._coordinator

    def _link(self, session: str, ranks: Collection[int] | None = None) -> None:
        """Connect to receivers; None: to all of them. Sockets of other hosts' engines cannot be reached from here."""
        for peer in self._peers:
            if peer.rank not in self._links and (ranks is None or peer.rank in ranks):
                self._links[peer.rank] = PeerLink(peer, self._run_id, session, self._here, self._context)

    def _required_plan(self) -> Plan:
        if self._plan is None:
            raise StateError("no plan was set; describe the engines, plan, and call set_plan")
        return self._plan

    def _piece_tables(self, plan: Plan) -> dict[int, PieceTable]:
        if self._tables is None or self._tables[0] != plan.digest:
            tables = {rank: cut_pieces(plan.for_receiver(rank), self._sender.limit) for rank in plan.receivers}
            self._tables = plan.digest, tables
        return self._tables[1]


class _Progress:
    """How far rank 0 is with a publish."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.committed = False

    def required(self) -> Manifest:
        """The manifest that was announced."""
        if self.manifest is None:
            raise StateError("nothing was announced")
        return self.manifest


def _check_version(version: int) -> None:
    if type(version) is not int or not 0 <= version < 1 << 63:
        raise ConfigError(f"version {version!r}: expected a whole number from 0, of at most 63 bits")


def _check_settings(run_id: str, peers: Sequence[Peer], max_staging_bytes: int, policy: str) -> None:
    check_peers(run_id, peers)
    if max_staging_bytes < _LEAST_STAGING:
        raise ConfigError(
            f"max_staging_bytes: expected at least {_LEAST_STAGING}, found {max_staging_bytes}; 256 MiB suits most "
            "models"
        )
    if policy not in ("abort", "continue"):
        raise ConfigError(f"on_engine_failure: expected 'abort' or 'continue', found {policy!r}")
