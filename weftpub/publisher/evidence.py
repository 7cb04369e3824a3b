"""What rank 0 makes of the senders' evidence: one manifest, proof that replicas are equal, and the comparison of sha256
on both sides.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftpub.errors import ChecksumError, ManifestError
from weftpub.plan import PieceTable, Plan
from weftpub.plan.views import listing
from weftpub.publisher.sender import decode
from weftpub.wire.manifest import pack_checksums

__all__ = ["assemble", "check_replicas", "compare_sha256"]


def check_replicas(plan: Plan, replicas: Sequence[Mapping[str, int]]) -> None:
    """Prove that sender ranks which hold the same part of a tensor hold the same bytes.

    Args:
        replicas: per sender rank, the checksums of the tensors that it shares with others.

    Raises:
        ManifestError: names the tensors and ranks that differ.
    """
    if not any(replicas):
        return
    first: dict[tuple[str, object], tuple[int, int]] = {}
    differing: list[str] = []
    for shard in plan.sources:
        value = replicas[shard.rank].get(shard.name) if shard.rank < len(replicas) else None
        if value is None:
            continue
        rank, expected = first.setdefault((shard.name, shard.box), (shard.rank, value))
        if value != expected:
            differing.append(
                f"{shard.name} (sender rank {rank}: {expected:016x}, sender rank {shard.rank}: {value:016x})"
            )
    if differing:
        raise ManifestError(
            f"{len(differing)} replicas differ between data-parallel sender ranks: {listing(differing, 4)}; nothing "
            "was sent. "
            "Bring the ranks back to one state, from a checkpoint if need be"
        )


def assemble(tables: Mapping[int, PieceTable], pieces: Sequence[Mapping[str, Any]]) -> dict[int, bytes]:
    """Checksums of every receiver's pieces in their order, from what each sender computed for its own.

    Raises:
        ManifestError: a sender reported another number of pieces than the plan gives it.
    """
    found: dict[int, bytes] = {}
    for receiver, table in tables.items():
        values = np.zeros(len(table.pieces), dtype=np.uint64)
        for sender, indices in table.by_sender.items():
            reported = decode(pieces[sender].get(str(receiver), ""))
            if len(reported) != len(indices):
                raise ManifestError(
                    f"sender rank {sender} reported {len(reported)} checksums for receiver rank {receiver}, the plan "
                    f"gives it {len(indices)} pieces"
                )
            values[indices] = reported
        found[receiver] = pack_checksums(values)
    return found


def compare_sha256(
    tables: Mapping[int, PieceTable], served: Mapping[int, Sequence[str]], sent: Sequence[Mapping[str, Sequence[str]]]
) -> dict[str, str]:
    """Compare what engines serve with what the trainer computes with.

    Args:
        served: receiver rank to sha256 of its pieces.
        sent: per sender rank, receiver to sha256 of the pieces that this sender has.

    Returns:
        sha256 by piece name.

    Raises:
        ChecksumError: names the tensors that differ.
    """
    digests: dict[str, str] = {}
    differing: list[str] = []
    for receiver, found in served.items():
        table = tables[receiver]
        if len(found) != len(table.pieces):
            raise ChecksumError(
                f"receiver rank {receiver} returned {len(found)} sha256 for its {len(table.pieces)} pieces; do both "
                "sides run the same release?"
            )
        for sender, indices in table.by_sender.items():
            for index, expected in zip(indices.tolist(), sent[sender][str(receiver)], strict=True):
                name = table.describe(index)
                digests[name] = expected
                if found[index] != expected:
                    differing.append(f"{name} (trainer {expected[:16]}, receiver rank {receiver} {found[index][:16]})")
    if differing:
        raise ChecksumError(
            f"sha256 of {len(differing)} tensors differs between trainer and engine: {listing(differing, 4)}"
        )
    return digests
