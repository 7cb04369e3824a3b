"""The Megatron adapter on one GPU: exact bytes, training curves, schedules, memory and checkpoints, in one repeatable
run.

    python tests/gpu/megatron_adapter.py --out OUT [--only layer,accumulate,schedule,memory,checkpoint,training]

Writes OUT/megatron_adapter.json and OUT/megatron_adapter.png, and exits with 1 if any check fails. Sections:

    layer       hidden 3072, intermediate 1024, 32 experts, top-k 8, two layers, 128 tokens, two updates, full
                recomputation; Muon and AdamW; both buffer APIs
    accumulate  three microbatches against three single passes, plain and fused, reductions overlapped or not
    schedule    gradient norm, clipping, weight decay and learning-rate schedule of the bf16 variant against
                unattached Megatron
    memory      bytes per expert parameter between steps and at the step's peak, three variants
    checkpoint  distributed checkpoints: attached to unattached and back, resumed bytes
    training    a small Qwen3-MoE on real text (by default the language reference that Python itself carries): baseline,
                bf16, fp8, three seeds

Without TransformerEngine and a GPU, `--tiny` runs the same code with SequentialMLP on a CPU, as a check of this script.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from ran_on import need_gpu, ran_on

from weftpub_demo import cpu_megatron

if not torch.cuda.is_available():
    cpu_megatron.install()
# Read when their libraries start: the accumulation section wants fixed orders of summation.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

from weftpub_adapters.megatron.attached import AttachSettings, attach, prepare
from weftpub_adapters.te import count_fp8_gemms, count_weight_quantizations
from weftpub_demo.corpus import ByteCorpus
from weftpub_kernels import quantize_pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FIELDS = ("w", "wt", "scale", "scale_t")
PEAK_LR = 5e-4  # of the training section
_ADAM_BOUND = 2e-6  # of a master, absolute, per update of size lr = 1e-3


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    heads: int
    batch: int
    length: int
    recompute: bool = True
    vocab: int = 256

    @property
    def expert_numel(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.intermediate


REFERENCE = Shape(3072, 1024, 32, 8, 2, 24, 1, 128)
SMALL = Shape(512, 256, 16, 4, 2, 8, 16, 128, recompute=False)
TINY = Shape(256, 128, 4, 2, 2, 4, 1, 32)


class Report:
    """Numbers and checks; a failed check is remembered and the run goes on."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {"checks": {}, "failed": []}

    def check(self, name: str, passed: bool, detail: Any = None) -> None:
        self.data["checks"][name] = {"passed": bool(passed), "detail": detail}
        if not passed:
            self.data["failed"].append(name)
        print(f"  {'ok  ' if passed else 'FAIL'} {name}" + ("" if detail is None else f": {detail}"), flush=True)


def have_te() -> bool:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return bool(HAVE_TE)


# Building.


