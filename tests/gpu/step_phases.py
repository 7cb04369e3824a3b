"""What each part of a colocated step costs, beside the least that the machine needs for the same bytes.

    python tests/gpu/step_phases.py --out OUT [--tiny] [--cycles 10]

A live SGLang engine with the experts of Qwen3.5-35B-A3B at expert parallel size 8 (32 experts, 40 layers, 2048 x 512:
4.03 GB) and a KV cache of 33 GB; a trainer's `ExpertStore` in this process, which is offloaded between steps, so
that every publish opens its mappings anew. Each cycle: drain, release of kv_cache and of weights, reload of the store,
a new generation, resume of weights, publish with checksums, offload, resume of kv_cache, continue.

Floors, in the same run: the driver's own calls that unmap and map so many pieces of these sizes, cuIpcOpenMemHandle of
the store's buffers in another process, a pinned copy of the bytes over the link in each direction, one question to the
receiver and its answer.

Writes OUT/step_phases.json and prints the rows; exits with 1 if served bytes are wrong. `--tiny` checks the script on a
CPU, where there is no memory to release and no floor but the answer's.
"""

import argparse
import ctypes
import json
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from ran_on import need_gpu, ran_on
from sglang_adapter import DRIVER, GPU, WAITS, config_of, engine_arguments, install_plugin, sockets, write_model

from weftpub.memory import Access, driver, vmm
from weftpub.plan import Plan, Shard, make_plan, torch_dtype
from weftpub.publisher import Publisher, SourceBuffers
from weftpub.store import ExpertStore
from weftpub.transport import cuda_driver

HERE = Path(__file__).resolve().parent
RUN = "step-phases"
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
KV_TOKENS = 200_000


class Sizes:
    """The engine's model."""

    layers, experts, hidden, intermediate = 40, 32, 2048, 512
    heads, top_k, vocab = 4, 2, 512


class TinySizes(Sizes):
    """A first check."""

    layers, experts, hidden, intermediate = 2, 4, 256, 128


class Rows:
    """Times by name, beside a floor's."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}
        self.floors: dict[str, list[float]] = {}

    def take(self, name: str, action: Callable[[], Any]) -> Any:
        """Time a part of the step, the GPU's work included."""
        return _timed(self.ms, name, action)

    def floor(self, name: str, action: Callable[[], Any]) -> Any:
        """Time what stands beside the part of that name."""
        return _timed(self.floors, name, action)

    def table(self) -> list[dict[str, Any]]:
        """A row for each part; the first cycle, which compiles and plans, is not counted."""
        found: list[dict[str, Any]] = []
        for name, every in self.ms.items():
            ms = every[1:]
            row = {"name": name, "median_ms": statistics.median(ms), "min_ms": min(ms), "max_ms": max(ms), "n": len(ms)}
            if self.floors.get(name):
                row["floor_ms"] = statistics.median(self.floors[name])
                row["of_floor"] = row["median_ms"] / row["floor_ms"]
            found.append(row)
        return found


def _timed(into: dict[str, list[float]], name: str, action: Callable[[], Any]) -> Any:
    settle()
    start = time.perf_counter()
    value = action()
    settle()
    into.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
    return value


def settle() -> None:
    """Wait for the GPU."""
    if GPU:
        torch.cuda.synchronize()


# The trainer's side.


class Trainer:
    """Experts in a store, and the engine's other weights as plain tensors."""

    def __init__(self, sizes: type[Sizes]) -> None:
        self.store = ExpertStore(
            range(sizes.layers),
            range(sizes.experts),
            sizes.hidden,
            sizes.intermediate,
            device=DEVICE,
            wt="rebuild",
            measure_change=False,
        )
        self._generator = torch.Generator(DEVICE).manual_seed(1)
        self._others: dict[str, torch.Tensor] = {}
        self.generation = -1
        self.step()

    def step(self) -> None:
        """Write the next generation."""
        self.generation += 1
        writer = self.store.writer()
        with self.store.writing(self.generation):
            for matrix in self.store.layout.matrices:
                shape = self.store.layout.shape(matrix.projection)
                writer(matrix.name, torch.randn(shape, generator=self._generator, device=DEVICE))
        settle()

    def plan(self, descriptions: Iterable[Any]) -> Plan:
        """Where AWEX's converter finds canonical tensors in the engine, all of them from here."""
        from weftpub_adapters.awex.engine import engine_shards

        destinations = engine_shards(list(descriptions)).destinations
        own = {item.name for item in self.store.canonical()}
        sources: dict[str, Shard] = {}
        for one in (destination.shard for destination in destinations):
            zeros = (0,) * len(one.global_shape)
            sources[one.name] = Shard(one.name, one.dtype, one.global_shape, one.global_shape, zeros, 0)
            if one.name not in own and one.name not in self._others:
                self._others[one.name] = torch.full(one.global_shape, 0.01, dtype=torch_dtype(one.dtype), device=DEVICE)
        return make_plan(sources.values(), destinations)

    def sources(self) -> SourceBuffers:
        """Buffers whose mappings are closed before a publish returns: their memory is freed afterwards."""
        tensors = {item.name: item.tensor for item in self.store.canonical()}
        return SourceBuffers.of_tensors(tensors | self._others, in_place=GPU, keep=False)

    def sha256(self) -> dict[str, str]:
        """Of every canonical expert tensor."""
        return self.store.sha256()


