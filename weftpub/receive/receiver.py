"""One engine rank as a publisher sees it: a state machine that answers requests.

    hello, describe, probe, status, drop, bye: in any state; observers, who take no session, may only describe and ask
               for the status

    set_plan   not while RECEIVING or VERIFIED; the part is checked against the live parameters
    pause      SERVING -> PAUSED
    begin      PAUSED, COMMITTED, TORN -> RECEIVING; the views are made from the live parameters, whose memory is asked
               for once more then: an engine that gives it away looks for a receive first
    chunk      RECEIVING; open, copy, wait for the copy, let go, answer. The first makes it dirty; while the last one is
               copied, unless it is a staging buffer, the engine post-processes and the device begins checksums
    verify     RECEIVING -> VERIFIED; all arrived, post_process ran once, checksums of the live views agree
    commit     VERIFIED -> COMMITTED; told by a publisher whose record is on disk
    resume     COMMITTED, PAUSED -> SERVING; TORN if an offload took the weights meanwhile
    abort      RECEIVING -> PAUSED if clean, else TORN; VERIFIED -> TORN; the same when the receiver is closed

Whatever goes wrong after the first byte, here or at the publisher, ends in TORN: the engine stays paused and is fenced.
A publisher that falls silent in the middle of a publish is taken for dead after a while. A later publisher of the same
run may take over at any time; what the earlier one still sends is refused.

The receiver does no I/O of its own but opening offers, and holds no lock: one thread calls it (see
`weftpub.receive.server`).
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from weftpub.errors import StaleError, StateError
from weftpub.plan import PlanPart
from weftpub.plan.views import listing
from weftpub.receive.copies import CopyPlans, LayoutMemory
from weftpub.receive.engine import EngineSide, Readiness
from weftpub.receive.reception import Reception
from weftpub.receive.views import BoundPlan
from weftpub.transport import ReceiveTransport, TransportKind, open_receive_transports
from weftpub.transport.tensors import Known
from weftpub.version import EngineState, VersionState
from weftpub.wire import messages as m
from weftpub.wire.identity import local_identity

__all__ = ["Receiver"]

_LONGEST_ERROR = 8000  # characters of an error or a reason that travel
_OBSERVERS = 16  # sessions of observers that are remembered; an older one has to greet again


@dataclass
class _Session:
    """The publisher that is listened to.

    One of a higher epoch takes its place. Two that counted at the same moment have the same; then their sessions'
    names decide, the same way on every receiver.
    """

    session: str
    epoch: int

    def gives_way(self, request: m.Hello) -> bool:
        return (request.epoch, request.session) > (self.epoch, self.session)


class Receiver:
    """State machine of one engine rank.

    Args:
        engine: the engine rank.
        run_id: the run whose publishers are listened to; those of others are refused.
        version: the published version that the engine was loaded with, None if it holds none: then it is TORN until a
            complete publish.
        silence: seconds without a word in the middle of a publish after which the publisher is taken for dead, unless
            it asked for more when it began.
        transports: by kind; by default all that this process can use.
    """

    def __init__(
        self,
        engine: EngineSide,
        *,
        run_id: str,
        version: int | None = None,
        silence: float = 180.0,
        transports: Mapping[TransportKind, ReceiveTransport] | None = None,
    ) -> None:
        self._engine = engine
        self._run_id = run_id
        self._silence = self._allowed = silence
        self._state = VersionState.started(version)
        self._session: _Session | None = None
        self._observers: deque[str] = deque(maxlen=_OBSERVERS)
        self._bound: BoundPlan | None = None
        self._plans: CopyPlans | None = None
        self._layouts = LayoutMemory()
        self._reception: Reception | None = None
        self._verified: Known | None = None  # where what was verified last lies
        self._heard = time.monotonic()
        description = engine.describe()
        self.name = description.engine
        self.rank = description.rank
        self._device = description.device
        self._transports = open_receive_transports(description.device) if transports is None else transports
        if self._state.state is EngineState.TORN:
            engine.pause()
            engine.fence(self._state.reason)

    @property
    def state(self) -> VersionState:
        """Where this rank stands. Read only."""
        return self._state

    @property
    def session(self) -> str:
        """Of the publisher that is listened to; "" while none has come in. Read only."""
        return "" if self._session is None else self._session.session

    def handle(self, request: m.Request) -> m.Reply:
        """Carry out one request and answer it. Refusals raise; the caller answers them with `failure`.

        Raises:
            WeftpubError: the request is stale, out of order or cannot be carried out.
            Exception: whatever the engine raised.
        """
        if request.run_id != self._run_id:
            raise StateError(
                f"this receiver belongs to run {self._run_id!r}, the request to run {request.run_id!r}; it is ignored"
            )
        if isinstance(request, m.Hello):
            return self._hello(request)
        if request.session in self._observers:
            return self._observed(request)
        if self._session is None:
            raise StateError(
                f"request of session {request.session[:8]}, and no publisher has introduced itself to this receiver "
                "since it started; publish again"
            )
        if request.session != self._session.session:
            raise StaleError(
                f"request of session {request.session[:8]}, which is not the present one: a later publisher took "
                "over; it is ignored"
            )
        handler = self._HANDLERS[type(request)]
        try:
            return handler(self, request)
        finally:
            self._heard = time.monotonic()  # how long this rank took is not its publisher's silence

    def failure(self, request: int, error: BaseException) -> m.Failed:
        """The reply to a request that raised. It never fails itself, whatever the engine does: a rank whose error
        cannot be told would fall silent.
        """
        try:
            status = self.status()
        except Exception as second:  # the engine cannot even say whether its weights are whole: then they are not
            status = self._report(intact=False, readiness=Readiness("its engine cannot say", resting=False))
            error.add_note(f"and the engine's own account raised {type(second).__name__}: {second}")
        text = "; ".join((str(error), *getattr(error, "__notes__", ())))
        name = m.plain_text(type(error).__name__, 200)
        return m.Failed(request=request, status=status, error=name, message=m.plain_text(text, _LONGEST_ERROR))

    def tick(self) -> None:
        """Look at the clock: a publisher silent for too long in the middle of a publish is taken for dead."""
        if self._state.state is EngineState.RECEIVING and time.monotonic() - self._heard > self._allowed:
            self._give_up(
                f"its publisher said nothing for {self._allowed:g} s in the middle of version {self._state.incoming}"
            )

    def status(self) -> m.StatusReport:
        """Where this rank stands, as it is reported. Raises what the engine raises."""
        intact = self._state.held is not None and self._engine.weights_intact()
        return self._report(intact=intact, readiness=self._engine.readiness())

    def _report(self, *, intact: bool, readiness: Readiness) -> m.StatusReport:
        state = self._state
        version = state.incoming if state.state is EngineState.VERIFIED else state.held
        return m.StatusReport(
            state=state.state,
            version=version,
            digest=state.digest,
            incoming=state.incoming,
            lost=state.lost,
            reason=state.reason,
            plan_digest="" if self._bound is None else self._bound.part.plan_digest,
            intact=intact,
            may_serve=not readiness.why_not,
            why_not=m.plain_text(readiness.why_not, _LONGEST_ERROR),
            resting=readiness.resting,
        )

    def close(self) -> None:
        """Give up what is under way and let go of all memory of publishers."""
        if self._state.state is EngineState.RECEIVING:
            self._give_up("the receiver was closed")
        elif self._state.state is EngineState.VERIFIED:  # the old version is overwritten, and nobody is left to commit
            self._tear(f"the receiver was closed before version {self._state.incoming} was committed")
        self._close_transports()

    def _hello(self, request: m.Hello) -> m.Reply:
        present = self._session
        if request.role == "observer":
            if request.session not in self._observers:
                self._observers.append(request.session)
            return self._welcome(request)
        if request.role == "newcomer":
            return self._welcome(request)
        if request.role == "sender":
            if present is None or present.session != request.session:
                raise (StateError if present is None else StaleError)(
                    f"session {request.session[:8]} is not open on this receiver; its coordinator must introduce "
                    "itself first"
                )
        elif present is None or present.session != request.session:
            if present is not None and not present.gives_way(request):
                raise StaleError(
                    "a publisher that came later has taken over; this one is stale and must end, or call "
                    "take_over() if it is the one that counts"
                )
            if self._state.state is EngineState.RECEIVING:
                self._give_up(f"another publisher took over in the middle of version {self._state.incoming}")
            self._close_transports()
            self._session = _Session(request.session, request.epoch)
        else:  # its `take_over` counts against publishers that have an epoch and have not greeted with it yet
            present.epoch = max(present.epoch, request.epoch)
        self._heard = time.monotonic()
        return self._welcome(request)

    def _observed(self, request: m.Request) -> m.Reply:
        """Answer an observer. What it says is no word of the publisher."""
        if isinstance(request, m.Describe):
            return self._describe(request)
        if isinstance(request, m.Bye):
            self._observers.remove(request.session)
        elif not isinstance(request, m.Status):
            raise StateError(
                f"an observer may only describe and ask for the status, found {request.kind}; publish with a Publisher"
            )
        return self._done(request)

    def _welcome(self, request: m.Hello) -> m.Reply:
        return m.Welcome(
            request=request.request,
            status=self.status(),
            identity=local_identity(),
            engine=self.name,
            rank=self.rank,
            device=self._device,
            transports=tuple(self._transports),
            layouts=self._layouts.names,
            epoch=0 if self._session is None else self._session.epoch,
        )

    def _describe(self, request: m.Describe) -> m.Reply:
        description = self._engine.describe()
        bound, state = self._bound, self._state.state
        if (
            bound is not None
            and bound.layout_digest != description.layout_digest
            and state is not EngineState.RECEIVING
        ):
            # Experts moved, or parameters changed: whoever publishes next must plan for what is described here.
            self._bound = self._plans = None
        return m.Described(request=request.request, status=self.status(), description=description)

    def _set_plan(self, request: m.SetPlan) -> m.Reply:
        if self._state.state in (EngineState.RECEIVING, EngineState.VERIFIED):
            raise StateError(f"a plan cannot change while the engine is {self._state.state}; abort the publish first")
        self._bound = BoundPlan(PlanPart.from_json(request.part), self._engine.describe(), self._engine.live_tensors())
        self._plans = None
        return self._done(request)

    def _probe(self, request: m.Probe) -> m.Reply:
        transport = self._transports.get(request.offer.transport)
        if transport is None:
            raise StateError(
                f"this receiver has no transport {request.offer.transport}; it has {', '.join(self._transports)}"
            )
        transport.open(request.offer)
        transport.drop((request.offer.allocation,))
        return self._done(request)

    def _pause(self, request: m.Pause) -> m.Reply:
        if self._state.state is EngineState.SERVING:
            self._engine.pause()
            self._state.pause()
        return self._done(request)

    def _resume(self, request: m.Resume) -> m.Reply:
        state = self._state.state
        if state is EngineState.SERVING:
            return self._done(request)
        if state in (EngineState.PAUSED, EngineState.COMMITTED) and not self._engine.weights_intact():
            self._tear(
                f"an offload took version {self._state.held} and nothing replaced it, or a trainer that shares its "
                "memory began to write and did not end"
            )
        if state in (EngineState.RECEIVING, EngineState.VERIFIED):
            raise StateError(f"the engine is {state}; commit or abort version {self._state.incoming} before it serves")
        if self._state.state is EngineState.TORN:
            raise self._state.torn_error()
        self._engine.resume()
        self._state.resume()
        return self._done(request)

    def _status(self, request: m.Status) -> m.Reply:
        return self._done(request)

    def _begin(self, request: m.Begin) -> m.Reply:
        bound = self._bound
        if bound is None or bound.part.plan_digest != request.plan_digest:
            raise StateError(
                f"version {request.version} follows plan {request.plan_digest[:12]}, which this receiver does not "
                "have; send the plan first"
            )
        held, lost = self._state.held, self._state.lost
        newest = lost if held is None else held
        if newest is not None and request.version < newest and not request.allow_rollback:
            raise StateError(
                f"version {request.version} is older than version {newest}, which the engine "
                f"{'lost' if held is None else 'holds'}; set allow_rollback to go back"
            )
        if self._state.state is EngineState.VERIFIED:
            self._tear(
                f"version {self._state.incoming} was verified but never committed, and version {request.version} begins"
            )
        if self._plans is None or self._plans.table.limit != request.limit:
            self._plans = CopyPlans(bound.part, request.limit, self._layouts)
        reception = Reception(self.rank, request, bound, self._plans, self._engine)
        self._state.begin(request.version)
        self._reception = reception
        self._allowed = max(self._silence, request.quiet)
        self._require_resident()  # an engine that gave its memory away before this saw no receive to wait for
        return self._done(request)

    def _chunk(self, request: m.ChunkMessage) -> m.Reply:
        reception = self._current(request.version, request.nonce)
        try:
            reception.take(request, self._transports)
        except Exception as error:
            if reception.dirty:
                self._give_up(f"chunk {request.sequence} of version {request.version} failed: {error}")
            raise
        return self._done(request)

    def _verify(self, request: m.Verify) -> m.Reply:
        reception = self._current(request.version, request.nonce)
        try:
            self._end_transfer()
            sha256 = reception.verify(sha256=request.sha256)
        except Exception as error:
            self._give_up(f"version {request.version} could not be verified: {error}")
            raise
        self._state.verify(reception.digest)
        self._reception = None
        self._verified = reception.known
        return m.Verified(request=request.request, status=self.status(), digest=reception.digest, sha256=sha256)

    def _commit(self, request: m.Commit) -> m.Reply:
        state = self._state
        if state.digest != request.digest or self.status().version != request.version:
            raise StateError(
                f"version {request.version} with manifest {request.digest[:12]} is not what this engine holds "
                f"({state.state}, version {self.status().version}, manifest {state.digest[:12]}); publish it in full"
            )
        if state.state is EngineState.VERIFIED:
            self._check_unmoved()
            self._engine.commit(request.version)
            state.commit()
        return self._done(request)

    def _abort(self, request: m.Abort) -> m.Reply:
        state = self._state.state
        if state is EngineState.RECEIVING:
            self._give_up(request.reason)
        elif state is EngineState.VERIFIED or (state is EngineState.PAUSED and not self._engine.weights_intact()):
            self._tear(request.reason)
        return self._done(request)

    def _drop(self, request: m.Drop) -> m.Reply:
        for transport in self._transports.values():
            transport.drop(request.allocations)
        return self._done(request)

    def _bye(self, request: m.Bye) -> m.Reply:
        if self._state.state is EngineState.RECEIVING:
            self._give_up("its publisher left in the middle of a publish")
        self._close_transports()
        return self._done(request)

    def _current(self, version: int, nonce: str) -> Reception:
        reception = self._reception
        if reception is None or self._state.state is not EngineState.RECEIVING:
            raise StateError(
                f"the engine is {self._state.state} and receives no version, not even {version}; begin it first"
            )
        reception.require(version, nonce)
        self._require_resident()
        return reception

    def _require_resident(self) -> None:
        """Raises StateError, and the receive ends, if the engine gives away, or gave away, the weights' memory."""
        if self._engine.resident():
            return
        reason = f"the engine releases the memory of its weights while version {self._state.incoming} arrives"
        self._give_up(reason)
        raise StateError(f"{reason}; release before a publish, or after it, and publish again in full")

    def _check_unmoved(self) -> None:
        """What was verified is what will be served: an offload in between would leave other memory there."""
        assert self._verified is not None, "what is committed was verified"
        moved = self._verified.moved(self._engine.live_tensors())
        if moved:
            self._tear(
                f"{len(moved)} parameters moved after version {self._state.incoming} was verified: "
                f"{listing(sorted(moved))}"
            )
            raise self._state.torn_error()

    def _give_up(self, reason: str) -> None:
        """End a publish that will not complete: back to the old version if that is still whole, else torn."""
        reception, self._reception = self._reception, None
        if reception is not None:
            with suppress(RuntimeError):  # a device that failed; the fence must come all the same
                reception.end()
        self._end_transfer()
        clean = reception is not None and not reception.dirty and self._state.held is not None
        if clean and self._engine.weights_intact():
            self._state.withdraw()
        else:
            self._tear(reason)

    def _tear(self, reason: str) -> None:
        self._state.tear(m.plain_text(reason, _LONGEST_ERROR))
        self._engine.fence(self._state.reason)

    def _done(self, request: m.Request) -> m.Done:
        return m.Done(request=request.request, status=self.status())

    def _end_transfer(self) -> None:
        for transport in self._transports.values():
            transport.end_publish()

    def _close_transports(self) -> None:
        for transport in self._transports.values():
            transport.close()

    _HANDLERS: Mapping[type, Callable[..., m.Reply]] = {
        m.Describe: _describe,
        m.SetPlan: _set_plan,
        m.Probe: _probe,
        m.Pause: _pause,
        m.Resume: _resume,
        m.Status: _status,
        m.Begin: _begin,
        m.ChunkMessage: _chunk,
        m.Verify: _verify,
        m.Commit: _commit,
        m.Abort: _abort,
        m.Drop: _drop,
        m.Bye: _bye,
    }
