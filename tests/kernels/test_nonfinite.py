"""NaN and Inf are found with the right matrix, row, column and kind, and told when asked."""

import math
import pickle

import pytest
import torch

from weftpub_kernels import NonFiniteError, NonFiniteMonitor, QuantizedPair, ShapeError, quantize_into, quantize_pair

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def found(monitor: NonFiniteMonitor) -> tuple[str | int, int, int, str]:
    with pytest.raises(NonFiniteError) as caught:
        monitor.raise_if_set()
    error = caught.value
    return error.matrix, error.row, error.column, str(error.value)


def put(x: torch.Tensor, monitor: NonFiniteMonitor, name: str | list[str] | None = None) -> None:
    quantize_into(x, QuantizedPair.empty(x.shape, x.device), "te_fp32", monitor, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0, 0), (1, 127, 127), (2, 128, 0), (1, 199, 299), (0, 64, 290)])
def test_one_bad_element_is_named(device: str, value: float, place: tuple[int, int, int]) -> None:
    x = torch.randn(3, 200, 300, device=device)
    x[place] = value
    with pytest.raises(NonFiniteError) as caught:
        quantize_pair(x)
    error = caught.value
    assert (error.matrix, error.row, error.column) == place
    assert math.isnan(error.value) == math.isnan(value)
    assert math.isnan(value) or error.value == value
    assert f"row {place[1]}, column {place[2]}" in str(error)
    quantize_pair(torch.ones(3, 200, 300, device=device))  # the next call starts clean


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_of_many_is_named(device: str) -> None:
    x = torch.full((2, 256, 384), math.nan, device=device)
    x[0] = 1.0
    x[1, :130] = 1.0
    x[1, 130, :200] = 1.0
    x[1, 130, 200] = math.inf
    monitor = NonFiniteMonitor(device)
    put(x, monitor)
    assert found(monitor) == (1, 130, 200, "inf")


@pytest.mark.parametrize("device", DEVICES)
def test_names_follow_the_matrices(device: str) -> None:
    bad = torch.ones(2, 128, 128, device=device)
    bad[1, 7, 9] = math.nan
    fine = torch.ones(128, 256, device=device)
    monitor = NonFiniteMonitor(device, names=["a", "b", "c", "d"])
    put(fine, monitor)
    put(bad, monitor)
    assert found(monitor) == ("c", 7, 9, "nan")
    monitor.reset()
    monitor.raise_if_set()
    put(bad, monitor, ["left", "right"])
    assert found(monitor) == ("right", 7, 9, "nan")
    monitor.reset()
    put(fine, monitor, "layers.3.experts.5.fc1")
    put(bad[1], monitor, "layers.3.experts.5.fc2")
    assert found(monitor) == ("layers.3.experts.5.fc2", 7, 9, "nan")
    monitor.reset()
    put(bad, monitor, "stack")
    assert found(monitor) == ("stack[1]", 7, 9, "nan")


@pytest.mark.parametrize("device", DEVICES)
def test_the_earliest_launch_wins(device: str) -> None:
    first, second = torch.ones(128, 128, device=device), torch.ones(200, 300, device=device)
    first[127, 127], second[0, 0] = math.inf, math.nan
    monitor = NonFiniteMonitor(device)
    put(first, monitor, "first")
    put(second, monitor, "second")
    assert found(monitor) == ("first", 127, 127, "inf")


def test_names_must_fit() -> None:
    monitor = NonFiniteMonitor("cpu")
    with pytest.raises(ShapeError, match="3 names for 2 matrices"):
        put(torch.ones(2, 128, 128), monitor, ["a", "b", "c"])


def test_the_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(NonFiniteError("experts.3", 4, 5, math.inf)))
    assert (error.matrix, error.row, error.column, error.value) == ("experts.3", 4, 5, math.inf)


@pytest.mark.gpu
def test_noting_does_not_wait() -> None:
    """While a graph is captured the GPU does nothing, and a wait for it is an error; what was noted is there when the
    graph has run."""
    x = torch.full((128, 128), math.nan, device="cuda")
    monitor = NonFiniteMonitor("cuda")
    put(x, monitor)
    monitor.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        put(x, monitor)
    monitor.raise_if_set()
    graph.replay()
    assert found(monitor)[1:3] == (0, 0)
