"""Prompts in DAPO-Math-17k's schema, their order, and what they look like as tokens."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weftmoe.data import PromptSampler, arithmetic_rows, read_prompts, write_arithmetic
from weftmoe.loop.prompts import encode_prompts
from weftpub.errors import CheckpointError, ConfigError


def row(index: Any, question: str = "What is 1 + 1?", truth: str | None = "2", **changes: Any) -> dict[str, Any]:
    """A row as the data set's own parquet holds it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
        **changes,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


def test_repeated_rows_are_one_prompt(tmp_path: Path) -> None:
    """The published file holds 1.79 million rows of 17 thousand questions; training on all of them in order would show
    each question a hundred times in an epoch."""
    rows = [row("b", "q1"), row("a", "q2"), row("b", "q1"), row("b", "q1"), row("a", "q2")]
    found = read_prompts(write(tmp_path / "rows.jsonl", rows))
    assert [prompt.index for prompt in found.prompts] == ["b", "a"], "in order of first appearance"
    assert (found.rows, found.repeated) == (5, 3)
    assert "3 repeated rows dropped" in str(found)
    first = found.prompts[0]
    assert (first.chat, first.ground_truth, first.source) == ([{"role": "user", "content": "q1"}], "2", "math_dapo")


def test_rows_of_one_index_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 1: extra_info\.index 'a' names another question"):
        read_prompts(write(tmp_path / "rows.jsonl", [row("a", "q1"), row("a", "q2")]))


def test_a_question_under_two_indices_is_one_question(tmp_path: Path) -> None:
    """The published file names some questions twice, under different indices: they counted as different prompts, and
    were drawn twice as often. Where both came with different answers, whatever the model said was right once and wrong
    once.
    """
    rows = [
        row("a", "q1"),
        row("b", "q2", "5"),
        row("c", "q1", " 2 "),
        row("d", "q2", "6"),
        row("e", "q3"),
        row("a", "q1"),
    ]
    found = read_prompts(write(tmp_path / "rows.jsonl", rows))
    assert [prompt.index for prompt in found.prompts] == ["a", "e"]
    assert (found.rows, found.repeated, found.contradicting) == (6, 3, 1)
    assert "3 repeated rows dropped, 1 questions with contradicting answers left out" in str(found)
    with pytest.raises(ConfigError, match="every question comes with contradicting answers"):
        read_prompts(write(tmp_path / "rows.jsonl", [row("b", "q2", "5"), row("d", "q2", "6")]))


@pytest.mark.parametrize("truth", [None, "", " "])
def test_a_question_without_an_answer_is_refused(tmp_path: Path, truth: str | None) -> None:
    """A row whose ground truth was null was judged by the text "None": every completion of it was wrong."""
    with pytest.raises(ConfigError, match="row 1: no ground truth"):
        read_prompts(write(tmp_path / "rows.jsonl", [row("a"), row("b", "q2", truth)]))


@pytest.mark.parametrize(
    "broken",
    [{"prompt": "text"}, {"prompt": []}, {"reward_model": None}, {"extra_info": {}}, {"extra_info": {"index": None}}],
    ids=str,
)
def test_other_schemas_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="row 0"):
        read_prompts(write(tmp_path / "rows.jsonl", [row("a", **broken)]))


@pytest.mark.parametrize("name", ["nothing.parquet", "nothing.jsonl"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"), [("bad.parquet", "cannot be read as parquet"), ("bad.jsonl", "line 1: not JSON")]
)
def test_damaged_files_are_named(tmp_path: Path, name: str, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(b"PAR1 or not, \xff")
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / name)


def test_a_letter_that_is_none_is_refused(tmp_path: Path) -> None:
    """A file in another encoding was read with a mark in the place of every letter that UTF-8 does not know, and the
    model was asked other questions.
    """
    lines = [json.dumps(row("a")).encode(), json.dumps(row("b", "caf?")).replace("?", "\xe9").encode("latin-1")]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=r"line 2: not JSON.*utf-8"):
        read_prompts(tmp_path / "rows.jsonl")


def test_a_folder_without_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.parquet"):
        read_prompts(tmp_path)


