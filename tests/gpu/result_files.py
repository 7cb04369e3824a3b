"""What a dated page keeps beside it, in the folder of its name: the raw files that it was made from, and notes.txt, in
which whoever ran the scripts says what no script can know (what ran beside it, what was left out and why)."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["keep", "made_anew", "notes", "plain"]

_ROOT = Path(__file__).resolve().parents[2]


def keep(folder: Path, name: str, data: Mapping[str, Any], indent: int | None = 1) -> None:
    """Write a raw file, without the folders of the machine that it was made on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(plain(data), indent=indent) + "\n", encoding="utf-8")


def plain(found: Any) -> Any:
    """The same, with the last name of every temporary folder's file and of every installed one instead of its path."""
    if isinstance(found, Mapping):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if isinstance(found, str):
        return re.sub(r"(?<![\w.])/(?:tmp/[^\s\"'`()]*/|\S*/site-packages/)", "", found)
    return found


def notes(folder: Path) -> list[str]:
    """The lines of notes.txt as a list of the page; none where there is no such file."""
    path = folder / "notes.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return ["", *(f"- {line}" for line in lines)] if lines else []


def made_anew(script: str, page: Path, kept: Iterable[str] | None) -> list[str]:
    """The page's last lines: how it is made again from its raw files, given by their names and what follows those, or
    from their folder (None)."""
    shown = page.relative_to(_ROOT) if page.is_relative_to(_ROOT) else page
    folder = shown.with_suffix("").as_posix()
    sources = [folder]
    if kept is not None:
        sources = [f"{folder}/{name}.json{colon}{more}" for name, colon, more in (one.partition(":") for one in kept)]
    command = f"python tests/gpu/{script} {shown.as_posix()} {' '.join(sources)}"
    return ["", "Made anew from the files beside it:", "", "```", command, "```"]
