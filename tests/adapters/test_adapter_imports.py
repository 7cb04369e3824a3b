"""Which foreign systems the adapters import, read from their source and from a fresh process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weftpub_adapters

ROOT = Path(weftpub_adapters.__file__).parent
# Adapter to the foreign top-level packages that it may import.
OWN = {
    "awex": {"awex"},
    "bridge": {"megatron"},
    "doctor": set(),
    "megatron": {"megatron"},
    "safetensors": set(),
    "sglang": {"sglang"},
    "te": {"transformer_engine", "transformer_engine_torch"},
}
FOREIGN = {"transformers", "vllm"}.union(*OWN.values())
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.name != "__init__.py")
# Adapters that build on another one; every other pair keeps apart.
BUILDS_ON = {("bridge", "megatron"), ("megatron", "te")}
# The doctor asks each of the others which release it accepts.
BUILDS_ON |= {("doctor", adapter) for adapter in ("awex", "megatron", "sglang", "te")}


def adapter_of(path: Path) -> str:
    """The adapter that a source file belongs to: a folder, or a module of one file."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source: str) -> Iterator[str]:
    """Every module that a source file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(source: str, adapter: str) -> list[str]:
    """Imports that `adapter` must not have."""
    found = []
    for name in imported(source):
        parts = name.split(".")
        foreign = parts[0] in FOREIGN - OWN[adapter]
        ours = parts[0] == "weftpub_adapters" and len(parts) > 1 and parts[1] in OWN
        neighbour = ours and parts[1] != adapter and (adapter, parts[1]) not in BUILDS_ON
        if foreign or neighbour or "cpu_megatron" in parts or parts[0] == "weftpub_demo":
            found.append(name)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_adapter_imports_its_own_system_and_no_shim(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), adapter_of(path)) == []


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
    names = ", ".join(f"weftpub_adapters.{adapter}" for adapter in OWN)
    code = f"import sys, {names}; print(sorted({{m.split('.')[0] for m in sys.modules}} & {FOREIGN!r}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert result.stdout.strip() == "[]"
