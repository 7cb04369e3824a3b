"""Imports go down only, and no package carries the name of a foreign one."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "weftpub",
    "kernels/weftpub_kernels",
    "adapters/weftpub_adapters",
    "examples/weftpub_demo",
    "examples/weftmoe",
)


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    path = [str(root / part) for part in (".", "kernels", "adapters", "examples")]
    code = (
        f"import sys; sys.path[:0] = {path!r}; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(cache_dir=None))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=400, check=False
    )


def test_imports_go_down_only() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_that_goes_up_or_out_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for source in SOURCES:
        package = tmp_path / source
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    assert lint_imports(tmp_path).returncode == 0
    (tmp_path / "weftpub" / "up.py").write_text("import weftpub_adapters\n")
    (tmp_path / "weftpub" / "out.py").write_text("import sglang\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1
    assert "weftpub.up -> weftpub_adapters" in result.stdout
    assert "weftpub.out -> sglang" in result.stdout


def test_the_source_roots_are_no_packages() -> None:
    # A top-level package `kernels` would overwrite Hugging Face's, which SGLang imports.
    assert [root for root in ("kernels", "adapters", "examples") if (ROOT / root / "__init__.py").exists()] == []


def test_the_wheel_lists_every_package() -> None:
    # Wheels of this field have shipped with the root package alone.
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(SOURCES)
