"""weftmoe's starts: what a command line says is what is meant, what cannot work is refused before an engine is started,
and a resumed run may be given what the README names as a remedy.
"""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from weftmoe import settings as composed
from weftmoe import train, worker
from weftmoe.endings import lost
from weftmoe.launch import command, resolve
from weftmoe.rundir import EXIT_LOST, apart, claim, differences, forget_changes, going_path, unsaid_changes
from weftmoe.schema import Settings
from weftpub.errors import (
    ChannelError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    NonFiniteGradientError,
    StateError,
    WeftpubError,
)
from weftpub_kernels import UnknownPresetError

README = composed.CONFIGS.parent / "README.md"


def run(*arguments: str) -> int:
    return command(arguments)


def leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


# What a command line says.


@pytest.mark.parametrize("name", ["20261130", "off", "1e3", "[x]", "a=b", "null"])
def test_an_options_value_is_text_and_no_yaml(name: str) -> None:
    """`--out 20261130` was a number, and "not a valid path"; `--out off` was false, and `--data [x]` a list."""
    settings = resolve("fp8", out=Path(name), data=name)
    assert (settings.out, settings.data.path) == (Path(name), name)


def test_a_path_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `data.path=~/x` as it is, and there was no such file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "My-MoE"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    settings = resolve("fp8", model="~/My-MoE", overrides=["data.path=~/d.parquet", "out=~/run"])
    assert settings.model.path == str(model)
    assert (settings.data.path, settings.out) == (str(tmp_path / "d.parquet"), tmp_path / "run")
    with pytest.raises(ConfigError, match="makes a model of its own"):
        resolve("fp8", smoke=True, model="~/My-MoE")


def test_a_smoke_has_lengths_of_its_own() -> None:
    """`--smoke --length 16k` was taken, and stayed at 95 tokens."""
    with pytest.raises(ConfigError, match=r"leave --length 16k out, or set length\.total"):
        resolve("fp8", smoke=True, gpus=0, length="16k")
    assert resolve("fp8", smoke=True, gpus=0).length.total == 95
    assert resolve("fp8").length.name == "8k"


@pytest.mark.parametrize(
    ("variant", "override", "message"),
    [
        ("baseline", "train.pipeline=2\ntrain.expert=4", r"train\.pipeline=2 is not driven by this loop"),
        ("bf16", "train.expert_tensor=2\ntrain.expert=4", r"train\.expert_tensor=2 is not driven by this loop"),
        ("baseline", "optimizer.exp_avg_dtype=bf16", "optimizer 'muon' does not read it"),
        ("bf16", "publish.preset=foo", "no preset is named 'foo'"),
    ],
)
def test_what_no_variant_can_do_is_refused_by_the_settings(variant: str, override: str, message: str) -> None:
    """The loop refused it after it had started the engine, or with a traceback."""
    with pytest.raises(ConfigError, match=message):
        composed.load(variant, overrides=override.split("\n"))


def test_texts_that_end_a_completion_are_sglangs() -> None:
    """The torch sampler took them, and went on."""
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop is read by SGLang only"):
        composed.load("fp8", smoke="cpu", overrides=["rollout.sampling.stop=[x]"])
    assert composed.load("fp8", smoke="gpu", overrides=["rollout.sampling.stop=[x]"]).rollout.sampling.stop == ("x",)


# Packages.


