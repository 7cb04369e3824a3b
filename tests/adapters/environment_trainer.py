"""The trainer of `test_two_environments`: Megatron's model, a store, AWEX's plan and a publisher, in an environment
that holds no SGLang. It reaches the engine over HTTP, and its workers over their sockets.

    TRAINER_PYTHON environment_trainer.py CONFIG

Standard input: one JSON line that says where the engine is, then one line for every version to publish.
Standard output: one JSON line when the trainer has met the engine, then one for every version, whose tensors are in a
file by then.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_tensors
from environments import facts
from megatron_support import bare_trainer, megatron_ready, write_generation
from safetensors.torch import save_file

from weftpub.channel import Deadlines
from weftpub.publisher import Publisher, PublishReport
from weftpub.store import ExpertStore
from weftpub_adapters.sglang.driver import ColocatedEngine, DriverDeadlines, HttpEngine

__all__ = ["main"]

RUN = "two-environments"
DEADLINES = DriverDeadlines(start=60, drain=60, flush=20, memory=20, release=60, resume=60, control=60, shutdown=30)


def _prepare(config: dict[str, Any]) -> tuple[Any, ExpertStore]:
    """Megatron's model and the store of its experts, both with random bytes."""
    from weftpub_adapters.megatron import Qwen3MoeFields, fill_parameters, read_parameters

    megatron_ready()
    model, store = bare_trainer(config)
    fill_parameters(model, read_parameters(random_tensors(config), Qwen3MoeFields.from_hf(config)))
    return model, store


def _step(step: ColocatedEngine, version: int, sources: Any) -> PublishReport:
    """The five calls of a colocated step."""
    step.drain("retract")
    step.release()
    report = step.publish(version, sources.buffers(), verify_sha256=True)
    step.resume()
    step.continue_()
    return report


def main(path: str) -> None:
    """Publish as often as it is asked for."""
    say, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    from weftpub_adapters.awex import SourceMapping, plan_publish

    model, store = _prepare(config)
    (norm,) = (one for name, one in model.named_parameters() if name.endswith("final_layernorm.weight"))
    asked = json.loads(sys.stdin.readline())
    folder = Path(asked["folder"])
    engine = HttpEngine(asked["url"], asked["api_key"], admin_key=asked["admin_key"], deadlines=DEADLINES)
    peers = engine.start_receivers(RUN, folder / "s")
    with Publisher(RUN, None, peers, commit_path=folder / "commit.json", deadlines=Deadlines.all(60.0)) as publisher:
        publisher.set_plan(plan_publish(model, store, config, publisher.describe()))
        sources = SourceMapping(model, store, config)
        step = ColocatedEngine(engine, publisher, deadlines=DEADLINES)
        print(json.dumps(facts()), file=say, flush=True)
        for version in itertools.count(1):
            write_generation(store, version, seed=version)
            with torch.no_grad():
                norm[0] = version  # tokens show it
            save_file(sources.tensors(), folder / f"version-{version}.safetensors")
            if not sys.stdin.readline():
                break
            report = _step(step, version, sources)
            said = {"version": report.version, "transports": list(report.transports.values()), "sha256": report.sha256}
            print(json.dumps(said), file=say, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
