"""Section `train` of eight_gpus.py: two updates of each configuration on every rank, beside unattached Megatron on the
same gradients.
"""

import math
import time
from typing import Any

import torch
from eight_gpus_config import CONFIGURATIONS
from eight_gpus_ranks import RankReport, gather, meet
from eight_gpus_trainer import batch, build, expert_tensors, shards_of, stock_shards, unlike_replicas
from megatron_adapter import DEVICE, FIELDS, Trainer, allocated, clean, have_te, muon_names, step_together

from weftpub_adapters.megatron.names import plain_name
from weftpub_kernels import quantize_pair

__all__ = ["section_train"]

_ADAM_BOUND = 2e-6  # of a master, absolute, per update of size lr = 1e-3: TE's fused Adam groups the formula otherwise
_LOSS_BOUND = {"fp8": 1e-2, "bf16": 1e-3}  # relative, against unattached Megatron in BF16


def section_train(report: RankReport, settings: dict[str, Any]) -> None:
    """All configurations, one after the other."""
    seconds: dict[str, float] = {}
    for name in settings["configurations"]:
        began = time.monotonic()
        report.say(f"-- {name}")
        one_configuration(report, settings, name)
        clean()
        meet()
        seconds[name] = round(time.monotonic() - began, 1)
        report.note("seconds", seconds)


def one_configuration(report: RankReport, settings: dict[str, Any], name: str) -> None:
    optimizer, variant, api = CONFIGURATIONS[name]
    trainer = build(settings, optimizer, variant)
    # The fallback way of moving buffers changes nothing of a step: it is compared with Megatron once, above.
    stock = build(settings, optimizer, None) if api == "buffer" else None
    report.say(f"{name}: trainers built, {allocated() / 2**30:.1f} GiB on the device")
    check_storage(report, trainer, name)
    for step in (1, 2):
        one_update(report, settings, trainer, stock, name, step)
    unlike = unlike_replicas(trainer)
    report.check(f"{name}/replicated parameters are equal on all ranks", not unlike, unlike[:4] or None)
    offload_and_reload(report, trainer, name, api)
    close_and_go_on(report, settings, trainer, stock, name)


def check_storage(report: RankReport, trainer: Trainer, name: str) -> None:
    attachment = trainer.attachment
    owned, count = attachment.expert_storage_bytes, sum(p.numel() for p in attachment.placeholders.values())
    if attachment.variant == "fp8":
        report.check(f"{name}/zero BF16 expert storage", owned == 0, f"{owned} bytes of {count} parameters")
    else:
        report.check(f"{name}/experts are BF16 parameters", owned == 2 * count, f"{owned} bytes")


def one_update(
    report: RankReport, settings: dict[str, Any], trainer: Trainer, stock: Trainer | None, name: str, step: int
) -> None:
    tag = f"{name}/step {step}"
    batches = batch(settings, step)
    loss = counted(report, settings, trainer, batches, tag)
    if stock is not None:
        expected = stock.gradients(batches)
        off = abs(loss - expected) / expected
        bound = _LOSS_BOUND[trainer.attachment.variant]
        report.check(f"{tag}/loss is near that of BF16 Megatron", off <= bound, f"{loss:.5f}, {expected:.5f}")
        for (_, source), (_, target) in zip(trainer.ddp.named_parameters(), stock.ddp.named_parameters(), strict=True):
            target.main_grad.copy_(source.main_grad)
    success, norm, _ = trainer.optimizer.step()
    norms = gather(float(norm))
    agreed = bool(success) and len(set(norms)) == 1 and math.isfinite(norms[0])
    report.check(f"{tag}/one gradient norm on all ranks", agreed, norms[0] if agreed else norms)
    report.check(f"{tag}/published bytes are those of the masters", *exact_bytes(trainer, whole=step == 2))
    if stock is not None:
        stock.optimizer.step()
        compare_masters(report, trainer, stock, tag)


