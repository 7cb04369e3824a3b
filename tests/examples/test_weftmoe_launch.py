"""weftmoe's launch: what is started in which environment, what is refused, who is ended, and how a run comes again."""

import ast
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weftmoe import settings as composed
from weftmoe import train, worker
from weftmoe.checks import ALLOCATOR_VARIABLES
from weftmoe.env import changed, require_environment, role_environment
from weftmoe.launch import command, resolve, torchrun_command
from weftmoe.rundir import EXIT_LOST, claim, differences, settings_path
from weftpub.errors import CheckpointError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
WEFTMOE = ROOT / "examples" / "weftmoe"
RUN = WEFTMOE / "run.sh"
LIMIT_S = 60.0


# The command.


def test_one_node_stands_alone() -> None:
    command = torchrun_command(composed.load("fp8"))
    assert command[:4] == [sys.executable, "-m", "weftmoe.agent", "--nproc-per-node=8"]
    assert "--standalone" in command
    assert "--max-restarts=0" in command
    assert command[-3:] == ["-m", "weftmoe.worker", "runs/weftmoe/settings.yaml"]
    bound = torchrun_command(composed.load("fp8", overrides=["cluster.numa_binding=true"]))
    assert set(bound) - set(command) == {"--numa-binding=node"}


def test_several_nodes_meet_at_the_first() -> None:
    two = composed.load("fp8", nodes=2)
    command = torchrun_command(two, node_rank=1, master="host-a:1234")
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=host-a", "--master-port=1234"} <= set(command)
    assert command[-1] == "runs/weftmoe/settings-node-1.yaml"
    with pytest.raises(ConfigError, match="they count from 0"):
        torchrun_command(two, node_rank=2)
    with pytest.raises(ConfigError, match="host:port"):
        torchrun_command(two, master="host-a")


def test_a_machine_without_a_gpu_runs_one_rank_unless_told() -> None:
    assert "--nproc-per-node=1" in torchrun_command(composed.load("fp8", smoke="cpu"))
    two = composed.load("fp8", smoke="cpu", nodes=3, overrides=["cluster.cpu_ranks=2"])
    assert {"--nproc-per-node=2", "--nnodes=3"} <= set(torchrun_command(two, node_rank=2))
    assert two.cluster.world == 6


def test_a_smoke_makes_a_model_of_the_family_that_is_named(tmp_path: Path) -> None:
    made = resolve("fp8", smoke=True, gpus=0, model="Qwen/Qwen3.5-35B-A3B-Base").model
    assert (made.path, made.architecture) == ("made", "Qwen3_5MoeForConditionalGeneration")
    assert resolve("fp8", smoke=True, gpus=0).model.architecture == "Qwen3MoeForCausalLM"
    with pytest.raises(ConfigError, match="makes a model of its own"):
        resolve("fp8", smoke=True, model=str(tmp_path))


def test_options_come_before_overrides() -> None:
    given: Any = {"steps": 5, "seed": 7, "out": Path("there"), "data": "d.parquet"}
    settings = resolve("bf16", length="16k", gpus=4, overrides=["seed=8"], **given)
    assert (settings.steps, settings.seed, settings.out, settings.data.path) == (5, 8, Path("there"), "d.parquet")
    assert (settings.length.name, settings.cluster.gpus) == ("16k", 4)
    assert resolve("fp8", smoke=True, gpus=0).rollout.engine == "sampler"


def run(*arguments: str) -> int:
    return command(arguments)


def test_wrong_usage_speaks_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    """People call run.sh, and were told the usage of `weftpub launch`, which does not exist."""
    assert run("fp8", "--steps", "many") == 2
    message = capsys.readouterr().err
    assert "Usage: run.sh [OPTIONS]" in message
    assert "weftpub" not in message
    assert run("fp9") == 1
    assert capsys.readouterr().err.startswith("weftmoe: ConfigError: variant 'fp9' is unknown")


def test_settings_are_printed_and_nothing_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("fp8", "--print", "optimizer.lr=0") == 0
    shown = tmp_path / "shown.yaml"
    shown.write_text(capsys.readouterr().out)
    assert composed.read(shown) == composed.load("fp8", overrides=["optimizer.lr=0"])
    assert run("fp8", "--dry-run") == 0
    assert "fits" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [shown]


