"""Files of the repository name nobody's own folders: results are copied from runs, and a path of the machine that ran
them tells a reader nothing."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A folder of somebody's own, at the start of a path.
_OWN = re.compile(rb"(?<![\w.})-])/(?:root|work|home/\w+|Users/\w+)/[^\s\"'`]*")


def own_paths(data: bytes) -> Iterator[str]:
    """Paths in a text that lead into somebody's own folders."""
    if b"\0" not in data:
        yield from (found.decode(errors="replace") for found in _OWN.findall(data))


def test_no_file_names_somebodys_own_folders() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    assert len(files) > 100
    found = {
        str(file.relative_to(ROOT)): paths for file in files if (paths := sorted(set(own_paths(file.read_bytes()))))
    }
    assert found == {}


def test_such_a_path_is_found() -> None:
    home, root = "/" + "home", "/" + "root"  # put together, as this file is looked at, too
    text = f"cd {home}/mx/runs; {{out}}{root}/a.json, ..{root}/b, OUT{root}/c, '{root}/x.py'"
    assert list(own_paths(text.encode())) == [f"{home}/mx/runs;", f"{root}/x.py"]
    assert list(own_paths(b"\0" + text.encode())) == []
