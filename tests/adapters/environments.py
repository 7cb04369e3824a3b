"""Virtual environments of a trainer and of an engine, neither of which holds the other's system.

`tests/environments/install.sh` installs both for real, the engine's with the torch that SGLang pins, which is another
build than the trainer's. Without them, two are made here from the packages of the running environment, in a second and
without a download: then both have one torch, and what each lacks is real all the same.
"""

import importlib.util
import sys
import sysconfig
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["ENGINE_LACKS", "TRAINER_LACKS", "Environments", "facts", "prepare"]

_ROOT = Path(__file__).parents[2]
_INSTALLED = _ROOT / "build" / ".environments"  # where tests/environments/install.sh puts them
_SOURCES = (_ROOT, _ROOT / "kernels", _ROOT / "adapters", _ROOT / "examples", Path(__file__).parent)
_OURS = ("weftpub", "_weftpub", "__editable__")  # installed from _SOURCES instead
# Packages of the other side, by the start of their names in site-packages.
TRAINER_LACKS = ("sglang", "torch_memory_saver")
ENGINE_LACKS = ("megatron", "emerging_optimizers", "awex", "transformer_engine")
_FOREIGN = ("sglang", "torch_memory_saver", "megatron.core", "emerging_optimizers", "awex", "transformer_engine")


@dataclass(frozen=True)
class Environments:
    """The two interpreters, and whether they were installed or linked."""

    trainer: Path
    engine: Path
    installed: bool


def prepare(folder: Path) -> Environments:
    """Interpreters of both environments; test plugins of the engine are in `folder`."""
    plugins = folder / "plugins"
    _write_plugins(plugins)
    if (_INSTALLED / "ready").exists():
        trainer, engine = _INSTALLED / "trainer", _INSTALLED / "engine"
    else:
        trainer, engine = folder / "trainer", folder / "engine"
        _link(trainer, TRAINER_LACKS)
        _link(engine, ENGINE_LACKS)
    for root in (trainer, engine):
        (_site(root) / "weftpub_test.pth").write_text("\n".join(map(str, (*_SOURCES, plugins))), encoding="utf-8")
    return Environments(trainer / "bin" / "python", engine / "bin" / "python", trainer.parent == _INSTALLED)


def facts() -> dict[str, Any]:
    """What the environment of this process is."""
    found = {name: _there(name) for name in _FOREIGN}
    return {"prefix": sys.prefix, "torch": torch.__version__, "torch_file": torch.__file__, "found": found}


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False


def _write_plugins(folder: Path) -> None:
    """Entry points of this project's plugin and of the tests', as installed packages would have them."""
    info = folder / "weftpub_environments-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weftpub_environments\nVersion: 0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\n"
        "weftpub = weftpub_adapters.sglang.plugin:register\n"
        "cpu_engine = cpu_engine:register\n"
        "digests = environment_server:register\n",
        encoding="utf-8",
    )


def _link(root: Path, lacks: Sequence[str]) -> None:
    """Make a virtual environment with links to all packages of this one, except those whose names start so."""
    venv.create(root, symlinks=True, with_pip=False)
    site = _site(root)
    for source in {Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))}:
        for entry in source.iterdir():
            if entry.suffix != ".pth" and not entry.name.startswith((*lacks, *_OURS)) and entry.name != "__pycache__":
                (site / entry.name).symlink_to(entry)


def _site(root: Path) -> Path:
    """An environment's site-packages."""
    return Path(sysconfig.get_path("purelib", vars={"base": str(root), "platbase": str(root)}))
