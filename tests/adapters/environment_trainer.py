"""The trainer of `test_two_environments`: Megatron's model, a store, AWEX's plan and a publisher, in an environment
that holds no SGLang. It reaches the engine over HTTP, and its workers over their sockets.

Standard input: one JSON line that says where the engine is, then one line for every version to publish.
Standard output: one JSON line when the trainer is ready, then one for every published version; its tensors are in a
file.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from checkpoints import random_tensors
from environments import facts
from megatron_support import bare_trainer, megatron_ready, write_generation
from safetensors.torch import save_file

from weftpub.channel import Deadlines
from weftpub.errors import ChannelError
from weftpub.publisher import Publisher
from weftpub.store import ExpertStore
from weftpub_adapters.sglang.driver import ColocatedEngine, DriverDeadlines, HttpEngine

__all__ = ["main"]

RUN = "two-environments"
DEADLINES = DriverDeadlines(start=60, drain=60, flush=20, memory=20, release=60, resume=60, control=60, shutdown=30)
_START_S = 240.0  # of a server, on a machine that is busy with other tests


def _await(engine: HttpEngine) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            engine.server_info()
            return
        except ChannelError as error:
            if "got no answer" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.2)


def _prepare(config: dict[str, Any]) -> tuple[Any, ExpertStore]:
    """Megatron's model and the store of its experts, both with random bytes."""
    from weftpub_adapters.megatron import Qwen3MoeFields, fill_parameters, read_parameters

    megatron_ready()
    model, store = bare_trainer(config)
    fill_parameters(model, read_parameters(random_tensors(config), Qwen3MoeFields.from_hf(config)))
    return model, store


def main() -> None:
    """Publish what is asked for."""
    say, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    asked = json.loads(sys.stdin.readline())
    config, folder = asked["config"], Path(asked["folder"])
    from weftpub_adapters.awex import SourceMapping, plan_publish

    model, store = _prepare(config)
    engine = HttpEngine(asked["url"], asked["api_key"], admin_key=asked["admin_key"], deadlines=DEADLINES)
    _await(engine)
    peers = engine.start_receivers(RUN, folder / "s")
    with Publisher(RUN, None, peers, commit_path=folder / "commit.json", deadlines=Deadlines.all(60.0)) as publisher:
        publisher.set_plan(plan_publish(model, store, config, publisher.describe()))
        sources = SourceMapping(model, store, config)
        (norm,) = (one for name, one in model.named_parameters() if name.endswith("final_layernorm.weight"))
        step = ColocatedEngine(engine, publisher, deadlines=DEADLINES)
        print(json.dumps(facts()), file=say, flush=True)
        for version, _ in enumerate(sys.stdin, 1):
            write_generation(store, version, seed=version)
            with torch.no_grad():
                norm[0] = version  # tokens show it
            step.drain("retract")
            step.release()
            report = step.publish(version, sources.buffers(), verify_sha256=True)
            step.resume()
            step.continue_()
            save_file(sources.tensors(), folder / f"version-{version}.safetensors")
            answer = {
                "version": report.version,
                "transports": list(report.transports.values()),
                "sha256": report.sha256,
            }
            print(json.dumps(answer), file=say, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
