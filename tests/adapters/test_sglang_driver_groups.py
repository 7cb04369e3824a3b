"""Engines whose attention is data parallel: SGLang has a scheduler answer for each group, and joins the answers."""

import json

import pytest

from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver import HttpEngine

ANSWER = json.dumps([{"rank": rank, "address": f"ipc:///run/s/sglang-{rank}"} for rank in (1, 0)])


@pytest.fixture
def engine() -> HttpEngine:
    return HttpEngine("http://127.0.0.1:1", name="sglang")


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_every_group_of_attention_names_all_workers(engine: HttpEngine, groups: int) -> None:
    """A driver that expected one answer could start no receiver of an engine with DP attention: with two groups it read
    '[...] | [...]', and blamed the engine's installation."""
    peers = engine._peers(" | ".join([ANSWER] * groups), None)
    assert [(peer.rank, peer.address, peer.engine) for peer in peers] == [
        (0, "ipc:///run/s/sglang-0", "sglang"),
        (1, "ipc:///run/s/sglang-1", "sglang"),
    ]
    engine.shutdown()


def test_a_group_that_answers_otherwise_is_not_passed_over(engine: HttpEngine) -> None:
    with pytest.raises(ChannelError, match="expected the receivers' addresses"):
        engine._peers(f"{ANSWER} | initialized", None)
    engine.shutdown()
