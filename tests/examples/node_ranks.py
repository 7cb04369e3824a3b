"""Whole runs on several nodes of one machine: `python node_ranks.py OUT`, for test_weftmoe_nodes.py.

Megatron and AWEX are imported once, SGLang once (`sampler_zygote.py`); every rank of every case is a forked process,
and so is every node's sampler. Answers are judged by their letters, so that there is something to learn from the first
step on. OUT/CASE.RANK.json holds what a rank's run returned or raised; OUT/CASE is the run's directory.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_ranks

ZYGOTE = Path(__file__).with_name("sampler_zygote.py")
SMALL = [
    *("smoke.layers=1", "smoke.hidden=128", "smoke.intermediate=128", "smoke.experts=4", "smoke.heads=4"),
    *("smoke.kv_heads=2", "smoke.head_dim=32", "smoke.problems=64", "smoke.warmup_steps=0"),
    *("algorithm.prompts=4", "algorithm.completions=4", "telemetry.tensorboard=false", "telemetry.progress=false"),
    *("checkpoint.save=off", "publish.deadline=20", "rollout.ready_timeout=60", "length.total=64"),
]


BUCKET = 100_000
# The sampler's log-probs have other last bits in another company; the tokens that it draws have not.
ALONE = "algorithm.tis_cap=null"


@dataclass(frozen=True)
class Case:
    """Sizes of a world, and what goes wrong: `fails` is a version that the last node's engine fails to take, `dies` a
    step in whose rollout it dies. A run `again` goes on where the run of that name ended.
    """

    variant: str
    nodes: int
    each: int
    optimizer: str = "muon"
    steps: int = 2
    overrides: tuple[str, ...] = ()
    fails: int | None = None
    dies: int | None = None
    again: str | None = None

    @property
    def world(self) -> int:
        return self.nodes * self.each


CASES = {
    "one-node": Case("fp8", 1, 2, overrides=("train.expert=1", ALONE)),
    "two-nodes": Case("fp8", 2, 1, steps=1, overrides=(ALONE, "checkpoint.save=1")),
    "two-nodes-resumed": Case(
        "fp8", 2, 1, overrides=(ALONE, "checkpoint.save=2", "publish.experts=shared"), again="two-nodes"
    ),
    "adamw": Case("fp8", 2, 1, "adamw", steps=1, overrides=("optimizer.lr=1e-3",)),
    "two-by-two": Case("bf16", 2, 2, steps=1, overrides=("train.expert=2",)),
    "baseline": Case("baseline", 2, 2, overrides=("train.expert=2", "checkpoint.save=2", "optimizer.lr=2e-3")),
    "fails": Case("fp8", 2, 1, steps=1, fails=1),
    "dies": Case("fp8", 2, 1, steps=1, dies=1),
}


def settings_of(case: Case, out: Path) -> Any:
    from weftmoe import settings as composed

    sizes = [f"cluster.cpu_ranks={case.each}", f"steps={case.steps}", f"out={out}"]
    return composed.load(
        case.variant,
        optimizer=case.optimizer,
        smoke="cpu",
        nodes=case.nodes,
        overrides=[*SMALL, *sizes, *case.overrides],
    )


def run(name: str, case: Case, port: int, rank: int, folder: Path) -> dict[str, Any]:
    """One rank of a case."""
    from weftmoe.loop.run import run as run_loop
    from weftpub.errors import WeftpubError

    # As torchrun sets it.
    place = {"RANK": rank, "LOCAL_RANK": rank % case.each, "WORLD_SIZE": case.world, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": name})
    as_forked(case, rank, str(folder / "zygote"))
    try:
        result = run_loop(settings_of(case, folder / (case.again or name)))
    except WeftpubError as error:
        return {"error": f"{type(error).__name__}: {error}", "notes": list(getattr(error, "__notes__", ()))}
    finally:
        for writer in multiprocessing.active_children():  # of checkpoints, which wait for more of them
            writer.kill()
            writer.join()
    return {"steps": result.steps, "version": result.version}


def as_forked(case: Case, rank: int, zygote: str) -> None:
    """Samplers are forked from one that has SGLang; the last node's fails as the case says."""
    from weftmoe.reward import rules
    from weftmoe.rollout import torch_sampler

    last, process = rank == case.world - case.each, torch_sampler.ReceiverProcess
    more = ("--fail", str(case.fails)) if last and case.fails is not None else ()

    def start(sampler: str, command: list[str], **options: Any) -> Any:
        return process(sampler, [sys.executable, "-S", "-E", str(ZYGOTE), zygote, *command[3:], *more], **options)

    def reward(completion: str, truth: str) -> float:
        return float(sum(map(ord, completion)) % 3 == 0)

    torch_sampler.ReceiverProcess = start  # type: ignore[assignment, misc]
    rules.exact_reward = reward
    make = torch_sampler.make_buckets  # whose size is set in MiB, and all of this model is smaller
    torch_sampler.make_buckets = lambda shards, **more: make(shards, **{**more, "most": BUCKET})
    if last and case.dies is not None:
        answer, calls = torch_sampler.TorchRollout._answer, []

        def dying(self: Any, requests: Any) -> Any:
            calls.append(1)
            if len(calls) == case.dies:
                os.kill(self._ask("hello", 30.0)["pid"], signal.SIGKILL)
            return answer(self, requests)

        torch_sampler.TorchRollout._answer = dying  # type: ignore[method-assign]


def free_port() -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    environment = {**os.environ, "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1", "SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    zygote = subprocess.Popen(
        [sys.executable, str(ZYGOTE), str(folder / "zygote")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    try:
        return run_all(folder, only, zygote.stdout)
    finally:
        assert zygote.stdin is not None
        zygote.stdin.close()
        zygote.wait(30)


def run_all(folder: Path, only: list[str], ready: Any) -> int:
    from weftmoe.smoke.model import make_model

    plain = settings_of(CASES["two-nodes"], folder)
    make_model(folder / "model", plain.smoke, seed=plain.seed, tokens=plain.length.context, device="cpu")
    from weftpub_demo import cpu_megatron

    cpu_megatron.install()
    import awex.meta.train_meta_resolver  # noqa: F401
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer  # noqa: F401

    import weftmoe.loop.run
    import weftmoe.rollout.torch_sampler  # noqa: F401

    assert ready.readline() == b"ready\n"
    for name, case in CASES.items():
        if only and name not in only:
            continue
        work = partial(run, name, case, free_port(), folder=folder)
        if case.again is None:
            (folder / name).mkdir()
            (folder / name / "model").symlink_to(folder / "model")
        if not fork_ranks(name, case.world, work, folder):
            print(f"{name}: a rank failed", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
