"""The same job without weftpub: Megatron's ordinary BF16 training and a safetensors export that SGLang loads.

It is here to be compared with. FP32 masters live in Megatron's stock optimizer, the model computes with BF16 copies of
them, and every version goes through a checkpoint directory that each engine reads with its own `load_weights`.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from weftpub_adapters.megatron.fields import Qwen3MoeFields, read_config
from weftpub_adapters.megatron.loader import fill_parameters, read_parameters
from weftpub_adapters.megatron.model import build_model, initialize_parallel
from weftpub_adapters.megatron.names import parameter_sources, plain_name
from weftpub_demo.config import OptimizerName

__all__ = ["BaselineTrainer", "Export"]

_MEGATRON_NAME = {OptimizerName.ADAMW: "adam", OptimizerName.MUON: "muon"}


@dataclass(frozen=True)
class Export:
    """One written version: `changed` is the share of expert bytes that differ from the version before."""

    directory: Path
    sha256: str
    changed: float
    nbytes: int


class BaselineTrainer:
    """Megatron-core's GPTModel under its own DistributedDataParallel and stock optimizer, one rank."""

    def __init__(self, directory: Path, *, optimizer: OptimizerName, lr: float, weight_decay: float) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from weftpub.checkpoint import LazyTensors

        self.fields = Qwen3MoeFields.from_hf(read_config(directory))
        initialize_parallel()
        self.model = build_model(self.fields)
        fill_parameters(self.model, read_parameters(LazyTensors(directory), self.fields))
        # Megatron's Muon does not shard its state over data-parallel ranks; its Adam expects to.
        sharded = optimizer is OptimizerName.ADAMW
        self._ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True),
            self.model,
        )
        settings = OptimizerConfig(
            optimizer=_MEGATRON_NAME[optimizer],
            lr=lr,
            weight_decay=weight_decay,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=sharded,
            clip_grad=1.0,
        )
        self._optimizer = get_megatron_optimizer(settings, [self._ddp])
        self._previous = self._expert_bytes()

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward of one batch; the mean cross entropy."""
        from megatron.core.distributed import finalize_model_grads

        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        size = tokens.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        loss = self._ddp(tokens, positions, mask, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([self._ddp], None)
        return float(loss.detach())

    def update(self) -> None:
        """One step of the stock optimizer; raises RuntimeError when it skipped the step."""
        done, _, _ = self._optimizer.step()
        if not done:
            raise RuntimeError("Megatron's optimizer skipped the step: a gradient was not finite")

    def export(self, directory: Path) -> Export:
        """Write the model's BF16 weights under their Hugging Face names."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.hf_tensors()}
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        digest = hashlib.sha256()
        for name in sorted(tensors):
            digest.update(name.encode() + hashlib.sha256(_bytes(tensors[name]).numpy()).digest())
        now = self._expert_bytes()
        changed = int((now != self._previous).sum()) / now.numel()
        self._previous = now
        return Export(directory, digest.hexdigest(), changed, sum(tensor.nbytes for tensor in tensors.values()))

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter by its Hugging Face names; views where the layouts agree."""
        parameters = {plain_name(name): parameter.detach() for name, parameter in self.model.named_parameters()}
        for source in parameter_sources(self.fields):
            parameter = parameters[source.name]
            match source.tensors:
                case (_,):
                    parts: tuple[torch.Tensor, ...] = (parameter,)
                case (_, _):  # gate rows over up rows
                    parts = tuple(parameter.chunk(2))
                case _:  # query, key and value heads, interleaved by key/value group
                    parts = self._split_heads(parameter)
            yield from zip(source.tensors, parts, strict=True)

    def _split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fields = self.fields
        groups = qkv.view(fields.kv_heads, -1, fields.head_dim, qkv.shape[-1])
        queries = fields.heads // fields.kv_heads
        parts = groups.split([queries, 1, 1], dim=1)
        return tuple(part.reshape(-1, qkv.shape[-1]) for part in parts)

    def _expert_bytes(self) -> torch.Tensor:
        return torch.cat([_bytes(tensor).cpu() for name, tensor in self.hf_tensors() if ".experts." in name])


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()