def test_parquet_as_published(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row(f"id-{number % 3}", f"q{number % 3}") for number in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "dapo-math-17k.parquet")
    for source in (tmp_path / "dapo-math-17k.parquet", tmp_path):
        found = read_prompts(source)
        assert (len(found), found.rows) == (3, 10)
    write_arithmetic(tmp_path / "sums.parquet", 5, seed=0)
    assert len(read_prompts(tmp_path / "sums.parquet")) == 5


def load_dataset_here(
    path: str,
    name: str | None = None,
    data_dir: str | None = None,
    data_files: Any = None,
    split: Any = None,
    cache_dir: str | None = None,
    features: Any = None,
    download_config: Any = None,
    download_mode: Any = None,
    verification_mode: Any = None,
    keep_in_memory: bool | None = None,
    save_infos: bool = False,
    revision: Any = None,
    token: Any = None,
    streaming: bool = False,
    num_proc: int | None = None,
    storage_options: dict[str, Any] | None = None,
    **config_kwargs: Any,
) -> Any:
    """As `datasets.load_dataset` of release 5.2 is called, and answers for a folder of JSON lines."""
    assert (name, data_dir, data_files, streaming, config_kwargs) == (None, None, None, False, {})
    assert Path(path).is_dir(), "this one downloads nothing"
    files = {file.stem: file for file in Path(path).glob("*.jsonl")}
    if split is None:
        return {stem: [] for stem in files}
    if split not in files:
        raise ValueError(f'Unknown split "{split}". Should be one of {sorted(files)}.')
    return [json.loads(line) for line in files[split].read_text().splitlines()]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which "some/name" is a data set: of the real package where it is installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "name").mkdir(parents=True)
    if importlib.util.find_spec("datasets") is None:
        package, exceptions = ModuleType("datasets"), ModuleType("datasets.exceptions")
        package.__dict__.update(load_dataset=load_dataset_here, exceptions=exceptions)
        exceptions.__dict__.update(DatasetsError=type("DatasetsError", (Exception,), {}))
        monkeypatch.setitem(sys.modules, "datasets", package)
        monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    else:
        import datasets.config

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "some" / "name"


def test_a_data_set_is_loaded_by_its_name(datasets: Path) -> None:
    """What a run without --data does. A folder is a name, too, for the package; with a split it is no path for us."""
    write(datasets / "train.jsonl", [row("a"), row("b", "What is 2 + 2?", "4"), row("a")])
    write(datasets / "test.jsonl", [row("c")])
    found = read_prompts("some/name:train")
    assert [prompt.index for prompt in found.prompts] == ["a", "b"]
    assert (found.rows, found.origin) == (3, "some/name:train")
    assert found.prompts[1].chat == [{"role": "user", "content": "What is 2 + 2?"}]
    assert read_prompts("some/name:").prompts == found.prompts, "train, if no split is said"
    assert [prompt.index for prompt in read_prompts("some/name:test").prompts] == ["c"]


def test_a_split_that_is_not_there_is_named(datasets: Path) -> None:
    """It ended in a traceback of the package."""
    write(datasets / "train.jsonl", [row("a")])
    message = r"data set 'some/name', split 'validation': .*correct its name \(--data\) or data\.split, or give a file"
    with pytest.raises(ConfigError, match=message):
        read_prompts("some/name:validation")


def test_arithmetic_is_right_and_follows_from_its_seed(tmp_path: Path) -> None:
    rows = list(arithmetic_rows(300, seed=3))
    assert rows == list(arithmetic_rows(300, seed=3)) != list(arithmetic_rows(300, seed=4))
    questions = [one["prompt"][0]["content"] for one in rows]
    assert len(set(questions)) == 300
    for question, one in zip(questions, rows, strict=True):
        left, right = question.removesuffix("=").split("+")
        assert int(one["reward_model"]["ground_truth"]) == int(left) + int(right)
        assert max(len(left), len(right)) <= 2
    write_arithmetic(tmp_path / "sums.jsonl", 300, seed=3)
    assert read_prompts(tmp_path / "sums.jsonl").repeated == 0
    with pytest.raises(ConfigError, match="at most 50"):
        list(arithmetic_rows(60, seed=0, digits=1))


