"""The measuring programs, as far as they go without a GPU."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from weftpub_kernels import tuning
from weftpub_kernels.bench import environment, quantize, tune, verify
from weftpub_kernels.bench import transpose as turning
from weftpub_kernels.tuning import ROWS, TURN, Tuning, Turn, choose


def test_the_specs_are_those_of_the_targets() -> None:
    assert [spec.name for spec in quantize.LAYERS] == ["32x2048x3072", "32x3072x1024", "64x1024x2048"]
    assert [spec.name for spec in quantize.MATRICES] == ["1x1024x2048", "1x2048x3072", "1x7168x4096", "1x16384x8192"]
    assert quantize.LAYERS[0].bytes == 6 * 32 * 2048 * 3072
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantize.LAYERS[0].rows = 1  # type: ignore[misc]


def test_the_torch_contender_makes_our_bytes() -> None:
    """What is timed against must compute the same, or the comparison is void."""
    x = torch.randn(2, 256, 384)
    out = quantize.QuantizedPair.empty(x.shape, "cpu", sums=True)
    quantize.quantize_into(x, out)
    quantize._check(x, out)
    out.wt.view(torch.uint8)[1, 5, 6] ^= 1
    with pytest.raises(AssertionError, match=r"W\^T of \[2, 256, 384\] is wrong"):
        quantize._check(x, out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU they would run")
@pytest.mark.parametrize("program", [quantize, tune, turning, verify])
def test_without_a_gpu_they_say_so(program: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2  # type: ignore[attr-defined]
    assert "no CUDA GPU" in capsys.readouterr().err


def test_results_are_written_as_json(tmp_path: Path) -> None:
    environment.write(tmp_path / "out.json", {"rows": [1]})
    environment.write(None, {})
    assert json.loads((tmp_path / "out.json").read_text()) == {"rows": [1]}
    assert environment._ask("no-such-program") == "unknown"


def test_the_tuner_gives_every_run_a_turn_in_every_round() -> None:
    turns: list[str] = []

    def turn(run: object) -> float:
        assert callable(run)
        turns.append(run())
        return float(len(turns))

    times = tune.interleave({name: lambda name=name: name for name in "abc"}, turn, seconds=0.0)
    assert turns[:3] == list("abc")  # not counted
    rounds = [turns[i : i + 3] for i in range(3, len(turns), 3)]
    assert [sorted(names) for names in rounds] == [list("abc")] * 5
    assert len({names[0] for names in rounds}) == 3
    assert times["a"] == [float(3 * i + 4 + names.index("a")) for i, names in enumerate(rounds)]


def test_the_tuner_passes_over_what_was_wrong() -> None:
    quick, right = tune.CANDIDATES["strides"][:2]
    rows = [
        {"programs_per_processor": 13.6, "to_copy": {tune.label(quick): 0.9, tune.label(right): 1.1}, "faults": faults}
        for faults in ({}, {tune.label(quick): "4 bytes of wt are wrong"})
    ]
    assert tune.best_rows(rows[:1], [quick, right]) == [(32.0, quick)]
    assert tune.best_rows(rows, [quick, right]) == [(32.0, right)]


def test_the_tuner_keeps_the_row_in_use_where_it_is_as_good() -> None:
    present = tune.in_use(32.0)
    other = dataclasses.replace(present, apart=not present.apart)
    row = {"programs_per_processor": 13.6, "faults": {}, "to_copy": {tune.label(present): 1.0005, tune.label(other): 1}}
    assert present is choose(32, 1)
    assert tune.best_rows([row], [present, other]) == [(32.0, present)]
    row["to_copy"][tune.label(present)] = 1.002
    assert tune.best_rows([row], [present, other]) == [(32.0, other)]
    measured_with_few = {"programs_per_processor": 20.0, "faults": {}, "to_copy": {tune.label(present): 2.0}}
    assert tune.best_rows([row, measured_with_few], [present, other]) == [(32.0, present)]


def test_the_tuner_takes_the_best_of_its_focus_to_the_other_specs() -> None:
    candidates = [Tuning(registers=number) for number in range(1, 8)]
    times = {tune.label(candidate): 50.0 - place for place, candidate in enumerate(candidates)}
    row = {"us": times, "faults": {tune.label(candidates[-1]): "1 bytes of w are wrong"}}
    rows = list(dict.fromkeys(row for _, row in ROWS))
    assert tune.few_for_others(row, candidates) == [*rows, *candidates[-2:-6:-1]]


def test_candidates_have_names_of_their_own() -> None:
    for group in tune.CANDIDATES.values():
        assert len({tune.label(candidate) for candidate in group}) == len(group)


def test_the_tuner_writes_rows_that_read_as_what_they_were() -> None:
    text = "[\n" + tune.source_of(ROWS) + "]"
    assert eval(text, {"Tuning": Tuning}) == ROWS
    assert text in Path(tuning.__file__).read_text()
    long = [(math.inf, candidate) for group in tune.CANDIDATES.values() for candidate in group]
    text = tune.source_of(long)
    assert eval(f"[{text}]", {"Tuning": Tuning}) == long
    assert max(map(len, text.splitlines())) <= 120


def _turns(name: str, *, wrong: Turn) -> object:
    def launch(w: torch.Tensor, wt: torch.Tensor, scale: torch.Tensor, scale_t: torch.Tensor, turn: Turn) -> None:
        wt.copy_(w.transpose(1, 2))
        scale_t.copy_(scale.transpose(1, 2))
        if turn == wrong:
            {"wt": wt, "scale_t": scale_t}[name][-1, 1, 0] += 1

    return launch


@pytest.mark.parametrize(("name", "what"), [("wt", r"W^T"), ("scale_t", "scale_t")])
def test_the_transposition_is_checked_before_it_is_timed(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, wrong = turning.CANDIDATES[:3]
    timed: list[str] = []
    monkeypatch.setattr(turning, "launch", _turns(name, wrong=wrong))
    monkeypatch.setattr(turning, "_time_turn", lambda run: timed.append(run()) or float(1 + len(timed) % 3))
    work = turning.Work("small", ((2, 130, 140), (1, 16, 300)), 2)
    row = turning.measure(work, [first, second, wrong], 0.0, "cpu")
    assert row["faults"] == {repr(wrong): f"1 values of {what} of batch 0 are wrong"}
    assert [*row["us"]] == ["copy", "torch", "in use", repr(first), repr(second)]
    assert work.bytes == row["bytes"] == 2 * 2 * (2 * 130 * 140 + 16 * 300)
    assert row["rounds"] == 5
    assert row["of_copy"]["copy"] == 1.0
    assert turning.best([row], [wrong]) is None


def test_the_best_transposition_keeps_the_one_in_use_where_it_is_as_good() -> None:
    other = Turn(columns=8, down=4, cache=".cs")
    for share, found in ((0.9005, TURN), (0.902, other)):
        row = {"faults": {}, "of_copy": {repr(TURN): 0.9, repr(other): share}}
        assert turning.best([row], [TURN, other]) == found
    assert turning.best([row, {"faults": {repr(other): "wrong"}, "of_copy": row["of_copy"]}], [TURN, other]) == TURN


def test_the_transposition_in_use_is_written_as_it_reads() -> None:
    source = Path(tuning.__file__).read_text()
    assert source.count(f"\n{turning.source_of(TURN)}\n") == 1
    for candidate in turning.CANDIDATES:
        assert eval(turning.source_of(candidate).removeprefix("TURN = "), {"Turn": Turn}) == candidate
    assert turning.WORK[-1].bytes == 2 * 4_026_531_840
