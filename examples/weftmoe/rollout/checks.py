"""From a publish's report to the byte check that a step's record carries."""

import hashlib

from weftmoe.telemetry.record import ByteCheck
from weftpub.publisher import PublishReport

__all__ = ["byte_check"]


def byte_check(report: PublishReport) -> ByteCheck:
    """What was compared. A publish whose bytes disagree raises, so a report means that all agreed."""
    lines = "".join(f"{name} {report.sha256[name]}\n" for name in sorted(report.sha256))
    return ByteCheck(
        method="sha256" if report.sha256 else "checksum",
        pieces=report.pieces,
        bytes=report.nbytes + report.shared_nbytes,
        in_place=report.shared_nbytes,
        matched=True,
        digest=report.digest,
        sha256=hashlib.sha256(lines.encode()).hexdigest() if report.sha256 else None,
    )