def make_model(shape: Shape, seed: int = 0) -> Any:
    """GPTModel in Float16Module, TransformerEngine's layers where there are any, weights from a seed."""
    import torch.nn.functional as F
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads // 2,
        kv_channels=shape.hidden // shape.heads,
        num_moe_experts=shape.experts,
        moe_ffn_hidden_size=shape.intermediate,
        moe_router_topk=shape.top_k,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_grouped_gemm=have_te(),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=DEVICE.type == "cpu",
        perform_initialization=False,
        **(recompute if shape.recompute else {}),
    )
    spec = (
        get_gpt_layer_with_transformer_engine_spec(num_experts=shape.experts, moe_grouped_gemm=True, qk_layernorm=True)
        if have_te()
        else get_gpt_layer_local_spec(
            num_experts=shape.experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
        )
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab,
        max_sequence_length=shape.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = Float16Module(config, model.to(DEVICE))
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model


@dataclass
class Trainer:
    """A wrapped model, its optimizer, and the attachment of the staged variants."""

    ddp: Any
    optimizer: Any
    attachment: Any

    def gradients(self, batches: list[tuple[torch.Tensor, torch.Tensor]], parts: int | None = None) -> float:
        """Forward and backward over microbatches; the sum of their losses over `parts`, by default their mean."""
        from megatron.core.distributed import finalize_model_grads

        parts = parts or len(batches)
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        total = 0.0
        for index, (tokens, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = self.ddp(tokens, *positions_and_mask(tokens), labels=labels).float().mean() / parts
                loss.backward()
                total += loss.item()
        finalize_model_grads([self.ddp], None)
        return total

    def train(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, float]:
        """One step: loss and gradient norm."""
        loss = self.gradients(batches)
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)

    def main_gradients(self) -> dict[str, torch.Tensor]:
        """Copies of all main gradients."""
        return {name: p.main_grad.clone() for name, p in self.ddp.named_parameters()}

    def end(self) -> None:
        if self.attachment is not None and self.attachment.attached:
            self.attachment.close()


def build(
    shape: Shape, optimizer: str, variant: str | None, *, seed: int = 0, overlap: bool = False, **config: Any
) -> Trainer:
    """A trainer of one variant; None and "baseline" are unattached Megatron."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    staged = variant in ("bf16", "fp8")
    model = make_model(shape, seed)
    if staged:
        prepare(model, AttachSettings(variant=variant))
    flat = optimizer == "adam"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=flat, grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    settings: dict[str, Any] = {
        "optimizer": optimizer,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "weight_decay": 0.01,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_distributed_optimizer": flat,
        "clip_grad": 1.0,
    }
    if staged and flat:
        settings |= {
            "use_precision_aware_optimizer": True,
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 1.0,
        }
    opt = get_megatron_optimizer(OptimizerConfig(**{**settings, **config}), [ddp])
    return Trainer(ddp, opt, attach(ddp, opt) if staged else None)


def positions_and_mask(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    length = tokens.shape[1]
    positions = torch.arange(length, device=DEVICE)[None].expand(tokens.shape[0], -1)
    mask = None if have_te() else torch.triu(torch.ones(length, length, dtype=torch.bool, device=DEVICE), 1)[None, None]
    return positions, mask


def random_batches(shape: Shape, count: int, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    size = (shape.batch, shape.length + 1)
    batches = [torch.randint(0, shape.vocab, size, generator=generator).to(DEVICE) for _ in range(count)]
    return [(b[:, :-1].contiguous(), b[:, 1:].contiguous()) for b in batches]


def read_text(path: Path | None) -> bytes:
    """A file, or the half megabyte of language reference in every Python installation: real text that 300 steps do not
    learn by heart."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the steps, then a cosine down to a tenth: the end of a run is compared, and a constant
    rate would leave it noisy."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return PEAK_LR * (step + 1) / warmup
    return PEAK_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))))


