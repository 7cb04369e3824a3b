"""What the tests of Megatron's process share. Nothing here imports Megatron until a function runs."""

from typing import Any

import torch
from checkpoints import random_tensors

from weftpub.masters import ExpertMatrix
from weftpub.store import ExpertStore

__all__ = ["attached_model", "bare_trainer", "batch", "dequantized", "megatron_ready", "wrap", "write_generation"]


def megatron_ready() -> None:
    """CPU stand-ins where there is no GPU, and process groups of one rank; once per process."""
    from weftpub_demo import cpu_megatron

    cpu_megatron.install()
    from weftpub_adapters.megatron import initialize_parallel

    initialize_parallel()


def bare_trainer(config: dict[str, Any], format: Any = "fp8", experts: range | None = None) -> tuple[Any, ExpertStore]:
    """Megatron's model of either family, with uninitialised weights, and an empty store for `experts`."""
    config = {**config, **config.get("text_config", {})}
    if "layer_types" in config:
        from hybrid_megatron import build_hybrid

        model = build_hybrid(config)
    else:
        from weftpub_adapters.megatron import Qwen3MoeFields, build_model

        model = build_model(Qwen3MoeFields.from_hf(config))
    store = ExpertStore(
        range(config["num_hidden_layers"]),
        range(config["num_experts"]) if experts is None else experts,
        config["hidden_size"],
        config["moe_intermediate_size"],
        format=format,
    )
    return model, store


def batch(size: int, length: int, vocabulary: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their successors, ``[size, length]`` each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (size, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def write_generation(store: ExpertStore, generation: int, seed: int) -> None:
    """Fill a store with small random matrices."""
    generator = torch.Generator().manual_seed(seed)
    with store.writing(generation):
        for matrix in store.layout.matrices:
            shape = store.layout.shape(matrix.projection)
            store.writer()(matrix.name, torch.randn(shape, generator=generator) * 0.05)


def dequantized(store: ExpertStore, name: str) -> torch.Tensor:
    """BF16 weight that value = code * scale gives."""
    view = store.matrix(ExpertMatrix.parse(name))
    if view.scale is None:
        return view.w.clone()
    rows, columns = view.w.shape
    scale = view.scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (view.w.float() * scale).to(torch.bfloat16)


def wrap(model: Any, overlap: bool) -> Any:
    """Megatron's DistributedDataParallel with FP32 main gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=False, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    return DistributedDataParallel(model.config, config, model)


def attached_model(
    hf_config: dict[str, Any],
    fields: Any,
    format: Any,
    *,
    overlap: bool | None = None,
    overrides: dict[str, Any] | None = None,
) -> Any:
    """(model, store, attachment), and the DDP wrapper where `overlap` is given."""
    from weftpub_adapters.megatron import ExpertAttachment, build_model, fill_parameters, read_parameters

    model = build_model(fields, overrides)
    fill_parameters(model, read_parameters(random_tensors(hf_config), fields))
    store = ExpertStore(range(fields.layers), range(fields.experts), fields.hidden, fields.intermediate, format=format)
    write_generation(store, 0, seed=3)
    ddp = None if overlap is None else wrap(model, overlap)
    attachment = ExpertAttachment(model, store)
    return (model, store, attachment) if ddp is None else (model, store, attachment, ddp)
