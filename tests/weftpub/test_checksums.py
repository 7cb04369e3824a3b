"""Checksums by name and as an array are the same checksums."""

import numpy as np
import pytest

from weftpub.checksums import Checksums
from weftpub.errors import ConfigError

FOUND = {"b": -1, "a": 2**63 - 1, "c": -(2**63)}


def test_it_is_a_mapping() -> None:
    sums = Checksums.of(FOUND)
    assert sums == FOUND
    assert dict(sums) == FOUND
    assert list(sums) == ["b", "a", "c"]
    assert (sums["b"], "d" in sums, len(sums)) == (-1, False, 3)
    assert sums.values_in_order.tolist() == list(FOUND.values())
    assert len(Checksums.of({})) == 0


def test_it_does_not_change() -> None:
    values = np.array([1, 2])
    sums = Checksums(("a", "b"), values)
    values[0] = 7
    assert sums["a"] == 1
    with pytest.raises(ValueError, match="read-only"):
        sums.values_in_order[0] = 7


def test_names_are_shared_where_they_are_the_same() -> None:
    first = Checksums.of(FOUND)
    assert Checksums.of(dict(FOUND), first).names is first.names
    assert Checksums.of(dict(reversed(FOUND.items())), first).names == ("c", "a", "b")


@pytest.mark.parametrize("values", [np.array([1]), np.array([1.0, 2.0]), np.array([[1, 2]])])
def test_values_that_do_not_fit_the_names(values: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="2 names need as many int64 checksums"):
        Checksums(("a", "b"), values)
