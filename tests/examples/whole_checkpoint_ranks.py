"""Megatron's ranks read a checkpoint, and gather whole tensors again: `python whole_checkpoint_ranks.py OUT`, for
test_weftmoe_whole_checkpoint.py. Megatron and AWEX are imported once; every rank of every case is a forked process.

OUT/CASE.RANK.json holds by name the sha256 of what a rank has gathered, and OUT/CASE.json that of the checkpoint.
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from forked_ranks import fork_ranks
from safetensors import safe_open
from torch import is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAIT_S = 60.0


@dataclass(frozen=True)
class Case:
    """Sizes of a world, and what its model is."""

    world: int
    tensor: int
    expert: int
    architecture: str = "Qwen3MoeForCausalLM"
    tied: bool = False
    bucket: int = 100_000


CASES: dict[str, Case] = {
    "dp2-ep2": Case(2, 1, 2),
    "tp2-ep2": Case(2, 2, 2),
    "tp2-ep2-tied": Case(2, 2, 2, tied=True),
    "tp2-dp2-ep2": Case(4, 2, 2),
    "hybrid-tp2-ep2": Case(2, 2, 2, architecture="Qwen3_5MoeForCausalLM"),
    "adamw-resumed": Case(1, 1, 1),
}
RESUMED = "adamw-resumed"


def digest(tensor: torch.Tensor) -> str:
    """Of its values: some are published in FP32 that a checkpoint has in BF16."""
    tensor = tensor.float()
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def make_checkpoint(case: Case, directory: Path) -> dict[str, str]:
    """Digests of a random checkpoint, by name."""
    from transformers import AutoModelForCausalLM

    from weftmoe.smoke.model import model_config

    config = model_config(settings_of(case).smoke, 96, case.architecture)
    config.tie_word_embeddings = case.tied
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))
            if name.endswith("linear_attn.norm.weight"):  # the trainer keeps it less one in BF16
                parameter.copy_((parameter * 64).round().abs() / 64)
    model.save_pretrained(str(directory))
    found: dict[str, str] = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: digest(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    return found


def settings_of(case: Case) -> Any:
    from weftmoe import settings as composed

    sizes = ["smoke.hidden=128", "smoke.intermediate=128", "smoke.experts=4", "smoke.heads=4", "smoke.kv_heads=2"]
    made = composed.load(
        "baseline", smoke="cpu", overrides=[*sizes, "smoke.head_dim=32", f"cluster.cpu_ranks={case.world}"]
    )
    # No forward pass is made, so tensor parallel ranks need no sequence parallelism, which torch's norms have not.
    return made.model_copy(
        update={"train": made.train.model_copy(update={"tensor": case.tensor, "expert": case.expert})}
    )


def gathered(name: str, case: Case, rank: int, folder: Path) -> dict[str, str]:
    """Digests of what one rank has gathered, by name."""
    from weftmoe.loop.model import build_model, initialize
    from weftmoe.loop.weights import load_hf
    from weftmoe.rollout.gather import Bucket, BucketGather, make_buckets
    from weftpub.canonical import family_of
    from weftpub.publisher import TorchGroup
    from weftpub_adapters.awex import SourceMapping, trainer_shards
    from weftpub_adapters.megatron import read_config, read_fields

    store = torch.distributed.FileStore(str(folder / f"{name}.rendezvous"), case.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    settings, device, directory = settings_of(case), torch.device("cpu"), folder / name
    initialize(settings, device)
    hf_config = read_config(directory)
    fields = read_fields(hf_config)
    model = build_model(settings, fields, device)
    load_hf(model, directory, fields, grouped=False)
    buckets = make_buckets(
        trainer_shards(model, None, hf_config).shards, most=case.bucket, family=family_of(case.architecture)
    )
    found: dict[str, str] = {}

    def pack(bucket: Bucket, buffer: torch.Tensor) -> str:
        found.update((tensor, digest(whole)) for tensor, whole in bucket.named(buffer))
        return ""

    gather = BucketGather(buckets, TorchGroup(run_id=name), device, seconds=WAIT_S, verify=True)
    mapping = SourceMapping(model, None, hf_config)
    gather.run(mapping.one_by_one(), pack, lambda _: None, delivery=WAIT_S)
    # Without the comparison, whose checksum in plain torch takes sixteen times what it sums.
    gather = BucketGather(buckets, TorchGroup(run_id=f"{name}-again"), device, seconds=WAIT_S)
    mapping.release()
    with LiveBytes() as live:
        gather.run(mapping.one_by_one(), lambda *_: "", lambda _: None, delivery=WAIT_S)
    largest = max(bucket.nbytes for bucket in buckets)
    views = mapping.tensors()
    made = [views[name].nbytes for name, view in mapping.views.items() if view.param == name]
    found["memory"] = json.dumps({"peak": live.peak, "bucket": largest, "made": made})
    torch.distributed.barrier()
    return found


class LiveBytes(TorchDispatchMode):
    """The most bytes of storages at a time of those that operators made inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._storages.values()))
        return result


