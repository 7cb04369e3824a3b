"""SGLang's own update from tensors, as the baseline of weftmoe sends it: buckets of whole tensors, packed by each rank,
into the real models of an engine's workers.
"""

import base64
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_tensors
from layouts import BASE, HYBRID

from weftmoe.rollout.engine import serialized_bucket
from weftmoe.rollout.gather import BucketGather, make_buckets
from weftpub.plan import Shard, dtype_name
from weftpub.publisher import SoloGroup
from weftpub_adapters.sglang import ServedModel, build_model

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from sglang_update import update_from_tensors

pytestmark = pytest.mark.isolated("sglang")

CPU = torch.device("cpu")


def load_bucket(served: ServedModel, payload: str) -> None:
    """What a worker does with its payload, by SGLang's own code."""
    assert update_from_tensors(served, base64.b64decode(payload), "flattened_bucket", CPU) == (True, "Success")


def poisoned(served: ServedModel) -> dict[str, torch.Tensor]:
    """Parameters by name, every element NaN."""
    parameters = {name: parameter.data for name, parameter in served.model.named_parameters()}
    for tensor in parameters.values():
        tensor.fill_(float("nan"))
    return parameters


@pytest.mark.parametrize("sizes", [{}, {"attention_dp": 2}], ids=["tp2-ep2", "dp2-ep2"])
@pytest.mark.parametrize("config", [BASE, HYBRID], ids=["qwen3", "qwen3.5"])
def test_workers_take_their_parts_of_whole_tensors(config: Mapping[str, Any], sizes: dict[str, int]) -> None:
    """In small buckets, against SGLang's loader with the checkpoint as it is."""
    tensors = random_tensors(dict(config))
    shards = [
        Shard(name, dtype_name(t.dtype), tuple(t.shape), tuple(t.shape), (0,) * t.ndim, 0)
        for name, t in tensors.items()
    ]
    gather = BucketGather(make_buckets(shards, most=300_000), SoloGroup(), CPU, seconds=30.0)
    assert len(gather.buckets) > 3
    for rank in range(2):
        served = build_model(dict(config), tp_size=2, ep_size=2, rank=rank, format="bf16", **sizes)
        live = poisoned(served)
        with served.active():
            served.model.load_weights(iter(tensors.items()))
        expected = {name: tensor.clone() for name, tensor in live.items()}
        unloaded = {name for name, tensor in expected.items() if tensor.isnan().any()}
        assert not unloaded
        poisoned(served)
        gather.run(
            tensors,
            serialized_bucket,
            lambda payloads, served=served: load_bucket(served, payloads[0]),
            delivery=30.0,
        )
        assert [name for name, tensor in live.items() if not torch.equal(tensor, expected[name])] == []