def test_a_run_that_does_not_fit_is_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    big = ("baseline", "--model", "Qwen/Qwen3.5-122B-A10B", "--dry-run")
    assert run(*big) == 1
    message = capsys.readouterr().err
    assert "120.5 GiB too much" in message
    assert "--ignore-plan" in message
    assert run(*big, "--ignore-plan") == 0
    assert run(*big, "--optimizer", "adamw") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ("--model", "Qwen/Qwen3.5-35B-A3B-Base"),
            "install flash-linear-attention",
            marks=pytest.mark.skipif(find_spec("fla") is not None, reason="the package is there"),
        ),
    ],
)
def test_what_the_loop_does_not_drive_is_planned_and_not_started(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("fp8", *arguments, "--dry-run") == 0
    said = capsys.readouterr().err
    assert said.startswith("weftmoe: a start would be refused: ")
    assert message in said
    assert run("fp8", *arguments, "--out", str(tmp_path / "run")) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "none.parquet"), "data.path=none.parquet: there is no such file"),
        (("--out", "file/run"), "out=file/run cannot be made: Not a directory; choose another --out"),
        (("--out", "file"), "out=file cannot be made: File exists"),
        (("--data", "/nowhere/dapo-math.json"), "data.path=/nowhere/dapo-math.json: there is no such file"),
        (("--data", "some/name"), "data.path=some/name: no file, and loading it by name needs the datasets package"),
    ],
)
def test_paths_that_cannot_be_are_named_before_anything_starts(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    (tmp_path / "file").touch()
    assert run("fp8", "--smoke", "--gpus", "0", *arguments) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_machine_with_too_little_host_memory_is_told_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weftpub_adapters.doctor.facts.host_memory", lambda: (64 << 30, 60 << 30))
    assert run("fp8", "--data", __file__, "--out", str(tmp_path / "run")) == 1
    assert "pins 310 GiB of host memory here and 60 are free" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_machine_that_cannot_share_memory_is_told_so_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    """Trainer and engine would each fall back to memory of their own, where the plan counted one."""
    asked: list[tuple[Any, int]] = []

    def obstacle(device: Any, folder: str) -> str:
        asked.append((device, stat.S_IMODE(os.stat(folder).st_mode)))
        return "cuMemExportToShareableHandle is forbidden here"

    monkeypatch.setattr("weftpub.memory.sharing_obstacle", obstacle)
    arguments = ("fp8", "--smoke", "--gpus", str(gpus), "--out", str(tmp_path / "run"))
    assert run(*arguments, "publish.experts=shared") == 1
    assert asked == [("cuda" if gpus else "cpu", 0o700)]
    message = " ".join(capsys.readouterr().err.split())
    assert "cuMemExportToShareableHandle is forbidden here. Set publish.experts='copy'" in message
    assert not (tmp_path / "run").exists()


def test_a_variable_of_the_shell_gives_way_and_that_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("SGLANG_X", "1")
    assert run("fp8", "--dry-run", "roles.engine.env.SGLANG_X=2") == 0
    said = capsys.readouterr().out
    assert "CUDA_DEVICE_MAX_CONNECTIONS='8' of this shell gives way" in said
    assert "SGLANG_X='1' of this shell gives way to roles.engine.env: '2'" in said


@pytest.mark.parametrize("where", ["shell", "settings"])
def test_an_engine_reports_the_log_probs_that_it_samples_with(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads a variable as it is imported, and reports log-probs at temperature 1 then. A shell had it set: the
    trainer divides its logits by the temperature, so every importance ratio was wrong, and nothing said so.
    """
    options = ["fp8", "--dry-run", "rollout.sampling.temperature=0.8"]
    if where == "shell":
        monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "true")
    else:
        options.append("roles.engine.env.SGLANG_RETURN_ORIGINAL_LOGPROB=1")
    assert run(*options) == 1
    assert "would report log-probs at temperature 1 and sample at 0.8" in capsys.readouterr().err
    assert run(*[word for word in options if "temperature" not in word]) == 0, "they are the same at temperature 1"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_of_the_shell_is_refused_before_the_start(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the roles' blocks were looked at: a shell's own went through --dry-run and the plan, and its engine came up
    and then refused to be published to."""
    monkeypatch.setenv(name, "garbage_collection_threshold:0.8,expandable_segments:True")
    assert run("fp8", "--dry-run") == 1
    assert "expandable segments cannot be shared by CUDA IPC" in " ".join(capsys.readouterr().err.split())
    kept = [f"roles.{role}.env.{name}=expandable_segments:False" for role in ("trainer", "engine")]
    assert run("fp8", "--dry-run", *kept) == 0, "the blocks say something else"
    assert run("baseline", "--dry-run") == 0, "whose weights SGLang takes by itself"
    assert run("fp8", "--smoke", "--gpus", "0", "--dry-run") == 0


# Environments.


def test_each_role_gets_its_own_block_and_nothing_of_the_other() -> None:
    """A colocated engine inherited its trainer's variables: one hardware queue made it crawl, and torchrun's RANK made
    it wait for a process group that it was no part of."""
    settings = composed.load("fp8", overrides=["roles.engine.env.X=1"])
    shell = {"HOME": "/h", "RANK": "3", "MASTER_PORT": "1"}
    trainer = role_environment(settings, "trainer", shell)
    assert trainer == {**shell, **settings.roles.trainer.env}
    engine = role_environment(settings, "engine", trainer)
    assert engine == {"HOME": "/h", **settings.roles.engine.env}
    assert engine["X"] == "1"
    assert not engine.keys() & {"RANK", *settings.roles.trainer.env}
    require_environment(settings, "trainer", trainer)
    require_environment(settings, "engine", engine)
    assert changed(settings, "trainer", {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0"}) == {
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("0", "1")
    }


def test_a_process_that_was_started_otherwise_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = composed.load("fp8", smoke="cpu")
    with pytest.raises(ConfigError, match=r"NVTE_FP8_BLOCK_SCALING_FP32_SCALES=None instead of '1'"):
        require_environment(settings, "trainer", {})
    composed.write(settings, tmp_path / "settings.yaml")
    assert worker.main([str(tmp_path / "settings.yaml")]) == 1
    assert "was not started with the environment of role 'trainer'" in capsys.readouterr().err
    assert worker.main([str(tmp_path / "none.yaml")]) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), r"weftmoe: OUT cannot be written: No space left on device; \d+ MiB "),
        (
            OSError(13, "Permission denied", "/dev/none/x"),
            r"weftmoe: /dev/none/x cannot be written: Permission denied; ",
        ),
        (CheckpointError("its own"), "weftmoe: CheckpointError: its own"),
    ],
)
def test_a_disk_that_takes_nothing_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: OSError, said: str
) -> None:
    """A full disk ended a run, in the middle of its log, with a traceback of four libraries."""
    settings = composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"])
    composed.write(settings, tmp_path / "settings.yaml")
    monkeypatch.setattr(worker, "require_environment", lambda *_: None)

    def fails(_: Any) -> int:
        raise error

    monkeypatch.setattr(train, "main", fails)
    assert worker.main([str(tmp_path / "settings.yaml")]) == 1
    found = capsys.readouterr().err
    assert re.match(said.replace("OUT", re.escape(str(tmp_path))), found)
    assert len(found.splitlines()) == 1
    if not isinstance(error, CheckpointError):
        assert f"start again with --out {tmp_path}: checkpoints are whole" in found


