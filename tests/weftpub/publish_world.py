"""A small world to publish in: trainer tensors, engines laid out as SGLang lays them out, and the plan between them.

Every byte of a version follows from its number, so a test can say what an engine must hold without keeping it.
"""

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from weftpub.channel import unix_address
from weftpub.plan import Destination, Plan, Shard, ViewSpec, make_plan
from weftpub.publisher import Peer
from weftpub.receive import EngineDescription, Readiness, Receiver, parameter_specs, serve
from weftpub.wire import gpu_uuid

BLOCK = 128


@dataclass(frozen=True)
class World:
    """Sizes of the model and of both sides."""

    experts: int = 4
    hidden: int = 256
    intermediate: int = 256
    layers: int = 1
    send_ep: int = 1
    ep: int = 2
    tp: int = 1
    engines: int = 1
    up_first: bool = False
    replicas: int = 1  # data-parallel copies of every sender
    extra: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = (
        ("model.embed_tokens.weight", (300, 256), torch.bfloat16),
        ("model.norm.weight", (256,), torch.float32),
    )

    @property
    def ranks(self) -> int:
        """Ranks of one engine."""
        return self.ep * self.tp

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Canonical name to whole shape and dtype."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for layer in range(self.layers):
            for expert in range(self.experts):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    rows, columns = self.hidden, self.intermediate
                    if part != "down_proj":
                        rows, columns = columns, rows
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                    found[name] = (rows, columns), torch.float8_e4m3fn
                    found[name + "_scale_inv"] = (-(-rows // BLOCK), -(-columns // BLOCK)), torch.float32
        for name, shape, dtype in self.extra:
            found[name] = shape, dtype
        return found

    def value(self, name: str, version: int) -> torch.Tensor:
        """A canonical tensor of a version."""
        shape, dtype = self.tensors()[name]
        generator = torch.Generator().manual_seed(hash_of(name) + 7919 * version)
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 120, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    def holder(self, name: str) -> int | None:
        """Which sender (of one data-parallel copy) holds a routed expert's tensor; None: all of them."""
        if ".experts." not in name:
            return None
        expert = int(name.split(".experts.")[1].split(".")[0])
        return expert * self.send_ep // self.experts

    def sender_names(self, rank: int) -> list[str]:
        """Names that a sender rank holds."""
        return [name for name in self.tensors() if self.holder(name) in (None, rank % self.send_ep)]

    def sources(self, rank: int, version: int, device: str = "cpu") -> dict[str, torch.Tensor]:
        """A sender rank's tensors."""
        return {name: self.value(name, version).to(device) for name in self.sender_names(rank)}

    def source_shards(self) -> list[Shard]:
        """What all sender ranks hold."""
        shards: list[Shard] = []
        for rank in range(self.send_ep * self.replicas):
            for name in self.sender_names(rank):
                shape, dtype = self.tensors()[name]
                shards.append(Shard(name, str(dtype).removeprefix("torch."), shape, shape, (0,) * len(shape), rank))
        return shards

    def parameters(self, device: str = "cpu") -> dict[str, torch.nn.Parameter]:
        """Parameters of one engine rank, poisoned: stacked experts, and the other tensors whole."""
        local, rows = self.experts // self.ep, self.intermediate // self.tp
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}.mlp.experts."
            h, i = -(-self.hidden // BLOCK), -(-rows // BLOCK)
            shapes[prefix + "w13_weight"] = (local, 2 * rows, self.hidden), torch.float8_e4m3fn
            shapes[prefix + "w13_weight_scale_inv"] = (local, 2 * i, h), torch.float32
            shapes[prefix + "w2_weight"] = (local, self.hidden, rows), torch.float8_e4m3fn
            shapes[prefix + "w2_weight_scale_inv"] = (local, h, i), torch.float32
        for name, shape, dtype in self.extra:
            shapes[name] = shape, dtype
        return {
            name: torch.nn.Parameter(poisoned(shape, dtype, device), requires_grad=False)
            for name, (shape, dtype) in shapes.items()
        }

    def destinations(self, engine: int, rank: int) -> list[Destination]:
        """What rank `rank` of an engine serves."""
        recv = engine * self.ranks + rank
        ep_rank, tp_rank = divmod(rank, self.tp)
        local = self.experts // self.ep
        found: list[Destination] = []
        for name, (shape, dtype) in self.tensors().items():
            kind = str(dtype).removeprefix("torch.")
            if ".experts." not in name:
                stride = torch.empty(shape, device="meta").stride()
                found.append(
                    Destination(
                        Shard(name, kind, shape, shape, (0,) * len(shape), recv), ViewSpec(name, 0, shape, stride, kind)
                    )
                )
                continue
            head, _, tail = name.partition(".experts.")
            expert, part, suffix = tail.split(".")
            if int(expert) // local != ep_rank:
                continue
            found.append(
                self._expert(head, int(expert) - ep_rank * local, part, suffix, shape, kind, tp_rank, recv, name)
            )
        return found

    def _expert(
        self,
        head: str,
        slot: int,
        part: str,
        suffix: str,
        shape: tuple[int, ...],
        kind: str,
        tp_rank: int,
        recv: int,
        name: str,
    ) -> Destination:
        split = 1 if part == "down_proj" else 0
        mine = tuple(n // self.tp if d == split else n for d, n in enumerate(shape))
        offset = tuple(n * tp_rank if d == split else 0 for d, n in enumerate(mine))
        numel = mine[0] * mine[1]
        if part == "down_proj":
            param, start = "w2_", slot * numel
        else:
            second = (part == "up_proj") != self.up_first
            param, start = "w13_", slot * 2 * numel + (numel if second else 0)
        view = ViewSpec(f"{head}.experts.{param}{suffix}", start, mine, (mine[1], 1), kind)
        return Destination(Shard(name, kind, mine, shape, offset, recv), view)

    def plan(self) -> Plan:
        """The plan for all engines."""
        destinations = [d for e in range(self.engines) for r in range(self.ranks) for d in self.destinations(e, r)]
        return make_plan(self.source_shards(), destinations)

    def expected(self, engine: int, rank: int, version: int) -> dict[str, torch.Tensor]:
        """Parameters that an engine rank must hold, as bytes."""
        parameters = {name: p.data.clone() for name, p in self.parameters().items()}
        for d in self.destinations(engine, rank):
            value = self.value(d.shard.name, version)
            box = tuple(slice(o, o + n) for o, n in zip(d.shard.offset, d.shard.shape, strict=True))
            live = parameters[d.view.param]
            bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[live.element_size()]
            live.view(bits).view(-1).as_strided(d.view.shape, d.view.stride, d.view.offset).copy_(value.view(bits)[box])
        return {name: as_bytes(p) for name, p in parameters.items()}


def hash_of(name: str) -> int:
    """A number that is the same in every process."""
    return sum((i + 1) * byte for i, byte in enumerate(name.encode()))


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """New memory full of NaN bytes."""
    return (
        torch.full((torch.Size(shape).numel() * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
        .view(dtype)
        .view(shape)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, on the host."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).clone()


@dataclass
class FakeEngine:
    """An engine rank with plain torch parameters, and switches to make it fail."""

    world: World
    engine: int = 0
    rank: int = 0
    device: str = "cpu"
    fail_in: dict[str, str] = field(default_factory=dict)  # method -> message of the RuntimeError that it raises
    hang_in: dict[str, float] = field(default_factory=dict)  # method -> seconds that it takes
    exempt: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    serving: bool = True
    intact: bool = True
    version: int | None = None
    fenced: str = ""
    holds_memory: bool = True

    def __post_init__(self) -> None:
        self.parameters = self.world.parameters(self.device)
        self.buffers: dict[str, torch.Tensor] = {}

    @property
    def name(self) -> str:
        """Name of the engine."""
        return f"engine{self.engine}"

    def describe(self) -> EngineDescription:
        self._step("describe")
        device = gpu_uuid(torch.device(self.device).index or 0) if self.device.startswith("cuda") else "cpu"
        return EngineDescription(
            engine=self.name,
            rank=self.engine * self.world.ranks + self.rank,
            world_size=self.world.ranks,
            device=device,
            parameters=parameter_specs(self.live_tensors()),
            exempt=self.exempt,
        )

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}

    def weights_intact(self) -> bool:
        return self.intact

    def resident(self) -> bool:
        return self.holds_memory

    def readiness(self) -> Readiness:
        return Readiness(self.fenced or ("" if self.intact else "weights are not whole"), resting=not self.serving)

    def pause(self) -> None:
        self._step("pause")
        self.serving = False

    def resume(self) -> None:
        self._step("resume")
        self.serving = True

    def post_process(self) -> None:
        self._step("post_process")

    def commit(self, version: int) -> None:
        self._step("commit")
        self.version, self.intact, self.fenced = version, True, ""

    def fence(self, reason: str) -> None:
        self._step("fence")
        self.serving, self.intact, self.fenced = False, False, reason

    def offload(self) -> None:
        """Drop the weights' memory and bring it back elsewhere, poisoned."""
        assert not self.serving
        for parameter in self.parameters.values():
            parameter.data = poisoned(tuple(parameter.shape), parameter.dtype, self.device)
        self.intact = False

    def served(self) -> dict[str, torch.Tensor]:
        """What it would compute with, as bytes."""
        return {name: as_bytes(p.data) for name, p in self.parameters.items()}

    def _step(self, name: str) -> None:
        self.calls.append(name)
        if name in self.hang_in:
            time.sleep(self.hang_in[name])
        if name in self.fail_in:
            raise RuntimeError(self.fail_in[name])


def assert_serves(engine: FakeEngine, version: int) -> None:
    """Fail, naming the parameter, unless every byte of the engine rank is that of `version`."""
    expected = engine.world.expected(engine.engine, engine.rank, version)
    for name, served in engine.served().items():
        wrong = (served != expected[name]).nonzero()
        assert not len(wrong), f"{name}: byte {wrong[0].tolist()} of version {version} differs ({len(wrong)} in all)"


@dataclass
class RemoteEngine:
    """A receiver process with a `FakeEngine`, and a pipe to command it: ('call', method, args) -> result."""

    process: Any
    pipe: Any
    peer: Peer

    def call(self, method: str, *args: object) -> Any:
        """Call a method of the engine in its process (between two requests of the publisher)."""
        self.pipe.send((method, args))
        assert self.pipe.poll(60), f"the receiver process of rank {self.peer.rank} does not answer {method}"
        return self.pipe.recv()

    def kill(self) -> None:
        """kill -9; a process that is gone already stays gone."""
        self.process.kill()
        self.process.join(30)

    def stop(self) -> None:
        """End the process in an orderly way."""
        if self.process.is_alive():
            self.pipe.send(("stop", ()))
            self.process.join(30)
        if self.process.is_alive():
            self.kill()
        self.pipe.close()


def start_remote(
    folder: Path, world: World, engine: int, rank: int, run_id: str = "run", **options: Any
) -> RemoteEngine:
    """Start a receiver process and return once it serves."""
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    recv = engine * world.ranks + rank
    address = unix_address(folder / "sockets", f"r{recv}")
    process = context.Process(
        target=_remote_main, args=(there, world, engine, rank, run_id, address, options), daemon=True
    )
    process.start()
    there.close()
    assert here.poll(120), "the receiver process did not start"
    assert here.recv() == "ready"
    return RemoteEngine(process, here, Peer(recv, address, f"engine{engine}"))


def _remote_main(
    pipe: Any, world: World, engine: int, rank: int, run_id: str, address: str, options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    receiver_options = options.pop("receiver", {"version": 0})
    fake = FakeEngine(world, engine, rank, **options)
    receiver = Receiver(fake, run_id=run_id, **receiver_options)
    stop = threading.Event()

    def command() -> None:
        while True:
            try:
                method, args = pipe.recv()
            except EOFError:
                os._exit(3)  # the test is gone
            if method == "stop":
                stop.set()
                return
            if method == "set":
                setattr(fake, *args)
                pipe.send(None)
            elif method == "get":
                pipe.send(getattr(fake, args[0]))
            elif method == "check":
                try:
                    assert_serves(fake, args[0])
                    pipe.send("")
                except AssertionError as error:
                    pipe.send(str(error) or "differs")
            else:
                pipe.send(getattr(fake, method)(*args))

    threading.Thread(target=command, daemon=True).start()
    serve(receiver, address, stop, ready=lambda _: pipe.send("ready"))
