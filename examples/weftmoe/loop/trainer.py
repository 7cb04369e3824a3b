"""The Megatron trainer of a run: one variant's model, optimizer and attachment, and what the loop asks of them.

    baseline   Megatron as it is
    bf16, fp8  prepared and attached by weftpub_adapters.megatron

A trainer is built once per process. Between steps its device memory is offloaded by tags, as the attachment defines
them; a baseline's optimizer state is moved by Megatron's own calls.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weftmoe.grpo import (
    CorrectionSettings,
    Layout,
    LossSettings,
    Microbatch,
    Sequence,
    SequenceSums,
    batch_loss,
    deal,
    microbatches,
    sequence_sums,
    token_weights,
)
from weftmoe.loop.model import build_model, initialize
from weftmoe.loop.optimizer import optimizer_copies, optimizer_fields, set_groups, uses_flat_buffers
from weftmoe.loop.ranks import Place, Ranks
from weftmoe.loop.scoring import log_probabilities
from weftmoe.loop.weights import load_hf
from weftmoe.schema import Settings
from weftpub.errors import NonFiniteGradientError, StateError
from weftpub.publisher import SourceBuffers
from weftpub_adapters.megatron import read_config, read_fields
from weftpub_adapters.megatron.fields import HYBRID_ARCHITECTURES

__all__ = ["MegatronGrpo", "Sources", "Update", "layout_of"]


@dataclass(frozen=True)
class Update:
    """One optimizer update.

    Attributes:
        grad_norm: before clipping, over all ranks.
        sums: of this rank's sequences, against the rollout, by the weights before the update.
    """

    grad_norm: float
    sums: tuple[SequenceSums, ...]


@dataclass(frozen=True)
class Sources:
    """What one rank publishes.

    Attributes:
        tensors: by canonical name, or buffers with their places in them.
        checksums: those that are known, by canonical name.
    """

    tensors: Mapping[str, torch.Tensor] | SourceBuffers
    checksums: Mapping[str, int] | None


class MegatronGrpo:
    """Builds the trainer from a Hugging Face directory.

    Args:
        settings: the run's.
        directory: the checkpoint.
        device: this rank's.
        read_weights: False fills parameters with zeros, for a start that loads its own checkpoint afterwards.
        shared: folder where this rank and the engine on its GPU meet to map one memory for the experts.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        device: torch.device,
        *,
        read_weights: bool = True,
        shared: str | None = None,
    ) -> None:
        self.hf_config: Mapping[str, Any] = read_config(directory)
        self.fields = read_fields(self.hf_config)
        self.device = device
        self._settings = settings
        self._ranks = Ranks()
        self._away: frozenset[str] = frozenset()
        self._mapping: Any = None
        initialize(settings, device)
        model = build_model(settings, self.fields, device)
        if read_weights:
            load_hf(model, directory, self.fields, grouped=settings.train.experts == "grouped")
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        self._wrap(model, shared)
        self._loss = LossSettings(settings.algorithm.clip_low, settings.algorithm.clip_high)
        self._correction = _correction_settings(settings)

    # What it is.

    @property
    def generation(self) -> int | None:
        """Of the store; None for a baseline."""
        return self.attachment.generation if self.attachment.attached else None

    @property
    def changed_share(self) -> float | None:
        """Share of the published expert bytes that the last step changed; None where nothing measures it."""
        last = self.attachment.last_step
        return None if last is None else last.changed_share

    @property
    def expert_bytes(self) -> int:
        """Bytes of this rank's published experts in the store, scales included; 0 without one."""
        if self.attachment.store is None:
            return 0
        layout = self.attachment.store.layout
        each = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.buffer_shapes().values())
        return each * len(layout.layers)

    @property
    def model(self) -> Any:
        """Megatron's model without DistributedDataParallel."""
        return self.ddp.module

    @property
    def data_parallel(self) -> tuple[int, int]:
        """This rank's place among the data-parallel ranks, and their number."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    # Computing.

    def score(self, sequences: Many[Sequence]) -> dict[int, torch.Tensor]:
        """Log-probabilities of the completion tokens of this rank's share, by sequence index, float32 on the host."""
        found: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for batch in self._batches(sequences):
                values = self._log_probabilities(batch)
                for sequence, logp in zip(batch.sequences, batch.split(batch.pick(values).cpu()), strict=True):
                    if not sequence.placeholder:
                        found[sequence.index] = logp
        return found

    def compare(self, sequences: Many[Sequence]) -> tuple[SequenceSums, ...]:
        """Statistics of the present weights against the rollout, of this rank's share."""
        scores = self.score(sequences)
        return tuple(
            sequence_sums(s.index, scores[s.index], torch.tensor(s.rollout_logp))
            for s in sequences
            if s.index in scores
        )

    def update(self, sequences: Many[Sequence], old: Mapping[int, torch.Tensor] | None, *, lr: float) -> Update:
        """One optimizer update on sequences of all ranks, each with its advantage.

        Args:
            sequences: the same on all ranks; each trains its data-parallel share.
            old: log-probabilities before the step's first update, by index; None where this is the first one, and the
                forward pass itself gives them.
            lr: learning rate.

        Raises:
            NonFiniteGradientError: a gradient is NaN or Inf. With weftpub nothing was changed; a baseline's optimizer
                does not look, and its weights are lost.
        """
        from megatron.core.distributed import finalize_model_grads

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron averages gradients over data-parallel ranks; the loss is a mean over the tokens of all of them.
        weights = token_weights(sequences, self._settings.algorithm.loss)
        scale = self.data_parallel[1]
        batches, sums = list(self._batches(sequences)), []
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                logp = batch.pick(self._log_probabilities(batch))
                loss, found = batch_loss(batch, logp, old, weights, self._correction, self._loss)
                (loss * scale).backward()
            sums += found
        finalize_model_grads([self.ddp], None)
        set_groups(self.optimizer.param_groups, lr=lr, weight_decay=self._settings.optimizer.weight_decay)
        success, norm, _ = self.optimizer.step()
        if norm is not None and not math.isfinite(float(norm)):
            raise NonFiniteGradientError(
                f"the norm of the gradients is {float(norm)}, and Megatron's own optimizer has applied them: start "
                "again with the same --out, the run goes on from its last checkpoint"
            )
        if not success:
            raise NonFiniteGradientError(
                "the optimizer refused the step: a gradient is not finite; nothing was changed"
            )
        return Update(float(norm), tuple(sums))

    # Publishing.

    def plan(self, descriptions: Many[Any]) -> Any:
        """The plan from this trainer to engines that describe themselves, each on its node; collective."""
        from weftpub_adapters.awex import plan_publish

        nodes = self._settings.cluster.nodes
        hosts = Place.here(nodes).hosts if nodes > 1 else None
        return plan_publish(self.model, self.attachment.store, self.hf_config, descriptions, hosts)

    @contextmanager
    def sources(self) -> Iterator[Sources]:
        """What this rank publishes, held until the block ends; collective.

        Raises:
            WeftpubError: it cannot be had on this rank, or StateError, on another.
        """
        from weftpub_adapters.awex import SourceMapping
        from weftpub_adapters.megatron.attached.together import together

        store = self.attachment.store
        with contextlib.ExitStack() as stack:
            # A rank that raised here alone would leave the others in the publish until its deadline. Several ranks have
            # gloo, too (`join_world`): NCCL would make a communicator for it while the engine takes its memory.
            host = torch.device("cpu")
            with together("making what is published", host, "Nothing was published.", told=StateError):
                if self._mapping is None:  # the places stay; only memory comes and goes
                    self._mapping = SourceMapping(self.model, store, self.hf_config)
                if self.attachment.attached:
                    stack.enter_context(self.attachment.reading("publish"))
                stack.callback(self._mapping.release)
                made = self._sources(None if store is None else store.checksums)
            yield made

    def _sources(self, checksums: Mapping[str, int] | None) -> Sources:
        # On the CPU host code reads them through numpy, which makes a storage's size final: parameters that are
        # offloaded afterwards must not be the ones.
        host = self.device.type == "cpu"
        if self._settings.publish.path == "native":
            # Copied into buckets one after the other; all made ones at once would be a gigabyte beside the bucket.
            return Sources(self._mapping.one_by_one(copied=host), checksums)
        if not host:
            # Receivers on this host read them where they are, and let go before the publish returns.
            return Sources(self._mapping.buffers(in_place=True), checksums)
        known, found = checksums or {}, self._mapping.tensors()
        return Sources({name: tensor if name in known else tensor.clone() for name, tensor in found.items()}, checksums)

    # Memory.

    def offload(self, *tags: str) -> None:
        """Free the device memory of tags ("weights", "optimizer", "gradients") that the settings let leave."""
        wanted = [tag for tag in tags if tag in self._settings.train.offload and tag not in self._away]
        if not wanted:
            return
        if self.attachment.attached:
            self.attachment.offload(*wanted)
        else:
            self._offload_baseline(wanted)
        self._away |= set(wanted)

    def reload(self) -> None:
        """Take back everything."""
        if not self._away:
            return
        if self.attachment.attached:
            self.attachment.reload()
        else:
            own = [tag for tag in self._away if tag != "optimizer"]
            if own:
                self.attachment.reload(*own)
            if "optimizer" in self._away and self._moves_optimizer:
                self.optimizer.restore_from_cpu()
        self._away = frozenset()

    def close(self) -> None:
        """Leave Megatron's process groups; the process is about to end."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    # Inside.

    def _wrap(self, model: Any, shared: str | None) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from weftpub_adapters.megatron.attached import AttachSettings, attach, prepare

        settings = self._settings
        prepared = prepare(
            model,
            AttachSettings(
                variant=settings.variant,
                preset=settings.publish.preset,
                activation_scales=settings.publish.activation_scales,
                slots=settings.optimizer.slots,
                slot_numel=settings.optimizer.slot_numel,
                architecture=settings.model.architecture,
                shared_folder=shared,
            ),
        )
        flat = uses_flat_buffers(settings)
        wrapper = DistributedDataParallelConfig(
            use_distributed_optimizer=flat,
            num_distributed_optimizer_instances=optimizer_copies(settings),
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=settings.train.overlap_grad_reduce and self.device.type == "cuda",
        )
        self.ddp = DistributedDataParallel(model.config, wrapper, model)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**optimizer_fields(settings)), [self.ddp])
        self.attachment = attach(self.ddp, self.optimizer, prepared=prepared)

    def _offload_baseline(self, tags: Many[str]) -> None:
        own = [tag for tag in tags if tag != "optimizer"]
        if own:
            self.attachment.offload(*own)
        if "optimizer" in tags and self._moves_optimizer:
            self.optimizer.offload_to_cpu()

    @property
    def _moves_optimizer(self) -> bool:
        """Whether Megatron's own calls may move a baseline's optimizer. HybridDeviceOptimizer has its state on the host
        already, and holds views of the model's parameters, which those calls would replace by copies: updates would
        then reach the copies, and the state the GPU.
        """
        return not self._settings.optimizer.cpu_offload

    def _batches(self, sequences: Many[Sequence]) -> Iterator[Microbatch]:
        """This rank's microbatches; as many on every rank, because experts are exchanged between them."""
        rank, ranks = self.data_parallel
        made = list(self._cut(deal(sequences, ranks)[rank]))
        # Asked before the first is computed: a rank that asked after its last one would wait here while the others,
        # with more to compute, wait for it in an exchange of experts.
        most = max(self._ranks.gather(len(made)))
        yield from made
        for _ in range(most - len(made)):
            yield from self._cut([Sequence.nobody()])

    def _log_probabilities(self, batch: Microbatch) -> torch.Tensor:
        settings = self._settings
        return log_probabilities(
            self.ddp,
            batch,
            self.device,
            chunk_tokens=settings.train.logit_chunk_tokens,
            temperature=settings.rollout.sampling.temperature,
            masked=settings.train.experts != "grouped",
        )

    def _cut(self, sequences: Many[Sequence]) -> Iterator[Microbatch]:
        settings = self._settings
        yield from microbatches(
            sequences,
            budget=settings.length.microbatch_tokens,
            layout=layout_of(settings),
            pad_to=settings.train.tensor if settings.train.sequence_parallel else 1,
        )


def layout_of(settings: Settings) -> Layout:
    """Of microbatches: packed where every layer can stay inside its sequences. Attention can with TransformerEngine's
    kernels, a gated delta net with those of flash-linear-attention, which Megatron leaves aside to be deterministic.
    """
    hybrid = settings.model.architecture in HYBRID_ARCHITECTURES
    if settings.train.experts == "grouped" and not (hybrid and settings.train.deterministic):
        return "packed"
    return "padded"


def describe_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, for the log's header."""
    plain: dict[str, Any] = json.loads(settings.model_dump_json())
    return plain


def _correction_settings(settings: Settings) -> CorrectionSettings:
    """Of truncated importance sampling."""
    algorithm = settings.algorithm
    if algorithm.tis_cap is None:
        return CorrectionSettings(enabled=False)
    above = math.inf if algorithm.tis_reject_above is None else algorithm.tis_reject_above
    return CorrectionSettings(cap=algorithm.tis_cap, reject_below=algorithm.tis_reject_below, reject_above=above)
