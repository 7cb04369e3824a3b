"""What the settings of a run need, counted by `weftpub.budget`; `python -m weftmoe.needs` writes the README's table."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from weftmoe import settings as composed
from weftmoe.schema import Settings
from weftpub.budget import Budget, Engine, Limits, ModelShape, Request, Trainer, load_shape, make_budget
from weftpub.budget.budget import Change
from weftpub.budget.tables import markdown_rows

__all__ = ["TABLE_END", "TABLE_START", "TYPED", "budget_of", "memory_table", "model_shape", "updated"]

TABLE_START, TABLE_END = "<!-- memory table: python -m weftmoe.needs -->", "<!-- end of memory table -->"
# What run.sh is told for a change that makes a run fit; it has no word for the others.
TYPED: Mapping[Change, str] = {
    "adamw": "--optimizer adamw",
    "fp8": "run.sh fp8",
    "microbatch": "length.microbatch_tokens={}",
    "logits": "train.logit_chunk_tokens={}",
    "memory_fraction": "rollout.memory_fraction={}",
}
_README = Path(__file__).with_name("README.md")
_HEADINGS = (
    "model",
    "variant",
    "optimizer",
    "rollout",
    "train",
    "publish",
    "host of the run",
    "PCIe a step",
    "publish bytes",
    "fits 141 GB",
)


def model_shape(settings: Settings) -> ModelShape:
    """Shape of the run's model; the smoke mode's is made from its block.

    Raises:
        ConfigError: the path is neither a directory nor a model whose config is shipped.
    """
    if not settings.smoke.enabled:
        return load_shape(settings.model.path)
    made, hybrid = settings.smoke, settings.model.architecture != "Qwen3MoeForCausalLM"
    return ModelShape.from_config(
        {
            "architectures": [settings.model.architecture],
            "num_hidden_layers": made.layers,
            "hidden_size": made.hidden,
            "moe_intermediate_size": made.intermediate,
            "num_experts": made.experts,
            "num_experts_per_tok": made.top_k,
            "num_attention_heads": made.heads,
            "num_key_value_heads": made.kv_heads,
            "head_dim": made.head_dim,
            "vocab_size": made.vocab,
            # Read for Qwen3.5-MoE only.
            "full_attention_interval": min(4, made.layers),
            "shared_expert_intermediate_size": made.shared if hybrid else 0,
            "linear_num_key_heads": made.linear_heads // 2,
            "linear_num_value_heads": made.linear_heads,
            "linear_key_head_dim": made.linear_dim,
            "linear_value_head_dim": made.linear_dim,
            "linear_conv_kernel_dim": 4,
        }
    )


def budget_of(settings: Settings, gpu_memory: float = 141.0) -> Budget:
    """The budget of one rank of a run on GPUs that are sold with `gpu_memory` GB.

    Raises:
        ConfigError, PlanError: a layout that the adapters refuse, with what works.
    """
    train, rollout = settings.train, settings.rollout
    fp8 = settings.variant == "fp8"
    return make_budget(
        Request(
            shape=model_shape(settings),
            variant=settings.variant,
            rule=settings.optimizer.name,
            trainer=Trainer(
                world=settings.cluster.world,
                tensor=train.tensor,
                expert=train.expert,
                expert_tensor=train.expert_tensor,
                context=train.context,
                sequence_parallel=train.sequence_parallel,
            ),
            engine=Engine(tensor=rollout.tensor, data=rollout.data, expert=rollout.expert),
            limits=Limits(
                microbatch_tokens=settings.length.microbatch_tokens,
                total_tokens=settings.length.total,
                sequences=settings.algorithm.prompts * settings.algorithm.completions,
                logit_chunk_tokens=train.logit_chunk_tokens,
                slots=settings.optimizer.slots,
                staging_bytes=settings.publish.staging_mib << 20,
                bucket_bytes=settings.publish.bucket_mib << 20,
                memory_fraction=rollout.memory_fraction,
                gpu_memory=gpu_memory,
            ),
            cpu_offload=settings.optimizer.cpu_offload,
            shared_experts=fp8 and settings.publish.experts == "shared",
            recompute=train.recompute == "full",
        )
    )


def memory_table() -> str:
    """Markdown table of every model, variant and optimizer at length 8k."""
    rule = "|---" * 3 + "|---:" * (len(_HEADINGS) - 4) + "|---|"
    return "\n".join(["| " + " | ".join(_HEADINGS) + " |", rule, *_rows()])


def updated(page: str) -> str:
    """The page with its table between the two marks written anew."""
    before, start, rest = page.partition(TABLE_START)
    _, end, after = rest.partition(TABLE_END)
    if not start or not end:
        raise ValueError(f"the page has no {TABLE_START!r} ... {TABLE_END!r}")
    return f"{before}{start}\n{memory_table()}\n{end}{after}"


def _rows() -> Iterator[str]:
    for model in composed.MODELS:
        for variant in composed.VARIANTS:
            for optimizer in composed.OPTIMIZERS:
                one = composed.load(variant, model=model, optimizer=optimizer)
                budget = budget_of(one)
                row = markdown_rows(one.model.path.rpartition("/")[2], budget)
                typed: dict[Change, str] = {"adamw": TYPED["adamw"]} if optimizer != "adamw" else {}
                yield row if not budget.remedies(typed) else f"{row.removesuffix(' |')}: it needs `{TYPED['adamw']}` |"


def main() -> None:
    """Write the table into the README beside this file."""
    _README.write_text(updated(_README.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
