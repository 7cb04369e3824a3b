"""Dated pages say what their scripts make of the raw files beside them: a number that was changed by hand, or a raw
file that was replaced without making its page anew, is found."""

import importlib
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from result_files import plain

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs/results"
_COMMAND = re.compile(r"^python tests/gpu/(\w+)\.py (\S+) (.+)$", re.MULTILINE)
PAGES = [page.name for page in sorted(RESULTS.glob("2*.md")) if _COMMAND.search(page.read_text(encoding="utf-8"))]


def made_anew(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page that the command in a page makes, in another place."""
    found = _COMMAND.search(text)
    assert found is not None
    script, page = importlib.import_module(found[1]), Path(found[2])
    monkeypatch.chdir(folder)
    if hasattr(script, "draw"):
        monkeypatch.setattr(script, "draw", lambda *_: None)  # takes seconds, and is no text
    beside = page.with_suffix("")
    shutil.copytree(ROOT / beside, folder / beside, ignore=shutil.ignore_patterns("*.json"))
    sources = [str(ROOT / source) for source in shlex.split(found[3])]
    script.main(page, [Path(s) for s in sources] if found[1] == "eight_gpus_page" else sources)
    assert {path.name for path in (folder / beside).iterdir()} >= {path.name for path in (ROOT / beside).iterdir()}
    return (folder / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_its_script_makes_of_the_raw_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert made_anew(text, tmp_path, monkeypatch) == text


def test_such_pages_are_there() -> None:
    assert {re.sub(r"[\d-]{11}", "", name) for name in PAGES} >= {
        "h200.md",
        "sglang-h200.md",
        "two-gpus-h200.md",
        "weftmoe-h200.md",
        "zero-copy-h200.md",
    }


def test_a_page_of_fewer_gpus_says_what_did_not_run(tmp_path: Path) -> None:
    """A page of two GPUs was made by the script for eight, and nothing on it said so."""
    script = importlib.import_module("eight_gpus_page")
    raw = json.loads((RESULTS / "2026-11-30-two-gpus-h200/staging.json").read_text(encoding="utf-8"))
    row = raw["sections"]["staging"]["rows"][0]
    for ranks in (2, 8):
        raw["environment"] |= {"ranks": ranks, "gpus": ranks}
        raw["settings"]["shape"]["experts"] = 32 * ranks
        raw["sections"]["staging"]["rows"] = [{**row, "rank": rank} for rank in range(ranks)]
        (tmp_path / "raw.json").write_text(json.dumps(raw), encoding="utf-8")
        script.main(tmp_path / "page.md", [tmp_path / "raw.json"])
        text = (tmp_path / "page.md").read_text(encoding="utf-8")
        assert ("Eight GPUs were not available" in text) == (ranks == 2)
        assert "not on this page: train, publish, smoke." in text


def write_runs(folder: Path, **runs: dict[str, Any]) -> None:
    """Raw files of runs, by name."""
    for name, data in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")


def test_a_section_that_a_later_run_replaced_is_named(tmp_path: Path) -> None:
    """A measure that had failed went from the page without a word when another one passed."""
    script = importlib.import_module("weftmoe_smoke_page")
    raw = json.loads((RESULTS / "2026-11-30-weftmoe-h200/kl-00550fd.json").read_text(encoding="utf-8"))
    first = {**raw, "commit": "abcdef0", "checks": {"kl/x: y": {"passed": False, "detail": "no"}}}
    write_runs(tmp_path, first=first, second=raw)
    page = tmp_path / "page.md"
    script.main(page, [str(tmp_path / "first.json"), str(tmp_path / "second.json"), f"{tmp_path / 'first.json'}:Other"])
    text = page.read_text(encoding="utf-8")
    assert "at abcdef0 (1 checks, 1 failed), is in [kl-abcdef0.json](page/kl-abcdef0.json)" in text
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [script.TITLES["kl"], f"{script.TITLES['kl']}, Other"]
    assert json.loads((tmp_path / "page/kl-abcdef0.json").read_text(encoding="utf-8"))["commit"] == "abcdef0"


def test_seeds_of_a_later_run_are_put_to_those_of_an_earlier_one(tmp_path: Path) -> None:
    """A check over all seeds was of those of its own run, and stood on the page beside seeds that it had not seen."""
    script = importlib.import_module("weftmoe_smoke_page")
    folder = RESULTS / "2026-11-30-weftmoe-h200"
    first, more = (json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("kl", "kl-seeds-2-3"))
    of_its_own = "kl/fp8-two: KL of step 2 at most 1.2 x step 1, over all seeds"
    assert of_its_own in more["checks"]
    page = tmp_path / "page.md"
    script.main(page, [str(folder / "kl.json"), f"{folder / 'kl-seeds-2-3.json'}:+"])
    text = page.read_text(encoding="utf-8")
    rows = [row for row in first["rows"] + more["rows"] if row["run"].startswith("kl-fp8-two")]
    before, after = (sum(row[step] for row in rows) for step in ("kl_1", "kl_2"))
    assert f"| {of_its_own} | not shown | x {after / before:.3f}, no error is known" in text
    assert "error at most" not in text, "those errors took completions for draws"
    assert f"| **fp8-two** | all |  | - | {sum(row['trained_tokens'] for row in rows)} |" in text
    assert len(re.findall(r"^\| fp8-all \| [123] \|", text, re.MULTILINE)) == len(rows) == 3
    assert len(re.findall(r"^## ", text, re.MULTILINE)) == 1
    with pytest.raises(SystemExit, match="no file before it"):
        script.main(page, [f"{folder / 'kl-seeds-2-3.json'}:+"])
    with pytest.raises(SystemExit, match="runs of one name"):
        script.main(page, [str(folder / "kl.json"), f"{folder / 'kl.json'}:+"])


@pytest.mark.parametrize(
    ("covariance", "shown", "failed"),
    [(0.9, "ok | x 1.100 [1.0", "0 failed."), (-0.9, "not shown | x 1.100 [0.9", "0 failed, 3 not shown.")],
)
def test_runs_that_know_their_errors_are_judged_with_them(
    tmp_path: Path, covariance: float, shown: str, failed: str
) -> None:
    """Prompts whose KL is large in both steps tell more about its growth than as many that are large in one of them."""
    script = importlib.import_module("weftmoe_smoke_page")
    raw = json.loads((RESULTS / "2026-11-30-weftmoe-h200/kl-00550fd.json").read_text(encoding="utf-8"))
    rows = [row for row in raw["rows"] if row["run"].endswith("fp8-two")]
    raw["rows"] = [
        {
            **rows[0],
            "run": f"kl-fp8-two-seed-{seed}",
            "seed": seed,
            "prompts": 4096,
            "kl_covariance": covariance * 1e-12,
        }
        | {"kl_1": 2e-5, "kl_2": 2.2e-5, "kl_1_error": 1e-6, "kl_2_error": 1e-6}
        for seed in (1, 2)
    ]
    raw["checks"] = {}
    write_runs(tmp_path, raw=raw)
    script.main(tmp_path / "page.md", [str(tmp_path / "raw.json")])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    for name in (
        "fp8-two-seed-1: KL of step 2 at most 1.2 x step 1",
        "fp8-two: KL of step 2 at most 1.2 x step 1, over",
    ):
        assert re.search(rf"kl/{name}[^|]*\| {re.escape(shown)}", text)
    assert f"3 checks, {failed}" in text
    assert "| **fp8-two** | all |  | 8192 |" in text
    assert "2.000 (0.100) | 2.200 (0.100)" in text
    assert "Runs without an interval" not in text


def test_an_earlier_speed_stands_beside_the_one_that_is_taken(tmp_path: Path) -> None:
    """A limit that had been missed three times went from the page when a run met it."""
    script = importlib.import_module("zero_copy_page")
    folder = RESULTS / "2026-11-30-zero-copy-h200"
    page = tmp_path / "page.md"
    script.main(page, [str(folder / "speed.json"), f"{folder / 'speed-00550fd.json'}:earlier"])
    text = page.read_text(encoding="utf-8")
    taken = json.loads((folder / "speed.json").read_text(encoding="utf-8"))["numbers"]["shared_minus_other_ms"]
    assert f"{taken:.2f} ms more than the copy of the other weights" in text
    assert "| 00550fd | 32 | 13.46 | 7.88 | 5.58 | [speed-00550fd.json](page/speed-00550fd.json) |" in text
    assert (tmp_path / "page/speed-00550fd.json").is_file()


def test_a_later_section_of_the_sglang_page_wins_and_the_earlier_is_named(tmp_path: Path) -> None:
    script = importlib.import_module("sglang_adapter_page")
    raw = json.loads((RESULTS / "2026-11-30-sglang-h200/faults.json").read_text(encoding="utf-8"))
    failed = {**raw, "commit": "abcdef0", "checks": {"faults/x": {"passed": False, "detail": "no"}}}
    write_runs(tmp_path, first=failed, second=raw)
    page = tmp_path / "page.md"
    script.main(page, [str(tmp_path / "first.json"), str(tmp_path / "second.json")])
    text = page.read_text(encoding="utf-8")
    assert f"{len(raw['checks'])} checks, 0 failed." in text
    assert f"At {raw['commit']}. A publisher in a process of its own" in text
    assert "at abcdef0 (1 checks, 1 failed), is in [faults-abcdef0.json](page/faults-abcdef0.json)" in text
    script.main(page, [str(tmp_path / "second.json"), str(tmp_path / "first.json")])
    assert "1 checks, 1 failed.\n" in page.read_text(encoding="utf-8")


def test_a_section_that_came_to_nothing_is_on_the_page(tmp_path: Path) -> None:
    """Sections were taken from runs: one that died before its first run would not have been there, nor counted."""
    script = importlib.import_module("weftmoe_smoke_page")
    raw = json.loads((RESULTS / "2026-11-30-weftmoe-h200/kl-00550fd.json").read_text(encoding="utf-8"))
    raw["checks"]["shared: the section itself"] = {"passed": False, "detail": "ConfigError: no"}
    (tmp_path / "raw.json").write_text(json.dumps(raw), encoding="utf-8")
    script.main(tmp_path / "page.md", [str(tmp_path / "raw.json")])
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "13 checks, 1 failed, 6 not shown" in text
    assert "| shared: the section itself | **FAILED** | ConfigError: no |" in text


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        ("/tmp/w2/runs/fp8/arithmetic.jsonl (0 dropped)", "arithmetic.jsonl (0 dropped)"),
        ("at (/opt/x/.venv/lib/python3.12/site-packages/torch/lib/libc10.so)", "at (torch/lib/libc10.so)"),
        ({"a": ["/tmp/x/y", 1.5, None]}, {"a": ["y", 1.5, None]}),
        ("a/b of 3 GB/s, docs/results/x", "a/b of 3 GB/s, docs/results/x"),
    ],
)
def test_raw_files_name_no_folders_of_the_machine_they_come_from(found: object, kept: object) -> None:
    assert plain(found) == kept
