"""The SGLang rollout's own decisions: arguments of the engine, its view of the model, environments and buckets."""

import importlib.util
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from weftmoe import settings as composed
from weftmoe.loop.engines import make_rollout
from weftmoe.loop.ranks import Place
from weftmoe.rollout import Request
from weftmoe.rollout.engine import _buckets, process_environment
from weftmoe.rollout.sglang import SglangRollout, engine_arguments, engine_directory
from weftmoe.schema import Settings
from weftpub.errors import ChannelError, ConfigError, StateError, WeftpubError
from weftpub.publisher import ThreadGroup


def settings(variant: str, length: str = "8k", *overrides: str) -> Settings:
    return composed.load(variant, length=length, overrides=list(overrides))


def known_fields() -> set[str]:
    """Fields of the installed SGLang's server arguments, from its own list; importing it would take ten seconds."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("sglang is not installed")
    path = Path(spec.submodule_search_locations[0]) / "srt" / "arg_groups" / "field_order.py"
    return set(re.findall(r'^    "(\w+)",$', path.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("variant", composed.VARIANTS)
@pytest.mark.parametrize("length", ["8k", "16k"])
def test_every_argument_is_one_of_sglangs(variant: str, length: str) -> None:
    """A renamed argument would show only where an engine is started, after minutes on a GPU."""
    chosen = settings(variant, length, "rollout.attention_backend=triton", "rollout.cuda_graph=false")
    unknown = engine_arguments(chosen, Path("model")).keys() - known_fields()
    assert not unknown


def test_an_engine_is_told_where_it_meets_the_trainer() -> None:
    told = engine_arguments(settings("fp8"), Path("model"), "/run/weft")
    assert json.loads(told["json_model_override_args"]) == {"weftpub_shared_experts": {"folder": "/run/weft"}}
    assert told.keys() - known_fields() == set()
    assert told["log_level"] == "warning", "a worker that cannot share says why in a warning"
    assert "json_model_override_args" not in engine_arguments(settings("fp8"), Path("model"))


def test_a_resumed_engine_draws_other_numbers() -> None:
    """Started anew with the run's seed at each requeue of a job, it drew the random numbers of step 1 for the step that
    came next; and the engines of several nodes drew the same ones as each other."""

    def seed(**of: int) -> int:
        return engine_arguments(settings("fp8"), Path("model"), **of)["random_seed"]

    seeds = [seed(), seed(resumed=20), seed(resumed=40), seed(engine=1), seed(resumed=20, engine=1)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= one < 2**31 for one in seeds)
    assert seed(resumed=20) == seeds[1], "the same start draws the same"
    other = engine_arguments(composed.load("fp8", overrides=["seed=7"]), Path("model"))["random_seed"]
    assert other not in seeds


def test_an_engine_is_started_with_where_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def start(**arguments: Any) -> Any:
        started.append(arguments["random_seed"])
        return SimpleNamespace(shutdown=lambda: None)

    monkeypatch.setattr("weftmoe.rollout.sglang.UpdatableEngine", SimpleNamespace(start=start))
    monkeypatch.setattr("weftmoe.rollout.sglang.engine_directory", lambda work, model, settings: model)
    chosen = settings("fp8", "8k", f"out={tmp_path}")
    for resumed in (0, 20):
        made: Any = make_rollout(chosen, tmp_path, {}, (7,), "run", resumed=resumed)
        made._start_engine()
        made.close()
    assert started == [engine_arguments(chosen, tmp_path, resumed=resumed)["random_seed"] for resumed in (0, 20)]
    assert len(set(started)) == 2


def test_arguments_follow_the_settings() -> None:
    fp8 = engine_arguments(settings("fp8"), Path("model"))
    assert (fp8["tp_size"], fp8["ep_size"], fp8["dp_size"], fp8["enable_dp_attention"]) == (8, 8, 8, True)
    assert (fp8["load_format"], fp8["moe_runner_backend"], fp8["enable_memory_saver"]) == ("dummy", "triton", True)
    assert not fp8["enable_deterministic_inference"]
    baseline = engine_arguments(settings("baseline", "16k"), Path("model"))
    assert (baseline["load_format"], baseline["moe_runner_backend"]) == ("auto", "auto")
    assert "enable_dp_attention" not in baseline


def test_an_engine_of_qwen35_keeps_shared_experts_apart_and_leaves_the_vision_tower_out(tmp_path: Path) -> None:
    """Fused into the routed ones they would have no parameter that a publish could write."""
    hybrid = composed.load("fp8", model="qwen3.5-35b-a3b-base")
    told = engine_arguments(hybrid, Path("model"))
    assert told["disable_shared_experts_fusion"] is True
    assert told.keys() - known_fields() == set()
    assert "disable_shared_experts_fusion" not in engine_arguments(settings("fp8"), Path("model"))
    (tmp_path / "model").mkdir()
    config = {"architectures": [hybrid.model.architecture], "text_config": {"full_attention_interval": 4}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    bf16 = composed.load("bf16", model="qwen3.5-35b-a3b-base")
    seen = json.loads((engine_directory(tmp_path, tmp_path / "model", bf16) / "config.json").read_text())
    assert seen == {**config, "language_model_only": True}


def rollout(tmp_path: Path, *overrides: str) -> SglangRollout:
    return SglangRollout(settings("fp8", "8k", *overrides), tmp_path, {}, (7,), "run", tmp_path)


def test_a_request_says_everything_about_its_distribution(tmp_path: Path) -> None:
    """A model's generation_config.json asks for top_k 20 and a temperature of 0.6: log-probs would be of another
    distribution than the one that was drawn from."""
    chosen = rollout(tmp_path)._sampling(Request((1, 2), 33, 2**40 + 5))
    assert chosen == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 33,
        "stop_token_ids": [7],
    }
    seeded = rollout(tmp_path, "train.deterministic=true")._sampling(Request((1,), 1, 2**40 + 5))
    assert 0 <= seeded["sampling_seed"] < 2**31


def test_answers_of_an_unpublished_version_are_refused(tmp_path: Path) -> None:
    made = rollout(tmp_path)
    assert made._number("12") == 12
    with pytest.raises(StateError, match="'default'"):
        made._number("default")


def test_ranks_that_were_not_started_on_all_nodes_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 ranks on 2 nodes"):
        SglangRollout(composed.load("bf16", nodes=2), tmp_path, {}, (7,), "run", tmp_path)


def test_only_started_processes_get_the_engines_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    before = dict(os.environ)
    with process_environment({"THEIRS": "1", "PATH": os.environ["PATH"]}):
        assert "OURS" not in os.environ
        assert os.environ["THEIRS"] == "1"
    assert dict(os.environ) == before
    with pytest.raises(ValueError, match="x"), process_environment({}):
        raise ValueError("x")
    assert dict(os.environ) == before


def test_versions_of_a_start_only_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every publish allowed the engine to go back, for the sake of resumed runs. Those have engines of their own, which
    hold no version yet: what was allowed was a loop that publishes an older version over a newer one, unseen.
    """
    given: list[dict[str, Any]] = []

    class Engine:
        ms: ClassVar[dict[str, float]] = {}

        def publish(self, *_: Any, **options: Any) -> Any:
            given.append(options)
            return SimpleNamespace(ms={})

    monkeypatch.setattr("weftmoe.rollout.sglang.byte_check", lambda report: None)
    rollout: Any = SglangRollout(settings("fp8"), tmp_path, {}, (1,), "run", tmp_path)
    rollout._engine = Engine()
    assert rollout.publish(7, {}, None).version == 7
    assert not given[0].get("allow_rollback", False)