def test_an_error_that_is_not_the_disks_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Any) -> int:
        raise FileNotFoundError(2, "No such file or directory", "model")

    composed.write(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"]), tmp_path / "settings.yaml")
    monkeypatch.setattr(worker, "require_environment", lambda *_: None)
    monkeypatch.setattr(train, "main", fails)
    with pytest.raises(FileNotFoundError):
        worker.main([str(tmp_path / "settings.yaml")])


# Who reads or refuses allocator variables, and so names them; and who gives a process the whole environment of a role.
NAMERS = {
    "adapters/weftpub_adapters/doctor/environment.py",
    "adapters/weftpub_adapters/sglang/plugin/checks.py",
    "examples/weftmoe/checks.py",
}
ROLE_STARTERS = {"examples/weftmoe/rollout/engine.py"}
ALLOCATOR_CALLS = ("_set_allocator_settings", "change_current_allocator")


def sets_allocator(source: str, place: str = "") -> Iterator[int]:
    """Lines that may write an allocator variable into an environment, or an allocator's settings: those with the name
    of one, and those that write into this process's environment what they do not name.
    """
    for node in ast.walk(ast.parse(source)):
        names = isinstance(node, ast.Constant) and node.value in ALLOCATOR_VARIABLES and place not in NAMERS
        calls = isinstance(node, ast.Call) and called(node) in ALLOCATOR_CALLS
        if names or calls or (place not in ROLE_STARTERS and writes_unnamed(node)):
            yield getattr(node, "lineno", 0)


def writes_unnamed(node: ast.AST) -> bool:
    """Whether a variable is set in `os.environ` whose name does not stand there."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript) and is_environment(target.value):
                return not isinstance(target.slice, ast.Constant)
            if is_environment(target):
                return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("setdefault", "putenv", "__setitem__") and node.args:
            ours = is_environment(node.func.value) or node.func.attr == "putenv"
            return ours and not isinstance(node.args[0], ast.Constant)
        return node.func.attr == "update" and is_environment(node.func.value)
    return False


def is_environment(node: ast.AST) -> bool:
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) == "environ"


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def test_no_module_sets_an_allocator_variable() -> None:
    sources = [path for part in ("weftpub", "kernels", "adapters", "examples") for path in (ROOT / part).rglob("*.py")]
    assert len(sources) > 100
    places = {str(path.relative_to(ROOT)): path.read_text() for path in sources}
    assert set(places) >= NAMERS | ROLE_STARTERS
    found = [f"{place}:{line}" for place, source in places.items() for line in sets_allocator(source, place)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'", True),
        ("from os import environ\nenviron['PYTORCH_ALLOC_CONF'] = 'x'", True),
        ("import os\nos.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'x')", True),
        ("import os\nos.environ.update({'PYTORCH_ALLOC_CONF': 'x'})", True),
        ("import os\nos.environ.update(PYTORCH_ALLOC_CONF='x')", True),
        ("import torch\ntorch.cuda.memory._set_allocator_settings('x')", True),
        ("import os\nos.environ[NAME] = 'x'", True),
        ("import os\nos.environ |= WANTED", True),
        ("import os\nos.environ.update(WANTED)", True),
        ("import os\nos.environ.setdefault(NAME, 'x')", True),
        ("import os\nos.putenv(NAME, 'x')", True),
        ("WANTED = {'PYTORCH_CUDA_ALLOC_CONF': 'x'}", True),
        ("NAMES = ('PYTORCH_CUDA_ALLOC_CONF',)", True),
        ("print('set PYTORCH_ALLOC_CONF=x')", False),
        ("import os\nos.environ['HOME'] = 'x'", False),
        ("import os\nenvironment = dict(os.environ)\nenvironment.update(block)", False),
    ],
)
def test_the_scan_finds_what_it_looks_for(source: str, found: bool) -> None:
    assert bool(list(sets_allocator(source))) is found


def test_who_reads_the_variables_does_not_write_them() -> None:
    reader = "examples/weftmoe/checks.py"
    assert list(sets_allocator("NAMES = ('PYTORCH_CUDA_ALLOC_CONF',)", reader)) == []
    assert list(sets_allocator("import os\nfor name in NAMES:\n    os.environ[name] = 'x'", reader)) == [3]


@pytest.mark.parametrize("before", [False, True])
def test_the_end_says_where_the_numbers_are(
    before: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of a run that was done already took twenty seconds and ended as if it had trained."""
    settings = composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path / 'a run'}", "steps=3"])
    result = SimpleNamespace(first=True, steps=3, version=3, reward=None if before else 0.5, stopped=False)
    monkeypatch.setitem(sys.modules, "weftmoe.loop.run", SimpleNamespace(run=lambda _: result))
    assert train.main(settings) == 0
    said = capsys.readouterr()
    assert said.out == f"WEFTMOE OK steps=3 version=3{'' if before else ' reward=0.500'}\n"
    assert f"`weftpub report '{tmp_path}/a run'`" in said.err
    assert ("no step was left of 3" in said.err) is before


# The directory of a run.


