"""The trainer of the `engine` section of zero_copy.py, a process of its own so that it can be killed: a store of random
masters over the shared memory, the other weights under their checkpoint names, and a publisher.

What is shown is memory, versions, bytes and tokens, not training: masters follow from a seed, and a trainer that comes
back makes those of its checkpoint again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from zero_copy_base import DEVICE, GPU, NAME, expert_shards, masters_of

from weftpub.channel import Deadlines
from weftpub.checkpoint import export_hf
from weftpub.memory import SharedAllocation, SharedAllocator
from weftpub.plan import Destination, Plan, Shard, ViewSpec, make_plan, torch_dtype
from weftpub.plan.coincide import find_coincidences, places_of
from weftpub.publisher import Peer, Publisher, SourceBuffers
from weftpub.receive import EngineDescription
from weftpub.store import ExpertStore, StoreLayout
from weftpub.store.shared import shared_catalogue
from weftpub.transport import source_places
from weftpub.wire.identity import local_identity

__all__ = ["EngineTrainer"]


class EngineTrainer:
    """Joins the memory, or makes it.

    Args:
        folder: where trainer and engine meet.
        config: the model's `config.json`.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        layout = StoreLayout(
            tuple(range(config["num_hidden_layers"])),
            tuple(range(config["num_experts"])),
            config["hidden_size"],
            config["moe_intermediate_size"],
        )
        self._memory = SharedAllocation.join(folder, NAME, DEVICE, shared_catalogue(layout))
        self._store = ExpertStore(
            layout.layers,
            layout.experts,
            layout.hidden,
            layout.intermediate,
            device=DEVICE,
            allocator=SharedAllocator(self._memory),
            wt="rebuild",
            measure_change=False,
        )
        self._publisher: Publisher | None = None
        self._others: dict[str, tuple[tuple[int, ...], torch.dtype]] = others_of(config)

    def made(self) -> bool:
        """Whether this process made the memory."""
        return self._memory.created

    def expert_bytes(self) -> int:
        """Bytes of W and scales."""
        return sum(entry.nbytes for entry in self._memory.catalogue.entries)

    def standing(self) -> dict[str, Any]:
        """What the memory's header says."""
        now = self._memory.standing()
        return {
            "state": str(now.state),
            "committed": None if now.committed is None else now.committed.version,
            "obstacle": now.obstacle(local_identity()),
            "serving": len(now.serving),
        }

    def begin(self, generation: int) -> str:
        """Try to begin a generation; the error's text, "" if it was allowed."""
        try:
            self._store.begin(generation)
        except Exception as error:  # which one is the question
            return f"{type(error).__name__}: {error}"
        self._store.cancel()
        return ""

    def write(self, generation: int, seed: int, recover: bool = False) -> float:
        """Quantize a generation into the shared memory; milliseconds.

        What was there is proven first: releasing and resuming an engine's memory touched nothing that is shared.
        """
        if str(self._store.state) == "sealed":
            self._store.verify()
        start = time.perf_counter()
        masters, writer = masters_of(self._store, seed), self._store.writer()
        self._store.begin(generation, recover=recover or str(self._store.state) == "torn")
        for matrix in self._store.layout.matrices:
            writer(matrix.name, masters(matrix.name))
        self._store.seal()
        return (time.perf_counter() - start) * 1e3

    def verify(self) -> int | None:
        """Prove the sealed bytes; the generation."""
        self._store.verify()
        return self._store.generation

    def export(self, directory: str, seed: int) -> None:
        """The sealed generation and the seed's other weights, as SGLang loads them."""
        export_hf(Path(directory), self._store, self.others(seed), self._config, version=seed, overwrite=True)

    def connect(self, run: str, peers: Sequence[Peer], commit: str) -> dict[str, Any]:
        """A publisher to an engine, and a plan; what the engine says of itself."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = Publisher(run, None, peers, commit_path=commit, deadlines=Deadlines.all(60))
        (described,) = self._publisher.describe()
        plan = self._plan(described)
        self._publisher.set_plan(plan)
        keys = ("shared_experts", "shared_memory", "plugin")
        return {key: described.settings.get(key) for key in keys} | {"plan": self._explained(plan, described)}

    def _explained(self, plan: Plan, described: EngineDescription) -> list[str]:
        """What of the plan is in place, and why the rest is copied; nothing before a generation is sealed."""
        if str(self._store.state) != "sealed":
            return []
        tensors = {item.name: item.tensor for item in self._store.canonical()} | self.others(0)
        sources = SourceBuffers.of_tensors(tensors)
        places = {described.rank: places_of(described.device, described.settings)}
        return find_coincidences(plan, {0: source_places(sources.views, sources.buffers)}, places).explain()

    def pause(self) -> None:
        """Have the engine's receiver keep it at rest."""
        self._required().pause()

    def resume(self) -> None:
        """Have the engine's receiver let it go on."""
        self._required().resume()

    def publish(self, version: int, seed: int) -> dict[str, Any]:
        """Publish the sealed generation with the seed's other weights, sha256 of every piece compared."""
        sources = {item.name: item.tensor for item in self._store.canonical()} | self.others(seed)
        start = time.perf_counter()
        done = self._required().publish(version, sources, self._store.checksums, verify_sha256=True, resume=False)
        wall = (time.perf_counter() - start) * 1e3
        own = self._store.sha256()
        return {
            "same": all(done.sha256.get(name) == digest for name, digest in own.items()),
            "tensors": len(done.sha256),
            "moved": done.nbytes,
            "shared": done.shared_nbytes,
            "with_sha256_ms": wall,
            "ms": done.ms,
        }

    def others(self, seed: int) -> dict[str, torch.Tensor]:
        """The other weights of a version."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        found: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in self._others.items():
            if name.endswith("norm.weight"):
                value = torch.full(shape, 1.0 + seed % 50, device=DEVICE)
            else:
                value = torch.randn(shape, generator=generator, device=DEVICE) * 0.05
            found[name] = value.to(dtype)
        if GPU:
            torch.cuda.synchronize()
        return found

    def _plan(self, described: EngineDescription) -> Plan:
        pairs = list(expert_shards(self._store.layout))
        kept: Any = described.settings["kept"]
        for spec in described.parameters:
            if spec.name in kept or ".mlp.experts." in spec.name:
                continue
            row = 0
            for name, rows in parts_of(spec.name, spec.shape, self._others).items():
                shape = (rows, *spec.shape[1:])
                shard = Shard(name, spec.dtype, shape, shape, (0,) * len(shape), 0)
                view = ViewSpec(spec.name, row * spec.stride[0], shape, spec.stride, spec.dtype)
                pairs.append((shard, Destination(shard, view)))
                row += rows
                assert torch_dtype(spec.dtype) == self._others[name][1], name
        return make_plan([shard for shard, _ in pairs], [destination for _, destination in pairs])

    def _required(self) -> Publisher:
        assert self._publisher is not None
        return self._publisher


def others_of(config: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Checkpoint name, shape and dtype of everything but the routed experts."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, pairs = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        found |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (heads, hidden),
            prefix + "self_attn.k_proj.weight": (pairs, hidden),
            prefix + "self_attn.v_proj.weight": (pairs, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads),
            prefix + "self_attn.q_norm.weight": (head,),
            prefix + "self_attn.k_norm.weight": (head,),
            prefix + "mlp.gate.weight": (config["num_experts"], hidden),
        }
    return {name: (shape, torch.bfloat16) for name, shape in found.items()}


def parts_of(
    name: str, shape: Sequence[int], others: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, int]:
    """Checkpoint names of an engine's parameter and the rows of each: q, k and v lie in one, the others alone."""
    if "qkv_proj" not in name:
        return {name: shape[0]}
    names = [name.replace("qkv_proj", f"{letter}_proj") for letter in "qkv"]
    return {part: others[part][0][0] for part in names}