# The order.


def prompts(tmp_path: Path, count: int) -> Any:
    return read_prompts(write(tmp_path / "rows.jsonl", [row(n, f"q{n}") for n in range(count)])).prompts


def test_every_epoch_draws_every_prompt_once(tmp_path: Path) -> None:
    sampler = PromptSampler(prompts(tmp_path, 7), seed=1, epochs=2)
    drawn = [prompt.index for _ in range(7) for prompt in sampler.next(2)]
    assert sorted(drawn[:7]) == sorted(drawn[7:]) == [str(n) for n in range(7)]
    assert drawn[:7] != drawn[7:], "a new permutation each epoch"
    assert sampler.next(2) == []
    assert sampler.left == 0


def test_a_restored_position_goes_on_in_the_same_order(tmp_path: Path) -> None:
    unbroken = PromptSampler(prompts(tmp_path, 5), seed=1)
    unbroken.next(8)
    resumed = PromptSampler(prompts(tmp_path, 5), seed=1)
    resumed.restore(json.loads(json.dumps(unbroken.state())))
    assert resumed.epoch == 1
    assert resumed.next(9) == unbroken.next(9)


def test_without_shuffling_prompts_come_as_they_lie(tmp_path: Path) -> None:
    sampler = PromptSampler(prompts(tmp_path, 3), seed=1, shuffle=False)
    assert [prompt.index for prompt in sampler.next(5)] == ["0", "1", "2", "0", "1"]


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    state = PromptSampler(prompts(tmp_path, 5), seed=1).state()
    with pytest.raises(CheckpointError, match="resume with the same data and seed"):
        PromptSampler(prompts(tmp_path, 5), seed=2).restore(state)
    with pytest.raises(CheckpointError):
        PromptSampler(prompts(tmp_path, 4), seed=1).restore(state)


def test_as_many_other_prompts_are_other_data(tmp_path: Path) -> None:
    """A position is a number, and a data file that was written anew under its old name has as many prompts: a resumed
    run went on in it, drew some questions twice in that epoch, and others never.
    """
    five = prompts(tmp_path, 5)
    state = PromptSampler(five, seed=1).state()
    others = read_prompts(write(tmp_path / "rows.jsonl", [row(n, f"q{n}", str(n)) for n in range(5)])).prompts
    for changed in (others, five[::-1]):
        with pytest.raises(CheckpointError, match="resume with the same data and seed"):
            PromptSampler(changed, seed=1).restore(state)
    with pytest.raises(CheckpointError, match="'shuffle': 1"):
        PromptSampler(five, seed=1, shuffle=False).restore(state)


# Tokens.


class Letters:
    """A tokenizer of letters whose template marks turns."""

    def apply_chat_template(self, chat: list[dict[str, str]], *, tokenize: bool, **options: Any) -> str:
        assert not tokenize
        end = "A:" if options["add_generation_prompt"] else ""
        return "".join(f"{turn['role'][0]}:{turn['content']};" for turn in chat) + end

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens, "the template has them already"
        return {"input_ids": [ord(letter) for letter in text]}


def test_long_prompts_are_left_out_and_turns_are_measured(tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "hi"), ("assistant", "yes"), ("user", "more")]
    chat = [{"role": role, "content": content} for role, content in turns]
    rows = [row("short", "q"), row("long", "q" * 100), row("turns", prompt=chat)]
    read = read_prompts(write(tmp_path / "rows.jsonl", rows))
    kept, left_out = encode_prompts(read, Letters(), longest=40, enable_thinking=False)
    assert [one.prompt.index for one in kept] == ["short", "turns"]
    assert left_out == 1
    assert kept[0].tokens == tuple(map(ord, "u:q;A:"))
    assert kept[0].turns == (6,)
    assert kept[1].turns == (len("s:s;u:hi;"), len("s:s;u:hi;a:yes;u:more;A:"))
    with pytest.raises(ConfigError, match="max_prompt_tokens=3"):
        encode_prompts(read, Letters(), longest=3, enable_thinking=False)
