"""A publisher in a process of its own, which goes wrong in the way that it is asked to.

Its tensors are made from the plan alone: random bytes that an engine can compute with. What it raised, or that all went
well, is written to the account.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from weftpub.channel import Deadlines
from weftpub.plan import Plan, torch_dtype
from weftpub.publisher import Peer, Publisher, sender
from weftpub.publisher.coordinator import Coordinator
from weftpub.publisher.peers import PeerLink
from weftpub.version import CommitRecord
from weftpub.wire import messages as m

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAGING = 1 << 20  # many chunks


def tensors(plan: Plan, version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=DEVICE).manual_seed(version)
    found: dict[str, torch.Tensor] = {}
    for shard in plan.sources:
        dtype = torch_dtype(shard.dtype)
        if dtype == torch.float8_e4m3fn:
            codes = torch.randint(0, 120, shard.shape, generator=generator, dtype=torch.uint8, device=DEVICE)
            found[shard.name] = codes.view(dtype)
        elif shard.name.endswith("_scale_inv"):
            found[shard.name] = torch.full(shard.shape, 1e-4, dtype=dtype, device=DEVICE)
        else:
            noise = torch.randn(shard.shape, generator=generator, device=DEVICE) * 0.02
            found[shard.name] = (1 + noise if len(shard.shape) == 1 else noise).to(dtype)
    if "model.norm.weight" in found:
        found["model.norm.weight"][0] = 1 + version % 50
    return found


def die(*_: object, **__: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def arrange(fault: str, out: Path) -> None:
    """Break this process's own publisher."""
    sent = 0
    post = PeerLink.post

    def counted(link: PeerLink, kind: Any, deadline: Any, **fields: object) -> int:
        nonlocal sent
        number = post(link, kind, deadline, **fields)
        if kind is m.ChunkMessage:
            sent += 1
            (out / "chunk-sent").touch()
            if fault == "killed-during" and sent == 2:
                time.sleep(0.2)
                die()
            if fault == "slow":
                time.sleep(0.5)
        return number

    if fault in ("killed-during", "slow"):
        PeerLink.post = counted  # type: ignore[method-assign]
    if fault == "killed-after":
        CommitRecord.write = die  # type: ignore[method-assign]
    if fault == "killed-committed":
        Coordinator.commit = die  # type: ignore[method-assign]
    if fault == "flipped-byte":
        # After the checksums were computed, and before the bytes are on their way.
        waited = sender.wait_for_devices

        def flip(devices: Any) -> None:
            waited(devices)
            SOURCES["model.norm.weight"].view(torch.uint8)[5] ^= 1
            waited(devices)

        FLIPPED.append(flip)


FLIPPED: list[Any] = []
SOURCES: dict[str, torch.Tensor] = {}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--account", type=Path, required=True)
    given = parser.parse_args()
    plan = Plan.from_json((given.out / "plan.json").read_text(encoding="utf-8"))
    peers = [Peer(*entry) for entry in json.loads((given.out / "peers.json").read_text(encoding="utf-8"))]
    SOURCES.update(tensors(plan, given.version))
    commit = given.out / "commit.json"
    waits = Deadlines.all(20.0)

    def make() -> Publisher:
        return Publisher(given.run, plan, peers, commit_path=commit, deadlines=waits, max_staging_bytes=STAGING)

    publisher = make()
    arrange(given.fault, given.out)
    status, account = 0, {"error": ""}
    try:
        if given.fault == "killed-before":
            publisher.pause()
            die()
        if given.fault == "stale":
            make().status()  # a later publisher takes over
        if given.fault == "flipped-byte":
            deliver = publisher._transfer

            def transfer(*arguments: Any) -> Any:
                FLIPPED[0](())
                return deliver(*arguments)

            publisher._transfer = transfer  # type: ignore[method-assign]
        report = publisher.publish(given.version, SOURCES)
        account = {"error": "", "transports": list(report.transports.values()), "ms": report.ms}
    except Exception as error:  # told to whoever asked for the fault
        status = 1
        account = {"error": f"{type(error).__name__}: {error}", "notes": list(getattr(error, "__notes__", ()))}
    given.account.write_text(json.dumps(account), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
