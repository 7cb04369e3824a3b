"""Which foreign systems the adapters import, read from their source and from a fresh process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weftpub_adapters

ROOT = Path(weftpub_adapters.__file__).parent
FOREIGN = {"awex", "megatron", "sglang", "transformer_engine", "transformers", "vllm"}
PACKAGES = ("awex", "megatron", "sglang")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Every module that a source file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(source: str, package: str) -> list[str]:
    """Imports that an adapter of `package` must not have."""
    found = []
    for name in imported(source):
        parts = name.split(".")
        foreign = parts[0] in FOREIGN and parts[0] != package
        neighbour = parts[0] == "weftpub_adapters" and len(parts) > 1 and parts[1] in set(PACKAGES) - {package}
        if foreign or neighbour or "cpu_megatron" in parts or parts[0] == "weftpub_demo":
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_adapter_imports_its_own_system_and_no_shim(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parts[0]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from weftpub_demo import cpu_megatron",
        "from weftpub_demo.cpu_megatron import install",
        "def f():\n    import weftpub_demo.cpu_megatron",
        "def f():\n    from awex.models import registry",
        "import transformers",
        "from weftpub_adapters.awex import build_plan",
    ],
)
def test_the_scan_finds_what_it_looks_for(line: str) -> None:
    assert faults(line, "sglang") != []


def test_importing_the_adapters_imports_no_foreign_system() -> None:
    names = ", ".join(f"weftpub_adapters.{package}" for package in PACKAGES)
    code = f"import sys, {names}; print(sorted({{m.split('.')[0] for m in sys.modules}} & {FOREIGN!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"
