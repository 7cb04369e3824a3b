"""The handle of an engine in this process, with SGLang's request types and manager replaced by recorders."""

import asyncio
import sys
from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver.local import LocalEngine


@dataclass
class VersionRequest:
    """SGLang's own defaults: told of a new version, it aborts whatever is under way."""

    new_version: str
    abort_all_requests: bool = True


class Manager:
    def __init__(self) -> None:
        self.asked: list[VersionRequest] = []

    async def update_weight_version(self, request: VersionRequest) -> None:
        self.asked.append(request)

    async def init_weights_update_group(self, request: Any) -> None:
        raise AssertionError("data-parallel replicas are not supported")

    destroy_weights_update_group = init_weights_update_group


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    types: Any = ModuleType("sglang.srt.managers.io_struct")
    types.UpdateWeightVersionReqInput = VersionRequest
    types.InitWeightsUpdateGroupReqInput = types.DestroyWeightsUpdateGroupReqInput = SimpleNamespace
    monkeypatch.setitem(sys.modules, types.__name__, types)
    engine = SimpleNamespace(loop=asyncio.new_event_loop(), tokenizer_manager=Manager(), get_all_child_pids=lambda: [])
    made = LocalEngine(engine)
    yield made
    made.shutdown()


def test_a_new_version_aborts_no_request(handle: Any) -> None:
    """Requests that a publish had held were lost right after it: the engine was told its new version, and SGLang aborts
    all requests on that occasion unless it is asked not to."""
    handle.set_weight_version("9")
    assert handle._manager.asked == [VersionRequest("9", abort_all_requests=False)]


def test_an_engine_of_several_replicas_is_refused_as_the_engine_it_is(handle: Any) -> None:
    """SGLang ends such a call by an assertion, which no driver looks for."""
    for call in (handle.workers, lambda: handle.stop_receivers("run")):
        with pytest.raises(ChannelError, match="data-parallel replicas are not supported; start every replica"):
            call()
