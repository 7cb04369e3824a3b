"""SGLang's real FusedMoE layers over memory that a trainer's store writes."""

import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts import LAYOUTS

from weftpub.errors import ConfigError, TornError
from weftpub.memory import SharedAllocation, SharedAllocator, SharedState
from weftpub.receive.shared import SharedEngineSide
from weftpub.store import ExpertStore
from weftpub.store.shared import layout_of, shared_catalogue
from weftpub_adapters.sglang import ServedModel, SGLangEngine, build_model, shared_experts, shared_experts_pool
from weftpub_adapters.sglang.shared_experts import (
    SETTING,
    engine_side,
    experts_apart,
    share_experts,
    share_on_load,
    shared_of,
)

pytestmark = pytest.mark.isolated("sglang")

KINDS = ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv")


def experts_of(served: ServedModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in served.model.named_parameters() if name.rpartition(".")[2] in KINDS}


def fill(served: ServedModel, seed: int = 0) -> None:
    """Finite weights everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in served.model.parameters():
        if parameter.dtype == torch.float8_e4m3fn:
            codes = torch.randint(0, 100, parameter.shape, dtype=torch.uint8, generator=generator)
            parameter.data.view(torch.uint8).copy_(codes)
        else:
            parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 0.02)


@pytest.fixture
def served() -> ServedModel:
    made = build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
    fill(made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "meeting")


def share(served: ServedModel, folder: str, **options: Any) -> Any:
    with served.active():
        return share_experts(served.model, folder, **options)


def store_over(memory: SharedAllocation) -> ExpertStore:
    layout = layout_of(memory.catalogue)
    return ExpertStore(
        layout.layers,
        layout.experts,
        layout.hidden,
        layout.intermediate,
        allocator=SharedAllocator(memory),
        wt="rebuild",
    )


def write(store: ExpertStore, generation: int) -> None:
    generator = torch.Generator().manual_seed(generation)
    with store.writing(generation):
        for matrix in store.layout.matrices:
            store.writer()(matrix.name, torch.randn(store.layout.shape(matrix.projection), generator=generator) * 0.02)


def probe(served: ServedModel, layer: int = 0) -> torch.Tensor:
    hidden = torch.randn(5, served.hf_config["hidden_size"], generator=torch.Generator().manual_seed(7))
    return SGLangEngine(served).probe_layer(layer, hidden.bfloat16()).output


def test_parameters_keep_their_identity_and_bytes_and_the_trainer_writes_into_them(
    served: ServedModel, folder: str
) -> None:
    parameters = experts_of(served)
    loaded = {name: p.data.clone() for name, p in parameters.items()}
    shared = share(served, folder)
    try:
        assert (shared.filled, shared.given_back, dict(shared.reasons)) == (True, None, {})
        assert set(shared.parameters) == set(parameters)
        assert experts_of(served) == parameters  # the very Parameter objects
        for name, parameter in parameters.items():
            assert shared.memory.offset_of(parameter.data) is not None
            assert torch.equal(parameter.data.view(torch.uint8), loaded[name].view(torch.uint8))
            assert hasattr(parameter, "weight_loader")
        assert shared.memory.standing().state is SharedState.SEALED
        store = store_over(shared.memory)
        write(store, 1)
        for layer in store.layout.layers:
            served_now = served.model.model.layers[layer].mlp.experts
            assert torch.equal(served_now.w13_weight.view(torch.uint8), store.layer(layer).w13.view(torch.uint8))
            assert torch.equal(served_now.w2_weight_scale_inv, store.layer(layer).w2_scale)
            assert served_now.w2_weight.data_ptr() == store.layer(layer).w2.data_ptr()
    finally:
        shared.memory.leave()


def test_an_engine_that_comes_back_serves_what_is_there_and_drops_what_it_loaded(
    served: ServedModel, folder: str
) -> None:
    first = share(served, folder)
    try:
        write(store_over(first.memory), 1)
        first.memory.commit(1)
        expected = {name: p.data.clone() for name, p in experts_of(served).items()}
        again = build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
        fill(again, seed=5)
        second = share(again, folder)
        assert not second.filled
        for name, parameter in experts_of(again).items():
            assert torch.equal(parameter.data.view(torch.uint8), expected[name].view(torch.uint8))
        assert second.memory.standing().committed.version == 1
        with pytest.raises(ConfigError, match="said to serve version 3, but version 1 was committed last"):
            engine_side(SGLangEngine(again), again.model, 3)
        assert second.memory.standing().committed.version == 1
        engine_side(SGLangEngine(again), again.model, 1)
        assert second.memory.standing().serving
        second.memory.stop_serving()
        second.memory.leave()
    finally:
        first.memory.leave()


def test_a_trainer_that_was_quicker_keeps_its_bytes(
    served: ServedModel, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine had made the memory, and a trainer that joined at once wrote its first generation before the engine
    put its own weights there."""
    first = share(served, folder)
    try:
        write(store_over(first.memory), 1)
        expected = {name: p.data.view(torch.uint8).clone() for name, p in experts_of(served).items()}
        again = build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
        fill(again, seed=5)
        monkeypatch.setattr(shared_experts, "_join", lambda *_: (first.memory, True))
        second = share(again, folder)
        assert (second.filled, second.loaded) == (False, None)
        for name, parameter in experts_of(again).items():
            assert torch.equal(parameter.data.view(torch.uint8), expected[name])
        assert first.memory.standing().generation == 1
    finally:
        first.memory.leave()


