"""The manifest: which bytes a version consists of, as one checksum per piece and one digest over all.

What every piece is (name, dtype, shape, owner, destination, start, bytes) follows from the plan and the piece limit,
which both sides have; only the checksums are new at each publish. So a receiver gets its own checksums and one hash per
receiver for the others (the *leaves*), computes the digest of the whole manifest itself, and equal digests on all ranks
mean that all of them hold parts of one and the same publish.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weftpub.errors import ManifestError
from weftpub.plan import PieceTable
from weftpub.plan.boxes import Index

__all__ = ["Manifest", "ManifestEntry", "leaf_hash", "manifest_digest", "pack_checksums", "unpack_checksums"]


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One piece in words and numbers.

    Attributes:
        owner: sender rank.
        destination: receiver rank.
        start: first element of the piece in the receiver's shard.
        checksum: 64-bit checksum of the piece's bytes in row-major order.
    """

    name: str
    dtype: str
    shape: Index
    owner: int
    destination: int
    start: Index
    nbytes: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """All checksums of one publish.

    Attributes:
        run_id, version, nonce: which publish; the nonce is drawn anew each time, so two publishes never share a digest.
        plan_digest: digest of the plan that the pieces were cut from.
        limit: most bytes of a chunk, the limit that the pieces were cut with.
        checksums: receiver rank to its pieces' checksums in the order of its piece table, 8 bytes each, little-endian.
    """

    run_id: str
    version: int
    nonce: str
    plan_digest: str
    limit: int
    checksums: Mapping[int, bytes]

    @cached_property
    def leaves(self) -> dict[int, str]:
        """Receiver rank to the hash of its checksums, ascending."""
        return {rank: leaf_hash(self.checksums[rank]) for rank in sorted(self.checksums)}

    @cached_property
    def digest(self) -> str:
        """sha256 that names the whole manifest."""
        return manifest_digest(self.run_id, self.version, self.nonce, self.plan_digest, self.limit, self.leaves)

    def entries(self, tables: Mapping[int, PieceTable]) -> Iterator[ManifestEntry]:
        """Every piece with its checksum, receiver by receiver.

        Args:
            tables: receiver rank to the piece table of its part, cut with `limit`.

        Raises:
            ManifestError: a receiver has another number of pieces than checksums.
        """
        for rank in self.leaves:
            table = tables[rank]
            for piece, checksum in zip(
                table.pieces, unpack_checksums(self.checksums[rank], len(table.pieces)), strict=True
            ):
                move = table.part.moves[piece.move]
                start = tuple(a + b for a, b in zip(move.recv_start, piece.start, strict=True))
                yield ManifestEntry(
                    move.name, move.dtype, piece.shape, move.send_rank, rank, start, piece.nbytes, int(checksum)
                )

    def to_json(self) -> str:
        """The manifest as text, checksums in base64; read back by `from_json`."""
        data = {
            "format": 1,
            "run_id": self.run_id,
            "version": self.version,
            "nonce": self.nonce,
            "plan_digest": self.plan_digest,
            "limit": self.limit,
            "checksums": {
                str(rank): base64.b64encode(self.checksums[rank]).decode() for rank in sorted(self.checksums)
            },
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Read a manifest; ManifestError if the text is not one."""
        try:
            data = json.loads(text)
            if data["format"] != 1:
                raise ValueError(f"format {data['format']}")
            return cls(
                run_id=str(data["run_id"]),
                version=int(data["version"]),
                nonce=str(data["nonce"]),
                plan_digest=str(data["plan_digest"]),
                limit=int(data["limit"]),
                checksums={
                    int(rank): base64.b64decode(value, validate=True) for rank, value in data["checksums"].items()
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
            raise ManifestError(f"not a manifest: {error}") from None


def leaf_hash(checksums: bytes) -> str:
    """sha256 of one receiver's packed checksums."""
    return hashlib.sha256(checksums).hexdigest()


def manifest_digest(
    run_id: str, version: int, nonce: str, plan_digest: str, limit: int, leaves: Mapping[int, str]
) -> str:
    """The digest of a manifest from its head and its leaves, which is all that one receiver has of it."""
    head = [1, run_id, version, nonce, plan_digest, limit, [[rank, leaves[rank]] for rank in sorted(leaves)]]
    return hashlib.sha256(json.dumps(head, separators=(",", ":")).encode()).hexdigest()


def pack_checksums(values: "np.ndarray[tuple[int], np.dtype[np.uint64]]") -> bytes:
    """64-bit checksums as bytes, little-endian."""
    return values.astype("<u8", copy=False).tobytes()


def unpack_checksums(data: bytes, count: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """The `count` checksums in `data`; ManifestError if there are more or fewer."""
    if len(data) != 8 * count:
        raise ManifestError(
            f"the manifest announces {len(data) / 8:g} checksums for {count} pieces; plan and manifest do not belong "
            "together"
        )
    return np.frombuffer(data, dtype="<u8").astype(np.uint64, copy=False)
