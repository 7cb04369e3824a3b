"""What sender rank 0 does for all: it leads every receiver through the states of a publish, all or none.

A version belongs to an engine, and an engine is all of its ranks: when one rank fails, its engine does. The policy says
what that means for the others. With "abort" the publish ends for everybody; with "continue" the engine is left out (its
ranks are told to abort) and the others go on; but a publisher that is stale to one of them is stale to all.

Before the commit record nothing is visible anywhere and every failure is an abort. After it the version is committed,
whoever has heard of it: nothing is aborted any more, and `Publisher.recover` finishes what a failure left.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from weftpub.channel import Deadlines
from weftpub.errors import ManifestError, PlanError, StaleError, WeftpubError
from weftpub.plan import Plan
from weftpub.publisher.peers import PeerLink, by_engine, exchange
from weftpub.publisher.report import EngineOutcome
from weftpub.version import EngineState
from weftpub.wire import messages as m
from weftpub.wire.identity import Identity
from weftpub.wire.manifest import Manifest

__all__ = ["Coordinator", "FailurePolicy"]

FailurePolicy = Literal["abort", "continue"]
type _Fields = Mapping[str, object]


class Coordinator:
    """Leads the receivers of one publisher.

    Args:
        links: all receivers.
        policy: what an engine's failure means for the others.
        deadlines: for every wait.
        here: this process.
        take_epoch: called once, when the receivers have been heard: given the highest epoch among theirs, this
            publisher's.
        quiet: see `Begin`.
    """

    def __init__(
        self,
        links: Sequence[PeerLink],
        policy: FailurePolicy,
        deadlines: Deadlines,
        here: Identity,
        take_epoch: Callable[[int], int],
        quiet: float,
    ) -> None:
        self.links = tuple(links)
        self.failed: dict[str, WeftpubError] = {}
        self._policy = policy
        self._deadlines = deadlines
        self._here = here
        self._take_epoch = take_epoch
        self._epoch: int | None = None
        self._quiet = quiet
        self._posted: dict[PeerLink, int] = {}
        self._begun: dict[PeerLink, int] = {}
        self._served: set[str] = set()
        self.met = False  # whether anybody was greeted in this round

    @property
    def alive(self) -> list[PeerLink]:
        """Receivers whose engines have not failed in this publish."""
        return [link for link in self.links if link.engine not in self.failed]

    def begin_round(self) -> None:
        """Nothing is known about anybody's state until the next `meet`."""
        self.failed.clear()
        self._posted.clear()
        self._begun.clear()
        self._served.clear()
        self.met = False

    def greet_early(self) -> None:
        """Send the greetings of the coming `meet`, so that they are answered while this rank does something else."""
        if self._epoch is None:
            return
        for link in self.links:
            number = link.post_ahead(m.Hello, **self._hello(self._epoch))
            if number is not None:
                self._posted[link] = number

    def meet(self, *, tolerant: bool = False) -> None:
        """Say hello to everybody. Engines that failed in an earlier round are asked again.

        Args:
            tolerant: engines that cannot be reached are left out, whatever the policy.
        """
        self.met = True
        absent = self._come_in() if self._epoch is None else {}
        fields = self._hello(self._epoch or 0)
        greetings = {link: (m.Hello, fields) for link in self.links if link not in absent}
        posted, self._posted = self._posted, {}
        _, refused = exchange(greetings, "hello", self._deadlines.hello, posted)
        faults = {**absent, **refused}
        _require_present(faults)
        if tolerant:
            self.failed.update({link.engine: error for link, error in faults.items()})
        else:
            self.settle(faults)
        self._served = {
            engine
            for engine, links in by_engine(self.alive).items()
            if all(link.status is not None and link.status.state is EngineState.SERVING for link in links)
        }

    def _hello(self, epoch: int) -> _Fields:
        return {"role": "coordinator", "epoch": epoch, "identity": self._here}

    def _come_in(self) -> dict[PeerLink, WeftpubError]:
        """Take an epoch above all that receivers have heard of; the receivers that cannot be reached."""
        newcomer: _Fields = {"role": "newcomer", "identity": self._here}
        replies, absent = exchange(dict.fromkeys(self.links, (m.Hello, newcomer)), "hello", self._deadlines.hello)
        heard = [reply.epoch for reply in replies.values() if isinstance(reply, m.Welcome)]
        self._epoch = self._take_epoch(max(heard, default=0))
        return absent

    def describe(self) -> list[m.Described]:
        """Every rank's description."""
        replies = self._ask(m.Describe, lambda link: {}, "describe", self._deadlines.plan)
        return [reply for reply in replies.values() if isinstance(reply, m.Described)]

    def set_plan(self, plan: Plan) -> None:
        """Give every receiver its part, unless it has it.

        PlanError if the plan's receivers are not those that are linked.
        """
        linked, planned = {link.peer.rank for link in self.links}, set(plan.receivers)
        if linked != planned:
            raise PlanError(
                f"the plan is for receiver ranks {sorted(planned)}, the publisher has peers for {sorted(linked)}"
            )
        due = [link for link in self.alive if link.status is None or link.status.plan_digest != plan.digest]
        self._ask(
            m.SetPlan,
            lambda link: {"part": plan.for_receiver(link.peer.rank).to_json()},
            "plan",
            self._deadlines.plan,
            due,
        )

    def pause(self) -> None:
        """Pause every engine that serves, or says nothing about itself."""
        due = [link for link in self.alive if link.status is None or link.status.state is EngineState.SERVING]
        self._ask(m.Pause, lambda link: {}, "pause", self._deadlines.pause, due)

    def begin(self, manifest: Manifest, *, allow_rollback: bool, meanwhile: Callable[[], None] | None = None) -> None:
        """Announce a version to everybody; `meanwhile` is called while they take it in."""
        fields = _begin_fields(manifest, allow_rollback, self._quiet)
        self._ask(m.Begin, fields, "begin", self._deadlines.begin, meanwhile=meanwhile)

    def begin_ahead(self, manifest: Manifest, *, allow_rollback: bool) -> bool:
        """Announce a version to the only receiver there is without waiting for its answer, which `settle_begin` takes:
        it carries out requests in turn, and refuses chunks if it did not begin. With more receivers than one nothing
        may be sent to any before all have begun.

        Returns:
            whether it was announced.
        """
        if len(self.links) != 1 or not self.alive:
            return False
        link = self.links[0]
        number = link.post_ahead(m.Begin, **_begin_fields(manifest, allow_rollback, self._quiet)(link))
        if number is not None:
            self._begun[link] = number
        return number is not None

    def settle_begin(self) -> None:
        """Take the answers to `begin_ahead`, and fail if one is a refusal."""
        begun, self._begun = self._begun, {}
        if begun:
            _, faults = exchange(dict.fromkeys(begun, (m.Begin, {})), "begin", self._deadlines.begin, begun)
            self.settle(faults)

    def refusal(self) -> WeftpubError | None:
        """Why a receiver refused what `begin_ahead` announced, as far as it has answered."""
        for link, number in self._begun.items():
            reply = link.answered(number)
            if isinstance(reply, m.Failed):
                return link.error_of(reply)
        return None

    def ask_to_verify(self, manifest: Manifest, links: Sequence[PeerLink] | None = None, *, sha256: bool) -> None:
        """Ask receivers that have been sent their last chunk to verify, unless they were; by default all of them.
        `verify` takes their answers. One that cannot take it now is asked then.
        """
        fields = _verify_fields(manifest, sha256)
        for link in self.alive if links is None else links:
            number = None if link in self._posted else link.post_ahead(m.Verify, **fields)
            if number is not None:
                self._posted[link] = number

    def verify(self, manifest: Manifest, *, sha256: bool) -> dict[int, tuple[str, ...]]:
        """Have everybody verify; receiver rank to its pieces' sha256, if asked for."""
        fields = _verify_fields(manifest, sha256)
        posted, self._posted = self._posted, {}
        requests = dict.fromkeys(self.alive, (m.Verify, fields))
        replies, faults = exchange(requests, "verify", self._deadlines.verify, posted)
        self.settle(faults)
        found: dict[int, tuple[str, ...]] = {}
        for link, reply in replies.items():
            if not isinstance(reply, m.Verified) or reply.digest != manifest.digest:
                self.settle(
                    {link: ManifestError(f"{link.label}: verified another manifest than {manifest.digest[:12]}")}
                )
            else:
                found[link.peer.rank] = reply.sha256
        return found

    def commit(self, version: int, digest: str) -> None:
        """Tell everybody that the record is on disk. Nobody is aborted from here on."""
        fields: _Fields = {"version": version, "digest": digest}
        self._ask(m.Commit, lambda link: fields, "commit", self._deadlines.commit, abort=False)

    def resume(self) -> None:
        """Let every engine serve that did not fail."""
        self._ask(m.Resume, lambda link: {}, "resume", self._deadlines.resume, abort=False)

    def settle(self, faults: Mapping[PeerLink, WeftpubError], *, abort: bool = True) -> None:
        """Apply the policy to failed receivers: raise, or leave their engines out and go on with the others.

        Raises:
            StaleError: whatever the policy, a later publisher has one of them. What this one still leads is not its own
                any more either.
        """
        if not faults:
            return
        _require_present(faults)
        first, *others = faults.values()
        if self._policy == "abort":
            for other in others:
                first.add_note(f"also: {other}")
            raise first
        for link, error in faults.items():
            self.failed.setdefault(link.engine, error)
        if abort:
            self.abort("a rank of the engine failed", [link for link in self.links if link.engine in self.failed])
        if not self.alive:
            first.add_note("no engine is left")
            raise first

    def abort(self, reason: str, links: Sequence[PeerLink] | None = None) -> list[str]:
        """Tell receivers that the publish will not complete, and let engines that lost nothing serve again.

        Returns:
            what could not be done, in words.
        """
        told = self.links if links is None else links
        _, faults = exchange(
            {link: (m.Abort, {"reason": m.plain_text(reason, 4000)}) for link in told if link.greeted},
            "abort",
            self._deadlines.hello,
        )
        whole = [
            link
            for engine, ranks in by_engine(told).items()
            if engine in self._served and all(link not in faults and _can_serve(link) for link in ranks)
            for link in ranks
        ]
        _, more = exchange({link: (m.Resume, {}) for link in whole}, "resume", self._deadlines.resume)
        return [f"{link.label}: could not be told to stop: {error}" for link, error in (*faults.items(), *more.items())]

    def outcomes(self) -> dict[str, EngineOutcome]:
        """Where every engine stands, by the last word of its ranks."""
        found: dict[str, EngineOutcome] = {}
        for engine, links in by_engine(self.links).items():
            states = sorted({"unknown" if link.status is None else str(link.status.state) for link in links})
            versions = {None if link.status is None else link.status.version for link in links}
            version = versions.pop() if len(versions) == 1 else None
            found[engine] = EngineOutcome(", ".join(states), version, str(self.failed.get(engine, "")))
        return found

    def _ask(
        self,
        kind: Callable[..., m.Request],
        fields: Callable[[PeerLink], _Fields],
        phase: str,
        seconds: float,
        links: Sequence[PeerLink] | None = None,
        *,
        abort: bool = True,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[PeerLink, m.Reply]:
        asked = self.alive if links is None else links
        requests = {link: (kind, fields(link)) for link in asked}
        replies, faults = exchange(requests, phase, seconds, meanwhile=meanwhile)
        self.settle(faults, abort=abort)
        return replies


def _begin_fields(manifest: Manifest, allow_rollback: bool, quiet: float) -> Callable[[PeerLink], _Fields]:
    common: _Fields = {
        "version": manifest.version,
        "nonce": manifest.nonce,
        "plan_digest": manifest.plan_digest,
        "limit": manifest.limit,
        "leaves": manifest.leaves,
        "digest": manifest.digest,
        "allow_rollback": allow_rollback,
        "quiet": quiet,
    }
    return lambda link: {**common, "checksums": manifest.checksums[link.peer.rank]}


def _verify_fields(manifest: Manifest, sha256: bool) -> _Fields:
    return {"version": manifest.version, "nonce": manifest.nonce, "sha256": sha256}


def _require_present(faults: Mapping[PeerLink, WeftpubError]) -> None:
    for error in faults.values():
        if isinstance(error, StaleError):
            raise error


def _can_serve(link: PeerLink) -> bool:
    if link.status is None:
        return False
    return link.status.state is EngineState.SERVING or (link.status.state is EngineState.PAUSED and link.status.intact)
