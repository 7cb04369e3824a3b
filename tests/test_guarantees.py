"""The page of guarantees names a test in each row; a test that was renamed or dropped must not go on being promised."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
PAGE = ROOT.parent / "docs" / "reference" / "guarantees.md"
_TEST = re.compile(r"`([\w/]+\.py)::([\w:]+)`")
_ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
ROWS = [line for line in _ROWS if not line.startswith("| what can go wrong |")]


def names_of(path: Path) -> set[str]:
    """Names of a file's tests, those of classes as Class::test."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.update(f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef))
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_each_row_names_a_test_that_exists(row: str) -> None:
    named = _TEST.findall(row.split("|")[3])
    assert named, "a guarantee without a test"
    for file, test in named:
        assert test in names_of(ROOT / file), f"{file} has no {test}"


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 30
