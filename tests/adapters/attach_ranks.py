"""One rank of an expert-parallel world of attached trainers over gloo: `python attach_ranks.py RANK WORLD FILE OUTPUT`.

Writes what it found as JSON: losses, norms, and the sha256 of every published tensor, by optimizer and variant.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

FAULTS = ("gradient", "begin", "quantizer", "master", "stall")


def main(rank: int, world: int, rendezvous: str, output: str) -> None:
    from weftpub_demo import cpu_megatron

    cpu_megatron.install()
    torch.set_num_threads(1)
    limit = timedelta(seconds=100)  # a rank that waits for one that has failed shall say so
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=limit
    )
    from attach_support import start

    start(expert_parallel=world)
    found = {optimizer: run(optimizer, rank, world) for optimizer in ("muon", "adam")}
    Path(output).write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()


def run(optimizer: str, rank: int, world: int) -> dict[str, Any]:
    """The three variants, and a NaN on rank 1 at the end of fp8."""
    from attach_support import FIELDS, build, train

    from weftpub.errors import NonFiniteGradientError
    from weftpub_adapters.megatron.attached import attach

    first = rank * FIELDS.experts // world
    found: dict[str, Any] = {}
    for variant in (None, "bf16", "fp8"):
        ddp, opt = build(optimizer, variant, first=first)
        attachment = attach(ddp, opt) if variant else None
        found[str(variant)] = {"steps": [train(ddp, opt) for _ in range(3)]}
        if variant == "fp8":
            assert attachment is not None
            found["experts"] = sorted({e.name.split(".")[5] for e in attachment.metadata()})
            found["sha256"] = attachment.store.sha256()
            found["storage"] = attachment.expert_storage_bytes
            if rank == 1:
                next(iter(attachment.placeholders.values())).main_grad[0, 0] = float("nan")
            try:
                opt.step()
            except NonFiniteGradientError as error:
                found["nan"] = str(error)
            found["after_nan"] = attachment.store.sha256() == found["sha256"]
        if attachment is not None:
            attachment.close()
    found["faults"] = {fault: fail(optimizer, fault, rank, first) for fault in FAULTS}
    return found


def fail(optimizer: str, fault: str, rank: int, first: int) -> dict[str, Any]:
    """Rank 1 alone fails in its second step; what each rank raises, and what its store and masters are afterwards."""
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8", first=first)
    attachment = attach(ddp, opt)
    train(ddp, opt)
    gradients(ddp, opt)
    store = attachment.store
    if rank == 1:
        if fault == "gradient":
            lose_a_gradient(attachment)
        elif fault == "begin":
            store.begin = refuse
        elif fault == "quantizer":
            store._encoder.write = refuse
        elif fault == "master":
            next(master for name, master in attachment.masters().items() if "experts" in name)[0, 0] = float("nan")
        else:
            attachment._refresh = refuse
    found: dict[str, Any] = {}
    try:
        opt.step()
    except Exception as error:
        found |= {"kind": type(error).__name__, "text": str(error)}
    found |= {"state": str(store.state), "generation": store.generation}
    found["torn"] = [child.masters.torn is not None for child in attachment._children]
    return found


def lose_a_gradient(attachment: Any) -> None:
    """One parameter has none when Megatron has prepared them all."""
    prepare, key = attachment._inner_prepare, attachment._children[0].units[0].key

    def prepared() -> bool:
        found = prepare()
        key.grad = key.decoupled_grad = None
        return bool(found)

    attachment._inner_prepare = prepared


def refuse(*_: Any, **__: Any) -> None:
    raise ArithmeticError("what this rank does fails")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
