"""One rank of eight_gpus.py, started by torchrun: `eight_gpus_ranks.py SECTION SETTINGS.json`.

Writes OUT/SECTION-rankN.json after every check, so that a run that is cut short tells where it was. The process binds
itself to its GPU's NUMA node before anything allocates.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from eight_gpus_numa import bind_to_node

HERE = Path(__file__).resolve().parent
STARTED = time.monotonic()
_HANG_S = 240.0  # of one collective: then the rank that is missing has failed without a word
_plain: dict[str, Any] = {}  # the process group for plain data


class RankReport:
    """Checks and numbers of one rank. A failed check is remembered and the run goes on, so that ranks stay in step."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self.data: dict[str, Any] = {"rank": rank, "checks": {}, "unknown": [], "failed": [], "finished": False}
        self.write()

    def check(self, name: str, passed: bool | None, detail: Any = None) -> None:
        """Note a check; None says that this machine does not let it be made."""
        self.data["checks"][name] = {"passed": passed, "detail": detail}
        if not passed:
            self.data["unknown" if passed is None else "failed"].append(name)
        if self._rank == 0 or not passed:
            word = "ok  " if passed else "?   " if passed is None else "FAIL"
            self.say(f"{word} {name}" + ("" if detail is None else f": {detail}"))
        self.write()

    def note(self, name: str, value: Any) -> None:
        """Keep a number or a table of this rank."""
        self.data[name] = value
        self.write()

    def say(self, what: str) -> None:
        """A line of progress with the time and the rank."""
        print(f"{time.monotonic() - STARTED:7.1f} s [{self._rank}] {what}", flush=True)

    def write(self) -> None:
        """Replace the file whole."""
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.data, indent=1), encoding="utf-8")
        part.replace(self._path)


def start_world(settings: dict[str, Any]) -> None:
    """Device, the default process group, one over gloo for plain data, and Megatron's groups."""
    import torch

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    patience = timedelta(seconds=_HANG_S)
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    _plain["group"] = torch.distributed.new_group(backend="gloo", timeout=patience)
    if "tensor" not in settings:
        return
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        settings["tensor"],
        1,
        expert_model_parallel_size=torch.distributed.get_world_size(),
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def gather(value: Any) -> list[Any]:
    """Every rank's value, in their order. Ranks wait on the host: a GPU that waits would keep an engine from it."""
    import torch

    held: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(held, value, group=_plain["group"])
    return held


def broadcast(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    import torch

    held = [value]
    torch.distributed.broadcast_object_list(held, src=0, group=_plain["group"])
    return held[0]


def meet() -> None:
    """Return when all ranks have come."""
    import torch

    torch.distributed.barrier(group=_plain["group"])


def sections() -> dict[str, Callable[[RankReport, dict[str, Any]], None]]:
    """Section name to what its ranks do; imported late, Megatron takes ten seconds."""

    def train(report: RankReport, settings: dict[str, Any]) -> None:
        from eight_gpus_train import section_train

        section_train(report, settings)

    def publish(report: RankReport, settings: dict[str, Any]) -> None:
        from eight_gpus_publish import section_publish

        section_publish(report, settings)

    def staging(report: RankReport, settings: dict[str, Any]) -> None:
        from eight_gpus_staging import section_staging

        section_staging(report, settings)

    def plan(report: RankReport, settings: dict[str, Any]) -> None:
        from eight_gpus_plan import section_plan

        section_plan(report, settings)

    return {"train": train, "publish": publish, "staging": staging, "plan": plan}


def main(section: str, path: str) -> int:
    settings: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    report = RankReport(Path(settings["out"]) / f"{section}-rank{rank}.json", rank)
    if section != "publish":  # an engine that rank 0 starts would keep to these CPUs, too
        report.note("cpus", bind_to_node(settings["nodes"][rank] if settings["nodes"] else None))
    try:
        if section != "staging":
            import megatron_adapter  # stands in for CUDA where there is none, before Megatron is imported

            del megatron_adapter
        else:
            settings = {name: value for name, value in settings.items() if name != "tensor"}
        start_world(settings)
        sections()[section](report, settings)
    except BaseException as error:  # torchrun ends the others; the account of this one is kept
        report.check(f"{section}: ran to its end", False, traceback.format_exc()[-4000:])
        if not isinstance(error, Exception):
            raise
        return 1
    report.data["finished"] = True
    report.write()
    meet()
    return 0


def be_told(signum: int, frame: object) -> None:
    """torchrun ends ranks when another one failed: then an engine that this one started has to end, too."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    from eight_gpus_ranks import main as run  # the module that sections import, not this copy of it

    signal.signal(signal.SIGTERM, be_told)
    status = run(*sys.argv[1:3])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what a failed rank leaves behind (NCCL, an engine's threads) must not hold it
