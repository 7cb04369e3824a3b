"""What is asked: variant, optimizer, parallel layouts, sizes; and the refusals that the adapters would make later."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from weftpub.budget.shape import Group, ModelShape
from weftpub.errors import ConfigError
from weftpub.plan import legal_ep, require_legal_tp

__all__ = ["Engine", "Limits", "Request", "Rule", "Trainer", "Variant"]

Variant = Literal["baseline", "bf16", "fp8"]
Rule = Literal["muon", "adamw"]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Megatron's parallel sizes on `world` ranks; dense data parallel size is the rest."""

    world: int
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    context: int = 1
    sequence_parallel: bool = True

    @property
    def data(self) -> int:
        """Replicas of the dense parameters."""
        return self.world // (self.tensor * self.context)

    @property
    def expert_data(self) -> int:
        """Replicas of every expert."""
        return self.world // (self.expert * self.expert_tensor)

    def share(self, group: Group) -> int:
        """Elements of a group that one rank holds."""
        parts = {"expert": self.expert * self.expert_tensor, "tensor": self.tensor, "copy": 1}
        return 0 if group.train == "absent" else -(-group.count // parts[group.train])


@dataclass(frozen=True, kw_only=True)
class Engine:
    """SGLang's tp_size, dp_size (with DP attention) and ep_size; several engines share the run's GPUs."""

    tensor: int
    data: int = 1
    expert: int = 1

    @property
    def attention_tensor(self) -> int:
        """Ranks that split one attention layer."""
        return self.tensor // self.data

    def share(self, group: Group) -> int:
        """Elements of a group that one rank holds."""
        parts = {"expert": self.tensor, "attention": self.attention_tensor, "world": self.tensor, "copy": 1}
        most = parts[group.serve] if group.serve_most is None else group.serve_most
        return -(-group.count // min(parts[group.serve], most))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes of a step and of its buffers.

    Attributes:
        microbatch_tokens: tokens of a packed microbatch of one data-parallel rank.
        total_tokens: most tokens of a prompt and its completion.
        sequences: completions of a step, over all engines.
        logit_chunk_tokens: tokens whose logits exist at once; 0 is a whole microbatch.
        slots: staging slots.
        staging_bytes: cap of a publish's extra GPU memory, on each side.
        bucket_bytes: bucket of SGLang's own weight update (baseline).
        memory_fraction: SGLang's mem_fraction_static.
        gpu_memory: of one GPU, as it is sold: 141 for an H200.
    """

    microbatch_tokens: int = 65536
    total_tokens: int = 8191
    sequences: int = 512
    logit_chunk_tokens: int = 4096
    slots: int = 3
    staging_bytes: int = 512 << 20
    bucket_bytes: int = 1 << 30
    memory_fraction: float = 0.7
    gpu_memory: float = 141.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One run to count.

    Attributes:
        variant, rule: as in `weftmoe`.
        cpu_offload: baseline with AdamW: Megatron's HybridDeviceOptimizer.
        shared_experts: trainer and engine map one allocation for W and its scales (fp8).
        rebuild_wt: W^T of one layer at a time instead of all (fp8).
        recompute: full activation recomputation.
    """

    shape: ModelShape
    variant: Variant
    rule: Rule
    trainer: Trainer
    engine: Engine
    limits: Limits = field(default_factory=Limits)
    cpu_offload: bool = False
    shared_experts: bool = False
    rebuild_wt: bool = False
    recompute: bool = True

    @property
    def staged(self) -> bool:
        """Whether masters and state live in host memory, and updates are staged."""
        return self.variant != "baseline"

    @property
    def optimizer_copies(self) -> int:
        """Instances of AdamW's distributed optimizer, each with all masters: FP8 experts are written whole, so their
        replicas do not share them out.
        """
        return self.trainer.expert_data if self.variant == "fp8" else 1

    def check(self) -> None:
        """Refuse what no adapter would run.

        Raises:
            ConfigError: sizes that do not divide, split experts for fp8, or an unknown name.
            PlanError: sizes that split an expert inside a quantization block; lists the legal ones.
        """
        for name, value, kind in (("variant", self.variant, Variant), ("optimizer", self.rule, Rule)):
            if value not in get_args(kind):
                raise ConfigError(f"{name} {value!r} is unknown; choose one of {', '.join(get_args(kind))}")
        self._check_trainer()
        self._check_engine()
        if self.cpu_offload and (self.staged or self.rule != "adamw"):
            raise ConfigError("cpu_offload is Megatron's own and works with variant baseline and AdamW only")
        if self.variant != "fp8" and (self.shared_experts or self.rebuild_wt):
            raise ConfigError(f"shared experts and rebuilt W^T are of variant 'fp8', not {self.variant!r}")
        if self.shared_experts and not (
            self.engine.expert == self.engine.tensor == self.trainer.expert and self.trainer.expert_tensor == 1
        ):
            raise ConfigError(
                "shared experts need the same experts on the same GPU: engine expert = engine tensor = trainer expert "
                f"size; found {self.engine.expert}, {self.engine.tensor}, {self.trainer.expert}"
            )

    def _check_trainer(self) -> None:
        t, s = self.trainer, self.shape
        for name, size, remedy in (
            ("tensor x context", t.tensor * t.context, "--tensor"),
            ("expert x expert tensor", t.expert * t.expert_tensor, "--expert"),
        ):
            if t.world % size:
                raise ConfigError(
                    f"trainer: {name} = {size} must divide its {t.world} ranks; set {remedy} to a divisor of {t.world}"
                )
        if s.experts % t.expert:
            raise ConfigError(
                f"trainer: {s.experts} experts cannot be dealt to expert={t.expert} ranks equally; take a number of "
                f"GPUs, or --expert, that divides {s.experts}"
            )
        if s.heads % t.tensor:
            raise ConfigError(f"trainer: {s.heads} attention heads cannot be split over tensor={t.tensor}")
        if self.variant == "fp8" and t.expert_tensor > 1:
            raise ConfigError(f"trainer: expert tensor size {t.expert_tensor} splits experts; fp8 needs 1, or use bf16")

    def _check_engine(self) -> None:
        e, s = self.engine, self.shape
        for name, size in (("expert", e.expert), ("data", e.data)):
            if e.tensor % size:
                raise ConfigError(f"engine: {name}={size} must divide tensor={e.tensor}, the ranks of one engine")
        if s.experts % e.expert:
            sizes = ", ".join(map(str, legal_ep(s.intermediate, e.tensor, s.experts)))
            raise ConfigError(
                f"engine: {s.experts} experts cannot be dealt to expert={e.expert} ranks equally; legal on its "
                f"{e.tensor} ranks: {sizes}"
            )
        if s.heads % e.attention_tensor:
            raise ConfigError(f"engine: {s.heads} attention heads cannot be split over {e.attention_tensor} ranks")
        if self.trainer.world % e.tensor:
            raise ConfigError(f"engine: tensor={e.tensor} must divide the {self.trainer.world} GPUs of the run")
        if self.variant == "fp8":
            require_legal_tp(s.intermediate, e.tensor // e.expert, experts=s.experts)
