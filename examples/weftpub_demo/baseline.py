"""The same job without weftpub: Megatron's ordinary BF16 training and a safetensors export that SGLang loads.

It is here to be compared with. FP32 masters live in Megatron's stock optimizer, the model computes with BF16 copies of
them, and every version goes through a checkpoint directory that each engine reads with its own `load_weights`.
"""

import hashlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weftpub.checkpoint import LazyTensors
from weftpub.errors import NonFiniteGradientError
from weftpub_adapters.megatron import (
    Qwen3MoeFields,
    TrainerProbe,
    build_model,
    fill_parameters,
    initialize_parallel,
    read_config,
    read_parameters,
)
from weftpub_adapters.megatron.experts import expert_parameters
from weftpub_adapters.megatron.names import parameter_sources, plain_name
from weftpub_demo.config import DemoConfig, OptimizerName
from weftpub_demo.job import CLIP_GRAD, WEIGHT_DECAY, Published, combined_sha256, learning_rate
from weftpub_demo.receivers import Receivers

__all__ = ["BaselineJob"]

_MEGATRON_NAME = {OptimizerName.ADAMW: "adam", OptimizerName.MUON: "muon"}


class BaselineJob:
    """Megatron-core's GPTModel under its own DistributedDataParallel and stock optimizer, one rank."""

    def __init__(self, config: DemoConfig, checkpoint: Path, receivers: Receivers) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self._receivers = receivers
        self._out = config.work / "exports"
        self.fields = Qwen3MoeFields.from_hf(read_config(checkpoint))
        initialize_parallel()
        self.model = build_model(self.fields)
        fill_parameters(self.model, read_parameters(LazyTensors(checkpoint), self.fields))
        # Megatron's Adam shards its state over data-parallel ranks; its Muon needs whole matrices.
        sharded = config.optimizer is OptimizerName.ADAMW
        self._ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True),
            self.model,
        )
        self._optimizer = get_megatron_optimizer(_optimizer_config(config, sharded), [self._ddp])
        self._previous = self._expert_bytes()
        receivers.call("hello")

    def pause(self) -> None:
        """Nothing: a receiver that is told to drop its weights stops serving by itself."""

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward of one batch; the mean cross entropy."""
        from megatron.core.distributed import finalize_model_grads

        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        device = next(self.model.parameters()).device
        tokens, labels = tokens.to(device), labels.to(device)
        size = tokens.shape[1]
        positions = torch.arange(size, device=device).expand_as(tokens)
        mask = torch.ones(size, size, dtype=torch.bool, device=device).triu(1)[None, None]
        loss = self._ddp(tokens, positions, mask, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads([self._ddp], None)
        return float(loss.detach())

    def update(self) -> None:
        """One step of the stock optimizer.

        Raises:
            NonFiniteGradientError: Megatron skipped the step.
        """
        done, _, _ = self._optimizer.step()
        if not done:
            raise NonFiniteGradientError("Megatron's optimizer skipped the step: a gradient was not finite")

    def publish(self, version: int) -> Published:
        """Write the BF16 weights under their Hugging Face names, and let every receiver's own loader read them."""
        start = time.perf_counter()
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.hf_tensors()}
        directory = self._out / f"version-{version}"
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        exported = time.perf_counter()
        self._receivers.call("load", directory=str(directory), version=version)
        loaded = time.perf_counter()
        shutil.rmtree(directory)
        digests = {name: hashlib.sha256(_bytes(tensor).numpy()).hexdigest() for name, tensor in tensors.items()}
        now = self._expert_bytes()
        changed = int((now != self._previous).sum()) / now.numel()
        self._previous = now
        return Published(
            ms=(loaded - start) * 1e3,
            phases_ms={"export": (exported - start) * 1e3, "load": (loaded - exported) * 1e3},
            changed=changed,
            sha256=combined_sha256(digests),
            nbytes=sum(tensor.nbytes for tensor in tensors.values()),
            transport="files",
        )

    def probe(self, layer: int, tokens: torch.Tensor) -> TrainerProbe:
        """Megatron's own MoE layer on `tokens`, and the BF16 weights that it multiplied with."""
        with torch.no_grad():
            moe = self.model.module.decoder.layers[layer].mlp
            x = tokens.to(next(moe.parameters()).device, torch.bfloat16)[:, None]
            probabilities, _ = moe.router(x)
            weights, ids = probabilities.float().topk(self.fields.top_k, dim=-1)
            output, _ = moe(x)
        digests = {
            matrix.name: hashlib.sha256(_bytes(parameter.detach()).cpu().numpy()).hexdigest()
            for matrix, parameter in expert_parameters(self.model, 0)
            if matrix.layer == layer
        }
        return TrainerProbe(digests, output[:, 0].float(), ids, weights)

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


def _optimizer_config(config: DemoConfig, sharded: bool) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer=_MEGATRON_NAME[config.optimizer],
        lr=learning_rate(config),
        weight_decay=WEIGHT_DECAY,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=sharded,
        clip_grad=CLIP_GRAD,
    )