def test_one_run_at_a_time(tmp_path: Path) -> None:
    settings = composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path / 'run'}"])
    lock = claim(settings)
    assert lock is not None
    assert composed.read(settings_path(settings.out)) == settings
    code = f"from weftmoe import rundir, settings; rundir.claim(settings.read({str(settings_path(settings.out))!r}))"
    second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "another run is at work in" in second.stderr
    assert claim(settings, node_rank=1) is None
    os.close(lock)
    again = claim(settings)
    assert again is not None
    os.close(again)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """One that was there already, and belonged to somebody else, ended the start in a traceback."""
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ConfigError, match=r"run\.lock cannot be written: Is a directory; choose another --out"):
        claim(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"]))


def test_settings_that_a_full_disk_does_not_take_are_named(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml.part").symlink_to("/dev/full")
    with pytest.raises(
        ConfigError, match=r"settings\.yaml cannot be written: No space left on device; \d+ MiB are free"
    ):
        claim(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}"]))


def test_a_run_is_resumed_as_what_it_was_begun(tmp_path: Path) -> None:
    def begun(*overrides: str) -> int:
        one = composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}", *overrides])
        lock = claim(one)
        assert lock is not None
        return lock

    os.close(begun())
    os.close(begun("optimizer.lr=2e-4"))  # nothing was saved yet, so nothing is resumed
    checkpoint(tmp_path, 10)
    os.close(begun("optimizer.lr=2e-4", "steps=99", "telemetry.wandb=offline", "checkpoint.save=5"))
    os.close(begun("optimizer.lr=2e-4", "publish.experts=shared"))
    with pytest.raises(ConfigError, match=r"optimizer\.lr: 0\.0002 -> 0\.0003; seed: 1234 -> 5\. Resume it"):
        begun("optimizer.lr=3e-4", "seed=5")
    # A refused start leaves the directory as it was, and free.
    os.close(begun("optimizer.lr=2e-4"))
    os.close(begun("optimizer.lr=3e-4", "checkpoint.resume=false"))


def test_a_run_that_starts_anew_sets_aside_what_was_there(tmp_path: Path) -> None:
    """A run was begun anew in the directory of one that had come to step 50. Its checkpoints of steps 10 and 20 were
    deleted as the oldest, and its next start went on from the other run's step 50."""

    def start(*overrides: str) -> None:
        lock = claim(composed.load("fp8", smoke="cpu", overrides=[f"out={tmp_path}", *overrides]))
        assert lock is not None
        os.close(lock)

    for times in (1, 2):
        checkpoint(tmp_path, 10 * times)
        (tmp_path / "steps.jsonl").write_text("{}\n", encoding="utf-8")
        start()
        assert (tmp_path / "steps.jsonl").exists(), "a resumed run keeps what is there"
        start("checkpoint.resume=false")
        assert not (tmp_path / "checkpoints").exists()
        assert not (tmp_path / "steps.jsonl").exists()
        aside = tmp_path / f"before-{times}"
        assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "steps.jsonl"]
        assert (aside / "checkpoints" / f"step-0000{times}0").is_dir()
    start("checkpoint.resume=false")
    assert not (tmp_path / "before-3").exists(), "nothing was there"


