"""Section `plan` of eight_gpus.py: the plans of the other sections at their full size, proven on any machine.

Trainer ranks are processes whose parameters have no content; the engine's ranks are SGLang's own modules on the meta
device, described in a process of their own (`eight_gpus_plan.py SETTINGS.json DESCRIPTIONS.json`). Every plan is
checked for exactly-once coverage, as ever, and its bytes are counted by GPU.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__all__ = ["section_plan"]


def section_plan(report: Any, settings: dict[str, Any]) -> None:
    """Plans for every layout; rank 0 makes them, from what all ranks say of themselves."""
    import torch
    from eight_gpus_config import hf_config
    from eight_gpus_limits import traffic_of
    from eight_gpus_trainer import make_model

    from weftpub.errors import PlanError
    from weftpub.receive import EngineDescription
    from weftpub.store import StoreLayout
    from weftpub_adapters.awex import build_plan, engine_shards, trainer_shards

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    out, shape = Path(settings["out"]), settings["shape"]
    describing = describe_elsewhere(out) if rank == 0 else None
    model = make_model(settings, fill=False)
    held = shape["experts"] // world
    experts = tuple(range(held * rank, held * (rank + 1)))
    layout = StoreLayout(
        layers=tuple(range(shape["layers"])),
        experts=experts,
        hidden=shape["hidden"],
        intermediate=shape["intermediate"],
    )
    store: Any = SimpleNamespace(layout=layout)  # planning reads a store's layout alone
    shards = trainer_shards(model.module, store, hf_config(settings))
    report.check("this rank's expert tensors are the store's", True, f"experts {experts[0]} to {experts[-1]}")
    if describing is None:
        return
    if describing.wait(300):
        raise RuntimeError(f"SGLang's modules could not be described: status {describing.returncode}")
    described = json.loads((out / "descriptions.json").read_text(encoding="utf-8"))
    for name in settings["layouts"]:
        began = time.monotonic()
        ranks = [EngineDescription.model_validate(one) for one in described[name]]
        try:
            plan = build_plan(shards, engine_shards(ranks))
        except PlanError as error:
            report.check(f"{name}/every element is sent exactly once", False, str(error))
            continue
        detail = f"{len(plan.moves)} moves, {sum(move.nbytes for move in plan.moves)} bytes"
        report.check(f"{name}/every element is sent exactly once", True, detail)
        report.note(f"{name}_traffic", {"plan_s": round(time.monotonic() - began, 2), **traffic_of(plan).as_dict()})


def describe_elsewhere(out: Path) -> "subprocess.Popen[bytes]":
    """Describe the engine's ranks; AWEX and SGLang's layers do not share a process."""
    command = [sys.executable, __file__, str(out / "settings.json"), str(out / "descriptions.json")]
    return subprocess.Popen(command)


def describe(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Layout name to the description of each engine rank."""
    from eight_gpus_config import hf_config

    from weftpub_adapters.sglang import build_model, describe_model

    world, config = settings["ranks"], hf_config(settings)
    found: dict[str, list[Any]] = {}
    for name in settings["layouts"]:
        groups = world if name == "dp" else 1
        models = [
            build_model(config, tp_size=world, ep_size=world, rank=rank, attention_dp=groups, device="meta")
            for rank in range(world)
        ]
        found[name] = [describe_model(model, engine=f"sglang-{name}").model_dump(mode="json") for model in models]
    return found


if __name__ == "__main__":
    made = describe(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(made), encoding="utf-8")
