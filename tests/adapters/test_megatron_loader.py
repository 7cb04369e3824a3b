"""The name table and the loader, without Megatron: every tensor has one place, and a wrong checkpoint is named."""

from typing import Any

import pytest
import torch
from checkpoints import random_tensors

from weftpub.errors import CheckpointError, ConfigError
from weftpub.masters import ExpertMatrix
from weftpub_adapters.megatron.fields import Qwen3MoeFields
from weftpub_adapters.megatron.loader import fill_parameters, read_parameters
from weftpub_adapters.megatron.names import expert_of, parameter_sources, plain_name


@pytest.fixture
def fields(hf_config: dict[str, Any]) -> Qwen3MoeFields:
    return Qwen3MoeFields.from_hf(hf_config)


@pytest.mark.parametrize("expert_parallel", [1, 2, 4, 8])
def test_every_tensor_feeds_exactly_one_parameter_of_one_rank(
    hf_config: dict[str, Any], fields: Qwen3MoeFields, expert_parallel: int
) -> None:
    used = [tensor for source in parameter_sources(fields, expert_parallel) for tensor in source.tensors]
    assert sorted(used) == sorted(random_tensors(hf_config))


def test_ranks_hold_consecutive_blocks_of_global_experts(fields: Qwen3MoeFields) -> None:
    """A peer numbered experts from 0 on every rank, so the experts of all ranks but the first were never updated."""
    held: dict[int, set[int]] = {}
    for source in parameter_sources(fields, 4):
        if source.expert is not None and source.owner is not None:
            held.setdefault(source.owner, set()).add(source.expert.expert)
            local = int(source.name.split(".local_experts.")[1].split(".")[0])
            assert source.owner * 2 + local == source.expert.expert
            assert f".experts.{source.expert.expert}." in source.tensors[0]
    assert held == {0: {0, 1}, 1: {2, 3}, 2: {4, 5}, 3: {6, 7}}


def test_gate_rows_lie_over_up_rows(hf_config: dict[str, Any], fields: Qwen3MoeFields) -> None:
    tensors = random_tensors(hf_config)
    for name, tensor in tensors.items():
        if name.endswith("gate_proj.weight"):
            tensor.fill_(1)
        if name.endswith("up_proj.weight"):
            tensor.fill_(2)
    matrices = [item.tensor for item in read_parameters(tensors, fields) if item.source.name.endswith("fc1.weight")]
    assert len(matrices) == 16
    for matrix in matrices:
        assert matrix.shape == (1024, 256)
        assert torch.all(matrix[:512] == 1)
        assert torch.all(matrix[512:] == 2)


def test_heads_are_interleaved_by_group(hf_config: dict[str, Any], fields: Qwen3MoeFields) -> None:
    tensors = random_tensors(hf_config)
    at = "model.layers.1.self_attn."
    for part in ("q_proj", "k_proj", "v_proj"):
        rows = tensors[f"{at}{part}.weight"].shape[0]
        tensors[f"{at}{part}.weight"] = (torch.arange(rows) // 32)[:, None].expand(rows, 256).to(torch.bfloat16)
    (qkv,) = [
        item.tensor
        for item in read_parameters(tensors, fields)
        if item.source.name == "decoder.layers.1.self_attention.linear_qkv.weight"
    ]
    heads = qkv.view(16, 32, 256)[:, 0, 0].int().tolist()
    assert heads == [0, 1, 0, 0, 2, 3, 1, 1, 4, 5, 2, 2, 6, 7, 3, 3]  # two query heads, the key head, the value head


def test_a_rank_reads_its_own_experts_only(hf_config: dict[str, Any], fields: Qwen3MoeFields) -> None:
    read: list[str] = []

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            read.append(name)
            return super().__getitem__(name)

    items = list(read_parameters(Watched(random_tensors(hf_config)), fields, rank=1, expert_parallel=4))
    experts = {item.source.expert.expert for item in items if item.source.expert is not None}
    assert experts == {2, 3}
    assert not [name for name in read if ".experts.0." in name or ".experts.7." in name]
    assert len([name for name in read if ".experts." in name]) == 2 * 2 * 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "1 tensors missing.*model.norm.weight"),
        (lambda t: t.update(extra=torch.ones(1)), "1 unknown.*extra"),
        (lambda t: t.update({"model.norm.weight": torch.ones(256, dtype=torch.int8)}), "torch.int8"),
        (
            lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": torch.ones(512, 128)}),
            "cannot be joined",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    hf_config: dict[str, Any], fields: Qwen3MoeFields, damage: Any, message: str
) -> None:
    tensors = random_tensors(hf_config)
    damage(tensors)
    with pytest.raises(CheckpointError, match=message):
        list(read_parameters(tensors, fields))


def test_a_tied_head_is_not_asked_for_and_must_agree(hf_config: dict[str, Any]) -> None:
    tied = {**hf_config, "tie_word_embeddings": True}
    fields = Qwen3MoeFields.from_hf(tied)
    tensors = random_tensors(tied)
    assert all(item.source.name != "output_layer.weight" for item in read_parameters(tensors, fields))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert len(list(read_parameters(tensors, fields))) > 0
    tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(CheckpointError, match="lm_head"):
        list(read_parameters(tensors, fields))


def test_ranks_that_cannot_share_the_experts_are_refused(hf_config: dict[str, Any], fields: Qwen3MoeFields) -> None:
    with pytest.raises(ConfigError, match="rank 0 of 3"):
        list(read_parameters(random_tensors(hf_config), fields, expert_parallel=3))


def test_filling_needs_every_parameter_once(hf_config: dict[str, Any], fields: Qwen3MoeFields) -> None:
    loaded = list(read_parameters(random_tensors(hf_config), fields))
    few = loaded[:3]
    model = _Model({item.source.name: item.tensor for item in few})
    fill_parameters(model, few)
    for item in few:
        assert torch.equal(model.parameters_by_name[item.source.name], item.tensor)
    with pytest.raises(CheckpointError, match="filled before"):
        fill_parameters(model, [*few, few[0]])
    with pytest.raises(CheckpointError, match="1 parameters of the model were not in the checkpoint"):
        fill_parameters(model, few[:2])
    with pytest.raises(CheckpointError, match="no such parameter"):
        fill_parameters(model, loaded[:4])


def test_names_of_experts_are_parsed_with_global_ids() -> None:
    name = "module.module.decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight"
    assert plain_name(name) == "decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight"
    assert expert_of(name, first_expert=6) == ExpertMatrix(3, 7, "fc2")
    assert expert_of("decoder.layers.3.mlp.router.weight", 0) is None
    assert expert_of("decoder.layers.3.mlp.shared_experts.linear_fc1.weight", 0) is None


@pytest.mark.parametrize(
    "tail", ["linear_fc1.weight0", "local_experts.0.linear_fc1.bias", "local_experts.0.norm.weight"]
)
def test_other_expert_parameters_are_refused(tail: str) -> None:
    with pytest.raises(ConfigError, match="SequentialMLP"):
        expert_of(f"decoder.layers.0.mlp.experts.{tail}", 0)


class _Model:
    """Parameters under the wrapped names that Megatron gives."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.parameters_by_name = {name: torch.nn.Parameter(torch.zeros_like(t)) for name, t in tensors.items()}

    def named_parameters(self) -> Any:
        return [(f"module.{name}", parameter) for name, parameter in self.parameters_by_name.items()]
