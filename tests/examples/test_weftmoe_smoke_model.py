"""The smoke's model is made in a process of its own: the same bytes, progress, errors told, and nothing left behind.

A user's first command, `run.sh fp8 --smoke` on two GPUs of a machine with a cuDNN of its own, died while it built its
trainer: "libcudnn_heuristic.so.9: undefined symbol". Rank 0 had warmed the model up on the GPU, and torch had loaded a
part of its cuDNN for that; then TransformerEngine's library asked the loader for all parts by name, got the others
from the system, and they did not fit. Scripts that made the model elsewhere had never shown it.
"""

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from weftmoe import settings as composed
from weftmoe.loop.inputs import Inputs, find_inputs
from weftmoe.loop.model import prepare_process
from weftmoe.schema import Settings
from weftmoe.smoke import Warmup, apart, make_model_apart
from weftmoe.smoke import model as in_process
from weftpub.errors import ConfigError, DeadlineError
from weftpub_demo.peer import PeerError, ReceiverProcess

STEPS = 3
SMALL = ("layers=1", "hidden=128", "intermediate=128", "experts=4", "heads=4", "kv_heads=2", "head_dim=32")
# A maker that is asked, says who it is, and is busy for ever.
BUSY = """
import os, time
from pathlib import Path
from weftpub_demo.control import Control
def make(request):
    part = Path(request["directory"]).with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(request["directory"])
    time.sleep(600)
Control().serve({"make": make})
"""
DRIVER = f"""
import sys
from pathlib import Path
from weftmoe import settings
from weftmoe.smoke import apart
apart._COMMAND = (sys.executable, "-c", {BUSY!r})
smoke = settings.load("fp8", smoke="cpu").smoke
apart.make_model_apart(Path(sys.argv[1]), smoke, seed=1, tokens=96, device="cpu")
"""


def small(out: Path) -> Settings:
    overrides = [*(f"smoke.{setting}" for setting in SMALL), f"smoke.warmup_steps={STEPS}", "smoke.problems=64"]
    return composed.load("fp8", smoke="cpu", overrides=[f"out={out}", *overrides])


def make(settings: Settings, **more: Any) -> Warmup:
    tokens = settings.length.context
    return make_model_apart(
        settings.out / "model", settings.smoke, seed=settings.seed, tokens=tokens, device="cpu", **more
    )


@dataclass
class Made:
    settings: Settings
    inputs: Inputs
    progress: list[tuple[int, int]] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run's inputs, found by a process that cannot warm anything up itself."""

    def refuse(*_: object) -> None:
        raise AssertionError("the warm-up ran in the process of the rank")

    settings, progress = small(tmp_path_factory.mktemp("run")), []
    makers: list[int] = []

    class Watched(ReceiverProcess):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            makers.append(self.pid)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_process, "_warm_up", refuse)
        patch.setattr(apart, "ReceiverProcess", Watched)
        inputs = find_inputs(settings, torch.device("cpu"), lambda done, total: progress.append((done, total)))
    return Made(settings, inputs, progress, makers)


def test_the_process_has_ended_when_the_model_is_there(made: Made) -> None:
    (maker,) = made.makers
    assert not psutil.pid_exists(maker)
    assert made.progress == [(step, STEPS) for step in range(1, STEPS + 1)]
    assert any(note.startswith(f"warm-up: {STEPS} supervised steps") for note in made.inputs.notes)


def test_its_bytes_are_those_of_a_model_made_in_this_process(made: Made, tmp_path: Path) -> None:
    settings = made.settings
    in_process.make_model(tmp_path, settings.smoke, seed=settings.seed, tokens=settings.length.context, device="cpu")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in made.inputs.model.iterdir()}
    for name in names - {"warmup.json"}:  # which says how long it took
        assert (tmp_path / name).read_bytes() == (made.inputs.model / name).read_bytes(), name


def test_the_padding_token_has_an_ordinary_embedding(made: Made) -> None:
    # A row of zeros, as transformers leaves it, made the norm of all gradients 3e3 when a completion held the token.
    (rows,) = (t for name, t in load_file(made.inputs.model / "model.safetensors").items() if "embed_tokens" in name)
    assert 0.3 < float(rows[0].float().std() / rows[1:].float().std()) < 3


