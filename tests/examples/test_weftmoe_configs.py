"""weftmoe's settings: every resolved form is written down, every file states only what differs, every run is counted.

Rewrite the golden files with `pytest tests/examples/test_weftmoe_configs.py --update-golden`.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from settings_reads import keys, reads

from weftmoe import settings as composed
from weftmoe.needs import TABLE_END, TABLE_START, budget_of, memory_table, updated
from weftmoe.schema import Settings
from weftpub.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden" / "weftmoe"
README = composed.CONFIGS.parent / "README.md"

FULL = list(itertools.product(composed.VARIANTS, composed.MODELS, composed.LENGTHS, composed.OPTIMIZERS))
SMOKE = list(itertools.product(composed.VARIANTS, ("gpu", "cpu")))
# What eight GPUs of 141 GB cannot hold: Megatron's Muon keeps FP32 masters and momentum of every expert on the GPU.
TOO_LARGE = {("baseline", "qwen3.5-122b-a10b", length, "muon") for length in composed.LENGTHS}


def full(variant: str, model: str = "qwen3-30b-a3b", length: str = "8k", optimizer: str = "muon") -> Settings:
    return composed.load(variant, model=model, length=length, optimizer=optimizer)


def resolved() -> dict[str, Settings]:
    names = {"-".join(parts): full(*parts) for parts in FULL}
    smokes: Any = {f"smoke-{variant}-{place}": composed.load(variant, smoke=place) for variant, place in SMOKE}
    return {**names, **smokes}


# Resolved forms.


def test_every_resolved_form_is_the_golden_one(request: pytest.FixtureRequest) -> None:
    forms = {f"{name}.yaml": composed.render(one) for name, one in resolved().items()}
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for path in GOLDEN.glob("*.yaml"):
            path.unlink()
        for name, text in forms.items():
            (GOLDEN / name).write_text(text)
    assert sorted(path.name for path in GOLDEN.glob("*.yaml")) == sorted(forms)
    for name, text in forms.items():
        assert (GOLDEN / name).read_text() == text, name


def test_a_resolved_form_reads_back_as_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for one in [full("fp8"), full("baseline", optimizer="adamw"), composed.load("bf16", smoke="cpu")]:
        composed.write(one, path)
        assert composed.read(path) == one


@pytest.mark.parametrize(("variant", "model", "length", "optimizer"), FULL)
def test_the_numbers_of_a_run(variant: str, model: str, length: str, optimizer: str) -> None:
    s = full(variant, model, length, optimizer)
    train = s.train
    assert (train.tensor, train.expert, train.expert_tensor, train.context, train.pipeline) == (2, 8, 1, 1, 1)
    assert (s.cluster.world, s.cluster.world // train.tensor) == (8, 4)
    assert train.recompute == "full"
    assert (s.optimizer.name, s.optimizer.lr) == (optimizer, 1e-6)
    assert (s.algorithm.prompts, s.algorithm.completions, s.algorithm.epochs) == (32, 16, 1)
    assert (s.rollout.sampling.temperature, s.rollout.sampling.top_p) == (1.0, 1.0)
    assert (s.length.total, s.length.context, s.length.microbatch_tokens) == {
        "8k": (8191, 8192, 65536),
        "16k": (16383, 16384, 16384),
    }[length]
    rollout = s.rollout
    attention = not (variant == "baseline" and length == "16k")
    assert (rollout.tensor, rollout.data, rollout.expert) == (8, 8 if attention else 1, 8)
    assert rollout.dp_attention is attention
    assert (s.model.mtp, s.model.speculative) == ("off", "off")
    staged = variant != "baseline"
    assert train.dispatcher == ("alltoall" if staged else "flex")
    assert train.flex_backend == "deepep"
    assert rollout.moe_runner == ("triton" if staged else "auto")
    assert s.publish.path == ("weftpub" if staged else "native")


def test_the_smoke_is_small_and_its_baseline_uses_alltoall() -> None:
    for variant, place in SMOKE:
        s = composed.load(variant, smoke=place)
        assert s.smoke.enabled
        assert s.train.dispatcher == "alltoall"
        assert s.cluster.world == 1
        assert s.rollout.engine == ("sglang" if place == "gpu" else "sampler")
        assert s.train.experts == ("grouped" if place == "gpu" else "sequential")
        assert s.smoke.intermediate % (2 * 128) == 0, "two ranks may split its experts"
    assert composed.load("fp8", smoke="gpu").steps == 50


@pytest.mark.parametrize("changes", [["train.tensor=2", "train.sequence_parallel=true"], [], ["rollout.expert=1"]])
def test_the_smoke_on_two_gpus(changes: list[str]) -> None:
    s = composed.load("fp8", smoke="gpu", gpus=2, overrides=changes)
    assert (s.train.expert, s.rollout.tensor) == (2, 2)
    assert s.rollout.tensor // s.rollout.expert == (2 if changes == ["rollout.expert=1"] else 1)
    assert budget_of(s).fits


# Files.


def leaves(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def own(path: Path) -> dict[str, Any]:
    return dict(leaves(OmegaConf.to_container(OmegaConf.load(path))))


def stacks() -> list[tuple[Path, ...]]:
    """The files of every run, in order."""
    smokes: Any = [composed.sources(variant, "qwen3-30b-a3b", "8k", "muon", place) for variant, place in SMOKE]
    return [composed.sources(*parts, None) for parts in FULL] + smokes


def repetitions(runs: list[tuple[Path, ...]]) -> set[tuple[str, str]]:
    """(file, key) whose value is what it would be without that file, in every run that the file is part of."""
    defaults = dict(
        leaves(Settings.model_validate(full("bf16").model_dump(exclude_unset=True)).model_dump(mode="json"))
    )
    different: dict[tuple[str, str], bool] = {}
    for run in runs:
        below = dict(defaults)
        below.update(own(run[0]))
        for path in run[1:]:
            for key, value in own(path).items():
                place = (path.name, key)
                different[place] = different.get(place, False) or below.get(key) != value
                below[key] = value
    return {place for place, differs in different.items() if not differs}


def test_every_file_states_only_what_differs() -> None:
    # The first model, length and variant of each kind are where the others differ from.
    first = {"qwen3-30b-a3b.yaml", "8k.yaml", "bf16.yaml"}
    assert {place for place in repetitions(stacks()) if place[0] not in first} == set()


def test_the_scan_finds_a_repetition(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("train:\n  tensor: 2\n  expert: 4\n")
    assert repetitions([(composed.CONFIGS / "base.yaml", path)]) == {("x.yaml", "train.tensor")}


def test_every_file_is_used() -> None:
    assert {path for run in stacks() for path in run} == set(composed.CONFIGS.rglob("*.yaml"))


# These say what stays off or what there is, and take no other value; and whose numbers a block holds.
SAID = {("Model", "mtp"), ("Model", "speculative"), ("Algorithm", "name"), ("Length", "name")}


def test_every_setting_is_read_somewhere() -> None:
    """A key that nothing reads promises what does not happen. Keys of other blocks with the same name do not count, and
    neither do attributes of other things."""
    about = {"schema.py", "settings.py", "checks.py", "needs.py"}
    sources = [path.read_text() for path in composed.CONFIGS.parent.rglob("*.py") if path.name not in about]
    assert set(keys()) - reads(sources) == SAID


def test_the_search_for_reads_tells_blocks_and_other_things_apart() -> None:
    source = """