# Floors.


class Pieces:
    """Device memory of these sizes, mapped and unmapped with the driver's calls alone."""

    def __init__(self, sizes: Iterable[int]) -> None:
        unit = vmm.granularity(0)
        self.sizes = [-(-size // unit) * unit for size in sizes]
        self._addresses: list[int] = []

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def map(self) -> None:
        """Create and map all."""
        self._addresses = [vmm.map_handle(0, _create(size), size, Access.WRITE) for size in self.sizes]

    def unmap(self) -> None:
        """Free all."""
        for address, size in zip(self._addresses, self.sizes, strict=True):
            vmm.unmap(0, address, size)
        self._addresses = []


def _create(nbytes: int) -> int:
    """Handle of new memory that no other process can be shown: making it so takes several times as long."""
    handle, wanted = ctypes.c_uint64(), vmm.properties(0)
    wanted.handle_types = 0
    with driver.current(0) as library:
        status = library.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(wanted), ctypes.c_ulonglong(0)
        )
        driver.check(status, f"cuMemCreate of {nbytes} bytes")
    return handle.value


def open_handles(handles: list[bytes], pipe: Any) -> None:
    """In another process: milliseconds for opening all of them, five times."""
    torch.cuda.init()
    found: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        addresses = [cuda_driver.open_handle(0, handle) for handle in handles]
        found.append((time.perf_counter() - start) * 1e3)
        for address in addresses:
            cuda_driver.close_handle(0, address)
    pipe.send(found)


def opening_floor(buffers: Iterable[torch.Tensor]) -> list[float]:
    """`open_handles` for the allocations that these buffers lie in."""
    starts = {cuda_driver.region_of(0, buffer.data_ptr())[0] for buffer in buffers if buffer.nbytes}
    handles = [cuda_driver.export_handle(0, start) for start in sorted(starts)]
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=open_handles, args=(handles, there), daemon=True)
    process.start()
    if not here.poll(120):
        process.kill()
        raise RuntimeError("no process could open the store's handles within 120 s")
    found: list[float] = here.recv()
    process.join(30)
    return found


