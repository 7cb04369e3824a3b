"""The `speed` section of zero_copy.py: from the last matrix that the quantizer wrote to the engine serving the new
version, in every way that the bytes can take; and what W^T costs where it is stored and where it is rebuilt.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from sglang_update import WAYS, apply_update
from zero_copy_base import (
    DEVICE,
    GPU,
    NAME,
    RUN,
    EngineRank,
    Process,
    Report,
    Sizes,
    expert_parameters,
    free_bytes,
    make_store,
    plan_of,
    settle,
    tidy,
    write_all,
)

from weftpub.channel import Deadlines
from weftpub.memory import SharedAllocation
from weftpub.publisher import Peer, Publisher, SourceBuffers
from weftpub.store import ExpertStore
from weftpub.store.shared import shared_catalogue
from weftpub_kernels import checksum

__all__ = ["LIMIT_MS", "VARIANTS", "rest_of", "speed"]

LIMIT_MS = 5.0  # that shared experts may add to the copy of the other weights
VARIANTS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "other weights alone": (("rest",), False),
    "experts shared": (("experts", "rest"), True),
    "experts copied": (("experts", "rest"), False),
}
_SMALL = 1 << 28  # parameters up to which sha256 is compared, too


def rest_of(sizes: Sizes, seed: int = 3) -> dict[str, torch.Tensor]:
    """The other weights."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return {n: torch.randn(s, generator=generator, device=DEVICE).bfloat16() * 0.02 for n, s in sizes.rest().items()}


