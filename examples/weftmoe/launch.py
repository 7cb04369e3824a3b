"""`python -m weftmoe.launch VARIANT ...`: resolve, check, write down, and become torchrun.

The process replaces itself by torchrun (`weftmoe.agent`), so that whoever started it can end everything by ending it.
Each rank runs `weftmoe.worker`, which reads the settings that were written down here.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from weftmoe import settings as composed
from weftmoe.data.prompts import MADE, names_a_path
from weftmoe.env import ROLES, changed, role_environment
from weftmoe.loop.stop import NOTICE
from weftmoe.reward.math import load_verifier
from weftmoe.rundir import claim, settings_path, unsaid_changes
from weftmoe.schema import Settings
from weftpub.errors import ConfigError, WeftpubError

__all__ = ["command", "launch", "main", "require_driven", "resolve", "torchrun_command"]


def launch(
    variant: Annotated[str, typer.Argument(help="baseline, bf16 or fp8.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as block.key=value.")] = None,
    model: Annotated[str | None, typer.Option(help="Hugging Face directory, or the name of a configuration.")] = None,
    data: Annotated[str | None, typer.Option(help="DAPO-Math-17k parquet, or the name of a dataset.")] = None,
    length: Annotated[str | None, typer.Option(help="8k (the default) or 16k.")] = None,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    nodes: Annotated[int | None, typer.Option(help="Machines.", min=1)] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of each machine.", min=0)] = None,
    steps: Annotated[int | None, typer.Option(help="Steps to train.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Everything that the run writes; resumed from if it can be.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data, sampling and made models.", min=0)] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The tiny run.")] = False,
    node_rank: Annotated[int, typer.Option(help="Which machine this is, from 0.", min=0)] = 0,
    master: Annotated[str, typer.Option(help="Host and port of machine 0.")] = "127.0.0.1:29500",
    gpu_memory: Annotated[float, typer.Option(help="Of one GPU as it is sold, in GB, for the memory plan.")] = 141.0,
    ignore_plan: Annotated[bool, typer.Option("--ignore-plan", help="Start although the plan says no.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the resolved settings and leave.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started, and leave.")] = False,
) -> None:
    """Start a run, or resume the one in --out."""
    settings = resolve(
        variant,
        model=model,
        data=data,
        length=length,
        optimizer=optimizer,
        nodes=nodes,
        gpus=gpus,
        steps=steps,
        out=out,
        seed=seed,
        smoke=smoke,
        overrides=overrides or (),
    )
    if show:
        print(composed.render(settings), end="")
        return
    if not settings.smoke.enabled:
        _check_plan(settings, gpu_memory, ignore=ignore_plan)
    command = torchrun_command(settings, node_rank=node_rank, master=master)
    environment = role_environment(settings, "trainer")
    role_environment(settings, "engine")  # refuses now what would be refused where the engine is started
    for role in ROLES:
        for name, (theirs, ours) in changed(settings, role, os.environ).items():
            print(f"weftmoe: {name}={theirs!r} of this shell gives way to roles.{role}.env: {ours!r}", flush=True)
    if dry_run:
        _warn_of_refusal(settings)
        print(" ".join(command))
        return
    require_driven(settings)
    if node_rank == 0:  # whose first rank draws, judges and keeps the log for all
        _check_data(settings)
        _check_packages(settings)
    if settings.publish.experts == "shared":
        _check_sharing(settings)
    if not settings.smoke.enabled:
        _check_host(settings, ignore=ignore_plan)
    claim(settings, node_rank)
    for words in unsaid_changes(settings.out) if node_rank == 0 else ():
        print(f"weftmoe: resumed with another setting, {words}", flush=True)
    _become(command, environment)


def resolve(
    variant: str,
    *,
    model: str | None = None,
    data: str | None = None,
    length: str | None = None,
    optimizer: str = "muon",
    nodes: int | None = None,
    gpus: int | None = None,
    steps: int | None = None,
    out: Path | None = None,
    seed: int | None = None,
    smoke: bool = False,
    overrides: Sequence[str] = (),
) -> Settings:
    """Settings of a command line: options first, overrides last.

    Raises:
        ConfigError: as `weftmoe.settings.load`; or a checkpoint or a length with --smoke, which has its own.
    """
    if smoke and length is not None:
        raise ConfigError(
            f"--smoke has token limits of its own: leave --length {length} out, or set length.total, length.context "
            "and length.microbatch_tokens"
        )
    if smoke and model is not None and Path(model).expanduser().is_dir():
        raise ConfigError(
            f"--smoke makes a model of its own, of the family of a configuration: give --model one of "
            f"{', '.join(composed.MODELS)}, or train {model} without --smoke"
        )
    options = {"data.path": data, "steps": steps, "seed": seed, "out": None if out is None else str(out)}
    place = None
    if smoke:
        place = "cpu" if gpus == 0 or (gpus is None and not _has_gpu()) else "gpu"
    named = {} if model is None else {"model": model}
    return composed.load(
        variant,
        **named,
        length="8k" if length is None else length,
        optimizer=optimizer,
        smoke=place,
        nodes=nodes,
        gpus=gpus,
        options={key: value for key, value in options.items() if value is not None},
        overrides=overrides,
    )


def torchrun_command(settings: Settings, *, node_rank: int = 0, master: str = "127.0.0.1:29500") -> list[str]:
    """The command that starts this node's ranks."""
    cluster = settings.cluster
    command = [sys.executable, "-m", "weftmoe.agent", f"--nproc-per-node={cluster.ranks}"]
    if cluster.numa_binding and cluster.gpus:
        command += ["--numa-binding=node"]
    if cluster.nodes == 1:
        command += ["--standalone"]
    else:
        if not 0 <= node_rank < cluster.nodes:
            raise ConfigError(f"node_rank={node_rank} of {cluster.nodes} nodes; they count from 0")
        host, colon, port = master.rpartition(":")
        if not colon or not host or not port.isdigit():
            raise ConfigError(f"master={master!r}: write it as host:port")
        # Restarts are the script's and Slurm's, from a checkpoint: a rank alone cannot rejoin.
        command += [f"--nnodes={cluster.nodes}", f"--node-rank={node_rank}"]
        command += [f"--master-addr={host}", f"--master-port={port}"]
    return [*command, "--max-restarts=0", "-m", "weftmoe.worker", str(settings_path(settings.out, node_rank))]


