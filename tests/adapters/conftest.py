"""Fixtures of the adapter tests, and the switch that sends tests of a foreign system into a process of its own."""

from typing import Any

import pytest
from isolated import CHILD, Child, IsolatedItem
from layouts import BASE

_CHILDREN = pytest.StashKey[list[Child]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "isolated(system): runs in a process that holds this foreign system only")
    config.stash[_CHILDREN] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.has_plugin(CHILD):
        return
    by_module = hasattr(config, "workerinput")
    children: dict[str, Child] = {}
    for position, item in enumerate(items):
        marker = item.get_closest_marker("isolated")
        if marker is None:
            continue
        (system,) = marker.args
        key = f"{system} {item.path}" if by_module else system
        if key not in children:
            children[key] = Child(config, system)
        items[position] = IsolatedItem.wrap(item, children[key])
    config.stash[_CHILDREN] += children.values()


def pytest_sessionfinish(session: pytest.Session) -> None:
    for child in session.config.stash[_CHILDREN]:
        child.close()


@pytest.fixture(scope="session")
def hf_config() -> dict[str, Any]:
    """config.json of the model that most adapter tests use."""
    return dict(BASE)