def link_floors(rows: Rows, nbytes: int) -> None:
    """Pinned copies over the link, in each direction alone."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    for turn in range(4):
        into = rows if turn else Rows()  # the first touches the pages
        into.floor("trainer: offload", lambda: host.copy_(device, non_blocking=True))
        into.floor("trainer: reload", lambda: device.copy_(host, non_blocking=True))


def memory_floors(rows: Rows, parameters: Iterable[int], sizes: type[Sizes]) -> dict[str, int]:
    """The driver's calls for the engine's weights and for its KV cache; the bytes of both."""
    head = 2 * sizes.hidden // sizes.heads * (sizes.heads // 2)  # BF16 bytes of a token's keys in a layer
    weights = Pieces(size for size in parameters if size >= 1 << 20)  # smaller ones share a piece
    cache = Pieces([KV_TOKENS * head] * (2 * sizes.layers))
    for name, pieces in (("weights", weights), ("kv_cache", cache)):
        for turn in range(4):
            into = rows if turn else Rows()
            into.floor(f"resume {name}", pieces.map)
            into.floor(f"release {name}", pieces.unmap)
    return {"weights": weights.nbytes, "kv_cache": cache.nbytes}


# The step.


def cycle(step: Any, publisher: Publisher, trainer: Trainer, version: int, rows: Rows, *, verify: bool) -> None:
    """One colocated step."""
    rows.take("drain", lambda: step.drain("retract"))
    rows.take("release kv_cache", lambda: step.release(["kv_cache"]))
    rows.take("release weights", lambda: step.release(["weights"]))
    if not trainer.store.resident:
        rows.take("trainer: reload", lambda: trainer.store.reload(rebuild_wt=False))
    trainer.step()
    sources, checksums = trainer.sources(), trainer.store.checksums
    whole = rows.take(
        "resume weights and publish", lambda: step.publish(version, sources, checksums, verify_sha256=verify)
    )
    rows.ms.setdefault("resume weights", []).append(step.ms["resume_weights"])
    rows.ms.setdefault("publish, mappings opened", []).append(whole.ms["total"])
    if verify:
        own = trainer.sha256()
        wrong = [name for name, digest in own.items() if whole.sha256.get(name) != digest]
        if wrong:
            raise SystemExit(f"version {version}: served bytes of {len(wrong)} tensors are wrong, the first {wrong[0]}")
    rows.take("trainer: offload", trainer.store.offload)
    rows.take("resume kv_cache", step.resume)
    rows.floor("continue", publisher.status)
    rows.take("continue", step.continue_)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--commit", default="", help="what is measured, for the page")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check this script")
    given = parser.parse_args()
    need_gpu(given.tiny)
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    sizes = TinySizes if given.tiny else Sizes
    sys.path.insert(0, str(HERE.parent / "adapters"))
    if not GPU:
        from cpu_engine import environment as cpu_environment

        os.environ.update(cpu_environment(1))
    install_plugin(out / "site")
    model = write_model(out, config_of(sizes))
    from sglang.srt.entrypoints.engine import Engine

    from weftpub_adapters.sglang.driver import ColocatedEngine, LocalEngine

    del Engine  # imported while the directory is written
    if model.wait(120):
        raise RuntimeError("the engine's model directory could not be written")

    arguments = engine_arguments(out / "model", graphs=False)
    if GPU:
        arguments |= {"max_total_tokens": KV_TOKENS, "mem_fraction_static": 0.5}
    engine = LocalEngine.start(deadlines=DRIVER, **arguments)
    try:
        peers = engine.start_receivers(RUN, sockets(out, 1))
        (out / "commit.json").unlink(missing_ok=True)
        with Publisher(RUN, None, peers, commit_path=out / "commit.json", deadlines=WAITS) as publisher:
            trainer = Trainer(sizes)
            descriptions = publisher.describe()
            publisher.set_plan(trainer.plan(descriptions))
            step = ColocatedEngine(engine, publisher, deadlines=DRIVER)
            rows = Rows()
            for version in range(1, given.cycles + 1):
                cycle(step, publisher, trainer, version, rows, verify=version == 1)
                print(f"cycle {version}: { ({name: round(ms[-1], 1) for name, ms in rows.ms.items()}) }", flush=True)
            cycle(step, publisher, trainer, given.cycles + 1, Rows(), verify=True)
            answers = engine.generate([[1, 2, 3]], {"max_new_tokens": 4, "temperature": 0}, seconds=120)
            trainer.store.reload(rebuild_wt=False)
            bytes_of: dict[str, int] = {"store": sum(item.tensor.nbytes for item in trainer.store.canonical())}
            if GPU:
                rows.floors["publish, mappings opened"] = opening_floor(trainer.sources().buffers.values())
                described = (
                    torch.Size(s.shape).numel() * torch_dtype(s.dtype).itemsize for s in descriptions[0].parameters
                )
                bytes_of |= memory_floors(rows, described, sizes)
                link_floors(rows, bytes_of["store"])
    finally:
        engine.shutdown()
    table = rows.table()
    for row in table:
        floor = f"  floor {row['floor_ms']:9.3f} ms, x {row['of_floor']:.2f}" if "floor_ms" in row else ""
        print(f"{row['name']:28s} {row['median_ms']:9.3f} ms  [{row['min_ms']:.3f} .. {row['max_ms']:.3f}]{floor}")
    found = {"rows": table, "bytes": bytes_of, "commit": given.commit, "served": answers[0].versions[-1].version}
    found["environment"] = ran_on("sglang", "awex", "torch-memory-saver", "triton")
    (out / "step_phases.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
