"""Reads prompts in DAPO-Math-17k's schema, from its parquet file or from a data set of the `datasets` package.

    data_source   string
    prompt        list of {role, content}
    ability       string
    reward_model  {ground_truth, style}
    extra_info    {index}

The published file repeats every question about a hundred times; rows are one prompt if their ``extra_info.index`` is
one, or their conversation. The first is kept, and `PromptSet` says how many there were. Rows that share an index and
differ are an error. A question that comes under several indices with different answers has no answer, and is left out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weftpub.errors import ConfigError

__all__ = ["MADE", "Prompt", "PromptSet", "names_a_path", "read_prompts"]

MADE = "made"  # what smoke configurations write for a path

_ROWS_AT_ONCE = 4096
_FILES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        index: the data set's own name of it.
        messages: the conversation's turns so far, as (role, content).
        ground_truth: the expected answer.
        source: `data_source`; says which rule judges the answer.
        style: `reward_model.style`.
    """

    index: str
    messages: tuple[tuple[str, str], ...]
    ground_truth: str
    source: str
    style: str

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates take them."""
        return [{"role": role, "content": content} for role, content in self.messages]


@dataclass(frozen=True)
class PromptSet:
    """The questions of a data set, each once, in the order of their first appearance.

    Attributes:
        prompts: the questions.
        rows: rows that were read.
        origin: where from.
        contradicting: questions that were left out because their rows give different answers.
    """

    prompts: tuple[Prompt, ...]
    rows: int
    origin: str
    contradicting: int = 0

    @property
    def repeated(self) -> int:
        """Rows that were dropped because their question was there already."""
        return self.rows - len(self.prompts) - self.contradicting

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        text = f"{len(self)} prompts from {self.rows} rows of {self.origin} ({self.repeated} repeated rows dropped"
        if self.contradicting:
            text += f", {self.contradicting} questions with contradicting answers left out"
        return f"{text})"


def names_a_path(source: str) -> bool:
    """Whether a file or directory is meant, there or not, and no data set's name."""
    return Path(source).suffix in _FILES or source.startswith(("/", ".", "~")) or Path(source).exists()


def read_prompts(source: str | Path) -> PromptSet:
    """Read all prompts.

    Args:
        source: a ``.parquet`` or ``.jsonl`` file, a directory of parquet files, or the name of a data set (with
            ``name:split``; "train" by default), which needs the `datasets` package.

    Raises:
        ConfigError: nothing is there, a package is missing, or rows are not in the schema; names the row.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.rglob("*.parquet"))
        if not files:
            raise ConfigError(f"{path} holds no .parquet file; give DAPO-Math-17k's file or a directory with it")
        return _dedupe((row for file in files for row in _parquet_rows(file)), str(path))
    if path.suffix in _FILES:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; give DAPO-Math-17k's parquet file or the name of a data set")
        return _dedupe(_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path), str(path))
    return _dedupe(_dataset_rows(str(source)), str(source))


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path}: reading parquet files needs pyarrow; install pyarrow") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE):
                yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors of damaged files are ValueErrors
        raise ConfigError(f"{path} cannot be read as parquet: {error}; is it whole?") from None


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:  # of JSON or of UTF-8: a replaced letter would change a question unseen
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from None


def _dataset_rows(name: str) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise ConfigError(
            f"{name!r} is no file, and loading it by name needs the datasets package; install datasets or give a file"
        ) from None
    name, _, split = name.partition(":")
    split = split if split else "train"
    try:
        rows = load_dataset(name, split=split)
    except (OSError, ValueError, DatasetsError) as error:  # not to be found or reached; no such split
        raise ConfigError(
            f"data set {name!r}, split {split!r}: {error}; correct its name (--data) or data.split, or give a file"
        ) from error
    yield from rows


def _dedupe(rows: Iterable[Mapping[str, Any]], origin: str) -> PromptSet:
    found: dict[str, Prompt] = {}
    count = 0
    for row in rows:
        prompt = _prompt(row, count, origin)
        count += 1
        first = found.setdefault(prompt.index, prompt)
        if first is not prompt and (first.messages, first.ground_truth) != (prompt.messages, prompt.ground_truth):
            raise ConfigError(
                f"{origin}, row {count - 1}: extra_info.index {prompt.index!r} names another question than its first "
                "row; rows of one index must be copies"
            )
    if not found:
        raise ConfigError(f"{origin} has no rows")
    return _once(found.values(), count, origin)


def _once(prompts: Iterable[Prompt], rows: int, origin: str) -> PromptSet:
    """Every question once, whatever it is called: published data has some under several indices."""
    first: dict[tuple[tuple[str, str], ...], Prompt] = {}
    contradicting: set[tuple[tuple[str, str], ...]] = set()
    for prompt in prompts:
        if first.setdefault(prompt.messages, prompt).ground_truth.strip() != prompt.ground_truth.strip():
            contradicting.add(prompt.messages)
    kept = tuple(prompt for messages, prompt in first.items() if messages not in contradicting)
    if not kept:
        raise ConfigError(f"{origin}: every question comes with contradicting answers; is this the right data?")
    return PromptSet(kept, rows, origin, len(contradicting))


def _prompt(row: Mapping[str, Any], number: int, origin: str) -> Prompt:
    try:
        messages = tuple((str(turn["role"]), str(turn["content"])) for turn in row["prompt"])
        model, info = row["reward_model"], row["extra_info"]
        made = Prompt(
            index=str(info["index"]),
            messages=messages,
            ground_truth=str(model["ground_truth"]),
            source=str(row["data_source"]),
            style=str(model.get("style", "")),
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{origin}, row {number}: not in DAPO-Math-17k's schema ({type(error).__name__}: {error}); expected "
            "data_source, prompt [{role, content}], ability, reward_model {ground_truth, style}, extra_info {index}"
        ) from None
    if not messages or info["index"] is None:
        raise ConfigError(f"{origin}, row {number}: an empty prompt or no extra_info.index")
    if model["ground_truth"] is None or not made.ground_truth.strip():
        raise ConfigError(f"{origin}, row {number}: no ground truth, so every answer would be wrong; leave it out")
    return made