@pytest.mark.parametrize(
    ("package", "override", "message"),
    [
        ("wandb", "telemetry.wandb=offline", "telemetry.wandb='offline', but wandb is not installed"),
        ("math_verify", "reward.verifier=math", "install 'math-verify[antlr4_13_2]'"),
        ("pyarrow", "data.path=there.parquet", "reading parquet files needs pyarrow"),
        ("datasets", "data.path=some/name", "needs the datasets package"),
    ],
)
def test_a_missing_package_is_named_before_anything_starts(
    package: str,
    override: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 alone found out that there was no wandb, when the engine had been started; and that there was no verifier,
    after the first rollout.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.parquet").touch()
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    monkeypatch.setattr("weftmoe.launch._become", lambda *_: pytest.fail("it was started"))
    assert run("fp8", "--smoke", "--gpus", "0", "--out", "run", override) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
    assert run("fp8", "--smoke", "--gpus", "0", "--out", "run", override, "--dry-run") == 0


# The README's commands.


def readme_commands() -> list[list[str]]:
    lines = re.findall(r"^(?:\S*/)?run\.sh ([^`\n]*)$", README.read_text(), re.MULTILINE)
    found = [shlex.split(line, comments=True) for line in lines]
    assert len(found) > 8
    return found


def test_the_readmes_commands_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    """ "What else people change" was what they have anyway, and the second command had no folder of its own."""

    def printed(words: list[str]) -> str:
        known = [
            "qwen3-30b-a3b" if word == "DIR" or word.startswith("/models/") else word
            for word in words
            if word != "--print"
        ]
        gpus = ["--gpus", "1"] if "--smoke" in words else []
        assert run(*known, *gpus, "--print") == 0, words
        return capsys.readouterr().out

    folders = []
    for words in readme_commands():
        whole = printed(words)
        for word in words:
            if "=" in word and not word.startswith("--"):
                assert printed([one for one in words if one != word]) != whole, word
        other_node = "--node-rank" in words and words[words.index("--node-rank") + 1] != "0"
        if "--print" not in words and not other_node:
            folders.append(words[words.index("--out") + 1])
    assert len(folders) == len(set(folders)), folders


def test_optional_packages_are_those_that_the_set_allows() -> None:
    """`pip install wandb` brought a release that Megatron-Bridge does not take."""
    (pins,) = re.findall(r"pip install (wandb\S*) (datasets\S*)", README.read_text())
    try:
        wanted = [Requirement(line) for line in metadata.requires("megatron-bridge") or ()]
    except metadata.PackageNotFoundError:
        pytest.skip("no Megatron-Bridge here")
    for pin in map(Requirement, pins):
        (release,) = [spec.version for spec in pin.specifier]
        assert all(one.specifier.contains(release) for one in wanted if one.name == pin.name), pin


# A run that does not fit.


def test_what_fits_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal of a run told people to add --cpu-offload, which run.sh does not know."""
    arguments = ["--model", "qwen3.5-122b-a10b", "--dry-run"]
    assert run("baseline", *arguments) == 1
    said = capsys.readouterr().err
    remedies = re.findall(r"\(([^()]*)\)", said.partition("it fits with")[2])
    assert remedies == ["--optimizer adamw", "run.sh fp8"], said
    assert run("baseline", *arguments, *remedies[0].split()) == 0
    assert run("fp8", *arguments) == 0
    assert run("fp8", *arguments, "--gpu-memory", "120") == 1
    said = capsys.readouterr().err
    assert "--rebuild-wt" not in said, "it has no such option"
    found = re.findall(r"\(([^()]*=[^()]*)\)", said.partition("it fits with")[2])
    assert found, said
    for remedy in found:
        assert run("fp8", *arguments, "--gpu-memory", "120", remedy) == 0


# A resumed run.


def resumed(out: Path, *overrides: str, variant: str = "fp8") -> None:
    lock = claim(composed.load(variant, smoke="cpu", overrides=[f"out={out}", *overrides]))
    assert lock is not None
    os.close(lock)


def checkpoint(out: Path, step: int) -> Path:
    path = out / "checkpoints" / f"step-{step:06d}"
    (path / "trainer").mkdir(parents=True)
    (path / "loop.json").touch()
    return path


def remedies() -> list[str]:
    """Settings that the README's table of troubles tells people to change."""
    table = README.read_text().partition("## When something is wrong")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    known = leaves(composed.load("fp8").model_dump(mode="json"))
    blocks = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    names = {name for cell in cells for name in re.findall(rf"`((?:{blocks})\.[a-z_.]+)(?:=[^`]*)?`", cell)}
    assert names <= set(known), names - set(known)
    return sorted(names)


# One is looked at, one is a lower bound that stays, and one ends a run before it has saved anything.
LOOKED_AT = {"publish.activation_scales", "length.total", "data.max_prompt_tokens"}


def test_what_the_readme_names_as_a_remedy_may_change() -> None:
    """A run died of memory in its twentieth step. The README said to make microbatches smaller, and the start with
    smaller ones was refused: "holds a run with other settings".
    """
    found = set(remedies())
    assert {"length.microbatch_tokens", "rollout.memory_fraction", "publish.bucket_mib", "train.dispatcher"} <= found
    assert found >= LOOKED_AT
    before = composed.load("fp8").model_dump(mode="json")
    for key in sorted(found - LOOKED_AT):
        after = json.loads(json.dumps(before))
        block, _, name = key.rpartition(".")
        place = after
        for part in block.split("."):
            place = place[part]
        assert name in place, key
        place[name] = "other"
        old, new = (Settings.model_construct(**values) for values in (before, after))
        assert differences(old, new) == [], key


@pytest.mark.parametrize(
    "override",
    [
        "length.microbatch_tokens=4096",
        "train.logit_chunk_tokens=64",
        "rollout.memory_fraction=0.2",
        "rollout.generate_timeout=60",
        "rollout.max_running=8",
        "publish.staging_mib=32",
        "publish.deadline=60",
        "cluster.numa_binding=true",
        "optimizer.slots=4",
        "data.path=moved.jsonl",
        "data.epochs=3",
        "algorithm.max_resamples=9",
        "roles.engine.env.NCCL_DEBUG=INFO",
    ],
)
def test_how_a_run_goes_may_change_and_is_said(tmp_path: Path, override: str) -> None:
    checkpoint(tmp_path, 10)
    resumed(tmp_path)
    assert unsaid_changes(tmp_path) == ()
    for _ in range(2):  # the first of them ends before it has a log
        resumed(tmp_path, override, "steps=99")
        (words,) = unsaid_changes(tmp_path)
        assert words.startswith(f"{override.partition('=')[0]}: ")
    forget_changes(tmp_path)
    resumed(tmp_path, override, "steps=99")
    assert unsaid_changes(tmp_path) == (), "the start before had it too"


def test_no_node_leaves_the_word_of_an_earlier_start(tmp_path: Path) -> None:
    """Node 0 failed before it had removed it, and a node that lost it said that another start would cure that."""
    going_path(tmp_path).touch()
    claim(composed.load("fp8", smoke="cpu", nodes=2, overrides=[f"out={tmp_path}"]), node_rank=1)
    assert not going_path(tmp_path).exists()


@pytest.mark.parametrize(
    "override",
    [
        "reward.timeout=1",  # it decides verdicts
        "reward.correct=2",
        "optimizer.clip_grad=0.5",
        "length.total=80",
        "data.max_prompt_tokens=40",
        "data.shuffle=false",
        "rollout.sampling.top_p=0.9",
        "algorithm.clip_high=0.3",
        "smoke.digits=1",
    ],
)
def test_what_is_learned_may_not_change(tmp_path: Path, override: str) -> None:
    checkpoint(tmp_path, 10)
    resumed(tmp_path)
    with pytest.raises(ConfigError, match=f"holds a run with other settings: {re.escape(override.partition('=')[0])}:"):
        resumed(tmp_path, override)


def test_a_start_removes_what_a_killed_save_has_left(tmp_path: Path) -> None:
    """A run was killed while it saved step 40, and went on from step 30 to another end: 300 GB of a part lay there for
    good.
    """
    kept = checkpoint(tmp_path, 30)
    half_removed = checkpoint(tmp_path, 20)
    (half_removed / "loop.json").unlink()
    part = tmp_path / "checkpoints" / ".step-000040.part"
    (part / "trainer").mkdir(parents=True)
    (part / "trainer" / "__0_0.distcp").write_bytes(b"x")
    (part / "loop.json").touch()
    resumed(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]
    part.mkdir()
    resumed(tmp_path, "checkpoint.resume=false")
    assert [path.name for path in (tmp_path / "before-1" / "checkpoints").iterdir()] == [kept.name]


def test_every_key_that_may_change_is_one() -> None:
    from weftmoe.rundir import _FREE

    known = leaves(composed.load("fp8").model_dump(mode="json"))
    blocks = {name.rpartition(".")[0] for name in known} | {name.partition(".")[0] for name in known}
    assert set(_FREE) <= set(known) | blocks


# What rank 0 reads for all.


class Letters:
    """A tokenizer whose tokens are letters."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_: Any) -> str:
        return chat[0]["content"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


def on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[list[Any], list[int]]:
    """What each of two ranks gets of the prompts, or raises; and the ranks that read them."""
    from weftmoe.loop import inputs, run
    from weftmoe.telemetry import Counters

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    settings = composed.load(
        "fp8",
        smoke="cpu",
        overrides=[f"out={tmp_path}", f"model.path={model}", "smoke.problems=5", "data.epochs=2", *overrides],
    )
    readers: list[int] = []
    read = inputs.read_prompts
    meeting = threading.Barrier(2, timeout=60)
    said: dict[int, Any] = {}

    def ranked(rank: int) -> Any:
        def broadcast(value: Any) -> Any:
            said[rank] = value
            meeting.wait()
            found = said[0]
            meeting.wait()
            return found

        return SimpleNamespace(first=rank == 0, broadcast=broadcast)

    def one(rank: int) -> Any:
        monkeypatch.setattr(inputs, "read_prompts", lambda *a: (readers.append(rank), read(*a))[1])
        made: Any = object.__new__(run._Run)
        made._settings, made._ranks, made._device = settings, ranked(rank), torch.device("cpu")
        made._progress = SimpleNamespace(stage=lambda _: None, note=lambda _: None, phase=None, advance=None)
        made._hold_ranks = lambda: None
        made._state = run.checkpoint.LoopState(0, {}, Counters(), {})
        made._inputs = made._make_inputs(rank == 0)
        made._tokenizer = Letters()
        return made

    runs = [one(rank) for rank in range(2)]
    found: list[Any] = [None, None]
    with ExitStack() as stack:

        def collect(rank: int) -> None:
            try:
                found[rank] = runs[rank]._make_collector(stack)
            except WeftpubError as error:
                found[rank] = error

        threads = [threading.Thread(target=collect, args=(rank,), daemon=True) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return found, readers


def test_only_the_rank_that_draws_reads_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank read all rows, and put all questions into tokens; one of them draws."""
    found, readers = on_ranks(tmp_path, monkeypatch)
    assert readers == [0]
    assert found[1] is None
    sampler = found[0]._sampler
    assert sampler.left == 2 * 5, "data.epochs"
    assert len(sampler.next(99)) == 10


def test_what_is_wrong_with_the_prompts_is_raised_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = on_ranks(tmp_path, monkeypatch, "data.max_prompt_tokens=1")
    assert [type(error) for error in found] == [ConfigError, ConfigError], found
    assert "longer than data.max_prompt_tokens" in str(found[0])
    assert str(found[0]) in str(found[1])


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ("algorithm.clip_high=0.5", "algorithm.clip_high: 0.28 -> 0.5"),
        ("optimizer.lr=2e-6", "optimizer.lr"),
        ("steps=9", "steps"),
        ("telemetry.measure_every=3", "telemetry.measure_every"),
        ("model.path=/elsewhere", None),
        ("roles.trainer.env.NCCL_SOCKET_IFNAME=eth1", None),
    ],
)
def test_nodes_that_were_told_otherwise_are_refused_on_all_ranks(
    told: str, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run.sh` is started once a node: with another clipping on one of them half of each gradient was computed with it;
    with other steps to save or measure after, the others waited in a collective.
    """
    from weftmoe.loop import run

    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(run, "join_world", lambda *_: None)
    first, other = (composed.load("fp8", smoke="cpu", overrides=more) for more in ([], [told]))
    gathers: Any = (lambda mine: [mine, apart(first, other)], lambda mine: [[], mine])
    for settings, gather in zip((first, other), gathers, strict=True):
        made: Any = object.__new__(run._Run)
        made._settings, made._device = settings, torch.device("cpu")
        made._ranks = SimpleNamespace(broadcast=lambda _: first, gather=gather)
        if named is None:
            made._hold_ranks()
            continue
        with pytest.raises(ConfigError, match=f"rank 1 was started with other settings than rank 0: {named}"):
            made._hold_ranks()


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e@e", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_log_says_which_commit_ran_and_whether_it_was_that(tmp_path: Path) -> None:
    """Nothing was found in a worktree, or where git had packed its refs; and changed files were not mentioned."""
    from weftmoe.loop.run import _commit

    home, tree = tmp_path / "home", tmp_path / "tree"
    home.mkdir()
    assert _commit(home) is None
    git(home, "init", "-q")
    (home / "a").write_text("1")
    git(home, "add", "a")
    git(home, "commit", "-qm", "c")
    git(home, "tag", "v1")
    git(home, "pack-refs", "--all")
    commit = git(home, "rev-parse", "HEAD")
    git(home, "worktree", "add", "-q", str(tree))
    assert _commit(home) == _commit(tree) == commit
    (tree / "a").write_text("2")
    assert (_commit(home), _commit(tree)) == (commit, f"{commit}-dirty")
    (home / "installed").mkdir()
    assert _commit(home / "installed") is None, "a package inside of somebody else's checkout"


# How it ends.


# As torch names the base of its errors.
DistError = type("DistError", (RuntimeError,), {})
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeadlineError("rank 3: silent"), EXIT_LOST),
        (ChannelError("engine sglang: its worker processes [7] have ended"), EXIT_LOST),
        (RuntimeError(GLOO), EXIT_LOST),
        (type("DistNetworkError", (DistError,), {})("the connection was reset"), EXIT_LOST),
        (ConfigError("train.tensor=3"), 1),
        (StateError("none of the groups has rewards that differ"), 1),
        (CheckpointError("the disk is full"), 1),
        (NonFiniteGradientError("layers.0"), 1),
        (UnknownPresetError("no preset is named 'foo'"), 1),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
    ],
)
def test_a_rank_says_whether_another_start_would_cure_it(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead engine and settings that cannot work both ended a job with 1, and for good."""

    def fails(_: Settings) -> int:
        raise error

    composed.write(composed.load("bf16", smoke="cpu", overrides=[f"out={tmp_path}"]), tmp_path / "settings.yaml")
    monkeypatch.setattr(worker, "require_environment", lambda *_: None)
    monkeypatch.setattr(train, "main", fails)
    going_path(tmp_path).touch()
    assert worker.main([str(tmp_path / "settings.yaml")]) == code
    said = capsys.readouterr().err
    assert str(error) in said or "No space left" in said
    assert ("Traceback" in said) is (isinstance(error, RuntimeError) and not isinstance(error, WeftpubError))
    assert going_path(tmp_path).exists() is (code == EXIT_LOST)
    assert lost(code, tmp_path) is (code == EXIT_LOST)
    # Another rank, that only lost this one or was ended for it.
    assert lost(-9, tmp_path) is lost(EXIT_LOST, tmp_path) is (code == EXIT_LOST)


def test_what_is_lost_before_the_first_step_is_most_likely_the_settings_fault(tmp_path: Path) -> None:
    """An engine that its settings let no room ends as one that was killed."""
    assert not lost(-9, tmp_path)
    going_path(tmp_path).touch()
    assert lost(-9, tmp_path)
    assert not lost(1, tmp_path)


def test_the_code_of_a_lost_run_is_the_largest_of_a_jobs(tmp_path: Path) -> None:
    """Of several nodes' exit codes srun gives the largest; a node that ends with the others says 143 or 137."""
    assert 128 + max(signal.valid_signals()) < EXIT_LOST < 256
    script = (composed.CONFIGS.parent / "slurm.sbatch").read_text()
    assert f"code == {EXIT_LOST}" in script
    assert f"{EXIT_LOST} a rank" in (composed.CONFIGS.parent / "run.sh").read_text()
    assert f"\n| {EXIT_LOST} |" in README.read_text()


def test_a_start_knows_nothing_of_how_the_last_one_went(tmp_path: Path) -> None:
    going_path(tmp_path).touch()
    resumed(tmp_path)
    assert not going_path(tmp_path).exists()
