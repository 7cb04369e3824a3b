"""The `kills` section of zero_copy.py: a trainer and an engine at work, either killed at random points, many times.

What is served before, between and after is always one whole, committed version.
"""

import contextlib
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_copy_base import (
    DEVICE,
    MIDDLE,
    NAME,
    RUN,
    EngineRank,
    Process,
    Report,
    Sizes,
    bits,
    make_store,
    plan_of,
    settle,
    write_all,
)
from zero_copy_speed import rest_of

from weftpub.channel import Deadlines
from weftpub.memory import SharedAllocation
from weftpub.publisher import Peer, Publisher
from weftpub.store import ExpertStore
from weftpub.store.shared import shared_catalogue, verify_shared
from weftpub.wire.identity import local_identity

__all__ = ["kills"]


class StepTrainer:
    """A trainer that writes and publishes versions; generation, version and seed are one number.

    Args:
        sizes: of the model.
        folder: where it meets the engine.
    """

    def __init__(self, sizes: Sizes, folder: str) -> None:
        self._sizes = sizes
        self._folder = folder
        self._memory = SharedAllocation.join(folder, NAME, DEVICE, shared_catalogue(sizes.layout()))
        self._store = make_store(sizes, memory=self._memory)
        self._rest = rest_of(sizes)
        self._publisher: Publisher | None = None

    def connect(self, address: str) -> None:
        """A publisher to an engine."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = Publisher(
            RUN,
            plan_of(self._sizes, ("experts", "rest")),
            [Peer(0, address, "engine")],
            commit_path=Path(self._folder) / "commit.json",
            deadlines=replace(Deadlines.all(20), hello=3.0),
        )

    def step(self, version: int, recover: bool = False) -> int:
        """Pause the engine, write a version, publish it; bytes that moved."""
        assert self._publisher is not None
        self._publisher.pause()
        write_all(self._store, version, version, recover=recover or str(self._store.state) in ("torn", "writing"))
        self._store.seal()
        return self._publish(version).nbytes

    def again(self, version: int) -> int:
        """Publish what is sealed to an engine that came back; bytes that moved."""
        return self._publish(version).nbytes

    def resume(self) -> None:
        """Ask the engine to go on with what it has."""
        assert self._publisher is not None
        self._publisher.resume()

    def standing(self) -> dict[str, Any]:
        """What the memory's header says."""
        now = self._memory.standing()
        return {
            "state": str(now.state),
            "generation": now.generation,
            "committed": None if now.committed is None else now.committed.version,
            "obstacle": now.obstacle(local_identity()),
        }

    def _publish(self, version: int) -> Any:
        assert self._publisher is not None
        sources = {item.name: item.tensor for item in self._store.canonical()} | self._rest
        return self._publisher.publish(version, sources, self._store.checksums)


class StepEngine(EngineRank):
    """An engine that reads its experts by a captured graph.

    Args:
        sizes: of the model.
        folder: where it meets the trainer.
    """

    def __init__(self, sizes: Sizes, folder: str) -> None:
        super().__init__(sizes, folder, ("experts", "rest"), True)
        self.capture()

    def proven(self) -> int:
        """The committed version, proven from the bytes; TornError or ChecksumError if they are not."""
        assert self.memory is not None
        return verify_shared(self.memory)


class Control:
    """What the sum over a version's bytes must be, from a store of this process' own."""

    def __init__(self, sizes: Sizes) -> None:
        self._store: ExpertStore = make_store(sizes)
        self._known: dict[int, int] = {}

    def sum(self, version: int) -> int:
        """As `EngineRank.replay` gives it."""
        if version not in self._known:
            write_all(self._store, version, version, recover=True)
            self._store.seal()
            layers = [self._store.buffers(layer) for layer in self._store.layout.layers]
            parts = [t for layer in layers for t in (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)]
            self._known[version] = sum(int(bits(t).long().sum()) for t in parts if t is not None)
            settle()
        return self._known[version]


def kills(report: Report, sizes: Sizes = MIDDLE, count: int = 10, seed: int = 1) -> None:
    """Kill `count` processes at points that follow from `seed`."""
    drawn = random.Random(seed)
    victims = [drawn.choice(("trainer", "engine")) for _ in range(count)]
    with tempfile.TemporaryDirectory(prefix="weft-") as folder, contextlib.ExitStack() as stack:
        spares = [Process() for _ in range(2 + count)]
        for spare in spares:
            stack.callback(spare.kill)
        world = World(report, sizes, folder, spares, drawn)
        world.start()
        for number, victim in enumerate(victims, 1):
            world.round(number, victim)
    rows = world.rows
    report.data["kills"] = {"seed": seed, "rounds": rows}
    points = {f"{row['victim']}: {row['left']}" for row in rows}
    report.check(f"kills: {count} deaths, and never another than a whole version served", world.sound, sorted(points))
    restarts = {side: [row["restart_ms"] for row in rows if row["victim"] == side] for side in set(victims)}
    report.number("kills_restart_ms", restarts)


