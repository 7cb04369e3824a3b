"""A small but whole Megatron trainer: real modules forward and backward, staged optimizers, experts in a store.

One step, in order: gradients of all microbatches, one global norm, clipping, then every master through a slot, where it
is updated and written while it is there: an expert matrix into the store's next generation, any other parameter into
the BF16 parameter of the model. No BF16 copy of an expert exists between the first step and `close`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from weftpub.checkpoint import LazyTensors, SavedState, load_state
from weftpub.errors import ConfigError, StateError
from weftpub.masters import MasterSet, find_nonfinite
from weftpub.optim import (
    AdamWHyperparameters,
    MuonHyperparameters,
    Override,
    StagedAdamW,
    StagedOptimizer,
    StepReport,
)
from weftpub.staging import StagingPipeline, Writer
from weftpub.store import ExpertStore, SealReport
from weftpub_adapters.megatron.experts import ExpertAttachment, expert_parameters, first_expert
from weftpub_adapters.megatron.fields import Qwen3MoeFields, read_config
from weftpub_adapters.megatron.gradients import ClipReport, clip_global_norm
from weftpub_adapters.megatron.loader import fill_parameters, read_parameters
from weftpub_adapters.megatron.model import build_model
from weftpub_adapters.megatron.muon import QkvSplitMuon
from weftpub_adapters.megatron.names import plain_name
from weftpub_kernels import NonFiniteError

__all__ = ["MegatronTrainer", "TrainerSettings", "TrainerStep"]


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """How the trainer updates.

    Attributes:
        muon: settings of Muon for the matrices that Megatron gives to it (2-D, neither embedding nor output layer);
            None updates everything with AdamW.
        adamw: settings of AdamW for the rest, or for everything.
        split_qkv: orthogonalize query, key and value rows apart, as Megatron does by default.
        clip_grad: largest global gradient norm; None does not clip.
        format: "fp8" experts, or "bf16" for the same path without quantization.
        preset: quantizer of the FP8 format; None takes the store's default.
        slots: staging slots of each optimizer.
    """

    muon: MuonHyperparameters | None = field(default_factory=MuonHyperparameters)
    adamw: AdamWHyperparameters = field(default_factory=AdamWHyperparameters)
    split_qkv: bool = True
    clip_grad: float | None = 1.0
    format: Literal["fp8", "bf16"] = "fp8"
    preset: str | None = None
    slots: int = 3


@dataclass(frozen=True)
class TrainerStep:
    """What one step did.

    Attributes:
        generation: the store's new generation.
        clip: global gradient norm before clipping, and the factor.
        updates: optimizer name to its report.
        seal: the store's report: share of bytes changed, checksums of the published tensors.
    """

    generation: int
    clip: ClipReport
    updates: Mapping[str, StepReport]
    seal: SealReport


class MegatronTrainer:
    """Trains a Hugging Face Qwen3-MoE checkpoint; Megatron's process groups must exist (`initialize_parallel`).

    Args:
        checkpoint: directory with `config.json` and BF16 or FP32 safetensors.
        settings: optimizers, clipping, format of the experts.
        overrides: further TransformerConfig fields, such as recomputation.

    Attributes:
        fields, hf_config: sizes of the model, and its `config.json`.
        model: Megatron's Float16Module; `ddp` is Megatron's DistributedDataParallel around it.
        store: the experts; generation 0 holds the checkpoint's.
        optimizers: "muon" and "adamw", or "adamw" alone; what `weftpub.checkpoint.save_state` takes.

    Raises:
        ConfigError: a setting is refused by name. CheckpointError: tensors do not match the model.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        settings: TrainerSettings | None = None,
        *,
        overrides: Mapping[str, Any] | None = None,
    ) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        self.settings = TrainerSettings() if settings is None else settings
        self.hf_config = read_config(checkpoint)
        self.fields = Qwen3MoeFields.from_hf(self.hf_config)
        self.expert_rank = parallel_state.get_expert_model_parallel_rank()
        self.expert_parallel = parallel_state.get_expert_model_parallel_world_size()
        self.model = build_model(self.fields, overrides)
        self.device = next(self.model.parameters()).device
        first = first_expert(self.model)
        self._experts = {matrix.name: parameter for matrix, parameter in expert_parameters(self.model, first)}
        weights = self._load(LazyTensors(Path(checkpoint)))
        held = range(first, first + self.fields.experts // self.expert_parallel)
        self.store = ExpertStore(
            range(self.fields.layers),
            held,
            self.fields.hidden,
            self.fields.intermediate,
            preset=self.settings.preset,
            format=self.settings.format,
            device=self.device,
        )
        self.ddp = DistributedDataParallel(
            self.model_config,
            DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=True),
            self.model,
        )
        # After DDP: it takes a view of every parameter to find the autograd node for its hook, and views need memory.
        self.attachment = ExpertAttachment(self.model, self.store, first=first)
        self._dense = _DenseWriter(self._trained())
        self.optimizers = self._build_optimizers(weights)
        with self.store.writing(0):
            for optimizer in self.optimizers.values():
                optimizer.write_all()
        self._closed = False

    @property
    def model_config(self) -> Any:
        """Megatron's TransformerConfig."""
        return self.model.config

    @property
    def masters(self) -> dict[str, torch.Tensor]:
        """Every FP32 master weight by name; expert matrices by their names in the store."""
        return {
            name: master.weight for optimizer in self.optimizers.values() for name, master in optimizer.masters.items()
        }

    def forward_backward(self, tokens: torch.Tensor, labels: torch.Tensor, *, microbatches: int = 1) -> float:
        """Gradients of the mean cross entropy; returns the loss.

        Args:
            tokens, labels: int64 ``[batch, sequence]``; label t is the token after position t.
            microbatches: equal parts of the batch that run one after the other.

        Raises:
            ConfigError: shapes differ, or the batch cannot be divided. StateError: the trainer was closed.
        """
        from megatron.core.distributed import finalize_model_grads

        self._require_open("forward_backward")
        if tokens.shape != labels.shape or tokens.ndim != 2 or tokens.shape[0] % microbatches:
            raise ConfigError(
                f"tokens {list(tokens.shape)} and labels {list(labels.shape)}: expected two [batch, sequence] of one "
                f"shape, with a batch that {microbatches} microbatches divide"
            )
        self.ddp.zero_grad_buffer()
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        total = torch.zeros((), device=self.device)
        parts = list(zip(tokens.chunk(microbatches), labels.chunk(microbatches), strict=True))
        for number, (part, part_labels) in enumerate(parts, start=1):
            loss = self._loss(part, part_labels) / microbatches
            if number < microbatches:
                with self.ddp.no_sync():
                    loss.backward()
            else:
                loss.backward()
            total += loss.detach()
        finalize_model_grads([self.ddp], None)
        return float(total)

    def gradients(self) -> dict[str, torch.Tensor]:
        """FP32 main gradient of every master, by its name."""
        return {name: parameter.main_grad for name, parameter in self._trained().items()}

    def step(self, *, lr_scale: float = 1.0) -> TrainerStep:
        """Clip, update every master, and write the store's next generation.

        Args:
            lr_scale: multiplies the learning rates of the settings; a schedule's value at this step.

        Raises:
            NonFiniteGradientError: names matrix, row and column; nothing was changed. NonFiniteError: a master became
                NaN or Inf; masters and store are torn. StateError: the trainer was closed, or an optimizer changed no
                byte of its masters although their rates and gradients were not zero (what the store holds is whole).
        """
        self._require_open("step")
        gradients = self.gradients()
        clip = clip_global_norm(gradients, self._experts.keys(), self.settings.clip_grad, self._expert_group())
        current = self.store.generation
        generation = 0 if current is None else current + 1
        updates: dict[str, StepReport] = {}
        with self.store.writing(generation, on_torn=self._tear) as writing:
            self._dense.reset()
            for name, optimizer in self.optimizers.items():
                own = {master: gradients[master] for master in optimizer.masters}
                updates[name] = optimizer.step(own, lr=optimizer.hyperparameters.lr * lr_scale)
            self._dense.raise_if_nonfinite()
        unmoved = [name for name, report in updates.items() if report.none_changed]
        if unmoved:
            raise StateError(
                f"generation {generation}: not one master byte of {' and '.join(unmoved)} changed although learning "
                "rates and gradients are not zero; the updates are lost on their way, or the learning rate is below "
                "FP32's resolution"
            )
        return TrainerStep(generation, clip, updates, writing.report)

    def load(self, directory: Path | str) -> SavedState:
        """Take over what `weftpub.checkpoint.save_state` wrote of `optimizers` and `store`, dense parameters of the
        model included. Resumes a run, and is all that a torn trainer needs.

        Raises:
            CheckpointError, ChecksumError, ConfigError: damaged, or of another trainer. StateError: the trainer was
                closed.
        """
        self._require_open("load")
        saved = load_state(directory, optimizers=self.optimizers, store=self.store)
        self.refresh_parameters()
        return saved

    @torch.no_grad()
    def refresh_parameters(self) -> None:
        """Copy the masters of all dense parameters into the model, after the masters were changed from outside."""
        masters = self.masters
        for name, parameter in self._trained().items():
            if name not in self._experts:
                parameter.copy_(masters[name])

    def close(self) -> Any:
        """Detach: returns the model as an ordinary BF16 Megatron model whose experts come from the masters.

        Raises:
            TornError: the masters are torn, so there is nothing whole to return.
        """
        self._require_open("close")
        for optimizer in self.optimizers.values():
            optimizer.masters.require_whole("closing the trainer")
        masters = self.masters
        self.attachment.detach({name: masters[name] for name in self._experts})
        self._closed = True
        return self.model

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Fill the model; returns the weights by master name, in the checkpoint's precision."""
        loaded = list(
            read_parameters(tensors, self.fields, rank=self.expert_rank, expert_parallel=self.expert_parallel)
        )
        fill_parameters(self.model, loaded)
        return {
            item.source.name if item.source.expert is None else item.source.expert.name: item.tensor for item in loaded
        }

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        """Master name to parameter: experts by their store names, the rest by Megatron's."""
        experts = {id(parameter) for parameter in self._experts.values()}
        dense = {
            plain_name(name): parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in experts
        }
        return {**self._experts, **dense}

    def _build_optimizers(self, weights: Mapping[str, torch.Tensor]) -> dict[str, StagedOptimizer[Any]]:
        parameters, muon = self._trained(), self.settings.muon
        matrices = [name for name, parameter in parameters.items() if muon is not None and _is_for_muon(parameter)]
        rest = [name for name in parameters if name not in set(matrices)]
        optimizers: dict[str, StagedOptimizer[Any]] = {}
        if muon is not None:
            masters, common = self._staged(matrices, weights, parameters, QkvSplitMuon.STATES)
            qkv = {name: self._qkv_rows() for name in matrices if name.endswith("linear_qkv.weight")}
            optimizers["muon"] = QkvSplitMuon(masters, *common, muon, qkv=qkv if self.settings.split_qkv else {})
        masters, common = self._staged(rest, weights, parameters, StagedAdamW.STATES)
        # Megatron decays no vector: norms and biases have nothing to be pulled towards zero for.
        overrides = {name: Override(weight_decay=0.0) for name in rest if parameters[name].ndim == 1}
        optimizers["adamw"] = StagedAdamW(masters, *common, self.settings.adamw, overrides=overrides)
        return optimizers

    def _staged(
        self,
        names: list[str],
        weights: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.nn.Parameter],
        states: tuple[str, ...],
    ) -> tuple[MasterSet, tuple[StagingPipeline, dict[str, Writer]]]:
        masters = MasterSet.from_tensors({name: weights[name] for name in names}, states)
        pipeline = StagingPipeline.for_masters(masters, self.device, slots=self.settings.slots)
        writer = self.store.writer()
        writers = {name: writer if name in self._experts else self._dense for name in names}
        return masters, (pipeline, writers)

    def _qkv_rows(self) -> tuple[int, int, int]:
        fields = self.fields
        return fields.heads // fields.kv_heads * fields.head_dim, fields.head_dim, fields.head_dim

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        return self.ddp(tokens, positions, mask, labels=labels).float().mean()

    def _expert_group(self) -> torch.distributed.ProcessGroup | None:
        from megatron.core import parallel_state

        return parallel_state.get_expert_model_parallel_group() if self.expert_parallel > 1 else None

    def _tear(self, reason: str) -> None:
        for optimizer in self.optimizers.values():
            optimizer.masters.mark_torn(reason)

    def _require_open(self, action: str) -> None:
        if self._closed:
            raise StateError(f"{action}: the trainer was closed, its model is an ordinary Megatron model now")


