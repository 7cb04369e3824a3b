"""Pages promise what is there: links lead somewhere, Python compiles and imports what exists, files, names, commands,
their options and make's targets are known."""

import ast
import importlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_WHERE = ("*.md", "docs/**/*.md", "examples/*/*.md")
PAGES = [path.relative_to(ROOT).as_posix() for where in _WHERE for path in sorted(ROOT.glob(where))]
SOURCES = {"weftpub": "", "weftpub_kernels": "kernels", "weftpub_adapters": "adapters"}
SOURCES |= dict.fromkeys(("weftpub_demo", "weftmoe"), "examples")

_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w./-])((?:tests|docs|examples|requirements|\.ci)/[\w./-]*[\w])(?![\w*{]|::|\.\w+::)")
_NAME = re.compile(r"\b(?:weftpub|weftpub_kernels|weftpub_adapters|weftpub_demo|weftmoe)(?:\.[A-Za-z_]\w*)+")
_COMMAND = re.compile(r"(?:^|/| )(weftpub [a-z]+|run\.sh|(?:python3? |\S+/python )(?:-m [\w.]+|\S+\.py))(?![\w/])(.*)")
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
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in SOURCES:
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


def code_of(page: str) -> Iterator[str]:
    """Every line of a page's code: of its blocks, and between backticks."""
    text = text_of(page)
    for _, body in _FENCE.findall(text):
        yield from body.splitlines()
    yield from _CODE.findall(_FENCE.sub("", text))


def missing_files(lines: Iterator[str]) -> list[str]:
    """Paths from the repository's root that are not there; names in capitals stand for the reader's own."""
    named = {path for line in lines for path in _FILE.findall(line) if not re.search(r"\b[A-Z]+\b", Path(path).stem)}
    return sorted(path for path in named if not (ROOT / path).exists())


def missing_names(lines: Iterator[str]) -> list[str]:
    """Dotted names of our packages whose module is not there, or does not contain the name."""
    return sorted({name for line in lines for name in _NAME.findall(line) if not _known(name)})


def _known(name: str) -> bool:
    first, *rest = name.split(".")
    place = ROOT / SOURCES[first] / first
    while rest and (place / rest[0]).is_dir():
        place /= rest.pop(0)
    module = place.with_suffix(".py") if not place.is_dir() else place / "__init__.py"
    if rest and (place / f"{rest[0]}.py").is_file():
        module = place / f"{rest.pop(0)}.py"
    return not rest or re.search(rf"\b{rest[0]}\b", module.read_text(encoding="utf-8")) is not None


def unknown_options(lines: Iterator[str]) -> list[str]:
    """Options of our commands and scripts that their source does not know; KeyError for a command that is none."""
    unknown: list[str] = []
    for part in (part for line in lines for part in re.split(r"[;|&]", line.partition("#")[0])):
        found = _COMMAND.search(part)
        source = None if found is None else _source_of(found[1])
        if found is not None and source is not None:
            named = re.findall(r"(?<![\w-])--[a-z][a-z-]*", found[2])
            unknown.extend(f"{found[1]} {option}" for option in named if not _takes(source, option))
    return unknown


def _source_of(command: str) -> str | None:
    """Where a command reads its options; None if it is not ours."""
    words = command.split()
    if words[0] == "run.sh":
        return text_of("examples/weftmoe/run.sh")
    if words[0] == "weftpub":
        if words[1] == "presets":
            return text_of("weftpub/cli.py")
        commands = tomllib.loads(text_of("pyproject.toml"))["project"]["entry-points"]["weftpub.commands"]
        module = commands[words[1]].partition(":")[0]
    elif words[1] == "-m":
        module = words[2]
    else:
        return text_of(words[1]) if words[1].startswith(("tests/", "docs/")) else None
    first = module.partition(".")[0]
    if first not in SOURCES:
        return None
    place = ROOT / SOURCES[first] / module.replace(".", "/")
    file = place.with_suffix(".py")
    return (file if file.is_file() else place / "__main__.py").read_text(encoding="utf-8")


def _takes(source: str, option: str) -> bool:
    parameter = option.removeprefix("--").replace("-", "_")
    return option == "--help" or option in source or re.search(rf"\b{parameter}: Annotated", source) is not None


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    assert missing_files(code_of(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page: str) -> None:
    assert missing_names(code_of(page)) == []


@pytest.mark.parametrize("page", PAGES)
def test_options_exist(page: str) -> None:
    assert unknown_options(code_of(page)) == []


def test_what_is_not_there_is_found() -> None:
    lines = [
        "python tests/gpu/gone.py --out OUT > docs/results/PAGE.md",
        "weftpub plan --model DIR --colour; examples/weftmoe/run.sh fp8 --smoke --slow # --not-read",
        "weftpub.store.ExpertStore, weftpub.store.Shop, weftpub_kernels.bench.verify, weftpub.shop",
        "python -m weftpub.staging.bench --check-only --fast",
    ]
    assert missing_files(iter(lines)) == ["tests/gpu/gone.py"]
    assert missing_names(iter(lines)) == ["weftpub.shop", "weftpub.store.Shop"]
    assert unknown_options(iter(lines[1:])) == [
        "weftpub plan --colour",
        "run.sh --slow",
        "python -m weftpub.staging.bench --fast",
    ]
