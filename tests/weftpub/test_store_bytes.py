"""The bytes: SGLang's layout, what the quantizer made of the FP32 master, W^T, the share that changed, checksums."""

import hashlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import fill, make_masters, make_store, published, same_bytes

from weftpub.errors import ChecksumError, ConfigError, GenerationError
from weftpub.masters import ExpertMatrix
from weftpub.memory import TorchAllocator
from weftpub.store import ExpertStore
from weftpub_kernels import (
    PRESETS,
    KernelError,
    UnfitPresetError,
    UnknownPresetError,
    checksum,
    dequantize,
    quantize_pair,
    transpose,
)


def test_layout_is_sglangs() -> None:
    """w13 [experts, 2 * intermediate, hidden], w2 [experts, hidden, intermediate], scales in blocks of 128."""
    store = make_store(hidden=384, intermediate=256)
    fill(store, 0)
    layer = store.layer(3)
    shapes = {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in vars(layer).items() if torch.is_tensor(tensor)
    }
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    assert shapes == {
        "w13": ((3, 512, 384), fp8),
        "w13_scale": ((3, 4, 3), f32),
        "w2": ((3, 384, 256), fp8),
        "w2_scale": ((3, 3, 2), f32),
        "w13_t": ((3, 384, 512), fp8),
        "w13_scale_t": ((3, 3, 4), f32),
        "w2_t": ((3, 256, 384), fp8),
        "w2_scale_t": ((3, 2, 3), f32),
    }
    assert all(tensor.is_contiguous() for tensor in vars(layer).values() if torch.is_tensor(tensor))


@pytest.mark.parametrize("preset", [name for name, recipe in PRESETS.items() if recipe.ieee and recipe.publishable])
def test_bytes_are_those_of_the_quantizer_on_the_fp32_master(preset: str) -> None:
    """A rollout once served a BF16-rounded export of what the trainer computed with; 2-3% of the bytes differed."""
    if PRESETS[preset].input_dtype != torch.float32:
        with pytest.raises(ConfigError, match="float32"):
            make_store(preset=preset)
        return
    store = make_store(preset=preset)
    masters = make_masters(store)
    fill(store, 0, masters)
    for matrix in store.layout.matrices:
        view, expected = store.matrix(matrix), quantize_pair(masters[matrix.name], preset)
        for found, wanted in ((view.w, expected.w), (view.wt, expected.wt)):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(view.scale, expected.scale)
        assert torch.equal(view.scale_t, expected.scale_t)


def test_a_bf16_detour_would_show() -> None:
    store = make_store()
    masters = make_masters(store)
    fill(store, 0, masters)
    before = store.sha256()
    fill(store, 1, {name: master.bfloat16().float() for name, master in masters.items()})
    after = store.sha256()
    weights = [name for name in before if name.endswith(".weight")]
    assert all(before[name] != after[name] for name in weights)


def test_every_expert_lands_on_its_own_global_id() -> None:
    """With expert parallel 4, each rank once advertised ids 0-31, so experts 32-127 were never updated. Here the
    payload codes layer, global expert and projection.
    """
    store = make_store()

    def code(matrix: ExpertMatrix) -> float:
        return 100.0 * matrix.layer + 10.0 * matrix.expert + (1.0 if matrix.projection == "fc1" else 2.0)

    masters = {m.name: torch.full(store.layout.shape(m.projection), code(m)) for m in store.layout.matrices}
    fill(store, 0, masters)
    by_name = {item.name: item.tensor for item in store.canonical()}
    assert len(by_name) == 2 * 3 * 3 * 2
    for layer in (1, 3):
        for expert in (4, 5, 7):
            for part, projection in (("gate_proj", "fc1"), ("up_proj", "fc1"), ("down_proj", "fc2")):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                values = dequantize(by_name[f"{name}.weight"], by_name[f"{name}.weight_scale_inv"])
                expected = torch.tensor(code(ExpertMatrix(layer, expert, projection)))
                torch.testing.assert_close(values, expected.expand_as(values), rtol=1e-6, atol=0)


