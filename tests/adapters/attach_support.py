"""Small Megatron trainers on the CPU: model, DDP, optimizer, one training step. Imported inside the Megatron test
process only."""

from typing import Any

import torch

from weftpub_adapters.megatron import Qwen3MoeFields, build_model, initialize_parallel
from weftpub_adapters.megatron.attached import AttachSettings, prepare
from weftpub_demo import cpu_megatron

FIELDS = Qwen3MoeFields(
    layers=2,
    hidden=256,
    vocab=256,
    positions=64,
    heads=4,
    kv_heads=2,
    head_dim=64,
    experts=4,
    top_k=2,
    intermediate=128,
    norm_topk=True,
    rope_theta=1e6,
    norm_eps=1e-6,
    tied=False,
)
LENGTH = 32


def start(expert_parallel: int = 1) -> None:
    """Megatron on the CPU, process groups included; may be called again."""
    cpu_megatron.install()
    initialize_parallel(expert_parallel=expert_parallel)


def make_model(seed: int = 0, first: int = 0, **overrides: Any) -> Any:
    """The model with weights that depend on parameter names and global expert ids alone."""
    model = build_model(FIELDS, overrides or None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = sum((i + 1) * ord(c) for i, c in enumerate(global_name(name, first))) + 100_000 * seed
            generator = torch.Generator().manual_seed(key)
            value = (
                torch.ones(parameter.shape)
                if parameter.ndim == 1
                else torch.randn(parameter.shape, generator=generator) * 0.02
            )
            parameter.copy_(value)
    return model


def global_name(name: str, first: int) -> str:
    """A parameter's name with the expert's global number, without wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    parts = name.split(".")
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        parts[at] = str(int(parts[at]) + first)
    return ".".join(parts)


def optimizer_config(optimizer: str, staged: bool, **changes: Any) -> Any:
    """What the optimizer needs when it is staged, and its ordinary form when not."""
    from megatron.core.optimizer import OptimizerConfig

    distributed = optimizer == "adam"
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "lr": 1e-3,
        "weight_decay": 0.01,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": distributed,
        "clip_grad": 1.0,
    }
    if staged and distributed:
        settings |= {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        }
    return OptimizerConfig(**{**settings, **changes})


def wrap(model: Any, optimizer: str, **ddp: Any) -> Any:
    """DistributedDataParallel as the optimizer needs it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        **{"use_distributed_optimizer": optimizer == "adam", "grad_reduce_in_fp32": True, **ddp}
    )
    return DistributedDataParallel(model.config, config, model)


def build(
    optimizer: str,
    variant: str | None = None,
    *,
    seed: int = 0,
    first: int = 0,
    ddp: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """A wrapped model and its optimizer: prepared for a variant, or untouched for None."""
    from megatron.core.optimizer import get_megatron_optimizer

    bare = make_model(seed, first, **(model or {}))
    if variant is not None:
        prepare(bare, AttachSettings(variant=variant, **settings))
    wrapped = wrap(bare, optimizer, **(ddp or {}))
    return wrapped, get_megatron_optimizer(
        optimizer_config(optimizer, variant is not None, **(config or {})), [wrapped]
    )


def batch(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and attention mask of two sequences."""
    tokens = torch.randint(0, FIELDS.vocab, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(LENGTH)[None].expand(2, -1)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    return tokens, positions, mask


def gradients(ddp: Any, optimizer: Any, seeds: tuple[int, ...] = (1,)) -> float:
    """Forward and backward over microbatches, as Megatron's schedule does; returns the mean loss."""
    from megatron.core.distributed import finalize_model_grads

    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    losses: list[float] = []
    for index, seed in enumerate(seeds):
        tokens, positions, mask = batch(seed)
        last = index == len(seeds) - 1
        with _sync(ddp, last):
            loss = ddp(tokens, positions, mask, labels=tokens).float().mean() / len(seeds)
            loss.backward()
        losses.append(loss.item())
    finalize_model_grads([ddp], None)
    return sum(losses)


def train(ddp: Any, optimizer: Any, seeds: tuple[int, ...] = (1,)) -> tuple[float, float]:
    """One step; loss and gradient norm."""
    loss = gradients(ddp, optimizer, seeds)
    success, norm, _ = optimizer.step()
    assert success
    return loss, float(norm)


def parameters(ddp: Any) -> dict[str, torch.Tensor]:
    """Copies of all parameters, by plain name."""
    return {global_name(name, 0): p.detach().clone() for name, p in ddp.named_parameters()}


def main_gradients(ddp: Any) -> dict[str, torch.Tensor]:
    """Copies of all main gradients, by plain name."""
    return {global_name(name, 0): p.main_grad.clone() for name, p in ddp.named_parameters()}


def _sync(ddp: Any, last: bool) -> Any:
    import contextlib

    return contextlib.nullcontext() if last else ddp.no_sync()