class World:
    """The two sides, and those that take their places."""

    def __init__(self, report: Report, sizes: Sizes, folder: str, spares: list[Process], drawn: random.Random) -> None:
        self._report = report
        self._sizes = sizes
        self._folder = folder
        self._spares = spares
        self._random = drawn
        self._control = Control(sizes)
        self._rest_bytes = sum(rows * columns * 2 for rows, columns in sizes.rest().values())
        self._version = 0
        self._took = 0.5
        self.sound = True
        self.rows: list[dict[str, Any]] = []

    def start(self) -> None:
        """Trainer and engine, and one version served."""
        self._trainer = self._spares.pop(0).make(StepTrainer, self._sizes, self._folder)
        self._engine = self._spares.pop(0).make(StepEngine, self._sizes, self._folder)
        self._trainer("connect", self._engine("where"))
        for _ in range(3):  # the first ones compile
            self._step(recover=self._version == 0)
        self._require("a version is served", self._served() == self._version)

    def round(self, number: int, victim: str) -> None:
        """One death, what is there afterwards, and the way back."""
        before, attempted = self._version, self._version + 1
        self._version = attempted
        self._trainer.send("step", attempted)
        delay = self._random.random() * 1.2 * self._took
        time.sleep(delay)
        row: dict[str, Any] = {"round": number, "victim": victim, "ms": round(delay * 1e3, 1)}
        if victim == "trainer":
            self._trainer.kill()
            row |= self._trainer_back(before, attempted)
        else:
            self._engine.kill()
            row |= self._engine_back()
        self._require(f"round {number}: version {self._version} is served", self._served() == self._version)
        self.rows.append(row)
        self._report.progress(f"kills {number}: {row}")

    def _trainer_back(self, before: int, attempted: int) -> dict[str, Any]:
        """The trainer died: whether the engine serves, and what; then another trainer."""
        start = time.perf_counter()
        self._trainer = self._spares.pop(0).make(StepTrainer, self._sizes, self._folder)
        joined = (time.perf_counter() - start) * 1e3
        standing = self._trainer("standing")
        serving = self._engine("state")[0]
        if serving:
            self._require("it serves a version that was committed", self._served() in (before, attempted))
        self._trainer("connect", self._engine("where"))
        allowed, said = self._trainer.attempt("resume")
        if allowed:
            self._require("it goes on with a whole version", self._served() in (before, attempted))
        else:
            self._require("it does not serve", not self._engine("state")[0])
        if standing["obstacle"] is not None:
            self._require("half a generation is not served", not allowed)
        self._step(recover=True)
        left = "serving" if serving else standing["state"] if standing["obstacle"] else "paused"
        return {"left": left, "restart_ms": round(joined, 1), "resumed": allowed, "said": None if allowed else said}

    def _engine_back(self) -> dict[str, Any]:
        """The engine died: the trainer's step ends one way or the other; then another engine."""
        finished, said = self._trainer.answer("step", 60)
        start = time.perf_counter()
        self._engine = self._spares.pop(0).make(StepEngine, self._sizes, self._folder)
        joined = (time.perf_counter() - start) * 1e3
        standing = self._trainer("standing")
        proven, version = self._engine.attempt("proven")
        if proven:
            self._require("what it proves is what was committed", version == standing["committed"])
            self._require("and its bytes are that version's", self._engine("replay") == self._control.sum(version))
        self._trainer("connect", self._engine("where"))
        if standing["state"] == "sealed" and standing["generation"] == self._version:
            moved = self._trainer("again", self._version)
            self._require("no expert byte moved", moved == self._rest_bytes)
        else:
            self._step(recover=True)
        left = "committed" if proven else standing["state"]
        return {"left": left, "restart_ms": round(joined, 1), "finished": finished, "said": None if finished else said}

    def _step(self, *, recover: bool) -> None:
        self._version += 1
        start = time.perf_counter()
        self._trainer("step", self._version, recover)
        self._took = time.perf_counter() - start

    def _served(self) -> int | None:
        """The version whose bytes the engine serves, None if it serves nothing whole."""
        serving, version = self._engine("state")
        if not serving or version is None or self._engine("replay") != self._control.sum(version):
            return None
        return version

    def _require(self, what: str, passed: bool) -> None:
        if not passed:
            self.sound = False
            self._report.check(f"kills: {what}", False)