def test_a_version_that_nobody_committed_is_seen_not_believed(served: ServedModel, folder: str) -> None:
    """An engine was started from an export of version 3 while a trainer held the memory and had written other bytes
    there; its receivers took the version from whoever started them, and served the trainer's unfinished work as 3."""
    first = share(served, folder)
    try:
        assert first.loaded == 0
        same = build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
        fill(same)
        second = share(same, folder)
        assert (second.filled, second.loaded) == (False, 0)  # it loaded what is there
        store = store_over(first.memory)
        write(store, 1)
        other = build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
        fill(other)
        third = share(other, folder)
        assert third.loaded is None
        for engine in (served, same, other):
            with pytest.raises(ConfigError, match=r"\(generation 1, sealed\) are not those that it loaded"):
                engine_side(SGLangEngine(engine), engine.model, 3)
        assert first.memory.standing().committed is None
        second.memory.leave()
        third.memory.leave()
    finally:
        first.memory.leave()


def test_a_version_whose_bytes_this_engine_loaded_is_committed(served: ServedModel, folder: str) -> None:
    shared = share(served, folder)
    try:
        engine_side(SGLangEngine(served), served.model, 3)
        standing = shared.memory.standing()
        assert (standing.committed.version, standing.committed.generation, bool(standing.serving)) == (3, 0, True)
        shared.memory.stop_serving()
    finally:
        shared.memory.leave()


def test_the_side_asks_the_header(served: ServedModel, folder: str) -> None:
    plain = SGLangEngine(served)
    assert engine_side(plain, served.model) is plain
    shared = share(served, folder)
    try:
        side = engine_side(plain, served.model)
        assert isinstance(side, SharedEngineSide)
        assert shared_of(served.model) is shared
        places = side.describe().settings["shared_memory"]
        assert set(places) == set(shared.parameters)
        side.pause()
        store = store_over(shared.memory)
        write(store, 1)
        side.commit(1)
        side.resume()
        assert plain.serving
        side.pause()
        store.begin(2)
        assert not side.weights_intact()
        with pytest.raises(TornError, match="generation 2 is being written"):
            side.resume()
        assert not plain.serving
        assert "generation 2 is being written" in side.readiness().why_not
        store.cancel()
        side.resume()
        assert plain.serving
        side.pause()
    finally:
        shared.memory.leave()


