"""Records, logs, sinks, and what `weftpub report` makes of them."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weftmoe.report import draw_runs, report, summarize_run
from weftmoe.report.draw import PANELS
from weftmoe.telemetry import (
    ByteCheck,
    Counters,
    KlByPrompt,
    ModelShape,
    PhaseProgress,
    RunHeader,
    RunLog,
    StepRecord,
    Timers,
    open_sinks,
    read_log,
    training_flops,
    turn_lengths,
)
from weftmoe.telemetry.log import LOG_NAME, told_apart
from weftpub import cli
from weftpub.errors import ConfigError


def header(variant: str = "fp8", **changes: Any) -> RunHeader:
    fields: dict[str, Any] = {
        "run_id": "run",
        "started": "2026-01-01T00:00:00+00:00",
        "variant": variant,
        "seed": 3,
        "model": "smoke",
        "resumed_from": None,
        "rollout": "an engine",
        "device": "CPU",
        "notes": ("a note",),
        "settings": {},
        "versions": {"torch": "1"},
    }
    return RunHeader(**fields | changes)


def record(step: int, **changes: Any) -> StepRecord:
    statistics = {"kl": 1e-4 * step, "difference_abs_mean": 0.01, "rejected_tokens": 1, "truncated_tokens": 2}
    statistics |= {"clip_low_fraction": 0.0, "clip_high_fraction": 0.1}
    one = Counters(prompt=10, completion=20, trained=20, completions=4)
    fields: dict[str, Any] = {
        "step": step,
        "epoch": 0,
        "served_version": step - 1,
        "published_version": step,
        "byte_check": ByteCheck(method="checksum", pieces=5, bytes=100, matched=True, digest="d"),
        "counters": one,
        "total": Counters(**{name: value * step for name, value in one.model_dump().items()}),
        "reward": step / 100,
        "reward_std": 0.5,
        "prompt_lengths": turn_lengths([(4,), (6, 9)]),
        "completion_mean": 5.0,
        "completion_longest": 8,
        "cut": 0.25,
        "before": statistics,
        "after": statistics if step % 2 else None,
        "grad_norm": 1.0,
        "learning_rate": 1e-4,
        "groups_kept": 2,
        "groups_dropped": 0,
        "rounds": 1,
        "verdicts": {"judged": 4},
        "seconds": {"rollout": 1.0 * step, "train": 2.0, "publish": 0.5, "total": 4.0},
        "flops_per_s": 1e12,
        "memory": {"peak": 2**30, "offloaded": 2**20},
        "generation": step,
        "changed_share": 0.02,
    }
    return StepRecord(**fields | changes)


def logged(directory: Path, *records: RunHeader | StepRecord) -> Path:
    with RunLog(directory) as log:
        for one in records:
            log.write(one)
    return directory


# Records.


def test_prompt_lengths_by_turn() -> None:
    first, second = turn_lengths([(4,), (6, 9)])
    assert (first.turn, first.mean, first.longest, first.prompts) == (1, 5.0, 6, 2)
    assert (second.turn, second.mean, second.longest, second.prompts) == (2, 9.0, 9, 1)


def test_scalars_have_paths() -> None:
    found = dict(record(1).scalars())
    assert found["reward"] == 0.01
    assert found["before/kl"] == 1e-4
    assert found["total/trained"] == 20.0
    assert found["prompt_lengths/turn_2_mean"] == 9.0
    assert found["byte_check/matched"] == 1.0
    assert "byte_check/digest" not in found
    assert "step" not in found


def test_flops_by_hand() -> None:
    shape = ModelShape(
        layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, experts=4, top_k=2, intermediate=16, vocabulary=10
    )
    # Per layer: q and o 2*8*8, k and v 2*8*4, experts 3*8*32, router 8*4.
    assert shape.active == 2 * (128 + 64 + 768 + 32) + 80
    assert training_flops(shape, [3, 5]) == 6 * shape.active * 8 + 6 * 2 * 2 * 4 * (9 + 25)


def test_timers_add_up_and_start_anew() -> None:
    synchronized: list[int] = []
    timers = Timers(lambda: synchronized.append(1))
    with timers.phase("a"):
        pass
    with pytest.raises(ValueError, match="x"), timers.phase("a"):
        raise ValueError("x")
    timers.add("b", 2.0)
    spent = timers.take()
    assert set(spent) == {"a", "b"}
    assert spent["b"] == 2.0
    assert len(synchronized) == 4, "queued work is waited for before and after"
    assert timers.take() == {}


# Logs.


def test_a_log_reads_back(tmp_path: Path) -> None:
    run = read_log(logged(tmp_path, header(), record(1), record(2)))
    assert run.headers == (header(),)
    assert run.steps == (record(1), record(2))
    assert run.name == "fp8 seed 3"


def test_a_resumed_run_replaces_its_steps(tmp_path: Path) -> None:
    """A run was killed after step 3, its checkpoint was of step 1: steps 2 and 3 of the log never led anywhere."""
    logged(tmp_path, header(), record(1), record(2), record(3))
    with (tmp_path / LOG_NAME).open("a", encoding="utf-8") as file:
        file.write('{"kind": "step", "ste')  # killed while writing
    logged(tmp_path, header(resumed_from=1), record(2, reward=0.7))
    run = read_log(tmp_path)
    assert [one.step for one in run.steps] == [1, 2, 3]
    assert run.steps[1].reward == 0.7
    assert len(run.headers) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"kind": "step"}\n', "line 1: not a record"), ("[]\n", "line 1: not a record"), ("", "no header line")],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / LOG_NAME).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_log(tmp_path)


def test_a_directory_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no"):
        read_log(tmp_path)


# Sinks.


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(tmp_path, header()) as sinks:
        sinks.write(record(1))
        sinks.write(record(2))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("reward")] == [(1, 0.01), (2, 0.02)]
    assert set(events.Tags()["scalars"]) == {name for name, _ in record(1).scalars()}


@pytest.mark.parametrize("resumed_from", [2, None], ids=["resumed", "begun anew"])
def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path: Path, resumed_from: int | None) -> None:
    """A run was killed after step 5 and went on from its checkpoint of step 2: its curve ran back to step 3."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_sinks(tmp_path, header()) as sinks:
        for step in range(1, 6):
            sinks.write(record(step, reward=0.0))
    again = 1 if resumed_from is None else resumed_from + 1
    with open_sinks(tmp_path, header(resumed_from=resumed_from)) as sinks:
        for step in range(again, 7):
            sinks.write(record(step, reward=1.0))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward")]
    assert found == [(step, float(step >= again)) for step in range(1, 7)]