def test_two_matrices_of_one_expert_may_have_different_block_grids() -> None:
    """fc1 7168x2048 and fc2 2048x1408 of one expert broke a loader that assumed one grid. Small relatives of both."""
    store = make_store(layers=[0], experts=[0], hidden=384, intermediate=128)
    fill(store, 0)
    store.check_wt()
    names = {item.name.split(".experts.0.")[1]: tuple(item.tensor.shape) for item in store.canonical()}
    assert names == {
        "gate_proj.weight": (128, 384),
        "gate_proj.weight_scale_inv": (1, 3),
        "up_proj.weight": (128, 384),
        "up_proj.weight_scale_inv": (1, 3),
        "down_proj.weight": (384, 128),
        "down_proj.weight_scale_inv": (3, 1),
    }


def test_bf16_store_rounds_the_master_once_and_has_no_scales() -> None:
    store = make_store(format="bf16")
    masters = make_masters(store)
    report = fill(store, 0, masters)
    assert {item.role for item in store.canonical()} == {"weight"}
    for matrix in store.layout.matrices:
        view = store.matrix(matrix)
        assert torch.equal(view.w, masters[matrix.name].bfloat16())
        assert view.wt.data_ptr() == view.w.data_ptr()
        assert torch.equal(view.wt, view.w.t())
        assert view.scale is None
        assert view.scale_t is None
    assert report.checksums == {item.name: checksum(item.tensor) for item in store.canonical()}
    store.check_wt()


def test_bf16_store_takes_an_intermediate_that_no_block_divides() -> None:
    store = make_store(format="bf16", intermediate=96)
    fill(store, 0)
    gate = next(store.canonical())
    assert tuple(gate.tensor.shape) == (96, 256)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intermediate": 192}, r"192 is not a multiple of 128.*128 or 256"),
        ({"intermediate": 100}, r"100 is not a multiple.*use 128, or format"),
        ({"hidden": 0}, "whole numbers from 1"),
        ({"hidden": 256.0}, r"whole numbers from 1, found 256\.0"),
        ({"layers": (0.5,)}, "distinct indices"),
        ({"device": "nope"}, "device 'nope' is none that torch knows"),
        ({"experts": []}, "distinct indices"),
        ({"experts": [1, 1]}, "distinct indices"),
        ({"layers": [-1]}, "distinct indices"),
        ({"format": "fp16"}, "'fp8' or 'bf16'"),
        ({"wt": "never"}, "'store' or 'rebuild'"),
        ({"format": "bf16", "preset": "te_fp32"}, "no quantizer"),
        ({"preset": "slime"}, "GPU only"),
        ({"device": "meta"}, "meta"),
    ],
)
def test_what_cannot_work_is_refused_at_construction(settings: dict, message: str) -> None:
    with pytest.raises((ConfigError, KernelError), match=message):
        make_store(**settings)


def test_presets_that_lose_blocks_or_do_not_exist_are_refused() -> None:
    with pytest.raises(UnfitPresetError, match="hf"):
        make_store(preset="hf")
    with pytest.raises(UnknownPresetError, match="te_fp23"):
        make_store(preset="te_fp23")


# W^T.


@pytest.mark.parametrize("wt", ["store", "rebuild"])
def test_wt_is_the_exact_transpose_in_every_generation(wt: str) -> None:
    store = make_store(wt=wt)
    for generation in range(3):
        fill(store, generation, make_masters(store, seed=generation))
        store.check_wt()
        layer = store.layer(3)
        assert torch.equal(layer.w13_t.view(torch.uint8), layer.w13.view(torch.uint8).transpose(1, 2))
        assert torch.equal(layer.w2_scale_t, layer.w2_scale.transpose(1, 2))


