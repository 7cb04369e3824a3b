"""One publish on its way into one engine rank: what has arrived, and the copies that put it in place."""

from collections.abc import Mapping

import numpy as np
import torch

from weftpub.errors import ManifestError, StateError
from weftpub.receive.copies import CopyPlans
from weftpub.receive.engine import EngineSide
from weftpub.receive.shared import require_shared_by_a_trainer
from weftpub.receive.views import BoundPlan, Computing, ReceiveViews
from weftpub.transport import ReceiveTransport, TransportKind, enqueued, settle, wait_for_devices
from weftpub.transport.tensors import Known
from weftpub.wire.manifest import leaf_hash, manifest_digest, unpack_checksums
from weftpub.wire.messages import Begin, ChunkMessage

__all__ = ["Reception"]


class Reception:
    """One publish into one rank, from begin to verify.

    Args:
        rank: this receiver rank.
        begin: the announcement.
        bound: the checked plan part.
        plans: its copy tables, for the announced limit.
        engine: the engine rank; the views are made from its live tensors now.

    Raises:
        ManifestError: the announced checksums are not those of this plan, or the digest does not fit them.
        PlanError: live parameters are no longer those that the plan was checked against.
        StateError: they lie in memory that must not be written here.

    Attributes:
        dirty: whether a byte of the engine's weights may have been written.
    """

    def __init__(self, rank: int, begin: Begin, bound: BoundPlan, plans: CopyPlans, engine: EngineSide) -> None:
        self.version = begin.version
        self.nonce = begin.nonce
        self.digest = _checked_digest(rank, begin)
        self.dirty = False
        self._engine = engine
        self._plans = plans
        self._expected = unpack_checksums(begin.checksums, len(plans.table.pieces))
        self._received = np.zeros(len(plans.table.pieces), dtype=np.bool_)
        self._next: dict[int, int] = {}
        self._views: ReceiveViews = bound.bind(plans, engine.live_tensors())
        require_shared_by_a_trainer(self._views.live)
        self._processed = False
        self._begun: Computing | None = None
        self._fault: Exception | None = None
        settle(self._views.devices)

    @property
    def known(self) -> Known:
        """Where the parameters that were written lie, as of the last look."""
        return self._views.known

    def require(self, version: int, nonce: str) -> None:
        """StateError unless a message belongs to this publish."""
        if (version, nonce) != (self.version, self.nonce):
            raise StateError(
                f"version {version} with nonce {nonce[:8]} is stale: the engine receives version {self.version} with "
                f"nonce {self.nonce[:8]}"
            )

    def take(self, chunk: ChunkMessage, transports: Mapping[TransportKind, ReceiveTransport]) -> None:
        """Copy a chunk into the live parameters; on return the copy is done and the sender's memory let go of. If the
        last one is memory that is shown where it is, the engine's post-processing and, on the device, the checksums
        that `verify` compares follow while it is copied. A staging buffer goes back first: other receivers wait for it.

        Raises:
            ManifestError: the chunk is out of turn, or brings a piece again. Nothing was written.
            TransportError: an offer cannot be opened. Nothing was written.
            PlanError: parameters have moved.
        """
        due = self._next.get(chunk.sender, 0)
        if chunk.sequence != due:
            raise ManifestError(f"chunk {chunk.sequence} of sender rank {chunk.sender} arrived, chunk {due} was due")
        pieces, copies, offers = self._plans.of(chunk)
        again = pieces[self._received[pieces]]
        if len(again):
            raise ManifestError(
                f"{self._plans.table.describe(int(again[0]))}: arrived twice; every piece is sent exactly once"
            )
        self._views.check_pointers()
        opened: list[int] = []
        buffers: list[torch.Tensor] = []
        try:
            for index, offer in enumerate(offers):
                if offer.transport not in transports:
                    raise ManifestError(
                        f"this receiver has no transport {offer.transport}; it has {', '.join(transports)}"
                    )
                buffers.append(transports[offer.transport].open(offer))
                opened.append(index)
            self.dirty = True
            self._views.scatter(copies, buffers)
            copied = enqueued(self._views.devices)
            self._received[pieces] = True
            self._next[chunk.sender] = due + 1
            if self._received.all() and self._plans.regions.nbytes[pieces].sum() > self._plans.table.limit:
                self._begin_to_verify()  # no staging buffer is as large: nobody else waits for this memory
            for event in copied:
                event.synchronize()
        finally:
            buffers.clear()
            for index in opened:
                transports[offers[index].transport].done(offers[index])

    def verify(self, *, sha256: bool) -> tuple[str, ...]:
        """Check that all has arrived, that the engine post-processed it, and compare checksums of what it will serve.

        Returns:
            sha256 of every piece if asked for.

        Raises:
            ManifestError: pieces are missing. ChecksumError: bytes differ. PlanError: a parameter has another layout.
            Exception: what the engine raised when it post-processed.
        """
        self._plans.require_all(self._received)
        if not self._processed:
            self._begin_to_verify()
        if self._fault is not None:
            raise self._fault
        self._views.verify(self._engine.live_tensors(), self._begun, self._expected)
        return self._views.sha256() if sha256 else ()

    def end(self) -> None:
        """Return when nothing of this publish touches the engine's memory any more, which may then go."""
        self._fault = None  # whose traceback leads back here: together they would hold the memory
        wait_for_devices(self._views.devices)

    def _begin_to_verify(self) -> None:
        """Post-process, and begin to compute checksums, while the last copy is under way. What goes wrong is told when
        the publisher asks."""
        self._processed = True
        try:
            self._engine.post_process()
            self._begun = self._views.begin_to_verify()
        except Exception as error:
            self._fault = error


def _checked_digest(rank: int, begin: Begin) -> str:
    if begin.leaves.get(rank) != leaf_hash(begin.checksums):
        raise ManifestError(
            f"the manifest of version {begin.version} does not hold the checksums of receiver rank {rank}"
        )
    digest = manifest_digest(begin.run_id, begin.version, begin.nonce, begin.plan_digest, begin.limit, begin.leaves)
    if digest != begin.digest:
        raise ManifestError(
            f"the manifest of version {begin.version} has digest {digest[:12]}, announced was {begin.digest[:12]}"
        )
    return digest
