"""Shared pytest switches: `--require-gpu` turns a missing GPU from a skip into a failure, so green means it ran."""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    require = "fail, instead of skip, tests marked gpu without a CUDA GPU"
    parser.addoption("--require-gpu", action="store_true", help=require)
    parser.addoption("--update-golden", action="store_true", help="rewrite the project's own golden files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: workers take whole files, and a long one that starts last runs alone."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # stable: the order within a file stays


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    need = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    have = torch.cuda.device_count() if need else 0
    if have >= need:
        return
    message = f"needs {need} CUDA GPU(s), found {have}"
    if item.config.getoption("--require-gpu"):
        pytest.fail(message)
    pytest.skip(message)
