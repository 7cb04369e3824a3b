"""Two ranks that share attention, delta nets, shared experts and routed experts of a Qwen3.5-MoE, over gloo.

Argument: a directory, which gets the checkpoint, transformers' logits, and a rank's part of Megatron's from each rank:
`expected.pt`, `rank0.pt`, `rank1.pt`. Each rank also plans what it would publish, and writes what it holds of it.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hybrid_checkpoints import make_model, save_text_form

RANKS, LENGTH = 2, 70


def tokens() -> torch.Tensor:
    return torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def settings_of(ranks: int) -> Any:
    """A run whose ranks split everything; refused outside of tests, where a trainer on a CPU is one process."""
    from weftmoe import settings as composed

    base = composed.load("bf16", smoke="cpu")
    train = base.train.model_copy(update={"tensor": ranks, "expert": ranks, "sequence_parallel": True})
    return base.model_copy(update={"train": train, "cluster": base.cluster.model_copy(update={"gpus": ranks})})


def run(directory: Path, rank: int) -> None:
    from weftmoe.loop import model as loop_model
    from weftmoe.loop.weights import load_hf
    from weftpub_adapters.awex import SourceMapping, trainer_shards
    from weftpub_adapters.megatron import read_config, read_fields

    store = torch.distributed.FileStore(str(directory / "rendezvous"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    settings, device = settings_of(RANKS), torch.device("cpu")
    loop_model.initialize(settings, device)
    config = read_config(directory / "checkpoint")
    fields = read_fields(config)
    original = loop_model.config_fields
    wide = {"bf16": False, "params_dtype": torch.float32, "pipeline_dtype": torch.float32}
    with mock.patch.object(loop_model, "config_fields", lambda *given: {**original(*given), **wide}):
        model = loop_model.build_model(settings, fields, device)
    load_hf(model, directory / "checkpoint", fields, grouped=False)
    model.eval()
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        part = model(tokens(), torch.arange(LENGTH)[None].repeat(2, 1), mask)
    shards = trainer_shards(model, None, config).shards
    own = {shard.name: shard.offset for shard in shards if shard.rank == rank}
    held = SourceMapping(model, None, config).tensors()
    published = {name: (own[name], tensor.clone()) for name, tensor in held.items()}
    torch.save({"logits": part, "published": published}, directory / f"rank{rank}.pt")
    torch.distributed.barrier()


def main() -> None:
    from weftpub_demo import cpu_megatron

    cpu_megatron.install()
    directory = Path(sys.argv[1])
    reference = make_model()
    save_text_form(reference, directory / "checkpoint")
    with torch.no_grad():
        torch.save(reference(input_ids=tokens()).logits, directory / "expected.pt")
    import megatron.core.models.gpt.gpt_model  # noqa: F401  # once for all ranks

    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(directory, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes))
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