def test_part_of_a_larger_memory_is_found_by_its_experts(tmp_path: Path) -> None:
    """The trainer holds all experts of two engine ranks; each rank finds its own run of them."""
    request = LAYOUTS["tp2-ep2"]
    alone = share(build_and_fill(request, 0), str(tmp_path / "alone"))
    layout = layout_of(alone.memory.catalogue)
    alone.memory.leave()
    whole = replace(layout, experts=tuple(range(2 * len(layout.experts))))
    memory = SharedAllocation.join(tmp_path / "whole", "experts", "cpu", shared_catalogue(whole))
    for rank in range(2):
        shared_model = build_and_fill(request, rank)
        shared = share(shared_model, str(tmp_path / "whole"))
        held = len(layout.experts)
        for layer in layout.layers:
            parameter = shared_model.model.model.layers[layer].mlp.experts.w2_weight
            expected = memory.tensor(f"layers.{layer}.w2")[rank * held : (rank + 1) * held]
            assert (parameter.data_ptr(), parameter.shape) == (expected.data_ptr(), expected.shape)
        assert not shared.filled
        shared.memory.leave()
    memory.leave()


def build_and_fill(layout: Any, rank: int) -> ServedModel:
    served = build_model(layout.config, **layout.request(rank))
    fill(served)
    return served


def test_experts_that_are_split_or_elsewhere_are_refused_by_name(tmp_path: Path) -> None:
    split = build_and_fill(LAYOUTS["tp2"], 0)
    before = {name: p.data_ptr() for name, p in experts_of(split).items()}
    with pytest.raises(ConfigError, match="splits every expert over 2 ranks"):
        share(split, str(tmp_path / "a"))
    assert {name: p.data_ptr() for name, p in experts_of(split).items()} == before
    second = build_and_fill(LAYOUTS["tp2-ep2"], 1)
    first = share(build_and_fill(LAYOUTS["tp2-ep2"], 0), str(tmp_path / "b"))
    try:
        with pytest.raises(ConfigError, match=r"no layer of experts can be shared: .* is no run of what the memory"):
            share(second, str(tmp_path / "b"))
    finally:
        first.memory.leave()


def test_the_hook_shares_what_it_is_told_to_and_starts_the_engine_in_any_case(
    served: ServedModel, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    def runner(wish: Any) -> Any:
        config = SimpleNamespace() if wish is None else SimpleNamespace(**{SETTING: wish})
        return SimpleNamespace(model=served.model, model_config=SimpleNamespace(hf_config=config))

    def load(_: Any, *args: Any) -> tuple[Any, ...]:
        return args

    with served.active():
        assert share_on_load(load, runner(None), 3) == (3,)
        assert shared_of(served.model) is None
        share_on_load(load, runner({"folder": folder, "wrong": 1}))
        assert "has 1 faults; experts are not shared" in caplog.text
        share_on_load(load, runner({"folder": "/proc/nowhere"}))
        assert "experts are not shared, publishes copy them" in caplog.text
        later = runner({"folder": folder, "name": "mine"})
        later.startup_weight_load = object()
        share_on_load(load, later)  # its weights would be written over what a trainer has there
        assert "start it with startup_weight_load_mode 'serial'" in caplog.text
        assert shared_of(served.model) is None
        share_on_load(load, runner({"folder": folder, "name": "mine"}))
    shared = shared_of(served.model)
    assert shared is not None
    assert probe(served).isfinite().all()
    shared.memory.leave()


class Saver:
    """Stands for torch-memory-saver: knows whether a region is open, and how often one was left and entered again."""

    def __init__(self) -> None:
        self.open = False
        self.enabled = True
        self.regions: list[tuple[str, bool]] = []
        self.apart = 0
        library = SimpleNamespace(
            tms_get_interesting_region=lambda: self.open, tms_set_interesting_region=self.set_interesting_region
        )
        self._impl = SimpleNamespace(_binary_wrapper=SimpleNamespace(cdll=library))

    def set_interesting_region(self, value: bool) -> None:
        assert self.open is not value
        self.open = value
        self.apart += value

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool) -> Generator[None]:
        assert not self.open
        self.regions.append((tag, enable_cpu_backup))
        self.open = True
        yield
        assert self.open
        self.open = False


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    made = Saver()
    monkeypatch.setitem(sys.modules, "torch_memory_saver", SimpleNamespace(torch_memory_saver=made))
    return made