def test_a_model_that_is_there_needs_no_process(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_COMMAND", ("false",))
    again = find_inputs(made.settings, torch.device("cpu"))
    assert again.notes == made.inputs.notes
    other = made.settings.model_copy(update={"seed": made.settings.seed + 1})
    with pytest.raises(PeerError):
        make(other)


def test_what_the_warm_ups_bits_depend_on_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Asked:
        def call(self, do: str, **fields: Any) -> dict[str, Any]:
            asked.append(fields)
            return {"steps": 1, "probability": 0.5, "loss": 1.0, "seconds": 0.1}

    monkeypatch.setattr(apart, "ReceiverProcess", lambda *_, **__: nullcontext(Asked()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert make(small(tmp_path)) == Warmup(1, 0.5, 1.0, 0.1)
    assert (asked[0]["threads"], asked[0]["deterministic"], asked[0]["device"]) == (5, True, "cpu")


def test_a_death_is_told_with_the_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = "import sys; print('CUDA error: out of memory', file=sys.stderr); sys.exit(9)"
    monkeypatch.setattr(apart, "_COMMAND", (sys.executable, "-c", dying))
    with pytest.raises(PeerError, match=r"(?s)maker of the smoke's model .* exit code 9 .*CUDA error: out of memory"):
        make(small(tmp_path))


def test_a_failure_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = """
from weftpub_demo.control import Control
def make(request):
    raise RuntimeError("no room for 512 rows")
Control().serve({"make": make})
"""
    monkeypatch.setattr(apart, "_COMMAND", (sys.executable, "-c", failing))
    with pytest.raises(PeerError, match="RuntimeError: no room for 512 rows"):
        make(small(tmp_path))
    assert "Traceback" in (tmp_path / "model.log").read_text(encoding="utf-8")


def test_a_silent_process_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_COMMAND", (sys.executable, "-c", BUSY))
    before = set(psutil.Process().children())
    with pytest.raises(DeadlineError, match=r"did not answer 'make' .*model\.log"):
        make(small(tmp_path), silent_s=0.1)
    assert set(psutil.Process().children()) <= before


def test_the_process_listens_before_it_loads_torch() -> None:
    """Its parent may be killed while it loads."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "weftmoe.smoke.maker"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "weftpub_demo.control" in loaded
    assert not loaded & {"torch", "transformers"}


def test_a_killed_parent_takes_the_process_along(tmp_path: Path) -> None:
    said = tmp_path / "model"
    parent = subprocess.Popen([sys.executable, "-c", DRIVER, str(said)])
    try:
        deadline = time.monotonic() + 120
        while not said.exists():
            assert parent.poll() is None, "it has ended by itself"
            assert time.monotonic() < deadline, "no process was asked for a model"
            time.sleep(0.05)
        maker = psutil.Process(int(said.read_text(encoding="utf-8")))
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([maker], timeout=60)
    assert alive == []


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if there were a GPU, and a TransformerEngine; its module."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.syspath_prepend(tmp_path)
    # Set first, so that it is taken out again.
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.delitem(sys.modules, "transformer_engine")
    return package / "__init__.py"


def any_settings() -> Any:
    return SimpleNamespace(cluster=SimpleNamespace(gpus=1), train=SimpleNamespace(deterministic=False))


def test_transformer_engine_is_loaded_before_anything_can_use_cudnn(gpu: Path) -> None:
    gpu.write_text("import os\nloaded_by = os.getpid()\n", encoding="utf-8")
    assert prepare_process(any_settings()) == torch.device("cuda", 0)
    assert sys.modules["transformer_engine"].loaded_by == os.getpid()


def test_a_transformer_engine_that_finds_two_cudnns_is_explained(gpu: Path) -> None:
    gpu.write_text("raise OSError('/lib/libcudnn_heuristic.so.9: undefined symbol')", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"libcudnn_heuristic.*weftpub doctor"):
        prepare_process(any_settings())