def test_stale_wt_is_refused_by_name() -> None:
    """A trainer stepped, quantized W, and computed the next gradients with the W^T of the step before: nothing knew
    that the two belonged together. Whoever brings W alone must rebuild W^T before anything can be read.
    """
    store = make_store()
    fill(store, 4)
    store.offload()
    store.reload(rebuild_wt=False)
    for read in (
        lambda: store.layer(1),
        lambda: store.matrix(store.layout.matrices[0]),
        lambda: next(store.canonical()),
    ):
        with pytest.raises(
            GenerationError,
            match=r"layers\.1\.experts\.4\.fc1: wt holds undefined bytes, .* generation 4.*rebuild_wt",
        ):
            read()
    store.rebuild_wt()
    store.check_wt()


def test_check_wt_says_where() -> None:
    store = make_store()
    fill(store, 0)
    view = store.matrix(ExpertMatrix(3, 7, "fc2"))
    view.wt.view(torch.uint8)[100, 33] ^= 1
    with pytest.raises(GenerationError, match=r"3\.experts\.7\.fc2: W\^T differs .* 1 elements.* row 33, column 100"):
        store.check_wt()
    store.rebuild_wt()
    store.check_wt()
    view.scale_t[0, 1] *= 2
    with pytest.raises(GenerationError, match=r"scale\^T differs .* row 1, column 0"):
        store.check_wt()


def test_rebuilding_stores_share_one_layers_wt() -> None:
    full, shared = make_store(layers=range(4)), make_store(layers=range(4), wt="rebuild")
    masters = make_masters(full)
    fill(full, 0, masters)
    fill(shared, 0, masters)
    assert shared.footprint()["wt"] * 4 == full.footprint()["wt"] == full.footprint()["w"]
    assert same_bytes(published(full), published(shared))
    # Reading layers in any order, a layer's W^T is right when it is handed out; backward passes go downwards.
    for layer in (0, 3, 2, 2, 0, 1):
        for matrix in (m for m in full.layout.matrices if m.layer == layer):
            expected = full.matrix(matrix).wt.view(torch.uint8)
            assert torch.equal(shared.matrix(matrix).wt.view(torch.uint8), expected)
        assert torch.equal(shared.layer(layer).w13_scale_t, full.layer(layer).w13_scale_t)


def test_rewriting_the_same_generation_leaves_no_wt_of_the_old_bytes() -> None:
    """The shared W^T knew only layer and generation, so a recovery that wrote a generation again kept the old one."""
    store = make_store(wt="rebuild")
    fill(store, 0)
    store.layer(1)
    with store.writing(0, recover=True):
        for name, master in make_masters(store, seed=1).items():
            store.writer()(name, master)
    store.check_wt()