class _DenseWriter:
    """Rounds updated masters into the model's parameters, on the stream of the update, and remembers which of them are
    not finite: dense weights are published too, and no quantizer looks at them.

    Args:
        parameters: by master name.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._finite: dict[str, torch.Tensor] = {}

    def reset(self) -> None:
        """Forget what was seen; a step begins."""
        self._finite.clear()

    @torch.no_grad()
    def __call__(self, name: str, matrix: torch.Tensor, /) -> None:
        parameter = self._parameters[name]
        parameter.copy_(matrix.view_as(parameter))
        self._finite[name] = parameter.isfinite().all()  # of what was rounded: BF16 overflows before FP32

    def raise_if_nonfinite(self) -> None:
        """NonFiniteError for the first parameter of the step that holds NaN or Inf; waits for the device once."""
        if not self._finite:
            return
        flags = torch.stack(list(self._finite.values())).tolist()
        for name, finite in zip(self._finite, flags, strict=True):
            spot = None if finite else find_nonfinite(self._parameters[name])
            if spot is not None:
                row, column, value = spot
                raise NonFiniteError(name, row, column, value)


def _is_for_muon(parameter: torch.nn.Parameter) -> bool:
    """Megatron's own rule: 2-D, and neither embedding nor output layer."""
    from megatron.core.optimizer.emerging_optimizers import _is_nonlinear_or_embedding

    return not _is_nonlinear_or_embedding(parameter)