def test_experts_that_may_be_shared_never_enter_the_savers_pool(saver: Saver, folder: str) -> None:
    """Once they did, and were dropped after the rebinding: the saver ended the process ("only support interesting
    region") when its pool was replaced to give the memory back. Then they were made in a pool that ended with each
    layer, inside of the region, and PyTorch ended the process ("captures_underway.empty() INTERNAL ASSERT FAILED")."""
    with experts_apart(), saver.region("weights", enable_cpu_backup=False):
        made = build_and_fill(LAYOUTS["tp1"], 0)
        layers = made.hf_config["num_hidden_layers"]
        assert saver.apart == layers
        with pytest.raises(ConfigError, match="outside of the memory saver's region"):
            share(made, folder)
    share(made, folder).memory.leave()
    with saver.region("weights", enable_cpu_backup=False):
        build_model(LAYOUTS["tp1"].config, **LAYOUTS["tp1"].request(0))
    assert saver.apart == layers  # the layers make them as ever


def test_the_experts_pool_ends_when_no_pool_is_in_use(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch aborts the process when a pool ends while any is in use, and the saver's is for as long as its region is
    open. Allocations go to the pool that was entered last."""
    used: list[Any] = []
    entered: list[Any] = []
    ended: list[bool] = []

    class Pool:
        def __init__(self) -> None:
            weakref.finalize(self, lambda: ended.append(bool(used) or saver.open))

    @contextmanager
    def use(pool: Any) -> Generator[None]:
        used.append(pool)
        entered.append(id(pool))
        yield
        used.remove(pool)

    monkeypatch.setattr(shared_experts_pool, "_new_pool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    with experts_apart():
        with saver.region("weights", enable_cpu_backup=False):
            made = build_and_fill(LAYOUTS["tp1"], 0)
            assert (used, ended, saver.open) == ([], [], True)
        assert ended == []
    assert ended == [False]  # at once: a collector may come by when another pool is in use
    assert len(entered) == made.hf_config["num_hidden_layers"]
    assert len(set(entered)) == 1


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_experts_that_are_not_shared_after_all_go_to_the_saver(
    saver: Saver, folder: str, shared: bool, apart: bool
) -> None:
    setting = {SETTING: {"folder": folder if shared else "/proc/nowhere", "apart": apart}}
    runner = SimpleNamespace(
        model=None, model_config=SimpleNamespace(hf_config=SimpleNamespace(**setting)), memory_saver_adapter=saver
    )

    def load(runner: Any) -> None:
        with saver.region("weights", enable_cpu_backup=False):
            served = build_and_fill(LAYOUTS["tp1"], 0)
            runner.model, runner.served = served.model, served
            runner.before = {
                name: (p.data_ptr(), p.data.view(torch.uint8).clone()) for name, p in experts_of(served).items()
            }

    context = build_and_fill(LAYOUTS["tp1"], 0)
    with context.active():
        share_on_load(load, runner)
    assert (saver.apart > 0) == apart
    assert saver.regions == [("weights", False)] * (2 if apart and not shared else 1)
    for name, parameter in experts_of(runner.served).items():
        address, codes = runner.before[name]
        assert (parameter.data_ptr() != address) == (shared or apart)  # else they are the saver's from the start
        assert torch.equal(parameter.data.view(torch.uint8), codes)
    found = shared_of(runner.model)
    assert (found is not None) == shared
    if found is not None:
        found.memory.leave()