def text_batches(text: bytes, shape: Shape, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    corpus = ByteCorpus(text, batch=shape.batch, sequence=shape.length, seed=seed)
    while True:
        tokens, labels = corpus.next()
        yield tokens.to(DEVICE), labels.to(DEVICE)


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def clean() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def stock_masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Unattached Megatron's FP32 masters by parameter name."""
    names = {id(p): name for name, p in trainer.ddp.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for part in trainer.optimizer.chained_optimizers:
        if hasattr(part, "model_float16_groups"):
            models, mains = part.model_float16_groups, part.shard_fp32_from_float16_groups
        else:
            models, mains = part.float16_groups, part.fp32_from_float16_groups
        for model_group, main_group in zip(models, mains, strict=True):
            for model, main in zip(model_group, main_group, strict=True):
                found[names[id(model)]] = main
    return found


def attached_masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Masters of an attached trainer by the names of its parameters."""
    placeholders = {id(p): name for name, p in trainer.attachment.placeholders.items()}
    masters = trainer.attachment.masters()
    found: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.ddp.named_parameters():
        key = placeholders.get(id(parameter), name.removeprefix("module.module."))
        found[name] = masters[key]
    return found


def muon_names(stock: Trainer) -> set[str]:
    """Parameters that unattached Megatron gives to Muon; it steps all others with TE's fused Adam."""
    muon = {
        id(parameter)
        for part in stock.optimizer.chained_optimizers
        if "Muon" in type(part.optimizer).__name__
        for group in part.float16_groups
        for parameter in group
    }
    return {name for name, parameter in stock.ddp.named_parameters() if id(parameter) in muon}


def largest_difference(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: Iterable[str] | None = None
) -> tuple[float, int]:
    """Largest absolute difference, and how many tensors differ at all."""
    worst, differing = 0.0, 0
    for name in other if names is None else names:
        expected = other[name]
        found = one[name].to(expected.device, non_blocking=True).reshape(expected.shape)
        difference = float((found - expected).abs().max())
        worst, differing = max(worst, difference), differing + (difference != 0.0)
    return worst, differing


# Sections.


def section_layer(report: Report, shape: Shape) -> None:
    for optimizer in ("muon", "adam"):
        for api in ("buffer", "resize"):
            one_layer_run(report, shape, optimizer, api, full=api == "buffer")
            clean()


def section_accumulate(report: Report, shape: Shape) -> None:
    for optimizer in ("muon", "adam"):
        with deterministic():
            gradient_accumulation(report, shape, optimizer)
        clean()


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Sums in a fixed order. Otherwise a token's choice of experts may flip between two passes over one batch, which
    moves a gradient of a few dozen tokens by tens of percent."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def one_layer_run(report: Report, shape: Shape, optimizer: str, api: str, full: bool) -> None:
    tag = f"layer/{optimizer}/{api}"
    print(tag, flush=True)
    trainer = build(shape, optimizer, "fp8")
    stock = build(shape, optimizer, None) if full else None
    attachment = trainer.attachment
    owned = attachment.expert_storage_bytes
    report.check(f"{tag}/zero BF16 expert storage", owned == 0, owned)
    for step in range(2):
        counted_gradients(report, trainer, shape, f"{tag}/step {step}")
        gradients = trainer.main_gradients() if stock is not None else {}
        trainer.optimizer.step()
        report.check(f"{tag}/step {step}/W and W^T are the quantized masters", *exact_bytes(trainer, step == 1))
        if stock is not None:
            compare_with_stock(report, trainer, stock, gradients, optimizer, f"{tag}/step {step}")
        del gradients
    offload_and_reload(report, trainer, api, tag)
    close_and_go_on(report, trainer, stock, shape, optimizer, tag)


def counted_gradients(report: Report, trainer: Trainer, shape: Shape, tag: str) -> None:
    """A pass that counts GEMMs and weight quantizations, and looks whether the bytes stayed."""
    batches = random_batches(shape, 1)
    if not have_te():
        trainer.gradients(batches)
        trainer.attachment.store.verify()
        return
    with count_weight_quantizations() as quantized, count_fp8_gemms() as gemms:
        trainer.gradients(batches)
    counts = {name: count.total for name, count in gemms.items()}
    # Two linears a layer: forward, recomputed forward, dgrad and wgrad.
    expected = shape.layers * 2 * (4 if shape.recompute else 3)
    report.check(f"{tag}/weight quantizer calls", quantized.total == 0, quantized.total)
    only_experts = counts["grouped_fp8"] == expected and counts["fp8"] == 0 and counts["grouped_other"] == 0
    report.check(f"{tag}/FP8 GEMMs are the experts' alone", only_experts, counts)
    trainer.attachment.store.verify()
    trainer.attachment.store.check_wt()
    report.check(f"{tag}/bytes after forward and backward", True, "checksums verified, W^T == W.T")


def exact_bytes(trainer: Trainer, full: bool) -> tuple[bool, str]:
    """Every published field of every matrix (or of each layer's first and last expert) against the reference on the
    host's master."""
    store, masters = trainer.attachment.store, trainer.attachment.masters()
    ends = (store.layout.experts[0], store.layout.experts[-1])
    matrices = [matrix for matrix in store.layout.matrices if full or matrix.expert in ends]
    for matrix in matrices:
        expected, found = quantize_pair(masters[matrix.name].clone()), store.matrix(matrix)
        for name in FIELDS:
            one, other = (
                getattr(expected, name).view(torch.uint8),
                getattr(found, name).contiguous().view(torch.uint8).cpu(),
            )
            if not torch.equal(one, other):
                return False, f"{matrix.name}.{name}: {int((one != other).sum())} bytes differ"
    return True, f"{len(matrices)} matrices, reference on the CPU"


def compare_with_stock(
    report: Report, trainer: Trainer, stock: Trainer, gradients: dict[str, torch.Tensor], optimizer: str, tag: str
) -> None:
    """Unattached Megatron's optimizer on the same gradients."""
    for name, parameter in stock.ddp.named_parameters():
        parameter.main_grad.copy_(gradients[name])
    stock.optimizer.step()
    found, expected = attached_masters(trainer), stock_masters(stock)
    by_muon = muon_names(stock)
    if optimizer == "muon":
        # The same operators in the same order.
        worst, differing = largest_difference(found, expected, by_muon)
        detail = {"max": worst, "differing": differing, "of": len(by_muon)}
        report.check(f"{tag}/Muon's masters equal stock Megatron's bit for bit", bool(by_muon) and worst == 0.0, detail)
    # TE's fused Adam groups AdamW's formula differently, and its norm is summed in another order: a few ulp of an
    # update of size lr.
    worst, differing = largest_difference(found, expected, expected.keys() - by_muon)
    detail = {"max": worst, "differing": differing, "of": len(expected) - len(by_muon)}
    report.check(f"{tag}/AdamW's masters equal stock Megatron's within {_ADAM_BOUND}", worst <= _ADAM_BOUND, detail)


def offload_and_reload(report: Report, trainer: Trainer, api: str, tag: str) -> None:
    attachment, before = trainer.attachment, allocated()
    sums = dict(attachment.store.checksums)
    identity = {name: (id(p), p.untyped_storage()._cdata) for name, p in trainer.ddp.named_parameters()}
    attachment.offload(api=api)
    away = allocated()
    trainer.optimizer.offload_to_cpu()
    trainer.optimizer.restore_from_cpu()
    report.check(f"{tag}/optimizer restore drags nothing to the GPU", allocated() == away, allocated() - away)
    attachment.reload()
    same = {name: (id(p), p.untyped_storage()._cdata) for name, p in trainer.ddp.named_parameters()} == identity
    detail = {"before": before, "offloaded": away, "after": allocated()}
    report.check(f"{tag}/offload and reload", same and dict(attachment.store.checksums) == sums, detail)


def close_and_go_on(
    report: Report, trainer: Trainer, stock: Trainer | None, shape: Shape, optimizer: str, tag: str
) -> None:
    """After close, an ordinary update: compared with the stock trainer, whose masters have been the same."""
    masters = {name: m.clone() for name, m in attached_masters(trainer).items()}
    trainer.end()
    exact = all(
        torch.equal(p.detach().float().cpu(), masters[n].bfloat16().float()) for n, p in trainer.ddp.named_parameters()
    )
    report.check(f"{tag}/close gives BF16 of the masters", exact)
    if DEVICE.type == "cpu" and optimizer == "adam":
        return  # Megatron's own CPU-offloaded Adam, which the closed trainer has, needs parameters on a GPU
    if stock is None:
        trainer.train(random_batches(shape, 1, seed=9))
        return
    trainer.gradients(random_batches(shape, 1, seed=9))
    norms = step_together(trainer, stock)
    found, expected = parameters(trainer), parameters(stock)
    by_muon = muon_names(stock)
    exact_worst, _ = largest_difference(found, expected, by_muon)
    worst, differing = largest_difference(found, expected, expected.keys() - by_muon)
    # Muon goes on bit for bit. Masters of AdamW differ by an ulp already, and the closed AdamW is Megatron's
    # CPU-offloaded one, the stock one TE's fused: a BF16 parameter may round the other way.
    same = exact_worst == 0.0 and worst <= 2**-7 and (optimizer == "adam" or norms[0] == norms[1])
    detail = {"norm": norms, "Muon": exact_worst, "AdamW, BF16": worst, "AdamW tensors": differing}
    report.check(f"{tag}/the next update after close is the ordinary one", same, detail)


def step_together(first: Trainer, second: Trainer) -> tuple[float, float]:
    """One optimizer step of both on the gradients of the first: GPU kernels that add in any order would set them
    apart."""
    for (_, source), (_, target) in zip(first.ddp.named_parameters(), second.ddp.named_parameters(), strict=True):
        target.main_grad.copy_(source.main_grad)
    return float(first.optimizer.step()[1]), float(second.optimizer.step()[1])


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters as FP32 copies."""
    return {name: p.detach().float() for name, p in trainer.ddp.named_parameters()}


def gradient_accumulation(report: Report, shape: Shape, optimizer: str) -> None:
    """Three microbatches: plain and fused accumulation, reductions overlapped or not, against the sum of three single
    passes."""
    batches = random_batches(shape, 3)
    expected: dict[str, torch.Tensor] | None = None
    for overlap in (False, True):
        trainer = build(shape, optimizer, "fp8", overlap=overlap)
        experts = {id(p) for p in trainer.attachment.placeholders.values()}
        if expected is None:
            expected = {
                name: torch.zeros_like(p.main_grad) for name, p in trainer.ddp.named_parameters() if id(p) in experts
            }
            twice = []
            for _ in range(2):
                trainer.gradients(batches[:1])
                twice.append(trainer.main_gradients())
            repeats = all(torch.equal(twice[0][name], twice[1][name]) for name in expected)
            report.check(f"accumulate/{optimizer}: the same pass gives the same gradients again", repeats)
            del twice
            for batch in batches:
                # Scaled as in the accumulating pass: another loss scale would quantize other gradients.
                trainer.gradients([batch], parts=len(batches))
                for name, parameter in trainer.ddp.named_parameters():
                    if name in expected:
                        expected[name] += parameter.main_grad
        for fused in (False, True) if have_te() else (False,):
            for layer in trainer.attachment.layers if have_te() else ():
                for linear in (layer.module.linear_fc1, layer.module.linear_fc2):
                    linear.fuse_wgrad_accumulation = fused
            for _ in range(2):  # from the second iteration on, hooks launch the reductions
                trainer.gradients(batches)
            error = max(
                float((p.main_grad - expected[name]).norm() / (expected[name].norm() + 1e-20))
                for name, p in trainer.ddp.named_parameters()
                if name in expected
            )
            name = f"accumulate/{optimizer}/overlap {overlap}/fused {fused}"
            report.check(f"{name}: every gradient counted once", error < 1e-2, f"relative error {error:.1e}")
        trainer.end()
        clean()


def section_schedule(report: Report, shape: Shape) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    shape = replace(shape, recompute=False)
    for optimizer in ("muon", "adam"):
        config = {"weight_decay": 0.1, "clip_grad": 0.5}
        trainers = [build(shape, optimizer, variant, **config) for variant in (None, "bf16")]
        schedules = [
            OptimizerParamScheduler(
                trainer.optimizer,
                init_lr=0.0,
                max_lr=1e-3,
                min_lr=1e-4,
                lr_warmup_steps=2,
                lr_decay_steps=8,
                lr_decay_style="cosine",
                start_wd=0.0,
                end_wd=0.2,
                wd_incr_steps=8,
                wd_incr_style="linear",
            )
            for trainer in trainers
        ]
        norms = []
        for step in range(8):
            trainers[0].gradients(random_batches(shape, 1, seed=step))
            norms.append(step_together(*trainers))
            for schedule in schedules:
                schedule.step(1)
        found, expected, by_muon = attached_masters(trainers[1]), stock_masters(trainers[0]), muon_names(trainers[0])
        exact_worst, _ = largest_difference(found, expected, by_muon)
        worst, differing = largest_difference(found, expected, expected.keys() - by_muon)
        relative = max(abs(plain - staged) / plain for plain, staged in norms)
        detail = {"relative difference of the norm": relative, "Muon": exact_worst, "Muon tensors": len(by_muon)}
        detail |= {"AdamW": worst, "AdamW tensors that differ": differing}
        # Muon's norm and masters are bitwise the same. AdamW's formula is grouped differently in TE's fused Adam, and
        # at expert parallel size one the experts have a buffer of their own, which changes the order of the flat norm.
        same = exact_worst == 0.0 and worst < 2e-5 and relative <= (0.0 if optimizer == "muon" else 1e-5)
        report.check(f"schedule/{optimizer}: norm, clipping, decay and schedule as unattached", same, detail)
        trainers[1].end()
        clean()


def section_memory(report: Report, shape: Shape) -> None:
    rows = []
    for optimizer in ("muon", "adam"):
        for variant in ("baseline", "bf16", "fp8"):
            clean()
            start = allocated()
            trainer = build(shape, optimizer, variant)
            batches = random_batches(shape, 1)
            trainer.train(batches)
            trainer.gradients(batches)
            if DEVICE.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            peak = torch.cuda.max_memory_allocated() - start if DEVICE.type == "cuda" else 0
            between = allocated() - start
            for buffer in trainer.ddp.buffers + trainer.ddp.expert_parallel_buffers:
                buffer.offload_to_cpu(move_params=False, move_grads=True)
            resting = allocated() - start
            for buffer in trainer.ddp.buffers + trainer.ddp.expert_parallel_buffers:
                buffer.reload_from_cpu(move_params=False, move_grads=True)
            row = {
                "optimizer": optimizer,
                "variant": variant,
                "expert_storage": trainer.attachment.expert_storage_bytes if trainer.attachment else None,
            }
            for name, value in (("between", between), ("without_gradients", resting), ("peak_of_step", peak)):
                row[f"{name}_bytes"] = value
                row[f"{name}_per_expert_parameter"] = round(value / shape.expert_numel, 3)
            trainer.end()
            del trainer, buffer
            clean()
            # What Megatron's own hooks keep alive; an attachment must not keep more.
            row["kept_after_close_bytes"] = allocated() - start
            rows.append(row)
            print("  ", row, flush=True)
    report.data["memory"] = {"expert_parameters": shape.expert_numel, "rows": rows}


def section_checkpoint(report: Report, shape: Shape, out: Path) -> None:
    import shutil

    for optimizer in ("muon", "adam"):
        directory = out / f"checkpoint-{optimizer}"
        shutil.rmtree(directory, ignore_errors=True)
        batches = random_batches(shape, 1)
        straight = build(shape, optimizer, "fp8")
        for _ in range(2):
            straight.train(batches)
        with straight.attachment.saving():
            save(straight, directory / "attached")
        steps, after = [], []
        for seed in (2, 3):
            straight.gradients(random_batches(shape, 1, seed=seed))
            steps.append(straight.main_gradients())
            straight.optimizer.step()
            after.append(dict(straight.attachment.store.checksums))

        resumed = build(shape, optimizer, "fp8", seed=5)
        with resumed.attachment.loading():
            load(resumed, directory / "attached")
        again = []
        for gradients in steps:  # the same ones: GPU kernels that add in any order would set the runs apart
            for name, parameter in resumed.ddp.named_parameters():
                parameter.main_grad.copy_(gradients[name])
            resumed.optimizer.step()
            again.append(dict(resumed.attachment.store.checksums))
        report.check(f"checkpoint/{optimizer}: resumed bytes are those of the uninterrupted run", again == after)

        plain = build(shape, optimizer, None, seed=6)
        plain.train(batches)
        save(plain, directory / "plain")
        report.check(
            f"checkpoint/{optimizer}: keys equal unattached Megatron's",
            keys(directory / "attached") == keys(directory / "plain"),
        )
        expected = {name: p.detach().clone() for name, p in plain.ddp.named_parameters()}
        with resumed.attachment.loading():
            load(resumed, directory / "plain")
        masters = attached_masters(resumed)
        found = all(torch.equal(masters[n].bfloat16(), p.cpu()) for n, p in expected.items())
        report.check(f"checkpoint/{optimizer}: an unattached save loads attached", found)
        if have_te() or optimizer == "muon":  # Megatron cannot load a distributed checkpoint into torch's own Adam
            with resumed.attachment.saving():
                save(resumed, directory / "back")
            load(plain, directory / "back")
            same = all(torch.equal(p, expected[n]) for n, p in plain.ddp.named_parameters())
            report.check(f"checkpoint/{optimizer}: an attached save loads unattached", same)
        straight.end()
        resumed.end()
        shutil.rmtree(directory, ignore_errors=True)
        clean()


def checkpoint_metadata() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def sharded(trainer: Trainer, loading: bool) -> dict[str, Any]:
    model = trainer.ddp.module.module.sharded_state_dict(metadata=checkpoint_metadata())
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=loading, metadata=checkpoint_metadata())
    return {"model": model, "optimizer": optimizer}


def save(trainer: Trainer, path: Path) -> None:
    from megatron.core import dist_checkpointing

    path.mkdir(parents=True)
    dist_checkpointing.save(sharded(trainer, False), str(path))


def load(trainer: Trainer, path: Path) -> None:
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load(sharded(trainer, True), str(path))
    trainer.ddp.module.module.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])


def keys(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_tensors_metadata(str(path))
    return {key: (str(tensor.dtype), tuple(tensor.global_shape)) for key, tensor in found.items()}


def section_training(report: Report, shape: Shape, out: Path, steps: int, optimizer: str, text: bytes) -> None:
    curves: dict[str, list[list[float]]] = {variant: [] for variant in ("baseline", "bf16", "fp8")}
    changed: list[list[float]] = []
    for seed in range(3):
        for variant in curves:
            began = time.monotonic()
            trainer = build(shape, optimizer, variant, seed=seed)
            source, losses, shares = text_batches(text, shape, seed), [], []
            for step in range(steps):
                for group in trainer.optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps)
                losses.append(trainer.train([next(source)])[0])
                if variant == "fp8":
                    shares.append(trainer.attachment.last_step.changed_share)
            curves[variant].append(losses)
            if shares:
                changed.append(shares)
            trainer.end()
            del trainer
            clean()
            print(
                f"  seed {seed} {variant}: {losses[0]:.3f} -> {losses[-1]:.3f} in {time.monotonic() - began:.0f} s",
                flush=True,
            )
    last = {v: [sum(c[-20:]) / len(c[-20:]) for c in seeds] for v, seeds in curves.items()}
    for seed in range(3):
        ratio = last["fp8"][seed] / last["bf16"][seed] - 1
        noise = last["bf16"][seed] / last["baseline"][seed] - 1  # the same arithmetic but for the last bit
        detail = f"{ratio:+.3%}; bf16 beside baseline {noise:+.3%}"
        report.check(f"training/seed {seed}: fp8 within 1% of bf16 over the last 20 steps", abs(ratio) < 0.01, detail)
    report.data["training"] = {"optimizer": optimizer, "curves": curves, "last20": last, "changed_share": changed}
    picture(report.data["training"], out / "megatron_adapter.png")


def picture(training: dict[str, Any], path: Path) -> None:
    """Loss curves and changed bytes; a machine without matplotlib leaves it to `--draw` elsewhere."""
    curves, changed = training["curves"], training["changed_share"]
    try:
        import matplotlib
    except ModuleNotFoundError:
        print(f"no matplotlib here: draw {path.name} from the JSON with --draw", flush=True)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
    for colour, (variant, seeds) in zip(("tab:grey", "tab:blue", "tab:orange"), curves.items(), strict=True):
        for index, losses in enumerate(seeds):
            left.plot(losses, color=colour, alpha=0.8, linewidth=0.9, label=variant if index == 0 else None)
    left.set(xlabel="step", ylabel="loss", title="Small Qwen3-MoE on real text, three seeds")
    left.legend()
    for index, shares in enumerate(changed):
        right.plot([100 * share for share in shares], linewidth=0.9, label=f"seed {index}")
    right.set(xlabel="step", ylabel="% of published expert bytes", title="Bytes changed by each step (fp8)")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="layer,accumulate,schedule,memory,checkpoint,training")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam", help="of the training section")
    parser.add_argument("--commit", default="unknown", help="what this tree was made from, for the record")
    parser.add_argument("--text", type=Path, help="text of the training section")
    parser.add_argument("--tiny", action="store_true", help="small sizes everywhere, to check this script")
    parser.add_argument("--draw", action="store_true", help="only draw the picture, from OUT/megatron_adapter.json")
    arguments = parser.parse_args()
    if arguments.draw:
        data = json.loads((arguments.out / "megatron_adapter.json").read_text(encoding="utf-8"))
        picture(data["training"], arguments.out / "megatron_adapter.png")
        return 0
    need_gpu(arguments.tiny)
    arguments.out.mkdir(parents=True, exist_ok=True)
    from weftpub_adapters.megatron import initialize_parallel

    initialize_parallel()
    layer, small = (TINY, TINY) if arguments.tiny else (REFERENCE, SMALL)
    sections: dict[str, Callable[[Report], None]] = {
        "layer": lambda report: section_layer(report, layer),
        "accumulate": lambda report: section_accumulate(report, layer),
        "schedule": lambda report: section_schedule(report, small),
        "memory": lambda report: section_memory(report, layer),
        "checkpoint": lambda report: section_checkpoint(report, small, arguments.out),
        "training": lambda report: section_training(
            report, small, arguments.out, arguments.steps, arguments.optimizer, read_text(arguments.text)
        ),
    }
    report = Report()
    report.data["environment"] = ran_on("megatron-core", "transformer-engine", "triton", "emerging-optimizers") | {
        "commit": arguments.commit
    }
    report.data["seconds"] = {}
    for name in arguments.only.split(","):
        began = time.monotonic()
        print(f"== {name}", flush=True)
        sections[name](report)
        report.data["seconds"][name] = round(time.monotonic() - began, 1)
        (arguments.out / "megatron_adapter.json").write_text(json.dumps(report.data, indent=1), encoding="utf-8")
        clean()
    print(json.dumps({"failed": report.data["failed"], "seconds": report.data["seconds"]}))
    return 1 if report.data["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