def resumed(name: str, case: Case, rank: int, folder: Path) -> dict[str, str]:
    """A baseline with torch's own AdamW trains a step, saves, and is read by another: names of masters and moments that
    differ. And what its sources take."""
    from weftmoe.loop import checkpoint
    from weftmoe.loop.ranks import Ranks
    from weftmoe.loop.trainer import MegatronGrpo
    from weftmoe.telemetry.record import Counters

    store = torch.distributed.FileStore(str(folder / f"{name}.rendezvous"), case.world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=case.world)
    settings, device = settings_of(case), torch.device("cpu")
    optimizer = settings.optimizer.model_copy(update={"name": "adamw", "lr": 1e-2})
    settings = settings.model_copy(update={"optimizer": optimizer, "out": folder / f"{name}-out"})
    first = MegatronGrpo(settings, folder / name, device)
    for _ in range(2):
        for number, parameter in enumerate(first.ddp.parameters()):
            parameter.main_grad.fill_(0.01 * (number % 7 + 1))
        first.optimizer.step()
    path = checkpoint.save(settings.out, first, checkpoint.LoopState(2, {}, Counters(), {}), Ranks())
    expected = state_of(first.optimizer)
    other = MegatronGrpo(settings, folder / name, device, read_weights=False)
    checkpoint.load(path, other, {})
    found = state_of(other.optimizer)
    torch.distributed.barrier()
    assert expected.keys() == found.keys()
    assert len(expected) > 10
    with LiveBytes() as live, other.sources() as sources:
        sizes = [tensor.nbytes for tensor in sources.tensors.values()]
    memory = {"peak": live.peak, "largest": max(sizes), "all": sum(sizes)}
    return {"memory": json.dumps(memory)} | {key: "differs" for key in expected if expected[key] != found[key]}


def state_of(optimizer: Any) -> dict[str, str]:
    """Masters, moments and steps of Megatron's optimizers."""
    return {
        f"{child}.{group}.{place}.{name}": digest(tensor)
        for child, one in enumerate(optimizer.chained_optimizers)
        for group, held in enumerate(one.optimizer.param_groups)
        for place, parameter in enumerate(held["params"])
        for name, tensor in {"master": parameter.detach(), **one.optimizer.state[parameter]}.items()
    }


def main() -> int:
    from weftpub_demo import cpu_megatron

    folder = Path(sys.argv[1])
    for name, case in CASES.items():
        expected = make_checkpoint(case, folder / name)
        (folder / f"{name}.json").write_text(json.dumps(expected), encoding="utf-8")
    cpu_megatron.install()
    import awex.meta.train_meta_resolver  # noqa: F401
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    for name, case in CASES.items():
        if name == RESUMED:
            continue
        if not fork_ranks(name, case.world, partial(gathered, name, case, folder=folder), folder):
            print(f"{name}: a rank failed", file=sys.stderr)
            return 1
    # In this process: a checkpoint's writers are processes that a forked one cannot start.
    found = resumed(RESUMED, CASES[RESUMED], 0, folder)
    (folder / f"{RESUMED}.0.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