@pytest.mark.parametrize("wt", ["store", "rebuild"])
def test_wt_is_made_by_the_kernel(wt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch turns bytes one by one: on an H200 a reload, or all layers of a backward pass, took ten times as long."""
    made: list[tuple[int, ...]] = []

    def counted(w: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        made.append(tuple(w.shape))
        return transpose(w, *rest)

    monkeypatch.setattr("weftpub.store.memory.transpose", counted)
    store = make_store(hidden=384, wt=wt)
    fill(store, 0)
    assert not made
    layer = [(3, 256, 384), (3, 384, 128)]
    store.offload()
    store.reload()
    assert made == (layer * 2 if wt == "store" else [])
    made.clear()
    for _ in range(2):
        for number in (3, 3, 1):
            store.layer(number)
    assert made == ([] if wt == "store" else layer * 4)
    store.check_wt()


# Changed bytes.


def test_first_generation_changes_everything() -> None:
    store = make_store()
    report = fill(store, 0)
    assert report.changed_bytes == report.total_bytes == store.footprint()["w"] + store.footprint()["scale"]
    assert report.changed_share == 1.0


@pytest.mark.parametrize("form", ["fp8", "bf16"])
@given(
    changes=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 127), st.integers(0, 127)), max_size=6, unique=True)
)
@settings(max_examples=10, deadline=None)
def test_changed_bytes_are_those_that_differ(form: str, changes: list[tuple[int, int, int]]) -> None:
    """The share of changed bytes says whether an optimizer's update reaches the forward pass at all: a Muon once
    updated masters that nobody read. It must count exactly.
    """
    store = make_store(format=form)
    masters = make_masters(store)
    fill(store, 0, masters)
    before = published(store)
    for index, row, column in changes:
        masters[store.layout.matrices[index].name][row, column] *= -1.5
    report = fill(store, 1, masters)
    after = published(store)
    assert report.changed_bytes == sum(int((before[name] != after[name]).sum()) for name in before)
    assert report.total_bytes == sum(tensor.numel() for tensor in after.values())
    assert bool(report.changed_bytes) == bool(changes)


def test_identical_masters_change_nothing() -> None:
    store = make_store()
    masters = make_masters(store)
    first = fill(store, 0, masters)
    second = fill(store, 1, masters)
    assert second.changed_bytes == 0
    assert second.changed_share == 0.0
    assert second.checksums == first.checksums


def test_measuring_can_be_switched_off() -> None:
    store = make_store(measure_change=False)
    fill(store, 0)
    report = fill(store, 1)
    assert report.changed_bytes is None
    assert report.changed_share is None


# Checksums.


@pytest.mark.parametrize(("form", "hidden"), [("fp8", 256), ("fp8", 200), ("bf16", 200)])
def test_seal_reports_the_checksum_of_every_canonical_tensor(form: str, hidden: int) -> None:
    store = make_store(format=form, hidden=hidden)
    report = fill(store, 0)
    assert report.checksums == {item.name: checksum(item.tensor.contiguous()) for item in store.canonical()}
    assert store.checksums == report.checksums
    assert len(set(report.checksums.values())) == len(report.checksums)


def test_verify_names_the_tensor_whose_bytes_changed() -> None:
    store = make_store()
    fill(store, 0)
    store.verify()
    victim = next(i for i in store.canonical() if i.name == "model.layers.3.mlp.experts.5.up_proj.weight")
    victim.tensor.view(torch.uint8)[64, 200] ^= 0x10
    with pytest.raises(ChecksumError, match=r"1 of 36 tensors.*'model\.layers\.3\.mlp\.experts\.5\.up_proj\.weight'"):
        store.verify()


def test_sha256_is_that_of_the_bytes() -> None:
    store = make_store()
    fill(store, 0)
    expected = {
        name: hashlib.sha256(bytes(tensor.flatten().tolist())).hexdigest() for name, tensor in published(store).items()
    }
    assert store.sha256() == expected


def test_publishing_reads_views_and_never_copies() -> None:
    store = make_store()
    fill(store, 0)
    storages = {
        store.buffers(layer).__dict__[name].untyped_storage().data_ptr()
        for layer in (1, 3)
        for name in ("w13", "w2", "w13_scale", "w2_scale")
    }
    assert {item.tensor.untyped_storage().data_ptr() for item in store.canonical()} == storages
    first, second = [i.tensor for i in store.canonical()], [i.tensor for i in store.canonical()]
    assert all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wrong", ["shape", "strides"])
def test_an_allocator_that_gives_something_else_is_refused(wrong: str) -> None:
    """An allocator gave rows with gaps between them. The store filled them, but what it published as one dense tensor
    was not."""

    class Allocator(TorchAllocator):
        def allocate(self, name: str, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if wrong == "shape":
                return super().allocate(name, (1,), dtype, device)
            return super().allocate(name, (*shape[:-1], 2 * shape[-1]), dtype, device)[..., : shape[-1]]

    with pytest.raises(ConfigError, match=r"layers\.0\.w13: expected a contiguous .* from the allocator"):
        ExpertStore((0,), (0,), 128, 128, allocator=Allocator())
