"""Engines served by threads of the test process, and publishers to them."""

import itertools
import json
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from publish_world import FakeEngine, World

from weftpub.channel import Deadlines, unix_address
from weftpub.publisher import Peer, Publisher
from weftpub.receive import Receiver, ReceiverThread

_NUMBERS = itertools.count()


@dataclass
class Room:
    """A world with its engines up, and what publishers need to reach them."""

    world: World
    folder: Path
    engines: list[FakeEngine]
    peers: list[Peer]
    stack: ExitStack
    options: dict[str, Any] = field(default_factory=dict)
    threads: list[ReceiverThread] = field(default_factory=list)

    @property
    def record(self) -> Path:
        """The commit record's file."""
        return self.folder / "commit.json"

    def publisher(self, **changes: Any) -> Publisher:
        """A publisher, closed with the room."""
        defaults = {"commit_path": self.record, "max_staging_bytes": 1 << 17, "deadlines": Deadlines.all(20)}
        options = {
            "run_id": "run",
            "plan": self.world.plan(),
            "peers": self.peers,
            **defaults,
            **self.options,
            **changes,
        }
        publisher = Publisher(options.pop("run_id"), options.pop("plan"), options.pop("peers"), **options)
        return self.stack.enter_context(publisher)

    def restart_receivers(self) -> None:
        """Put another receiver in every one's place; it remembers nothing but the version that its engine holds."""
        for thread in self.threads:
            thread.stop()
        for number, (engine, peer) in enumerate(zip(self.engines, self.peers, strict=True)):
            receiver = Receiver(engine, run_id="run", version=engine.version)
            self.threads[number] = ReceiverThread(receiver, peer.address).__enter__()

    def recorded(self) -> int | None:
        """The version that the record commits."""
        return json.loads(self.record.read_text())["version"] if self.record.exists() else None


@contextmanager
def open_room(
    world: World, folder: Path, *, version: int | None = 0, silence: float = 60.0, **options: Any
) -> Generator[Room]:
    """Start every engine rank of `world`, holding `version`."""
    folder = folder / f"room{next(_NUMBERS)}"
    with ExitStack() as stack:
        engines, peers, threads = [], [], []
        stack.callback(_stop, threads)  # after all publishers have said goodbye
        for engine in range(world.engines):
            for rank in range(world.ranks):
                fake = FakeEngine(world, engine, rank, device=options.pop("device", "cpu"))
                load(fake, version)
                receiver = Receiver(fake, run_id="run", version=version, silence=silence)
                address = unix_address(folder / "s", f"r{len(engines)}")
                threads.append(ReceiverThread(receiver, address).__enter__())
                peers.append(Peer(len(engines), address, fake.name))
                engines.append(fake)
        yield Room(world, folder, engines, peers, stack, options, threads)


def _stop(threads: list[ReceiverThread]) -> None:
    for thread in threads:
        thread.stop()


def load(engine: FakeEngine, version: int | None) -> None:
    """Give an engine the bytes of a version without publishing."""
    if version is not None:
        engine.version = version
        for name, served in engine.world.expected(engine.engine, engine.rank, version).items():
            parameter = engine.parameters[name]
            parameter.data = served.to(engine.device).view(parameter.dtype).view(parameter.shape)
