"""Two expert-parallel ranks and a single rank, each in a forked process, for the test of the same name.

Arguments: a checkpoint directory, and a directory for the results: `rank0`, `rank1` and `single`, each with
`report.json` and `gradients.safetensors`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from layouts import LAYOUTS, load_descriptions
from megatron_support import batch
from safetensors.torch import save_file

LAYOUT = "tp4-ep2"


def run(checkpoint: Path, out: Path, rank: int, world: int) -> None:
    from weftpub.errors import NonFiniteGradientError
    from weftpub_adapters.awex import canonical_sources, plan_publish
    from weftpub_adapters.megatron import MegatronTrainer, TrainerSettings, initialize_parallel, probe_layer

    if world > 1:
        store = torch.distributed.FileStore(str(out.parent / "rendezvous"), world)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    initialize_parallel(expert_parallel=world)
    trainer = MegatronTrainer(checkpoint, TrainerSettings(muon=None))
    tokens, labels = batch(2, 32, 500)
    own = slice(rank, rank + 1) if world > 1 else slice(0, 2)
    loss = trainer.forward_backward(tokens[own], labels[own])
    gradients = {name: gradient.clone() for name, gradient in trainer.gradients().items()}
    report: dict[str, Any] = {"loss": loss, "experts": list(trainer.store.layout.experts)}
    if world > 1:
        bad = next(iter(trainer.gradients().values()))
        kept = bad.flatten()[0].item()
        if rank == 1:
            bad.flatten()[0] = float("nan")
        try:
            trainer.step()
            report["refusal"] = None
        except NonFiniteGradientError as error:
            report["refusal"] = str(error)
        report["generation after refusal"] = trainer.store.generation
        bad.flatten()[0] = kept
    step = trainer.step()
    report |= {"norm": step.clip.norm, "factor": step.clip.factor, "generation": step.generation}
    description = load_descriptions()[LAYOUT]
    plan = plan_publish(trainer.model, trainer.store, LAYOUTS[LAYOUT].config, description)
    report["plan"] = plan.to_json()
    sources = canonical_sources(trainer.model, trainer.store, LAYOUTS[LAYOUT].config)
    report["sources"] = {name: list(tensor.shape) for name, tensor in sources.items()}
    report["probe"] = sorted(probe_layer(trainer, 0, torch.ones(2, 256)).sha256)
    out.mkdir()
    save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, out / "gradients.safetensors")
    (out / "report.json").write_text(json.dumps(report))
    if world > 1:
        torch.distributed.barrier()


def main() -> int:
    from weftpub_demo import cpu_megatron

    cpu_megatron.install()  # imported once, before the forks
    checkpoint, results = Path(sys.argv[1]), Path(sys.argv[2])
    children = []
    for name, rank, world in (("rank0", 0, 2), ("rank1", 1, 2), ("single", 0, 1)):
        child = os.fork()
        if child == 0:
            try:
                run(checkpoint, results / name, rank, world)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