class FakeWandb(ModuleType):
    """`wandb` as far as it is used, with the names of `wandb.init`'s parameters in 0.29 and 0.31."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[str, int, float]] = []

    def init(
        self, *, project: str, id: str, resume: str, name: str, dir: str, mode: str, config: Any, allow_val_change: bool
    ) -> Any:
        self.begun.append({"id": id, "resume": resume, "name": name, "mode": mode})
        return SimpleNamespace(
            log=lambda values, *, step: self.logged.append((id, step, values["reward"])), finish=lambda: None
        )


def test_starts_of_one_run_are_one_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start began a run of its own, and the curves of one run lay in pieces."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    for run_id, resumed_from in (("a", None), ("b", 1), ("c", 2), ("d", None)):
        started = header(run_id=run_id, resumed_from=resumed_from)
        with open_sinks(tmp_path, started, tensorboard=False, wandb="offline") as sinks:
            sinks.write(record(1 + (resumed_from or 0)))
    assert [one["id"] for one in fake.begun] == ["a", "a", "a", "d"], "the last start resumed nothing"
    assert {one["resume"] for one in fake.begun} == {"allow"}
    assert [one["name"] for one in fake.begun] == ["fp8-3-a"] * 3 + ["fp8-3-d"]
    assert fake.logged == [("a", 1, 0.01), ("a", 2, 0.02), ("a", 3, 0.03), ("d", 1, 0.01)]


def test_wandb_itself_takes_a_resumed_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    for run_id, resumed_from in (("a1", None), ("b1", 1)):
        started = header(run_id=run_id, resumed_from=resumed_from, settings={"steps": 2 + (resumed_from or 0)})
        with open_sinks(tmp_path, started, tensorboard=False, wandb="offline") as sinks:
            sinks.write(record(1 + (resumed_from or 0)))
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(folders) == 2
    assert all("-a1" in name and "b1" not in name for name in folders), folders


def test_missing_sinks_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert open_sinks(tmp_path, header()).missing == ("TensorBoard is not installed: no event files",)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        open_sinks(tmp_path, header(), tensorboard=False, wandb="offline")


def test_progress_away_from_a_terminal_is_a_line_a_stage_and_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    with PhaseProgress("run", 2) as progress:
        progress.stage("starting the engine")
        progress.phase("step 1: rollout", 4)
        progress.advance(2)
        progress.step(record(1))
    started, *lines = capsys.readouterr().err.splitlines()
    assert started.endswith(" s  starting the engine")
    assert len(lines) == 1
    assert "reward 0.010" in lines[0]
    assert "published v1" in lines[0], "it was sampled from the version before"


# The report.


def test_a_summary_by_hand(tmp_path: Path) -> None:
    steps = [record(step, fixed_logp_sha256="one") for step in range(1, 31)]
    row = summarize_run(read_log(logged(tmp_path, header(), *steps)))
    assert (row.steps, row.window) == (30, 10)
    assert row.first_reward == pytest.approx(0.055)
    assert row.last_reward == pytest.approx(0.255)
    assert (row.kl_1, row.kl_2) == (1e-4, 2e-4)
    assert (row.kl_1_error, row.kl_2_error) == (None, None), "a log from before it was measured"
    assert row.versions_in_order
    assert row.bytes_checked == 30
    assert row.fixed_tokens == 1
    assert row.rejected_tokens == 30
    assert row.seconds["rollout"] == 16.0
    assert row.trained_tokens == 600


def test_memory_of_all_processes_and_passes_that_train_nothing_are_drawn_and_summarized(tmp_path: Path) -> None:
    """The panel of the GPU's memory showed one process of two, and the timers' panel called a measurement training."""
    used = {"peak": 2 * 2**30, "offloaded": 2**30, "device_used": 70 * 2**30}
    spent = {"train": 2.0, "score": 0.25, "measure": 0.5}
    steps = [record(1, memory=used, seconds=spent), record(2, seconds={"train": 2.0})]
    curves = {curve.label: [curve.value(one) for one in steps] for panel in PANELS for curve in panel.curves}
    assert curves["in use on a GPU, all processes, most of all ranks"] == [70.0, None]
    assert curves["trainer's allocator on rank 0, peak"] == [2.0, 1.0]
    assert curves["passes that train nothing"] == [0.75, None]
    row = summarize_run(read_log(logged(tmp_path, header(), *steps)))
    assert (row.device_memory, row.peak_memory) == (70 * 2**30, 2 * 2**30)
    assert (row.seconds["score"], row.seconds["measure"]) == (0.25, 0.5)


def test_sums_by_prompt_are_kept_to_the_last_bit_and_are_no_curves(tmp_path: Path) -> None:
    one = record(1, by_prompt=KlByPrompt(kl=(0.1 + 0.2, 1e-300), tokens=(3, 4)))
    (found,) = read_log(logged(tmp_path, header(), one)).steps
    assert found.by_prompt == one.by_prompt
    assert not [name for name, _ in one.scalars() if "by_prompt" in name]
    assert read_log(logged(tmp_path / "b", header(), record(1))).steps[0].by_prompt == KlByPrompt()


def test_a_summary_shows_what_is_wrong(tmp_path: Path) -> None:
    steps = [record(1, fixed_logp_sha256="one"), record(2, served_version=0, fixed_logp_sha256="two")]
    row = summarize_run(read_log(logged(tmp_path, header(), *steps)))
    assert not row.versions_in_order
    assert row.fixed_tokens == 2


def test_one_picture_of_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = logged(tmp_path / "a", header(), *[record(step) for step in range(1, 6)])
    notes = ("a note", "its own")
    second = logged(tmp_path / "b", header("bf16", notes=notes), record(1, after=None, memory={}, changed_share=None))
    picture = tmp_path / "picture.png"
    code = cli.run(["report", str(first), str(second), "--out", str(picture)], commands={"report": report})
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "note: a note\n" in shown
    assert "note (bf16 seed 3): its own\n" in shown
    assert "results of fixed tokens" not in shown, "no run scored any"
    code = cli.run(["report", str(first), "--json"], commands={"report": report})
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["runs"][0]["name"] == "fp8 seed 3"
    assert Path(found["picture"]) == first / "report.png"


def test_runs_of_one_variant_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """Muon and AdamW with FP8 experts: both columns, and both curves, were called fp8 seed 3."""
    places = [tmp_path / "muon", tmp_path / "adamw", tmp_path / "bf16"]
    variants = ["fp8", "fp8", "bf16"]
    runs = [
        read_log(logged(place, header(variant), record(1))) for place, variant in zip(places, variants, strict=True)
    ]
    assert [run.name for run in told_apart(runs)] == ["fp8 seed 3, muon", "fp8 seed 3, adamw", "bf16 seed 3"]
    drawn = tmp_path / "three.svg"
    draw_runs(told_apart(runs), drawn)
    assert all(colour in drawn.read_text() for colour in ("#ff7f0e", "#d62728", "#1f77b4"))  # orange, red, blue
    deeper = read_log(logged(tmp_path / "x" / "muon", header()))
    assert [run.name for run in told_apart([runs[0], deeper])] == [
        f"fp8 seed 3, {place}" for place in (tmp_path / "muon", deeper.directory)
    ]


def test_a_long_conversation_is_drawn_to_its_end() -> None:
    """Turns above the fourth were left out of the picture, and nothing said so."""
    (panel,) = (panel for panel in PANELS if panel.title == "Prompt length up to each turn")

    def shown(turns: int) -> dict[str, float]:
        one = record(1, prompt_lengths=turn_lengths([[10 * turn for turn in range(1, turns + 1)]]))
        return {c.label: value for c in panel.curves if (value := c.value(one)) is not None}

    assert shown(1) == {"turn 1": 10}
    assert shown(3) == {"turn 1": 10, "turn 2": 20, "turn 3": 30}
    assert shown(4) == {**shown(3), "the last turn, of more than 3": 40}
    assert shown(7) == {**shown(3), "the last turn, of more than 3": 70}


def test_a_run_without_steps_can_be_drawn(tmp_path: Path) -> None:
    run = read_log(logged(tmp_path, header()))
    draw_runs([run], tmp_path / "empty.svg")
    assert summarize_run(run).last_reward is None


@pytest.mark.parametrize(("name", "message"), [("p.xyz", "end the name in one"), ("file/p.png", "cannot be written")])
def test_pictures_that_cannot_be_written_are_named(tmp_path: Path, name: str, message: str) -> None:
    with RunLog(tmp_path) as log:
        log.write(header())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=message):
        draw_runs([read_log(tmp_path)], tmp_path / name)


def test_bytes_that_are_no_text_are_no_log(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match="has no header line"):
        read_log(tmp_path)


def test_no_log_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["report", str(tmp_path)], commands={"report": report}) == 1
    assert "holds no" in capsys.readouterr().err


def test_a_log_on_a_full_disk_is_named_once(tmp_path: Path) -> None:
    """What the disk had not taken stayed in a buffer, and the closing of the log failed for it once more."""
    (tmp_path / LOG_NAME).symlink_to("/dev/full")
    log = RunLog(tmp_path)
    with pytest.raises(OSError, match=rf"No space left on device: '.*{LOG_NAME}'"):
        log.write(header())
    log.close()


def test_tensorboards_errors_name_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sinks = open_sinks(tmp_path, header())
    (sink,) = sinks._sinks

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink._writer, "add_scalar", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*tensorboard'"):
            sinks.write(record(1))
    sinks.close()