@pytest.mark.parametrize("variant", composed.VARIANTS)
@pytest.mark.parametrize("length", ["8k", "16k"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_machines_with_an_engine_each_are_driven(variant: str, length: str, nodes: int) -> None:
    from weftmoe.launch import require_driven

    require_driven(composed.load(variant, model="qwen3-30b-a3b", length=length, nodes=nodes))


def test_differences_name_keys_and_values() -> None:
    old, new = composed.load("bf16"), composed.load("bf16", overrides=["algorithm.clip_high=0.3", "steps=3"])
    assert differences(old, new) == ["algorithm.clip_high: 0.28 -> 0.3"]


# The script.


FAKE = r"""#!/usr/bin/env bash
# Stands for Python: notes what it is called with, and behaves as the files beside it say.
here="$(cd -- "$(dirname -- "$0")" && pwd)"
printf '%s\n' "$*" >>"$here/calls"
case "$*" in
  *weftpub_adapters.doctor*) exit "$(cat "$here/doctor" 2>/dev/null || echo 0)" ;;
esac
[[ -e "$here/stubborn" ]] && trap '' TERM
if [[ -e "$here/long" ]]; then
  sleep 300 &
  echo $! >"$here/child"
  echo $$ >"$here/leader"
  wait
  [[ -e "$here/stubborn" ]] && while :; do sleep 1; done
fi
exit "$(cat "$here/code" 2>/dev/null || echo 0)"
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def script(folder: Path, *arguments: str, **more: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHON": str(folder / "python"), **more}
    return subprocess.Popen(
        ["bash", str(RUN), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, out


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def written(path: Path) -> bool:
    """Whether it is there, and not only opened."""
    return path.exists() and path.stat().st_size > 0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ["run.sh", "slurm.sbatch"])
def test_the_scripts_are_clean(name: str) -> None:
    subprocess.run(["bash", "-n", str(WEFTMOE / name)], check=True)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("no shellcheck here")
    checked = subprocess.run([checker, str(WEFTMOE / name)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_machine_is_checked_first(fake: Path) -> None:
    options = ("--model", "m", "--data", "d", "--length", "16k", "--nodes", "2", "--gpus", "4", "--steps", "3")
    options += ("--gpu-memory", "80")
    code, out = finish(script(fake, "fp8", *options, "--out", "o", "--seed", "1", "a.b=c"))
    assert code == 0, out
    first, second = calls(fake)
    assert first.startswith("-m weftpub_adapters.doctor --variant fp8")
    assert first.endswith("--nodes 2 --gpus 4 --out o")
    assert second == "-m weftmoe.launch fp8 " + " ".join(options) + " --out o --seed 1 a.b=c"


def test_the_machine_is_checked_for_what_overrides_say(fake: Path) -> None:
    assert finish(script(fake, "fp8", "cluster.gpus=2", "out=there", "optimizer.lr=0"))[0] == 0
    first, second = calls(fake)
    assert first.endswith("--gpus 2 --out there")
    assert second == "-m weftmoe.launch fp8 cluster.gpus=2 out=there optimizer.lr=0"


def test_an_option_and_its_value_may_be_one_word(fake: Path) -> None:
    """`--gpus=2 --out=there` reached the launcher, and the doctor looked at 8 GPUs and at another folder; `--grace=10`
    was "no such option"."""
    (fake / "there").mkdir()
    words = ("--gpus=2", "--out=there", "--model=m", "--grace=10", "--save-grace=20", "--on-term=save")
    assert finish(script(fake, "fp8", *words, "optimizer.lr=0"))[0] == 0
    first, second = calls(fake)
    assert first.endswith("--gpus 2 --out there --model m")
    assert second == "-m weftmoe.launch fp8 --gpus 2 --out there --model m checkpoint.grace=20 optimizer.lr=0"


def test_the_doctor_looks_at_the_folder_that_is_meant(fake: Path) -> None:
    assert finish(script(fake, "fp8", "out=~/run", HOME=str(fake)))[0] == 0
    assert finish(script(fake, "fp8", "--out=~/run", HOME=str(fake)))[0] == 0
    assert [call.rpartition("--out ")[2].partition(" ")[0] for call in calls(fake)[::2]] == [f"{fake}/run"] * 2


def test_the_smoke_takes_whatever_is_there(fake: Path) -> None:
    """The doctor was asked for no GPU, and did not look at the one that the smoke then took."""
    assert finish(script(fake, "fp8", "--smoke"))[0] == 0
    assert "--gpus" not in calls(fake)[0]
    assert finish(script(fake, "fp8", "--smoke", "--gpus", "1"))[0] == 0
    assert calls(fake)[2].endswith("--gpus 1")
    assert finish(script(fake, "fp8"))[0] == 0
    assert calls(fake)[4].endswith("--gpus 8")


def test_a_sick_machine_starts_nothing(fake: Path) -> None:
    (fake / "doctor").write_text("1")
    assert finish(script(fake, "fp8"))[0] == 3
    assert len(calls(fake)) == 1
    assert finish(script(fake, "fp8", "--no-doctor"))[0] == 0


def test_printing_needs_no_doctor(fake: Path) -> None:
    assert finish(script(fake, "bf16", "--print"))[0] == 0
    assert calls(fake) == ["-m weftmoe.launch bf16 --print"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "variant is missing"),
        (("fp9",), "unknown variant"),
        (("fp8", "--speed"), "unknown option"),
        (("fp8", "--out"), "needs a value"),
        (("fp8", "--grace", "soon"), "needs a number of seconds"),
        (("fp8", "--save-grace", "0"), "needs a number of seconds"),
        (("fp8", "checkpoint.grace=soon"), "needs a number of seconds"),
        (("fp8", "checkpoint.grace=1.5e2"), "needs a number of seconds, such as 240"),
        (("fp8", "--grace=soon"), "needs a number of seconds"),
        (("fp8", "--speed=9"), "unknown option '--speed'"),
        (("fp8", "--smoke=yes"), "unknown option 'yes'"),
        (("fp8", "--on-term", "die"), "'end' or 'save'"),
    ],
)
def test_wrong_usage(fake: Path, arguments: tuple[str, ...], message: str) -> None:
    code, out = finish(script(fake, *arguments))
    assert code == 2
    assert message in out
    assert calls(fake) == []


def test_help_names_every_option() -> None:
    out = subprocess.run(["bash", str(RUN), "--help"], capture_output=True, text=True, check=True).stdout
    taken = set(
        re.findall(r"--[a-z][a-z-]+(?=[ )])", RUN.read_text().partition("while (($#))")[2].partition("\ndone\n")[0])
    )
    taken.remove("--help")
    assert {"--model", "--smoke", "--ignore-plan"} < taken
    for option in taken:
        assert re.search(rf"{option}\b", out), option


def test_the_runs_exit_code_is_passed_on_and_noted(fake: Path) -> None:
    (fake / "code").write_text("17")
    assert finish(script(fake, "fp8"))[0] == 17
    note = fake / "note"
    assert finish(script(fake, "fp8", "--note-code", str(note)))[0] == 17
    assert note.read_text() == "17\n"
    (fake / "doctor").write_text("1")
    assert finish(script(fake, "fp8", "--note-code", str(note)))[0] == 3
    assert note.read_text() == "3\n"
    assert finish(script(fake, "fp8", "--note-code", str(fake / "no" / "note")))[0] == 3


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_and_nothing_else(fake: Path, number: int, code: int) -> None:
    """A launch script killed by name, and with its own run those of everybody else on the machine."""
    (fake / "long").touch()
    bystander = subprocess.Popen(["sleep", "300"], start_new_session=True)
    process = script(fake, "fp8", "--note-code", str(fake / "note"))
    try:
        until(lambda: written(fake / "leader"))
        leader, child = (int((fake / name).read_text()) for name in ("leader", "child"))
        os.kill(process.pid, number)
        assert finish(process)[0] == code
        assert (fake / "note").read_text() == f"{code}\n"
        until(lambda: not alive(leader) and not alive(child))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


AT_ONCE = r"""# Read by run.sh before itself: the signal comes between the run's start and the very next command.
if [[ "$0" == *run.sh ]]; then
  told=''
  tell() { told=1; until [[ -s "$LEADER" ]]; do sleep 0.02; done; kill -s TERM $$; }
  trap '[[ -n "$told" || -z "${!:-}" ]] || tell' DEBUG
fi
"""


def test_a_signal_in_the_moment_of_the_start_ends_the_run_too(fake: Path) -> None:
    """The script's traps came after the run's start: a signal in between ended the script, and the run went on."""
    (fake / "long").touch()
    (fake / "at-once").write_text(AT_ONCE)
    process = script(fake, "fp8", BASH_ENV=str(fake / "at-once"), LEADER=str(fake / "leader"))
    until(lambda: written(fake / "leader") and process.poll() is not None)
    pids = [int((fake / name).read_text()) for name in ("leader", "child")]
    try:
        until(lambda: not any(map(alive, pids)))
        assert finish(process)[0] == 143
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_a_run_that_does_not_end_is_ended(fake: Path) -> None:
    (fake / "long").touch()
    (fake / "stubborn").touch()
    process = script(fake, "fp8", "--grace", "1")
    until(lambda: written(fake / "leader"))
    leader = int((fake / "leader").read_text())
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process)[0] == 143
    until(lambda: not alive(leader))


# Told to come again.

SAVING = r"""#!{python}
# Stands for Python: a run that can be told to come again, and behaves as the files beside it say.
import os, pathlib, signal, subprocess, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
if "weftpub_adapters.doctor" in sys.argv:
    if (here / "during-doctor").exists():
        os.kill(os.getppid(), signal.SIGUSR1)
    sys.exit(0)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGUSR1}})
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
child = subprocess.Popen(["sleep", "300"], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, ()))
(here / "child").write_text(str(child.pid))
(here / "ready").touch()
if (here / "deaf").exists():
    signal.pause()