def test_buckets_hold_every_tensor_once() -> None:
    tensors: list[tuple[str, Any]] = [(str(n), torch.zeros(n, dtype=torch.bfloat16)) for n in (3, 5, 100, 1, 1)]
    parts = list(_buckets(iter(tensors), 20))
    assert [[name for name, _ in part] for part in parts] == [["3", "5"], ["100"], ["1", "1"]]


def test_the_engines_view_of_a_model_has_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weftmoe.rollout import sglang as module

    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    for name, text in (("config.json", json.dumps(config)), ("tokenizer.json", "{}"), ("model.safetensors", "bytes")):
        (model / name).write_text(text, encoding="utf-8")
    (model / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(module, "quantization_config", lambda config: {"quant_method": "fp8"})
    view = module.engine_directory(tmp_path / "fp8", model, settings("fp8"))
    assert sorted(path.name for path in view.iterdir()) == ["config.json", "tokenizer.json"]
    assert json.loads((view / "config.json").read_text())["quantization_config"] == {"quant_method": "fp8"}
    plain = module.engine_directory(tmp_path / "bf16", model, settings("bf16"))
    assert "quantization_config" not in json.loads((plain / "config.json").read_text())


def test_the_baselines_engine_sees_the_weights_of_the_language_model_alone(tmp_path: Path) -> None:
    """It was started from the checkpoint itself, looked for Qwen3.5's image processor, and built a vision tower."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": {}, "vision_config": {}}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("model-1.safetensors", "model.safetensors.index.json"):
        (model / name).write_text(name, encoding="utf-8")
    for _ in range(2):  # a run that is resumed finds it there
        view = engine_directory(tmp_path / "work", model, settings("baseline"))
    assert {path.name for path in view.iterdir()} == {path.name for path in model.iterdir()}
    assert (view / "model-1.safetensors").resolve() == (model / "model-1.safetensors")
    assert json.loads((view / "config.json").read_text())["language_model_only"] is True


# The baseline on several ranks: the first of each node has its engine, and the GPUs of all are concerned.


class Handle:
    """Notes what it is told; `fails` raises."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> bool:
            words = [str(argument) for argument in arguments if not isinstance(argument, float)]
            self.calls.append(" ".join([name, *words]))
            if name == self._fails:
                raise ChannelError(f"{name} refused")
            return True

        return call


def ranks_on(nodes: int, handles: Sequence[Handle], monkeypatch: pytest.MonkeyPatch) -> list[SglangRollout]:
    """Two ranks, on one node or on two."""
    groups, made = ThreadGroup.of_size(2), []
    for number in range(2):
        rank = SglangRollout(settings("baseline", "16k"), Path(), {}, (7,), "run", Path())
        place = Place(number, nodes, 2 // nodes)
        rank._place = rank._fleet.place = place
        monkeypatch.setattr(rank._fleet, "group", lambda number=number: groups[number])
        rank._handle = handles[place.node] if place.leads else None  # type: ignore[assignment]
        rank._gather = Gathers(place, nodes)  # type: ignore[assignment]
        made.append(rank)
    return made


class Gathers:
    """Stands for a `BucketGather` of one bucket, which agrees by itself."""

    buckets = (None,)

    def __init__(self, place: Place, nodes: int) -> None:
        self._place, self._nodes = place, nodes

    def run(self, sources: Any, pack: Any, deliver: Any, *, delivery: float) -> None:
        if self._place.leads:
            deliver([f"payload of {rank}" for rank in self._place.hosts[self._place.node]])


def on_both(ranks: list[SglangRollout], step: Callable[[SglangRollout], Any]) -> list[Any]:
    """What a step returned or raised on each rank, which are threads."""

    def run(rank: SglangRollout) -> Any:
        try:
            return step(rank)
        except WeftpubError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ranks))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_first_rank_of_each_node_makes_the_calls_of_a_baselines_step(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [Handle() for _ in range(nodes)]
    ranks = ranks_on(nodes, handles, monkeypatch)

    def step(rank: SglangRollout) -> Any:
        rank.drain()
        rank.release()
        published = rank.publish(3, {}, None)
        rank.resume()
        rank.continue_()
        return published.version, published.check.method

    assert on_both(ranks, step) == [(3, "none")] * 2
    payloads = [["payload of 0", "payload of 1"]] if nodes == 1 else [["payload of 0"], ["payload of 1"]]
    for handle, payload in zip(handles, payloads, strict=True):
        assert handle.calls == [
            "pause drain",
            "flush",
            "release ('kv_cache', 'weights')",
            "resume ['weights']",
            "begin_update",
            f"load_bucket {payload}",
            "end_update",
            "set_weight_version 3",
            "resume ['kv_cache']",
            "continue_",
        ]


@pytest.mark.parametrize("nodes", [1, 2])
def test_an_engine_gets_memory_back_when_all_ranks_have_given_theirs(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was ready first; the engine took the memory of a GPU whose trainer still had its gradients there."""
    handles = [Handle() for _ in range(nodes)]
    first, second = ranks_on(nodes, handles, monkeypatch)
    for rank in (first, second):
        rank._away = True
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.resume)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.05)
        assert [handle.calls for handle in handles] == [[]] * nodes
        second.resume()
        waiting.result(timeout=30)
    assert [handle.calls for handle in handles] == [["resume ['kv_cache']"]] * nodes


@pytest.mark.parametrize(
    "fails", ["pause", "release", "begin_update", "load_bucket", "set_weight_version", "continue_"]
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_an_engine_refuses_all_ranks_hear(nodes: int, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last node's engine fails; no engine goes on."""
    handles = [*(Handle() for _ in range(nodes - 1)), Handle(fails)]
    ranks = ranks_on(nodes, handles, monkeypatch)

    def step(rank: SglangRollout) -> None:
        rank.drain()
        rank.release()
        rank.publish(3, {}, None)
        rank.continue_()

    for found in on_both(ranks, step):
        assert isinstance(found, ChannelError)
        assert f"{fails} refused" in str(found)
    if fails != "continue_":
        assert not any("continue_" in handle.calls for handle in handles)