def counted(
    report: RankReport,
    settings: dict[str, Any],
    trainer: Trainer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    tag: str,
) -> float:
    """A pass that counts FP8 GEMMs and weight quantizations, and looks whether the store's bytes stayed; its loss."""
    store = trainer.attachment.store
    if store is None or not have_te():
        loss = trainer.gradients(batches)
    else:
        from weftpub_adapters.te import count_fp8_gemms, count_weight_quantizations

        with count_weight_quantizations() as quantized, count_fp8_gemms() as gemms:
            loss = trainer.gradients(batches)
        counts = {kind: count.total for kind, count in gemms.items()}
        # Two linears a layer: forward, recomputed forward, dgrad and wgrad.
        expected = settings["shape"]["layers"] * 2 * 4
        only = counts["grouped_fp8"] == expected and counts["fp8"] == 0 and counts["grouped_other"] == 0
        report.check(f"{tag}/weights are not quantized again", quantized.total == 0, quantized.total)
        report.check(f"{tag}/FP8 GEMMs are the experts' alone, recomputation included", only, counts)
    if store is not None:
        store.verify()
        store.check_wt()
        report.check(f"{tag}/forward and backward leave the bytes alone", True, "checksums verified, W^T == W.T")
    return loss


def exact_bytes(trainer: Trainer, *, whole: bool) -> tuple[bool, str]:
    """W, W^T and scales of every expert matrix (or of each layer's first and last expert) against the reference
    quantizer on the host's master; for BF16 experts the parameter against the rounded master."""
    store, masters = trainer.attachment.store, trainer.attachment.masters()
    if store is None:
        wrong = [
            matrix
            for matrix, parameter in expert_tensors(trainer).items()
            if not torch.equal(parameter.cpu(), masters[matrix].bfloat16())
        ]
        return not wrong, f"{len(expert_tensors(trainer))} BF16 matrices" + (f", wrong: {wrong[:4]}" if wrong else "")
    ends = (store.layout.experts[0], store.layout.experts[-1])
    matrices = [matrix for matrix in store.layout.matrices if whole or matrix.expert in ends]
    for matrix in matrices:
        expected, found = quantize_pair(masters[matrix.name].clone()), store.matrix(matrix)
        for field in FIELDS:
            one = getattr(expected, field).view(torch.uint8)
            other = getattr(found, field).contiguous().view(torch.uint8).cpu()
            if not torch.equal(one, other):
                return False, f"{matrix.name}.{field}: {int((one != other).sum())} bytes differ"
    experts = f"experts {ends[0]} to {ends[1]}" if whole else f"experts {ends[0]} and {ends[1]}"
    return True, f"W, W^T and scales of {len(matrices)} matrices, {experts}; reference on the CPU"


def compare_masters(report: RankReport, trainer: Trainer, stock: Trainer, tag: str) -> None:
    """This rank's parts of all masters against unattached Megatron's after the same gradients."""
    found, expected = shards_of(trainer), stock_shards(stock)
    by_muon = {plain_name(name) for name in muon_names(stock)}
    misplaced = [
        name
        for name in found.keys() | expected.keys()
        if name not in found
        or name not in expected
        or (found[name][0], found[name][1].numel()) != (expected[name][0], expected[name][1].numel())
    ]
    report.check(f"{tag}/masters are cut as Megatron cuts them", not misplaced, misplaced[:4] or None)
    if misplaced:
        return
    worst = {"Muon": 0.0, "AdamW": 0.0}
    counts = {"Muon": 0, "AdamW": 0}
    for name, (_, numbers) in found.items():
        other = expected[name][1]
        kind = "Muon" if name in by_muon else "AdamW"
        counts[kind] += 1
        if numbers.numel():
            difference = float((numbers.to(other.device, non_blocking=True) - other).abs().max())
            worst[kind] = max(worst[kind], difference)
    if by_muon:
        detail = {"max": worst["Muon"], "of": counts["Muon"]}
        report.check(f"{tag}/Muon's masters equal stock Megatron's bit for bit", worst["Muon"] == 0.0, detail)
    detail = {"max": worst["AdamW"], "of": counts["AdamW"]}
    report.check(
        f"{tag}/AdamW's masters equal stock Megatron's within {_ADAM_BOUND}", worst["AdamW"] <= _ADAM_BOUND, detail
    )