signal.sigwait({{signal.SIGUSR1}})
assert child.poll() is None, "only the first process is told"
(here / "told").touch()
if (here / "saves-long").exists():
    signal.pause()
sys.exit(int((here / "code").read_text()))
"""


@pytest.fixture
def saving(tmp_path: Path) -> Path:
    python = tmp_path / "python"
    python.write_text(SAVING.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "code").write_text("75")
    return tmp_path


@pytest.mark.parametrize("code", [75, 0, 1])
@pytest.mark.parametrize(("number", "options"), [(signal.SIGUSR1, ()), (signal.SIGTERM, ("--on-term", "save"))])
def test_a_run_that_is_told_to_come_again_says_itself_how_it_ended(
    saving: Path, number: int, options: tuple[str, ...], code: int
) -> None:
    """A job near its time limit was ended at once, and up to twenty steps were lost."""
    (saving / "code").write_text(str(code))
    process = script(saving, "fp8", *options)
    until(lambda: (saving / "ready").exists())
    os.kill(process.pid, number)
    found, out = finish(process)
    assert found == code, out
    until(lambda: not alive(int((saving / "child").read_text())))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interruption_while_it_saves_is_still_one(saving: Path, number: int, code: int) -> None:
    (saving / "saves-long").touch()
    process = script(saving, "fp8")
    until(lambda: (saving / "ready").exists())
    os.kill(process.pid, signal.SIGUSR1)
    until(lambda: (saving / "told").exists())
    os.kill(process.pid, number)
    assert finish(process)[0] == code
    until(lambda: not alive(int((saving / "child").read_text())))


def test_a_run_that_does_not_save_in_time_is_ended_and_comes_again(saving: Path) -> None:
    (saving / "deaf").touch()
    process = script(saving, "fp8", "--save-grace", "1")
    until(lambda: (saving / "ready").exists())
    os.kill(process.pid, signal.SIGUSR1)
    code, out = finish(process)
    assert code == 75
    assert "goes on from an older checkpoint" in out
    until(lambda: not alive(int((saving / "child").read_text())))


def test_told_to_come_again_before_anything_runs(saving: Path) -> None:
    (saving / "during-doctor").touch()
    assert finish(script(saving, "fp8"))[0] == 75
    assert len(calls(saving)) == 1


def test_the_run_knows_how_long_it_has_for_saving(fake: Path) -> None:
    assert finish(script(fake, "fp8", "--save-grace", "100"))[0] == 0
    assert calls(fake)[1] == "-m weftmoe.launch fp8 checkpoint.grace=100"
    default = re.search(r"^save_grace=(\d+)$", RUN.read_text(), re.MULTILINE)
    assert default is not None
    assert float(default[1]) == composed.load("fp8").checkpoint.grace
    ahead = re.search(r"--signal=B:USR1@(\d+)$", (WEFTMOE / "slurm.sbatch").read_text(), re.MULTILINE)
    end = re.search(r"^grace=(\d+)$", RUN.read_text(), re.MULTILINE)
    assert ahead is not None
    assert end is not None
    assert int(ahead[1]) > float(default[1]) + int(end[1])


RANK = r"""
import pathlib, signal, sys, time
here, out = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1]).parent
assert signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "it must not end a rank that loads its modules"
(here / f"rank-{__import__('os').environ['RANK']}").touch()
if (here / "done").exists():
    sys.exit(0)
signal.sigwait({signal.SIGUSR1})
(out / "stopped.json").write_text("{}")
"""


@pytest.mark.parametrize("told", [True, False])
def test_the_agent_tells_all_ranks_and_says_that_they_stopped(tmp_path: Path, told: bool) -> None:
    """Torchrun knows 0 and 1 only, ends its ranks for every signal that it handles, and dies of the others."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    if not told:
        (tmp_path / "done").touch()
    arguments = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", str(script), str(tmp_path / "settings.yaml"))
    agent = subprocess.Popen(
        [sys.executable, "-m", "weftmoe.agent", *arguments],
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}),  # as the launcher leaves it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if told:
        agent.send_signal(signal.SIGUSR1)  # before any rank is there
    code, out = finish(agent)
    assert code == (75 if told else 0), out
    assert len(list(tmp_path.glob("rank-?"))) == 2


