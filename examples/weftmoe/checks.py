"""What single values cannot tell: settings that exclude each other, refused by name, with the setting that works."""

from collections.abc import Iterator, Mapping

from weftmoe.schema import Publish, Settings
from weftpub.errors import ConfigError

__all__ = ["ALLOCATOR_VARIABLES", "check", "problems", "unshared_memory"]

# Only a role's env block may set these: a module that did so at import would change other code's memory.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")

# Allocators whose memory no other process can map.
_UNSHARED = {"expandable_segments:true": "expandable segments", "backend:cudamallocasync": "cudaMallocAsync's memory"}


def check(settings: Settings) -> None:
    """ConfigError with every problem of `problems`, if there is one."""
    found = list(problems(settings))
    if found:
        raise ConfigError("; ".join(found))


def unshared_memory(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Variables that choose an allocator whose memory no other process can map: name, value, and which memory it is."""
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        for setting, what in _UNSHARED.items():
            if setting in value.lower().replace(" ", ""):
                yield variable, value, what


def problems(settings: Settings) -> Iterator[str]:
    """Every combination of values that cannot work, as one sentence with the remedy."""
    yield from _lengths(settings)
    yield from _correction(settings)
    yield from _train_layout(settings)
    yield from _rollout_layout(settings)
    yield from _variant(settings)
    yield from _moments(settings)
    yield from _preset(settings)
    yield from _environment(settings)


def _lengths(s: Settings) -> Iterator[str]:
    length = s.length
    if length.total >= length.context:
        yield f"length.total={length.total} must be below length.context={length.context}: the engine ends one earlier"
    if length.total > length.microbatch_tokens:
        yield (
            f"length.microbatch_tokens={length.microbatch_tokens} holds no sequence of length.total={length.total}; "
            "sequences are never cut"
        )
    if s.data.max_prompt_tokens >= length.total:
        yield f"data.max_prompt_tokens={s.data.max_prompt_tokens} leaves no room in length.total={length.total}"
    if s.algorithm.overlong_tokens >= length.total - s.data.max_prompt_tokens:
        yield f"algorithm.overlong_tokens={s.algorithm.overlong_tokens} covers whole completions; make it smaller"
    if s.algorithm.prompts % s.algorithm.minibatches:
        yield (
            f"algorithm.minibatches={s.algorithm.minibatches} must divide algorithm.prompts={s.algorithm.prompts}: "
            "groups stay together"
        )


def _correction(s: Settings) -> Iterator[str]:
    below, above = s.algorithm.tis_reject_below, s.algorithm.tis_reject_above
    if s.algorithm.tis_cap is None and (below > 0 or above is not None):
        yield "algorithm.tis_reject_below and tis_reject_above are part of the correction; set algorithm.tis_cap, too"
    if above is not None and above <= below:
        yield f"algorithm.tis_reject_above={above:g} must be above algorithm.tis_reject_below={below:g}"


def _train_layout(s: Settings) -> Iterator[str]:
    train, world = s.train, s.cluster.world
    for name in ("pipeline", "context", "expert_tensor"):
        if getattr(train, name) != 1:
            yield f"train.{name}={getattr(train, name)} is not driven by this loop; set it to 1 and use train.expert"
    dense = train.tensor * train.context * train.pipeline
    experts = train.expert * train.expert_tensor * train.pipeline
    if world % dense:
        yield f"train: tensor x context x pipeline = {dense} must divide the {world} ranks of the cluster"
    if world % experts:
        yield f"train: expert x expert_tensor x pipeline = {experts} must divide the {world} ranks of the cluster"
    near = s.cluster.ranks
    if s.cluster.nodes > 1 and (near % dense or near % experts):
        yield (
            f"train: tensor x context x pipeline = {dense} and expert x expert_tensor x pipeline = {experts} must "
            f"divide the {near} ranks of one node: its engine takes all weights from there"
        )
    if train.tensor > 1 and not train.sequence_parallel:
        yield f"train.tensor={train.tensor} with experts needs train.sequence_parallel=true (Megatron-core)"
    if train.tensor == 1 and train.sequence_parallel:
        yield "train.sequence_parallel=true needs train.tensor above 1; set it to false"
    if train.dispatcher == "flex" and train.flex_backend == "deepep" and train.tensor * train.expert == 1:
        yield "train.dispatcher='flex' with DeepEP needs tensor x expert above 1; set train.dispatcher='alltoall'"
    if train.sequence_parallel and train.experts == "sequential":
        yield (
            "train.experts='sequential' uses torch's norms, which Megatron-core does not let run with "
            "train.sequence_parallel=true; set train.tensor=1, or train.experts='grouped' on GPUs"
        )
    if s.cluster.gpus == 0 and train.experts == "grouped":
        yield "train.experts='grouped' needs a GPU; set train.experts='sequential'"


def _rollout_layout(s: Settings) -> Iterator[str]:
    rollout, world = s.rollout, s.cluster.world
    if rollout.engines != s.cluster.nodes:
        yield f"rollout.engines={rollout.engines}: each node has one, so set it to cluster.nodes={s.cluster.nodes}"
    if rollout.tensor % rollout.expert:
        yield f"rollout.expert={rollout.expert} must divide rollout.tensor={rollout.tensor}, the ranks of one engine"
    if rollout.dp_attention and rollout.tensor % rollout.data:
        yield f"rollout.data={rollout.data} must divide rollout.tensor={rollout.tensor} with rollout.dp_attention"
    if not rollout.dp_attention and rollout.data != 1:
        yield f"rollout.data={rollout.data} needs rollout.dp_attention=true; without it set rollout.data=1"
    if rollout.engine == "sampler" and rollout.sampling.stop:
        yield "rollout.sampling.stop is read by SGLang only; leave it out with rollout.engine='sampler'"
    if rollout.engine == "sglang" and s.cluster.gpus == 0:
        yield "rollout.engine='sglang' needs a GPU; set rollout.engine='sampler'"
    if rollout.engine == "sglang" and rollout.engines * rollout.tensor != world:
        yield (
            f"rollout: engines x tensor = {rollout.engines * rollout.tensor} must be the {world} GPUs that trainer and "
            "engine share"
        )
    if rollout.sampling.repeat and not s.train.deterministic:
        yield "rollout.sampling.repeat=true needs train.deterministic=true: else the engine draws numbers of its own"
    if rollout.max_running < rollout.data:
        yield f"rollout.max_running={rollout.max_running} is below rollout.data={rollout.data}"
    if s.publish.experts == "shared" and (s.train.expert, s.train.expert_tensor) != (
        rollout.expert,
        rollout.tensor // rollout.expert,
    ):
        yield (
            "publish.experts='shared' needs the same experts on the same GPU: rollout.expert = train.expert = "
            "rollout.tensor; set publish.experts='copy'"
        )


def _variant(s: Settings) -> Iterator[str]:
    staged = s.variant != "baseline"
    if staged != (s.publish.path == "weftpub"):
        works = "weftpub" if staged else "native"
        yield f"publish.path={s.publish.path!r} does not go with variant {s.variant!r}; set it to {works!r}"
    if staged and s.rollout.moe_runner != "triton":
        yield (
            f"rollout.moe_runner={s.rollout.moe_runner!r} may move or change weights after loading; variant "
            f"{s.variant!r} needs 'triton'"
        )
    if staged and s.optimizer.cpu_offload:
        yield f"optimizer.cpu_offload is Megatron's own; variant {s.variant!r} stages by itself: set it to false"
    if s.optimizer.cpu_offload and s.optimizer.name == "muon":
        yield "optimizer.cpu_offload works with optimizer.name='adamw' only; set it to false"
    if s.variant != "fp8" and s.publish.experts == "shared":
        yield f"publish.experts='shared' is for variant 'fp8'; set it to 'copy' for {s.variant!r}"


def _moments(s: Settings) -> Iterator[str]:
    """Of AdamW's moments only those on the host have a choice of dtypes."""
    chosen = {name: getattr(s.optimizer, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    wrong = ", ".join(f"optimizer.{name}={value!r}" for name, value in chosen.items() if value != "fp32")
    if not wrong:
        return
    if s.optimizer.name != "adamw":
        yield f"{wrong}: optimizer {s.optimizer.name!r} does not read it; add --optimizer adamw, or leave it out"
    elif s.variant == "baseline" and not (s.optimizer.cpu_offload and s.cluster.gpus):
        yield f"{wrong}: without optimizer.cpu_offload, or without a GPU, a baseline does not read it; leave it out"


def _preset(s: Settings) -> Iterator[str]:
    if s.publish.preset == Publish.model_fields["preset"].default:
        power_of_two = False
    else:
        # Loads torch; printing a run with the usual one need not wait for it.
        from weftpub_kernels import KernelError, require_publishable

        try:
            recipe = require_publishable(s.publish.preset)
        except KernelError as error:
            yield f"publish.preset={s.publish.preset!r}: {error}"
            return
        if str(recipe.input_dtype) != "torch.float32":
            yield f"publish.preset={recipe.name!r} quantizes {recipe.input_dtype}; masters are FP32: use 'te_fp32'"
        if not recipe.ieee and s.cluster.gpus == 0:
            yield f"publish.preset={recipe.name!r} divides as only a GPU does; without one use 'te_fp32'"
        power_of_two = recipe.pow2_rule != "none"
    if s.variant == "fp8" and power_of_two != (s.publish.activation_scales == "power_of_two"):
        rule = "power_of_two" if power_of_two else "fp32"
        yield (
            f"publish.preset={s.publish.preset!r} beside publish.activation_scales={s.publish.activation_scales!r}: "
            f"weights and activations of one GEMM have one rule; set publish.activation_scales={rule!r}"
        )


def _environment(s: Settings) -> Iterator[str]:
    for name, role in (("trainer", s.roles.trainer), ("engine", s.roles.engine)):
        for variable, value, what in unshared_memory(role.env):
            if s.publish.path == "weftpub":
                yield f"roles.{name}.env.{variable}={value!r}: {what} cannot be shared by CUDA IPC; leave it out"
    scales = s.roles.trainer.env.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    if s.variant == "fp8" and (scales == "1") != (s.publish.activation_scales == "fp32"):
        yield (
            f"publish.activation_scales={s.publish.activation_scales!r} and roles.trainer.env."
            f"NVTE_FP8_BLOCK_SCALING_FP32_SCALES={scales!r} disagree; set the variable to "
            f"{'1' if s.publish.activation_scales == 'fp32' else '0'!r}"
        )