def speed(report: Report, sizes: Sizes, cycles: int, *, sglang: bool) -> None:
    """All variants, in one run.

    Args:
        sglang: whether SGLang's own update is measured, too.
    """
    engines = {name: Process() for name in VARIANTS}
    if sglang:  # it is imported while the others run
        engines["SGLang"] = Process("weftpub_adapters.sglang")
    with contextlib.ExitStack() as stack:
        for engine in engines.values():
            stack.callback(engine.kill)
        rest = rest_of(sizes)
        report.number("expert_parameters", sizes.numel)
        report.number("other_bytes", sum(tensor.nbytes for tensor in rest.values()))
        rows: dict[str, Any] = {}
        for name, (parts, shared) in VARIANTS.items():
            rows[name] = _published(report, name, sizes, cycles, parts, shared, rest, engines[name])
            engines[name].kill()
            tidy()
            report.number(name, rows[name])
        alone = rows["other weights alone"]["median_ms"]
        extra = rows["experts shared"]["median_ms"] - alone
        report.number("shared_minus_other_ms", extra)
        report.number("copied_minus_other_ms", rows["experts copied"]["median_ms"] - alone)
        if GPU:
            report.check(
                f"at most {LIMIT_MS:g} ms more than the other weights alone", extra <= LIMIT_MS, f"{extra:.2f}"
            )
        _transposes(report, sizes)
        tidy()
        if sglang:
            _by_sglang(report, sizes, max(2, cycles // 4), rest, engines["SGLang"])
    tidy()


def _published(
    report: Report,
    name: str,
    sizes: Sizes,
    cycles: int,
    parts: tuple[str, ...],
    shared: bool,
    rest: Mapping[str, torch.Tensor],
    engine: Process,
) -> dict[str, Any]:
    """One variant: two cycles to warm up, then `cycles` that count."""
    free = free_bytes()
    with tempfile.TemporaryDirectory(prefix="weft-") as folder, contextlib.ExitStack() as stack:
        store: ExpertStore | None = None
        if "experts" in parts:
            memory: SharedAllocation | None = None
            if shared:
                memory = SharedAllocation.join(folder, NAME, DEVICE, shared_catalogue(sizes.layout()))
                stack.callback(memory.leave)
            store = make_store(sizes, memory=memory)
        engine.make(EngineRank, sizes, folder, parts, shared)
        publisher = stack.enter_context(
            Publisher(
                RUN,
                plan_of(sizes, parts),
                [Peer(0, engine("where"), "engine")],
                commit_path=Path(folder) / "commit.json",
                deadlines=Deadlines.all(120),
            )
        )
        walls: list[dict[str, float]] = []
        sources: SourceBuffers | None = None
        for version in range(1, cycles + 3):
            publisher.pause()
            if store is not None:
                write_all(store, version, version)
            settle()
            start = time.perf_counter()  # the last matrix is written
            if store is not None:
                store.seal()
            sealed = time.perf_counter()
            if sources is None:
                tensors = dict(rest) | ({} if store is None else {i.name: i.tensor for i in store.canonical()})
                sources = SourceBuffers.of_tensors(tensors, in_place=True, keep=True)
            done = publisher.publish(version, sources, None if store is None else store.checksums)
            end = time.perf_counter()
            phases = {"seal": (sealed - start) * 1e3, **{k: v for k, v in done.ms.items() if k != "total"}}
            walls.append({"total": (end - start) * 1e3, **phases})
        assert sources is not None
        report.check(f"{name}: serves the last version", engine("state") == (True, cycles + 2), engine("state"))
        _prove(report, name, publisher, sources, store, cycles + 3, small=sizes.numel < _SMALL)
        if shared:
            expected = sum(entry.nbytes for entry in shared_catalogue(sizes.layout()).entries)
            report.check(f"{name}: no expert byte moved", done.shared_nbytes == expected, done.nbytes)
        warm = walls[2:]
        return {
            "median_ms": statistics.median([w["total"] for w in warm]),
            "min_ms": min(w["total"] for w in warm),
            "max_ms": max(w["total"] for w in warm),
            "n": len(warm),
            "phases_ms": {k: statistics.median([w.get(k, 0.0) for w in warm]) for k in warm[-1]},
            "every_ms": [w["total"] for w in warm],
            "first_ms": walls[0]["total"],
            "moved_bytes": done.nbytes,
            "shared_bytes": done.shared_nbytes,
            "staging_bytes": done.staging_bytes,
            "transports": done.transports,
            "reasons": done.reasons,
            "gpu_bytes_of_both": free - free_bytes(),
            "footprint": None if store is None else store.footprint(),
        }


def _prove(
    report: Report,
    name: str,
    publisher: Publisher,
    sources: SourceBuffers,
    store: ExpertStore | None,
    version: int,
    *,
    small: bool,
) -> None:
    """The engine's bytes are the trainer's: the device's checksums said so at every publish, sha256 says it once."""
    known = None if store is None else store.checksums
    proof = publisher.publish(version, sources, known, verify_sha256=small)
    if store is None:
        return
    store.verify()
    if small:
        expected = store.sha256()
        report.check(f"{name}: served bytes are the trainer's", all(proof.sha256[n] == expected[n] for n in expected))


# What W^T costs.


def _transposes(report: Report, sizes: Sizes) -> None:
    """W^T stored against W^T rebuilt, for the step that writes, the backward pass that reads and the reload."""
    for wt in ("store", "rebuild"):
        store = make_store(sizes, wt=wt)  # type: ignore[arg-type]
        writes, reads, rebuilds = [], [], []
        for generation in range(1, 4):
            settle()
            start = time.perf_counter()
            write_all(store, generation, generation)
            settle()
            writes.append((time.perf_counter() - start) * 1e3)
            store.seal()
            reads.append(_timed_reads(store))
            settle()
            start = time.perf_counter()
            store.rebuild_wt()
            settle()
            rebuilds.append((time.perf_counter() - start) * 1e3)
        report.number(
            f"wt={wt}",
            {
                "write_ms": min(writes),
                "backward_ms": min(reads),
                "reload_ms": min(rebuilds),
                "wt_bytes": store.footprint()["wt"] + store.footprint()["scale_t"],
            },
        )
        if sizes.numel < _SMALL:
            store.check_wt()
        del store
        tidy()


def _timed_reads(store: ExpertStore) -> float:
    """Milliseconds to have W^T of every layer, last layer first, as dgrad asks for them."""
    settle()
    start = time.perf_counter()
    for layer in reversed(store.layout.layers):
        store.layer(layer)
    settle()
    return (time.perf_counter() - start) * 1e3


# SGLang's own update.


class SglangRank:
    """SGLang's real model of these sizes, which takes updates in SGLang's own way; lives in a process of its own."""

    def __init__(self, sizes: Sizes) -> None:
        from weftpub_adapters.sglang import build_model

        self._sizes = sizes
        self._served = build_model(hf_config(sizes), device=DEVICE)

    def poison(self) -> None:
        """NaN bytes everywhere."""
        for parameter in self._served.model.parameters():
            parameter.data.view(torch.uint8).fill_(0xFF)
        settle()

    def update(self, payload: bytes, load_format: str | None) -> str:
        """One update."""
        return apply_update(self._served, payload, load_format, DEVICE)

    def checksums(self) -> dict[str, int]:
        """Of every parameter that an update writes."""
        named = dict(self._served.model.named_parameters())
        names = [name for name, *_ in expert_parameters(self._sizes.layout())]
        names += [name for name in named if name.endswith(("embed_tokens.weight", "qkv_proj.weight", "o_proj.weight"))]
        return {name: checksum(named[name].data) for name in names}


def hf_config(sizes: Sizes) -> dict[str, Any]:
    """A Qwen3-MoE `config.json` with these experts and these other weights."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": sizes.head,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.heads,
        "num_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": sizes.vocabulary,
    }


def _by_sglang(report: Report, sizes: Sizes, repeats: int, rest: Mapping[str, torch.Tensor], engine: Process) -> None:
    """The same tensors through SGLang's own API."""
    engine.make(SglangRank, sizes)
    store = make_store(sizes)
    for way, (pack, load_format) in WAYS.items():
        walls: list[float] = []
        for version in range(1, repeats + 2):
            write_all(store, version, version, recover=True)
            settle()
            if version == 1:
                engine("poison")
            start = time.perf_counter()  # the last matrix is written
            store.seal()
            tensors = {item.name: item.tensor for item in store.canonical()} | dict(rest)
            payload, alive = pack(tensors)
            problem = engine("update", payload, load_format)
            walls.append((time.perf_counter() - start) * 1e3)
            del alive, tensors
            if problem:
                raise SystemExit(f"SGLang, {way}: {problem}")
        warm = walls[1:]
        report.number(
            f"SGLang, {way}",
            {"median_ms": statistics.median(warm), "min_ms": min(warm), "max_ms": max(warm), "n": len(warm)}
            | {"first_ms": walls[0]},
        )
        differ = _differing(engine("checksums"), store, rest)
        report.check(f"SGLang, {way}: the engine holds the trainer's bytes", not differ, differ[:3] or None)


def _differing(found: Mapping[str, int], store: ExpertStore, rest: Mapping[str, torch.Tensor]) -> list[str]:
    """Engine parameters with other bytes than the trainer's."""
    expected: dict[str, int] = {}
    for name, buffer, *_ in expert_parameters(store.layout):
        layer, kind = buffer.split(".")[1:]
        expected[name] = checksum(getattr(store.layer(int(layer)), kind))
    for name in found.keys() - expected.keys():
        parts: Iterable[str] = [name]
        if "qkv_proj" in name:
            parts = [name.replace("qkv_proj", f"{letter}_proj") for letter in "qkv"]
        expected[name] = checksum(torch.cat([rest[part] for part in parts]))
    return [name for name, value in expected.items() if found.get(name) != value]