BAD_RANK = r"""
import os, pathlib, signal, sys
print("weftmoe: ConfigError: the reason", file=sys.stderr, flush=True)
if "waits" in sys.argv:
    (pathlib.Path(__file__).parent / f"ready-{os.environ['RANK']}").touch()
    signal.pause()
if os.environ["RANK"] == "1":
    signal.pause()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("what", "code", "last"),
    [
        ("fails", 1, "weftmoe: rank 0 was the first to end, with exit code 3; what it said stands above"),
        ("waits", 128 + signal.SIGTERM, "weftmoe: ended by SIGTERM, with all ranks"),
    ],
)
def test_a_run_that_ends_badly_says_so_in_a_line_and_leaves_no_folder(
    tmp_path: Path, what: str, code: int, last: str
) -> None:
    """What a rank had said stood above forty lines of torchrun's tracebacks, which ended with "To enable traceback see
    ..."; and each start left a folder in /tmp.
    """
    folder, script = tmp_path / "tmp", tmp_path / "rank.py"
    folder.mkdir()
    script.write_text(BAD_RANK)
    arguments = ("--standalone", "--nproc-per-node=2", "--max-restarts=0", str(script), what, str(tmp_path / "s.yaml"))
    agent = subprocess.Popen(
        [sys.executable, "-m", "weftmoe.agent", *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    if what == "waits":
        # Of a rank that torchrun is about to start it would know nothing.
        until(lambda: len(list(tmp_path.glob("ready-?"))) == 2)
        agent.send_signal(signal.SIGTERM)
    found, out = finish(agent)
    assert found == code, out
    assert "weftmoe: ConfigError: the reason" in out
    assert out.splitlines()[-1] == last
    assert "Traceback" not in out
    assert list(folder.iterdir()) == []


KILLED_RANK = r"""
import os, pathlib, signal, sys, time
(pathlib.Path(sys.argv[1]).parent / "going").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_rank_is_no_failure_of_the_run(tmp_path: Path) -> None:
    """The system's killer took a rank, the run ended with 1 as for settings that cannot work, and its job was gone."""
    script = tmp_path / "rank.py"
    script.write_text(KILLED_RANK)
    arguments = ("--standalone", "--nproc-per-node=1", "--max-restarts=0", str(script), str(tmp_path / "settings.yaml"))
    agent = subprocess.Popen(
        [sys.executable, "-m", "weftmoe.agent", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code, out = finish(agent)
    assert code == EXIT_LOST, out
    assert "rank 0 was the first to end, by SIGKILL" in out
    assert out.splitlines()[-1] == "weftmoe: nothing that was set is to blame: started again, the run goes on"


def test_the_launcher_hands_over_a_blocked_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    from weftmoe import launch

    states: list[tuple[bool, Any]] = []

    def exec_instead(*_: Any) -> None:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        states.append((signal.SIGUSR1 in mask, signal.getsignal(signal.SIGUSR1)))

    monkeypatch.setattr(os, "execve", exec_instead)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        launch._become(["torchrun"], {})
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    assert states == [(True, signal.SIG_DFL)]


# Slurm.

SRUN = r"""#!/usr/bin/env bash
here="$(cd -- "$(dirname -- "$0")" && pwd)"
[[ "$1" == --* ]] && shift
SLURM_NODEID=1 SLURM_GPUS_ON_NODE=4 exec "$@"
"""


SCONTROL = r"""#!/usr/bin/env bash
here="$(cd -- "$(dirname -- "$0")" && pwd)"
printf '%s\n' "$*" >>"$here/scontrol.calls"
[[ "$1" == show ]] && printf 'node-a\nnode-b\n'
exit 0
"""

NODE_RUN = r"""#!/usr/bin/env bash
here="$(cd -- "$(dirname -- "$0")" && pwd)"
printf '%s\n' "$*" >>"$here/calls"
if [[ -e "$here/makes" ]]; then
  step="$(printf '%s/step-%06d' "$(cat "$here/makes")" "$(wc -l <"$here/calls")")"
  mkdir -p "$step" && touch "$step/loop.json"
fi
if [[ -e "$here/other" ]]; then # the other node's own code; this one's, and srun's, is larger
  cp "$here/other" "${!#%/*}/0"
fi
if [[ -e "$here/long" ]]; then
  sleep 300 &
  trap 'kill $!; exit "$(cat "$here/code")"' USR1
  touch "$here/started"
  wait
fi
exit "$(cat "$here/code")"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "run.sh": NODE_RUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "code").write_text("0")
    return tmp_path


def job(cluster: Path, *options: str, restarts: int = 0, home: Path | None = None) -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        **({"HOME": str(home)} if home else {}),
        **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
        "PATH": f"{cluster}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_NNODES": "2",
    }
    return subprocess.Popen(
        ["bash", str(WEFTMOE / "slurm.sbatch"), "fp8", "--out", "o", *options],
        cwd=cluster,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def queued_again(cluster: Path) -> bool:
    return "requeue 12345" in (cluster / "scontrol.calls").read_text().splitlines()


@pytest.mark.parametrize(("code", "exits", "again"), [(0, 0, False), (1, 1, False), (75, 0, True), (200, 0, True)])
def test_a_job_that_is_to_come_again_is_queued_again(cluster: Path, code: int, exits: int, again: bool) -> None:
    (cluster / "code").write_text(str(code))
    assert finish(job(cluster))[0] == exits
    place = "--gpus 4 --nodes 2 --node-rank 1 --master node-a:32345 --note-code o/codes/1"
    assert calls(cluster) == [f"fp8 --out o {place}"]
    assert queued_again(cluster) is again


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGUSR1, ()), (signal.SIGTERM, ("--on-term", "save"))], ids=["limit", "preempted"]
)
@pytest.mark.parametrize(("code", "exits", "again"), [(75, 0, True), (137, 0, True), (0, 0, False), (1, 1, False)])
def test_a_job_near_its_end_is_queued_again_unless_its_run_is_over(
    cluster: Path, number: int, options: tuple[str, ...], code: int, exits: int, again: bool
) -> None:
    (cluster / "long").touch()
    (cluster / "code").write_text(str(code))
    process = job(cluster, *options)
    until(lambda: (cluster / "started").exists())
    process.send_signal(number)
    assert finish(process)[0] == exits
    assert queued_again(cluster) is again


@pytest.mark.parametrize("own", [1, 3, 75, 0, 143])
def test_a_node_that_failed_is_not_hidden_by_those_that_were_ended_for_it(cluster: Path, own: int) -> None:
    """With `--on-term save` srun's SIGTERM told the other node to come again: the job of a machine that the doctor had
    refused was queued again until it had no more starts.
    """
    (cluster / "code").write_text("75")
    (cluster / "other").write_text(f"{own}\n")
    failed = own in (1, 3)
    assert finish(job(cluster, "--on-term", "save"))[0] == (own if failed else 0)
    assert queued_again(cluster) is not failed
    (cluster / "other").unlink()
    assert finish(job(cluster, "--on-term", "save"))[0] == 0, "codes are of this start"


def checkpoint(folder: Path, step: int) -> None:
    path = folder / "checkpoints" / f"step-{step:06d}" / "loop.json"
    path.parent.mkdir(parents=True)
    path.touch()


def test_a_job_without_progress_is_not_queued_again_for_ever(cluster: Path) -> None:
    """A step took longer than the job's time limit: for a week the job was queued again, and came to the same point."""
    (cluster / "code").write_text("75")
    checkpoint(cluster / "o", 20)
    for restarts in range(2):
        assert finish(job(cluster, restarts=restarts))[0] == 0
    code, said = finish(job(cluster, restarts=2))
    assert code == 1
    assert "3 starts in a row have made no checkpoint after step-000020 in o" in said
    assert (cluster / "scontrol.calls").read_text().splitlines().count("requeue 12345") == 2
    assert len(calls(cluster)) == 3


def test_starts_that_slurm_made_by_itself_count_too(cluster: Path) -> None:
    """A node that the run brings down each time: nothing of the job is left to ask for anything."""
    (cluster / "long").touch()
    for restarts in range(2):
        process = job(cluster, "--starts-without-progress", "2", restarts=restarts)
        until(lambda: (cluster / "started").exists())
        (cluster / "started").unlink()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
    code, said = finish(job(cluster, "--starts-without-progress", "2", restarts=2))
    assert code == 1
    assert "2 starts in a row have made no checkpoint after none" in said
    assert len(calls(cluster)) == 2
    assert not any("without-progress" in call for call in calls(cluster))


@pytest.mark.parametrize(("options", "folder"), [((), "o"), (("out=p",), "p")])
def test_a_job_with_progress_is_queued_again_for_ever(cluster: Path, options: tuple[str, ...], folder: str) -> None:
    (cluster / "code").write_text("75")
    (cluster / "makes").write_text(f"{folder}/checkpoints")
    for restarts in range(4):
        assert finish(job(cluster, "--starts-without-progress", "1", *options, restarts=restarts))[0] == 0
    assert (cluster / "scontrol.calls").read_text().splitlines().count("requeue 12345") == 4
    assert (cluster / folder / "starts").read_text() == "1 step-000003\n"


def test_starts_are_counted_where_the_run_writes(cluster: Path) -> None:
    (cluster / "code").write_text("200")
    assert finish(job(cluster, "--starts-without-progress=2", "--out=~/p", home=cluster))[0] == 0
    assert (cluster / "p" / "starts").read_text() == "1 none\n"
    code, said = finish(job(cluster, "--starts-without-progress=2", "--out=~/p", home=cluster, restarts=1))
    assert code == 1, "a run that loses something at every start is not queued again for ever"
    assert "2 starts in a row have made no checkpoint after none" in said


def test_a_job_that_is_submitted_anew_counts_from_the_beginning(cluster: Path) -> None:
    (cluster / "code").write_text("75")
    (cluster / "o").mkdir()
    (cluster / "o" / "starts").write_text("3 none\n")
    assert finish(job(cluster, restarts=3))[0] == 1
    assert calls(cluster) == []
    assert finish(job(cluster))[0] == 0
    assert (cluster / "o" / "starts").read_text() == "1 none\n"


@pytest.mark.parametrize("value", ["0", "many", ""])
def test_a_limit_of_starts_is_a_number(cluster: Path, value: str) -> None:
    code, said = finish(job(cluster, "--starts-without-progress", value))
    assert (code, calls(cluster)) == (2, [])
    assert "needs a number of starts" in said


def test_the_job_asks_to_be_queued_again_and_to_be_told_in_time() -> None:
    text = (WEFTMOE / "slurm.sbatch").read_text()
    assert "#SBATCH --requeue" in text
    assert "#SBATCH --signal=B:USR1@" in text
