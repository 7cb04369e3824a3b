"""Fixtures of the adapter tests, and the switch that sends tests of a foreign system into a process of its own."""

from typing import Any

import pytest
from isolated import CHILD, Child, IsolatedItem

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
    """A Qwen3-MoE that every tested size can split: 8 experts of 512, 8 heads over 4 key/value heads, an odd
    vocabulary.
    """
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": 128,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 8,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 500,
    }