class Engine:
    chosen: Optimizer

    def __init__(self, settings: Settings, config, limits: "Length"):
        self._settings, self._other = settings, config
        self._publish = self._settings.publish
        train, engine = settings.train, self._settings.rollout
        found = train.tensor, engine.expert, limits.total
        return lambda one: (found, engine.sampling.stop, settings.cluster.world)

    def f(self, other, run: Checkpoint):
        other.data.path, self._other.train.context, config.rollout.data, other.steps, run.unknown.keep
        run.keep, self._publish.path, self.chosen.lr
        self._settings.train.pipeline = 3

def g(settings):
    settings.out, settings.train.expert, settings.rollout.sampling.top_p
"""
    found = {read for read in reads([source]) if read in set(keys())}
    assert {key for block, key in found if block == "Cluster"} >= {"nodes", "gpus"}  # which its property reads
    assert {read for read in found if read[0] != "Cluster"} == {
        ("Train", "tensor"), ("Rollout", "expert"), ("Sampling", "stop"), ("Optimizer", "lr"), ("Publish", "path"),
        ("Length", "total"), ("Checkpoint", "keep"),
    }  # fmt: skip


# Memory.


@pytest.mark.parametrize("parts", FULL, ids="-".join)
def test_every_run_passes_the_plan_or_is_known_not_to(parts: tuple[str, str, str, str]) -> None:
    budget = budget_of(full(*parts), gpu_memory=141)
    assert budget.fits == (parts not in TOO_LARGE), budget.problems()
    if not budget.fits:
        assert "GiB too much" in budget.problems()[0]
        assert budget_of(full(parts[0], parts[1], parts[2], "adamw")).fits
        assert any("AdamW" in remedy for remedy in budget.remedies())


def test_the_readmes_table_is_the_plans() -> None:
    page = README.read_text()
    assert updated(page) == page, "run python -m weftmoe.needs"
    assert memory_table() in page
    with pytest.raises(ValueError, match="has no"):
        updated(page.replace(TABLE_START, "").replace(TABLE_END, ""))


# Overrides and refusals.

SCALES_OF_TE = "roles.trainer.env.NVTE_FP8_BLOCK_SCALING_FP32_SCALES=0"


def test_overrides_win_and_keep_their_types() -> None:
    s = composed.load(
        "fp8",
        overrides=["optimizer.lr=1e-7", "checkpoint.save=off", "telemetry.wandb=offline", "roles.engine.env.NUMBER=3"],
    )
    assert s.optimizer.lr == 1e-7
    assert s.checkpoint.save == "off"
    assert s.telemetry.wandb == "offline"
    assert s.roles.engine.env["NUMBER"] == "3"
    assert "NUMBER" not in s.roles.trainer.env


def test_other_numbers_of_gpus_move_the_parallel_sizes() -> None:
    four, two_nodes, one = (composed.load("fp8", gpus=4), composed.load("fp8", nodes=2), composed.load("bf16", gpus=1))
    assert (four.train.expert, four.rollout.tensor, four.rollout.data, four.rollout.engines) == (4, 4, 4, 1)
    assert (two_nodes.train.expert, two_nodes.rollout.tensor, two_nodes.rollout.engines) == (8, 8, 2)
    budgets = [budget_of(settings) for settings in (two_nodes, composed.load("fp8"))]
    assert budgets[0].host_bytes == budgets[1].host_bytes, "of one rank: each node has all experts, once"
    assert budgets[0].peak("train") == budgets[1].peak("train")
    assert composed.load("fp8", nodes=2, optimizer="adamw").train.expert == 8
    assert (one.train.tensor, one.train.sequence_parallel, one.rollout.data) == (1, False, 1)
    kept = composed.load("bf16", gpus=4, overrides=["train.expert=2"])
    assert kept.train.expert == 2


def test_a_directory_is_a_model(tmp_path: Path) -> None:
    directory = tmp_path / "My-MoE"
    directory.mkdir()
    config = directory / "config.json"
    config.write_text('{"architectures": ["Qwen3_5MoeForConditionalGeneration"]}')
    model = composed.load("fp8", model=str(directory)).model
    assert (model.name, model.path) == ("my-moe", str(directory))
    assert model.architecture == "Qwen3_5MoeForConditionalGeneration"
    config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match=r"model\.architecture='LlamaForCausalLM'"):
        composed.load("fp8", model=str(directory))
    config.unlink()
    with pytest.raises(ConfigError, match="no Hugging Face config"):
        composed.load("fp8", model=str(directory))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", r"unknown key optimizer\.lrr; did you mean optimizer\.lr\?"),
        ("train.top_p=1", r"unknown key train\.top_p; did you mean rollout\.sampling\.top_p\?"),
        ("optimizer.lr=fast", r"optimizer\.lr='fast'"),
        ("optimizer.lr=-1", "greater than or equal to 0"),
        ("optimizer.lr=nan", "finite number"),
        ("lr", "is not of the form"),
        ("train.tensor=3", "must divide the 8 ranks"),
        ("train.sequence_parallel=false", r"needs train\.sequence_parallel=true"),
        ("train.pipeline=2", r"train\.pipeline=2 is not driven by this loop; set it to 1"),
        ("train.context=2", r"train\.context=2 is not driven by this loop; set it to 1"),
        ("train.expert_tensor=2\ntrain.expert=4", r"train\.expert_tensor=2 is not driven by this loop"),
        ("publish.preset=te_fp23", r"no preset is named 'te_fp23'; did you mean 'te_fp32'"),
        ("publish.preset=nemo_pow2\npublish.activation_scales=power_of_two", "may not be published"),
        ("publish.preset=te_pow2", r"one rule; set publish\.activation_scales='power_of_two'"),
        ("publish.preset=sglang_ue8m0_bf16", "masters are FP32: use 'te_fp32'"),
        ("publish.preset=te_pow2\npublish.activation_scales=power_of_two\n" + SCALES_OF_TE, r"^$"),
        ("publish.preset=slime", r"^$"),
        ("optimizer.exp_avg_dtype=bf16", r"optimizer 'muon' does not read it; add --optimizer adamw"),
        ("optimizer.name=adamw\noptimizer.exp_avg_dtype=bf16", r"^$"),
        ("train.expert=4", r"^$"),
        ("train.expert=3", "must divide the 8 ranks"),
        ("cluster.nodes=2", r"each node has one, so set it to cluster\.nodes=2.*must be the 16 GPUs"),
        ("cluster.nodes=2\nrollout.engines=2\ntrain.expert=16", "must divide the 8 ranks of one node"),
        ("cluster.nodes=2\nrollout.engines=2", r"^$"),
        ("rollout.data=4", r"^$"),
        ("rollout.expert=3", r"must divide rollout\.tensor=8"),
        ("rollout.dp_attention=false", r"needs rollout\.dp_attention"),
        ("rollout.tensor=4", r"expert=8 must divide rollout\.tensor=4.*data=8 must divide"),
        ("rollout.engines=2", "must be the 8 GPUs"),
        ("rollout.moe_runner=auto", "needs 'triton'"),
        ("publish.path=native", "set it to 'weftpub'"),
        ("length.context=8191", r"must be below length\.context"),
        ("length.microbatch_tokens=4096", "holds no sequence"),
        ("data.max_prompt_tokens=9000", "leaves no room"),
        ("algorithm.overlong_tokens=7000", "covers whole completions"),
        ("algorithm.minibatches=5", "must divide algorithm.prompts=32"),
        ("algorithm.tis_reject_below=2\nalgorithm.tis_reject_above=0.5", "must be above"),
        ("algorithm.tis_cap=null\nalgorithm.tis_reject_above=3", "set algorithm.tis_cap, too"),
        ("algorithm.completions=1", "greater than or equal to 2"),
        ("train.experts=sequential", "torch's norms.*set train.tensor=1, or train.experts='grouped'"),
        ("rollout.sampling.repeat=true", r"needs train\.deterministic=true"),
        ("rollout.cuda_graph_batches=[]", "at least 1 item"),
        ("cluster.gpus=0", r"set train\.experts='sequential'.*set rollout\.engine='sampler'|needs a GPU"),
        ("optimizer.cpu_offload=true", "stages by itself"),
        ("publish.activation_scales=power_of_two", "disagree; set the variable to '0'"),
        ("roles.trainer.env.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "cannot be shared by CUDA IPC"),
        ("roles.trainer.env.PYTORCH_ALLOC_CONF=backend:cudaMallocAsync", "cudaMallocAsync's memory cannot be shared"),
        ("roles.engine.env.A=true", r"roles\.engine\.env\.A"),
    ],
)
def test_what_cannot_work_is_refused_with_what_does(override: str, message: str) -> None:
    if message == "^$":
        composed.load("fp8", overrides=override.split("\n"))
        return
    with pytest.raises(ConfigError, match=message):
        composed.load("fp8", overrides=override.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "fp9"}, "baseline, bf16, fp8"),
        ({"variant": "fp8", "model": "gpt-2"}, "qwen3-30b-a3b, qwen3.5-122b-a10b"),
        ({"variant": "fp8", "model": "/nowhere/Qwen3-30B-A3B"}, "'/nowhere/Qwen3-30B-A3B': there is no such directory"),
        ({"variant": "fp8", "model": "./qwen3-30b-a3b"}, "there is no such directory"),
        ({"variant": "fp8", "length": "4k"}, "16k, 8k"),
        ({"variant": "fp8", "optimizer": "sgd"}, "muon, adamw"),
        ({"variant": "fp8", "gpus": -1}, "no negative number"),
    ],
)
def test_unknown_names_list_the_known_ones(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed.load(**arguments)


def test_shared_experts_need_the_same_layout() -> None:
    with pytest.raises(ConfigError, match=r"set publish\.experts='copy'"):
        composed.load("fp8", overrides=["publish.experts=shared", "rollout.expert=4"])
    with pytest.raises(ConfigError, match="is for variant 'fp8'"):
        composed.load("bf16", overrides=["publish.experts=shared"])
    shared = composed.load("fp8", overrides=["publish.experts=shared"])
    assert budget_of(shared).peak("publish") < budget_of(full("fp8")).peak("publish")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    with pytest.raises(ConfigError, match="there is no such file"):
        composed.read(path)
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not readable as YAML"):
        composed.read(path)
    path.write_text("variant: fp8\n")
    with pytest.raises(ConfigError, match=r"settings\.yaml: .*train has no value"):
        composed.read(path)
