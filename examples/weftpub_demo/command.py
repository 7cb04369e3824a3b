"""`weftpub demo`: options in; a table, report.json, report.png and one last line out."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from weftpub_demo.config import DemoConfig, Device, OptimizerName, Variant
from weftpub_demo.quiet import hush

if TYPE_CHECKING:
    from weftpub_demo.report import Report

__all__ = ["demo", "main"]

_INTERRUPTED = 130


def demo(
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face Qwen3-MoE checkpoint directory; made from the seed if not given.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to train on, one token a byte; a shipped one if not given.")
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option(help="Update rule of the expert matrices.")] = OptimizerName.MUON,
    steps: Annotated[int, typer.Option(help="Steps to train and publish, 5 or more.")] = DemoConfig.steps,
    variant: Annotated[
        Variant, typer.Option(help="FP8 or BF16 experts through weftpub, or the baseline without it.")
    ] = Variant.FP8,
    preset: Annotated[str, typer.Option(help="Quantizer recipe: see `weftpub presets`.")] = DemoConfig.preset,
    device: Annotated[Device, typer.Option(help="Where trainer and engine compute.")] = Device.AUTO,
    lr: Annotated[float | None, typer.Option(help="Learning rate; the optimizer's own default if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the made checkpoint and of the drawn batches.")] = 0,
    limit: Annotated[float, typer.Option(help="Longest single wait for a receiver, in seconds.")] = DemoConfig.limit_s,
    out: Annotated[
        Path, typer.Option(help="Directory for report.json and report.png; working files go to demo-out/ in it.")
    ] = Path(),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report on stdout, and everything else on stderr.")
    ] = False,
) -> None:
    """Train a small MoE with Megatron-core and publish every step to two SGLang receivers, checking every byte."""
    config = DemoConfig(
        out=out,
        model=model,
        text=text,
        variant=variant,
        optimizer=optimizer,
        preset=preset,
        device=device,
        steps=steps,
        lr=lr,
        seed=seed,
        limit_s=limit,
    )
    config.check()
    if device is Device.CPU:
        # Before torch looks for a GPU: Megatron-core and SGLang take one wherever they see one.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    interruption = _Interruption()
    signal.signal(signal.SIGTERM, interruption)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job of a shell ignores it
        signal.signal(signal.SIGINT, interruption)
    hush()
    # These load torch and the foreign systems; --help and wrong options must not wait for them.
    from weftpub_demo.progress import Progress
    from weftpub_demo.run import run

    title = f"weftpub demo: {variant} experts, {optimizer}"
    try:
        with Progress(title, steps, interrupted=lambda: interruption.came) as progress:
            report = run(config, progress)
        if interruption.came and not report.ok:  # whatever error it became on its way through a package
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        print("DEMO FAILED: interrupted; the receivers were ended", file=sys.stderr if as_json else sys.stdout)
        raise typer.Exit(_INTERRUPTED) from None
    _print(report, title, as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


def main() -> None:
    """Entry point of `python -m weftpub_demo`: the demo alone, installed or not."""
    from weftpub import cli

    sys.exit(cli.run(["demo", *sys.argv[1:]], commands={"demo": demo}))


class _Interruption:
    """Makes a KeyboardInterrupt of Ctrl-C or a request to end, so that every receiver is ended on the way out, and
    remembers it: a package that is being imported may catch it, or make another error of it."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


def _print(report: "Report", title: str, *, as_json: bool) -> None:
    from rich.console import Console

    from weftpub_demo.report import table

    console = Console(stderr=as_json, highlight=False, soft_wrap=True)
    console.print(table(report.steps, title))
    for check in report.checks:
        console.print(f"{check.passed:6} x {check.name}: {check.meaning}", markup=False)
    console.print(
        f"report.json and report.png are in {report.settings['out']}; it took {report.seconds:.0f} s", markup=False
    )
    if report.error is not None and "\n" in report.error:
        console.print(report.error, markup=False)  # in full; the last line holds its first line
    if as_json:
        print(report.model_dump_json(indent=2))
    console.print(report.result, markup=False)
