"""`weftpub doctor`: whether a run would work on this machine, before it is started."""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weftpub_adapters.doctor.findings import Finding

__all__ = ["doctor"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class _Variant(StrEnum):
    BASELINE = "baseline"
    BF16 = "bf16"
    FP8 = "fp8"


class _Role(StrEnum):
    ALL = "all"
    TRAINER = "trainer"
    ENGINE = "engine"


def doctor(
    variant: Annotated[_Variant | None, typer.Option(help="Judge for this variant; for any by default.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of this node that the run needs.", min=0)] = None,
    nodes: Annotated[int, typer.Option(help="Machines of the run.", min=1)] = 1,
    role: Annotated[_Role, typer.Option(help="Whose packages belong into this environment.")] = _Role.ALL,
    out: Annotated[Path, typer.Option(help="Where the run will write.")] = Path(),
    host_memory: Annotated[float, typer.Option(help="GiB of host memory that the run pins here.", min=0.0)] = 0.0,
    disk: Annotated[float, typer.Option(help="GiB that the run writes.", min=0.0)] = 20.0,
    port: Annotated[int | None, typer.Option(help="TCP port that the run listens on here.", min=1, max=65535)] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint, or name of a known model: what its layers need is looked at, too.")
    ] = None,
    need_gpu: Annotated[bool, typer.Option(help="A missing GPU is a failure.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Look at Python, GPUs, packages, limits, memory, disk and environment; say what to change."""
    # torch and the adapters; --help need not wait for them.
    from weftpub_adapters.doctor.facts import gather
    from weftpub_adapters.doctor.findings import worst
    from weftpub_adapters.doctor.rules import GIB, Wanted, judge

    wanted = Wanted(
        variant=None if variant is None else variant.value,
        gpus=gpus,
        nodes=nodes,
        role=role.value,
        host_bytes=int(host_memory * GIB),
        disk_bytes=int(disk * GIB),
        need_gpu=need_gpu,
        delta_nets=_has_delta_nets(model),
    )
    findings = judge(gather(out, os.environ, port), wanted)
    level = worst(findings)
    if as_json:
        print(json.dumps({"level": level, "findings": [finding.to_json() for finding in findings]}, indent=2))
    else:
        _print(findings, level)
    raise typer.Exit(1 if level == "fail" else 0)


def _has_delta_nets(model: str | None) -> bool | None:
    """None for a model that nothing is known of: the run itself says what is wrong with its name."""
    from weftpub.budget import load_shape
    from weftpub.errors import ConfigError

    try:
        return None if model is None else load_shape(model).linear is not None
    except ConfigError:
        return None


def _print(findings: "list[Finding]", level: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        colour = _COLOURS[finding.level]
        console.print(f"[{colour}]{finding.level:<4}[/] {escape(finding.name)}: {escape(finding.found)}")
        if finding.level != "ok":
            console.print(f"     expected {escape(finding.expected)}; {escape(finding.remedy)}")
    words = {
        "ok": "all is well",
        "warn": "it works, with what is marked warn",
        "fail": "a run would fail: see what is marked fail",
    }
    console.print(f"doctor: {words[level]}", markup=False)