def require_driven(settings: Settings) -> None:
    """Refuse, before an engine is started, what the loop does not drive.

    Raises:
        ConfigError: no kernels for a model's gated delta nets.
    """
    if settings.cluster.gpus and settings.model.architecture != "Qwen3MoeForCausalLM":
        # Loads torch; printing and planning need not wait for it.
        from weftpub_adapters.megatron import require_delta_net_kernels

        require_delta_net_kernels(deterministic=settings.train.deterministic)


def command(arguments: Sequence[str]) -> int:
    """Run a command line, under the name of the script that people call; its exit code. weftpub's own errors become
    one message.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(launch)
    try:
        app(args=list(arguments), prog_name="run.sh")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except WeftpubError as error:
        print(f"weftmoe: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def main() -> None:
    """Entry point of `python -m weftmoe.launch`."""
    sys.exit(command(sys.argv[1:]))


def _check_plan(settings: Settings, gpu_memory: float, *, ignore: bool) -> None:
    from weftmoe.needs import TYPED, budget_of
    from weftpub.budget import GIB
    from weftpub.budget.tables import verdicts

    budget = budget_of(settings, gpu_memory)
    (verdict,) = verdicts([budget], TYPED)
    if not budget.fits and not ignore:
        raise ConfigError(f"{verdict}. --ignore-plan starts it all the same")
    needed = budget.host_bytes * settings.cluster.ranks / GIB
    print(f"weftmoe: {verdict}; {needed:.0f} GiB of pinned host memory a machine", flush=True)


def _check_host(settings: Settings, *, ignore: bool) -> None:
    """Refuse a run whose masters this machine's memory cannot hold."""
    from weftmoe.needs import budget_of
    from weftpub.budget import GIB
    from weftpub_adapters.doctor.facts import host_memory

    needed = budget_of(settings).host_bytes * settings.cluster.ranks
    _, free = host_memory()
    if needed > free and not ignore:
        raise ConfigError(
            f"the run pins {needed / GIB:.0f} GiB of host memory here and {free / GIB:.0f} are free: use Muon, "
            "variant fp8, or a machine with more memory. --ignore-plan starts it all the same"
        )


def _check_sharing(settings: Settings) -> None:
    """Refuse now what this machine's driver, or its folder for temporary files, forbids: each process would take memory
    of its own, where the plan counted one.
    """
    from weftpub.memory import sharing_obstacle

    device = "cuda" if settings.cluster.gpus else "cpu"
    with tempfile.TemporaryDirectory(prefix="weftmoe-") as folder:
        obstacle = sharing_obstacle(device, folder)
    if obstacle is not None:
        raise ConfigError(f"publish.experts='shared': {obstacle}. Set publish.experts='copy'")


def _warn_of_refusal(settings: Settings) -> None:
    try:
        require_driven(settings)
    except WeftpubError as error:
        print(f"weftmoe: a start would be refused: {error}", file=sys.stderr, flush=True)


def _check_data(settings: Settings) -> None:
    """Refuse a missing file now: the ranks would find out after the model was made."""
    path = settings.data.path
    if settings.smoke.enabled and path == MADE:
        return
    if names_a_path(path):
        if not Path(path).exists():
            raise ConfigError(
                f"data.path={path}: there is no such file; give DAPO-Math-17k's parquet file or a data set's name"
            )
    elif find_spec("datasets") is None:
        raise ConfigError(
            f"data.path={path}: no file, and loading it by name needs the datasets package; install datasets, or give "
            "the file with --data"
        )


def _check_packages(settings: Settings) -> None:
    """Refuse now what rank 0 would miss later: the verifier after the first rollout, the others after the engine's
    start.
    """
    if settings.telemetry.wandb != "off" and find_spec("wandb") is None:
        raise ConfigError(
            f"telemetry.wandb={settings.telemetry.wandb!r}, but wandb is not installed; install wandb==0.29.0, or set "
            "telemetry.wandb=off"
        )
    if settings.reward.verifier == "math":
        load_verifier()
    if settings.data.path != MADE and _is_parquet(Path(settings.data.path)) and find_spec("pyarrow") is None:
        raise ConfigError(f"data.path={settings.data.path}: reading parquet files needs pyarrow; install pyarrow")


def _is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet" or path.is_dir()


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Blocked, it waits for whoever learns to hear it; ignored, as run.sh has it until here, it would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    signal.signal(NOTICE, signal.SIG_DFL)
    os.execve(command[0], list(command), dict(environment))


if __name__ == "__main__":
    main()