def offload_and_reload(report: RankReport, trainer: Trainer, name: str, api: str) -> None:
    """Everything away and back: memory, bytes and identities."""
    attachment, before, own = trainer.attachment, allocated(), device_bytes(trainer)
    store = attachment.store
    sums = None if store is None else dict(store.checksums)
    resident = {plain_name(n): p for n, p in trainer.ddp.named_parameters() if p.untyped_storage().nbytes()}
    values = {key: parameter.detach().clone() for key, parameter in resident.items()}
    held = allocated() - before
    identity = {n: (id(p), p.untyped_storage()._cdata) for n, p in trainer.ddp.named_parameters()}
    began = time.monotonic()
    attachment.offload(api=api)
    away, seconds = allocated() - held, [round(time.monotonic() - began, 2)]
    trainer.optimizer.offload_to_cpu()
    trainer.optimizer.restore_from_cpu()
    dragged = allocated() - held - away
    report.check(f"{name}/the optimizer's own restore drags nothing to the device", dragged == 0, dragged)
    began = time.monotonic()
    attachment.reload()
    seconds += [round(time.monotonic() - began, 2)]
    detail = {"own": own, "before": before, "offloaded": away, "seconds": seconds}
    same = {n: (id(p), p.untyped_storage()._cdata) for n, p in trainer.ddp.named_parameters()} == identity
    bytes_same = sums is None or dict(store.checksums) == sums
    dense_same = all(torch.equal(parameter.detach(), values[key]) for key, parameter in resident.items())
    freed = DEVICE.type == "cpu" or before - away >= 0.95 * detail["own"]
    passed = freed and same and bytes_same and dense_same
    report.check(f"{name}/offload frees, reload ({api}) brings the same bytes back", passed, detail)


def device_bytes(trainer: Trainer) -> int:
    """What a trainer keeps on its device: parameters, main gradients, and the store's W, W^T and scales."""
    store = trainer.attachment.store
    tensors = [parameter.detach() for parameter in trainer.ddp.parameters()]
    tensors += [b.grad_data for b in (*trainer.ddp.buffers, *trainer.ddp.expert_parallel_buffers)]
    if store is not None:
        layers = [store.buffers(layer) for layer in store.layout.layers]
        tensors += [getattr(layer, name) for layer in layers for name in store.layout.buffer_shapes()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def close_and_go_on(
    report: RankReport, settings: dict[str, Any], trainer: Trainer, stock: Trainer | None, name: str
) -> None:
    """After close the model is an ordinary BF16 one, and its next update is Megatron's own."""
    masters = {key: (begin, numbers.bfloat16().clone()) for key, (begin, numbers) in shards_of(trainer).items()}
    trainer.end()
    wrong = []
    for key, parameter in ((plain_name(n), p) for n, p in trainer.ddp.named_parameters()):
        if key in masters:
            begin, numbers = masters[key]
            if not torch.equal(parameter.detach().reshape(-1)[begin : begin + numbers.numel()].cpu(), numbers):
                wrong.append(key)
    report.check(f"{name}/close gives BF16 of the masters", not wrong, wrong[:4] or f"{len(masters)} parameters")
    optimizer = CONFIGURATIONS[name][0]
    if DEVICE.type == "cpu" and optimizer == "adam":
        return  # Megatron's own CPU-offloaded Adam, which the closed trainer has, needs parameters on a GPU
    batches = batch(settings, 9)
    if stock is None:
        loss, norm = trainer.train(batches)
        finite = math.isfinite(loss) and math.isfinite(norm)
        report.check(f"{name}/an ordinary update after close", finite, [loss, norm])
        return
    trainer.gradients(batches)
    norms = step_together(trainer, stock)
    by_muon = muon_names(stock)
    worst = {"Muon": 0.0, "AdamW": 0.0}
    others = dict(stock.ddp.named_parameters())
    for key, parameter in trainer.ddp.named_parameters():
        kind = "Muon" if key in by_muon else "AdamW"
        difference = (parameter.detach().float() - others[key].detach().float()).abs().max()
        worst[kind] = max(worst[kind], float(difference))
    # Masters of AdamW differ by an ulp already: a BF16 parameter may round the other way.
    same = worst["Muon"] == 0.0 and worst["AdamW"] <= 2**-7 and (optimizer == "adam" or norms[0] == norms[1])
    report.check(f"{name}/the update after close is the ordinary one", same, {"norms": norms, **worst})
