"""Pages promise what is there: links lead somewhere, Python compiles and imports what exists, commands and targets are
known."""

import ast
import importlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [path.relative_to(ROOT).as_posix() for path in [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]]
OURS = ("weftpub", "weftpub_kernels", "weftpub_adapters", "weftpub_demo", "weftmoe")

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
_MAKE = re.compile(r"(?:^|`)make((?: [A-Z_]+=\S+)*(?: [a-z][a-z-]*)?)", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return [body for found, body in _FENCE.findall(text_of(page)) if found == language]


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as a forge's renderer makes them."""
    headings = re.findall(r"^#+ +(.+)$", _FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that lead to no file, or to no heading of it."""
    broken: list[str] = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(ROOT / page) == []


def test_a_link_to_nothing_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One thing\n[a](gone.md) [b](#one-thing) [c](#no-thing) [d](https://host.invalid/x)\n")
    assert broken_links(page) == ["gone.md", "#no-thing"]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_what_a_clone_has(page: str) -> None:
    # A folder that is empty, or that is ignored, is there on one machine only.
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for link in _LINK.findall(_FENCE.sub("", text_of(page))):
        name = link.partition("#")[0]
        if "://" in link or not name:
            continue
        target = ((ROOT / page).parent / name).resolve()
        known = [git, "ls-files", "--cached", "--others", "--exclude-standard", "--", str(target)]
        assert subprocess.run(known, cwd=ROOT, capture_output=True, text=True, check=True).stdout, link


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")])
def test_python_compiles_and_imports_what_exists(page: str) -> None:
    for body in blocks_of(page, "python"):
        tree = ast.parse(body, filename=page)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OURS:
                module = importlib.import_module(node.module or "")
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert not missing, f"{page}: {node.module} has no {missing}"


def test_every_page_of_the_documentation_is_in_its_index() -> None:
    linked = {(ROOT / "docs" / link).resolve() for link in _LINK.findall(text_of("docs/README.md"))}
    results = {ROOT / "docs/results/README.md"}  # which speaks for the dated pages beside it
    pages = results.union(ROOT / page for page in PAGES if re.match(r"docs/(?!results/)", page))
    assert pages - linked == {ROOT / "docs" / "README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(_TARGET.findall(text_of("Makefile")))
    named = {word for words in _MAKE.findall(text_of(page)) for word in words.split() if "=" not in word}
    assert named <= targets
