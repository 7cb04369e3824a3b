"""Releases of foreign packages: which is installed, and its number to compare."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed", "release"]


def installed(package: str) -> str | None:
    """The version of an installed distribution; None where it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(found: str) -> tuple[int, ...]:
    """The first three numbers of a version, without what a build adds: (2, 11, 0) of "2.11.0+cu130"."""
    return tuple(int(part) for part in found.split("+")[0].split(".")[:3] if part.isdigit())
