"""`weftpub plan`: what a colocated run needs, before a machine is asked for."""

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from weftpub.errors import ConfigError

if TYPE_CHECKING:
    from weftpub.budget.budget import Budget

__all__ = ["plan"]


class _Variant(StrEnum):
    BASELINE = "baseline"
    BF16 = "bf16"
    FP8 = "fp8"


class _Rule(StrEnum):
    MUON = "muon"
    ADAMW = "adamw"


def plan(
    model: Annotated[str, typer.Option(help="Hugging Face directory, config.json, or the name of a shipped config.")],
    gpus: Annotated[int, typer.Option(help="GPUs of the run, all nodes together.", min=1)] = 8,
    gpu_memory: Annotated[float, typer.Option(help="Of one GPU as it is sold, in GB: 141 for an H200.")] = 141.0,
    variant: Annotated[list[_Variant] | None, typer.Option(help="Which to compare; all three by default.")] = None,
    optimizer: Annotated[_Rule, typer.Option(help="Update rule.")] = _Rule.MUON,
    cpu_offload: Annotated[bool, typer.Option(help="Baseline: Megatron's own CPU offload (AdamW).")] = False,
    tensor: Annotated[
        int | None,
        typer.Option(help="Trainer's tensor parallel size; 2, or 1 for an odd number of GPUs.", min=1),
    ] = None,
    expert: Annotated[int | None, typer.Option(help="Trainer's expert parallel size; all GPUs by default.")] = None,
    rollout_tensor: Annotated[int | None, typer.Option(help="GPUs of one engine; all by default.")] = None,
    rollout_data: Annotated[int | None, typer.Option(help="DP attention size; all GPUs by default, 1 is off.")] = None,
    rollout_expert: Annotated[int | None, typer.Option(help="Engine's expert parallel size; all by default.")] = None,
    microbatch: Annotated[int, typer.Option(help="Tokens of a packed microbatch of one rank.", min=1)] = 65536,
    total: Annotated[int, typer.Option(help="Most tokens of a prompt and its completion.", min=1)] = 8191,
    logit_chunk: Annotated[int, typer.Option(help="Tokens whose logits exist at once; 0 is all.", min=0)] = 4096,
    memory_fraction: Annotated[float, typer.Option(help="SGLang's mem_fraction_static.", min=0.0, max=1.0)] = 0.7,
    shared_experts: Annotated[bool, typer.Option(help="fp8: trainer and engine map one allocation.")] = False,
    rebuild_wt: Annotated[bool, typer.Option(help="fp8: W^T of one layer at a time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every row and how it was counted.")] = False,
) -> None:
    """GPU memory of each phase, pinned host memory, PCIe and publish bytes of a colocated run, by arithmetic."""
    # torch comes with the tables' neighbours; --help need not wait for it.
    from weftpub.budget.budget import make_budget
    from weftpub.budget.request import Engine, Limits, Request, Trainer
    from weftpub.budget.shape import load_shape

    shape = load_shape(model)
    ranks = gpus if rollout_tensor is None else rollout_tensor
    split = 2 - gpus % 2 if tensor is None else tensor
    limits = Limits(
        microbatch_tokens=microbatch,
        total_tokens=total,
        logit_chunk_tokens=logit_chunk,
        memory_fraction=memory_fraction,
        gpu_memory=gpu_memory,
    )
    chosen = variant if variant else list(_Variant)
    if cpu_offload and chosen != [_Variant.BASELINE]:
        raise ConfigError("--cpu-offload is Megatron's own; add --variant baseline")
    if (shared_experts or rebuild_wt) and _Variant.FP8 not in chosen:
        raise ConfigError("--shared-experts and --rebuild-wt are for the store of variant fp8; add --variant fp8")
    budgets: list[Budget] = []
    for one in chosen:
        only_fp8 = one is _Variant.FP8
        request = Request(
            shape=shape,
            variant=one.value,
            rule=optimizer.value,
            trainer=Trainer(
                world=gpus, tensor=split, expert=gpus if expert is None else expert, sequence_parallel=split > 1
            ),
            engine=Engine(
                tensor=ranks,
                data=ranks if rollout_data is None else rollout_data,
                expert=ranks if rollout_expert is None else rollout_expert,
            ),
            limits=limits,
            cpu_offload=cpu_offload,
            shared_experts=shared_experts and only_fp8,
            rebuild_wt=rebuild_wt and only_fp8,
        )
        budgets.append(make_budget(request))
    if as_json:
        print(json.dumps([budget.to_json() for budget in budgets], indent=2))
    else:
        count = shape.parameters
        size = f"{count / 1e9:.1f}e9" if count >= 1e8 else f"{count / 1e6:.1f}e6"
        machine = f"{gpus} GPUs of {gpu_memory:g} GB each" if gpus > 1 else f"one GPU of {gpu_memory:g} GB"
        _print(budgets, f"{model}: {size} parameters on {machine}")
    raise typer.Exit(0 if all(budget.fits for budget in budgets) else 1)


def _print(budgets: "list[Budget]", title: str) -> None:
    from rich.console import Console

    from weftpub.budget.tables import comparison, verdicts

    console = Console(highlight=False, soft_wrap=True)
    console.print(comparison(budgets, title))
    for line in verdicts(budgets):
        console.print(line, markup=False)
