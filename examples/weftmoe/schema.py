"""Every setting of a run, typed. Unknown keys are errors, and values that exclude each other are refused by name.

One class a block of the YAML files. Nothing here reads a file or an environment variable: `weftmoe.settings` puts files
and overrides together, and everybody else gets a finished, immutable `Settings`.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = [
    "Algorithm",
    "Checkpoint",
    "Cluster",
    "Data",
    "EngineKind",
    "Length",
    "LengthName",
    "Model",
    "Optimizer",
    "OptimizerName",
    "Publish",
    "Reward",
    "Role",
    "Roles",
    "Rollout",
    "Sampling",
    "Settings",
    "Smoke",
    "Telemetry",
    "Train",
    "VariantName",
]

VariantName = Literal["baseline", "bf16", "fp8"]
LengthName = Literal["8k", "16k", "smoke"]
OptimizerName = Literal["muon", "adamw"]
EngineKind = Literal["sglang", "sampler"]

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


def _yaml_off(value: object) -> object:
    return "off" if value is False else value


def _words(value: object) -> object:
    """Numbers as the strings that environment variables are: `A=1` on a command line means "1"."""
    if not isinstance(value, dict):
        return value
    return {key: str(v) if isinstance(v, int | float) and not isinstance(v, bool) else v for key, v in value.items()}


# YAML 1.1 reads a bare `off` as false, in files and on the command line.
Off = Annotated[Literal["off"], BeforeValidator(_yaml_off)]
SaveEvery = Annotated[Literal["off"] | Positive, BeforeValidator(_yaml_off)]
WandbMode = Annotated[Literal["off", "offline", "online"], BeforeValidator(_yaml_off)]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Model(_Block):
    """The checkpoint that training starts from.

    Attributes:
        name: short name of the configuration, such as "qwen3-30b-a3b".
        path: Hugging Face directory or repository name. The smoke mode makes its own and ignores it.
        architecture: what ``architectures[0]`` of its config.json has to be.
        mtp, speculative: multi-token prediction and speculative decoding; both stay off.
    """

    name: str
    path: str
    architecture: Literal["Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"]
    mtp: Off = "off"
    speculative: Off = "off"


class Data(_Block):
    """Prompts and answers in the schema of DAPO-Math-17k.

    Attributes:
        path: parquet file or folder as published, or the name of a dataset of the `datasets` package.
        split: its split, for a name.
        epochs: how often each prompt is drawn before the run ends, as after its last step; None leaves that to `steps`.
        max_prompt_tokens: longer prompts are left out, and counted.
        shuffle: draw prompts in an order made from the seed; else as they lie.
        enable_thinking: passed to the chat template.
    """

    path: str
    split: str = "train"
    epochs: Positive | None = None
    max_prompt_tokens: Positive
    shuffle: bool = True
    enable_thinking: bool = True


class Length(_Block):
    """Token limits.

    Attributes:
        total: most tokens of a prompt and its completion together.
        context: the engine's context length.
        microbatch_tokens: most tokens of one packed microbatch of one data-parallel rank.
    """

    name: LengthName
    total: Positive
    context: Positive
    microbatch_tokens: Positive


class Cluster(_Block):
    """Machines of the run.

    Attributes:
        nodes, gpus: machines, and GPUs of each; 0 GPUs trains on the CPU.
        cpu_ranks: trainer ranks of each machine without GPUs.
        numa_binding: bind every rank to its GPU's NUMA node, where its pinned memory then lies (needs numactl).
    """

    nodes: Positive = 1
    gpus: Count = 8
    cpu_ranks: Positive = 1
    numa_binding: bool = False

    @property
    def ranks(self) -> int:
        """Trainer ranks of each machine."""
        return self.gpus or self.cpu_ranks

    @property
    def world(self) -> int:
        """Trainer ranks."""
        return self.nodes * self.ranks


class Sampling(_Block):
    """How completions are drawn.

    Attributes:
        temperature: the trainer's log-probs are of the same temperature.
        top_p: below 1 biases the ratio: the trainer's log-probs are of the whole distribution.
        stop: texts that end a completion (SGLang only).
        repeat: draw with the same random numbers at every step: steps on the same prompts (`data.shuffle` false) then
            differ by their weights alone. Needs `train.deterministic`, without which the engine draws its own.
    """

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    stop: tuple[str, ...] = ()
    repeat: bool = False


class Rollout(_Block):
    """The rollout engine.

    Attributes:
        engine: "sglang", or "sampler", which draws from SGLang's real layers without its server (a machine without a
            GPU).
        tensor, data, expert: SGLang's tp_size, dp_size and ep_size; tp_size counts all ranks of one engine.
        dp_attention: attention is data parallel over `data` groups; without it `data` is 1.
        engines: engines of the run, one a machine.
        moe_runner, fp8_gemm_runner, moe_a2a, attention_backend: SGLang's backends; "auto" and None leave the choice to
            SGLang.
        memory_fraction: SGLang's mem_fraction_static, the share of free GPU memory for weights and KV cache.
        max_running: most requests of one step of the engine.
        cuda_graph, cuda_graph_max_batch: decode graphs, and the largest batch that gets one.
        cuda_graph_batches: the batches that get one, each serving all below it down to the next; None leaves the list
            to SGLang, which captures some dozens.
        radix_cache: prefix cache; off with torch 2.11, for which SGLang's tree is not built.
        drain: what happens to requests in flight when the weights change.
        sampling: how completions are drawn.
        ready_timeout, generate_timeout: seconds for the engine to come up, and for the completions of one step.
    """

    engine: EngineKind = "sglang"
    tensor: Positive
    data: Positive
    expert: Positive
    dp_attention: bool
    engines: Positive = 1
    moe_runner: str
    fp8_gemm_runner: str
    moe_a2a: str = "none"
    attention_backend: str | None = None
    memory_fraction: Share
    max_running: Positive
    cuda_graph: bool = True
    cuda_graph_max_batch: Positive = 256
    cuda_graph_batches: Annotated[tuple[Positive, ...], Field(min_length=1)] | None = None
    radix_cache: bool = False
    drain: Literal["retract", "drain", "restart", "abort"] = "drain"
    sampling: Sampling = Sampling()
    ready_timeout: Seconds = 900.0
    generate_timeout: Seconds = 3600.0


class Train(_Block):
    """The Megatron-core trainer. Data parallel size is what is left: world / (tensor x context x pipeline).

    Attributes:
        tensor, expert, expert_tensor, context, pipeline: parallel sizes.
        sequence_parallel: Megatron's; needed for experts at tensor > 1.
        experts: "grouped" runs TransformerEngine's grouped GEMMs (Hopper), "sequential" one module an expert.
        attention: TransformerEngine's kernels; "auto" leaves the choice to it. "unfused" holds the scores of whole
            microbatches, for short sequences: what deterministic fused ones need grows with the square of their number.
        dispatcher, flex_backend: Megatron's moe_token_dispatcher_type and, for "flex", its backend.
        recompute: "full" recomputes every layer in the backward pass.
        overlap_grad_reduce: reduce gradients while the backward pass goes on.
        logit_chunk_tokens: tokens whose logits exist at once; 0 holds those of a whole microbatch.
        deterministic: choose deterministic kernels and reductions; replays then agree bit for bit.
        offload: what leaves the GPU while the engine generates.
    """

    tensor: Positive
    expert: Positive
    expert_tensor: Positive = 1
    context: Positive = 1
    pipeline: Positive = 1
    sequence_parallel: bool
    experts: Literal["grouped", "sequential"]
    attention: Literal["auto", "flash", "fused", "unfused"] = "auto"
    dispatcher: Literal["alltoall", "allgather", "flex"]
    flex_backend: Literal["deepep", "hybridep", "ncclep"] = "deepep"
    recompute: Literal["full", "none"]
    overlap_grad_reduce: bool = True
    logit_chunk_tokens: Count = 0
    deterministic: bool = False
    offload: tuple[Literal["weights", "optimizer", "gradients"], ...] = ("weights", "optimizer", "gradients")


class Optimizer(_Block):
    """Update rule. Which fields a rule reads is said by its prefix; the others serve both.

    Attributes:
        name: "muon" (matrices; vectors, scalars and embeddings get AdamW) or "adamw".
        lr, weight_decay, clip_grad: for every parameter; `clip_grad` 0 leaves gradients as they are.
        warmup_steps: linear warm-up from zero, then constant.
        muon_*: Megatron's fields of the same names.
        adam_*: betas and epsilon.
        cpu_offload: baseline only: Megatron's own HybridDeviceOptimizer (AdamW) keeps masters and state on the host.
        exp_avg_dtype, exp_avg_sq_dtype: dtypes of AdamW's moments, where they lie on the host.
        slots, slot_numel: staging slots and elements of the largest matrix they take (None: the model's largest).
    """

    name: OptimizerName
    lr: Annotated[float, Field(ge=0.0)]
    weight_decay: Annotated[float, Field(ge=0.0)]
    clip_grad: Annotated[float, Field(ge=0.0)]
    warmup_steps: Count = 0
    muon_momentum: Share = 0.95
    muon_nesterov: bool = False
    muon_scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    muon_num_ns_steps: Positive = 5
    adam_beta1: Share = 0.9
    adam_beta2: Share = 0.95
    adam_eps: Annotated[float, Field(gt=0.0)] = 1e-8
    cpu_offload: bool = False
    exp_avg_dtype: Literal["fp32", "bf16"] = "fp32"
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = "fp32"
    slots: Positive = 3
    slot_numel: Positive | None = None


class Algorithm(_Block):
    """GRPO with DAPO's changes.

    Attributes:
        prompts, completions: prompts of a step, and completions of each: one group.
        epochs: passes over a step's data; each ends in optimizer updates.
        minibatches: optimizer updates of one pass.
        advantage: rewards minus their group's mean, over its standard deviation ("std") or not ("mean").
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher).
        loss: "token" weighs every trained token alike; "sequence" every completion.
        tis_cap: truncated importance sampling: upper bound of the trainer-over-rollout probability ratio; None is off.
        tis_reject_below, tis_reject_above: tokens whose ratio lies outside are not trained on; the defaults reject none
            but those that are not finite.
        dynamic_sampling: leave out groups whose rewards are all equal, and draw more prompts.
        max_resamples: rounds of drawing more before the step goes on with what it has.
        overlong_tokens: last tokens before the limit in which reward falls linearly by up to 1; 0 is off.
    """

    name: Literal["grpo"] = "grpo"
    prompts: Positive
    completions: Annotated[int, Field(ge=2)]
    epochs: Positive = 1
    minibatches: Positive = 1
    advantage: Literal["std", "mean"] = "std"
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    loss: Literal["token", "sequence"] = "token"
    tis_cap: Annotated[float, Field(gt=0.0)] | None = 2.0
    tis_reject_below: Annotated[float, Field(ge=0.0)] = 0.0
    tis_reject_above: Annotated[float, Field(gt=0.0)] | None = None
    dynamic_sampling: bool = False
    max_resamples: Count = 3
    overlong_tokens: Count = 0


class Reward(_Block):
    """The verifier. `timeout`, rounded to whole seconds, bounds reading the truth, reading an answer, and each
    comparison of the two; a late answer counts as wrong and is logged.
    """

    verifier: Literal["math", "exact"] = "math"
    timeout: Seconds = 10.0
    workers: Positive = 8
    correct: float = 1.0
    wrong: float = 0.0


class Publish(_Block):
    """How a new version reaches the engine.

    Attributes:
        path: "weftpub", or "native": SGLang's own tensor update in BF16 buckets (baseline).
        preset: quantizer of the routed experts (fp8), a name of `weftpub_kernels.PRESETS`.
        activation_scales: rule for the scales of activations, the same in trainer and engine (fp8).
        experts: "copy", or "shared": trainer and engine map one allocation for the experts, and a publish copies the
            other weights only (fp8). A start that cannot do that ends with an error.
        staging_mib: most extra GPU memory of a publish.
        bucket_mib: bucket of the native path.
        verify_sha256: compare sha256 of what is served with what is trained, beside the checksums.
        deadline: seconds that one phase of a publish may take.
    """

    path: Literal["weftpub", "native"]
    preset: str = "te_fp32"
    activation_scales: Literal["fp32", "power_of_two"] = "fp32"
    experts: Literal["copy", "shared"] = "copy"
    staging_mib: Positive = 512
    bucket_mib: Positive = 1024
    verify_sha256: bool = False
    deadline: Seconds = 120.0


class Checkpoint(_Block):
    """Saving. `save` is "off" or a number of steps; the newest `keep` stay. `resume` takes up what lies in `out`;
    false sets it aside there and starts anew, at every start. `grace`: seconds from the signal that the job will be
    over soon (SIGUSR1) until it is; the run ends its step if there is time for it, and saves.
    """

    save: SaveEvery = 20
    keep: Positive = 2
    resume: bool = True
    grace: Seconds = 240.0


class Telemetry(_Block):
    """What a person watches.

    Attributes:
        progress: bars on a terminal, lines elsewhere.
        tensorboard, wandb, jsonl: which files or services get the records.
        wandb_project, name: of Weights & Biases; the name also titles the progress.
        measure_every: steps from one measurement of log-probs after the update to the next. It is a forward pass over
            the step's data, a third of what training costs.
    """

    progress: bool = True
    tensorboard: bool = True
    wandb: WandbMode = "off"
    wandb_project: str = "weftmoe"
    name: str | None = None
    jsonl: bool = True
    measure_every: Positive = 10


class Smoke(_Block):
    """The tiny run: a model, tokenizer and arithmetic made on the spot, then the same loop.

    Attributes:
        enabled: whether this is one.
        layers, hidden, intermediate, experts, top_k, heads, kv_heads, head_dim, vocab: of the made model, which is of
            the family that `model.architecture` says.
        shared, linear_heads, linear_dim: of a made Qwen3.5-MoE: width of the shared expert, value heads of a gated
            delta net (it has half as many key heads), and width of each. Every fourth layer, or the last of fewer, has
            attention.
        digits: most digits of an operand of the generated problems.
        problems: generated problems.
        warmup_steps, warmup_lr, warmup_batch: most supervised steps before GRPO; they end once three in ten answers
            would be right.
    """

    enabled: bool = False
    layers: Positive = 2
    hidden: Positive = 256
    intermediate: Positive = 256
    experts: Positive = 8
    top_k: Positive = 2
    heads: Positive = 8
    kv_heads: Positive = 4
    head_dim: Positive = 64
    vocab: Positive = 512
    shared: Positive = 128
    linear_heads: Annotated[int, Field(ge=2, multiple_of=2)] = 4
    linear_dim: Positive = 16
    digits: Positive = 2
    problems: Positive = 2048
    warmup_steps: Count = 200
    warmup_lr: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup_batch: Positive = 64


class Role(_Block):
    """One role's environment variables, set before its process starts."""

    env: Annotated[dict[str, str], BeforeValidator(_words)] = Field(default_factory=dict)


class Roles(_Block):
    """trainer: the torchrun ranks. engine: SGLang's processes."""

    trainer: Role = Role()
    engine: Role = Role()


class Settings(_Block):
    """One run, resolved. `out` holds everything that it writes."""

    variant: VariantName
    seed: Count = 1234
    steps: Positive
    out: Path
    model: Model
    data: Data
    length: Length
    cluster: Cluster
    rollout: Rollout
    train: Train
    optimizer: Optimizer
    algorithm: Algorithm
    reward: Reward
    publish: Publish
    checkpoint: Checkpoint
    telemetry: Telemetry
    smoke: Smoke
    roles: Roles
