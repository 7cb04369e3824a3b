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
from weftpub.publisher import Peer, Publisher
from weftpub.publisher.coordinator import Coordinator
from weftpub.publisher.peers import PeerLink
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


def arrange(fault: str, out: Path, sources: dict[str, torch.Tensor]) -> None:
    """Break this process's own publisher."""
    sent = 0
    post, transfer = PeerLink.post, Publisher._transfer

    def counted(link: PeerLink, kind: Any, *arguments: Any, **fields: Any) -> int:
        nonlocal sent
        number = post(link, kind, *arguments, **fields)
        if kind is m.ChunkMessage:
            sent += 1
            (out / "chunk-sent").touch()
            if fault == "killed-during" and sent == 1:
                time.sleep(0.2)
                die()
            if fault == "slow":
                time.sleep(0.5)
        return number

    def flipped(publisher: Publisher, *arguments: Any, **settings: Any) -> Any:
        """After the checksums were computed, before the bytes are on their way."""
        sources["model.norm.weight"].view(torch.uint8)[5] ^= 1
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return transfer(publisher, *arguments, **settings)

    if fault in ("killed-during", "slow"):
        PeerLink.post = counted  # type: ignore[method-assign]
    if fault == "killed-after":
        Publisher._record = die  # type: ignore[method-assign]
    if fault == "killed-committed":
        Coordinator.commit = die  # type: ignore[method-assign]
    if fault == "flipped-byte":
        Publisher._transfer = flipped  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--fault", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--account", type=Path, required=True)
    parser.add_argument("--go", type=Path, required=True, help="publish when this file is there")
    given = parser.parse_args()
    plan = Plan.from_json((given.out / "plan.json").read_text(encoding="utf-8"))
    peers = [Peer(*entry) for entry in json.loads((given.out / "peers.json").read_text(encoding="utf-8"))]
    sources = tensors(plan, given.version)
    commit = given.out / "commit.json"
    waits = Deadlines.all(20.0)

    def make() -> Publisher:
        return Publisher(given.run, plan, peers, commit_path=commit, deadlines=waits, max_staging_bytes=STAGING)

    arrange(given.fault, given.out, sources)
    given.go.with_suffix(".ready").touch()
    until = time.monotonic() + 300
    while not given.go.exists():  # everything slow is done; publishers of different faults take turns
        if time.monotonic() > until:
            return 3
        time.sleep(0.01)
    publisher = make()
    status, account = 0, {"error": ""}
    try:
        if given.fault == "killed-before":
            publisher.pause()
            die()
        if given.fault == "stale":
            publisher.status()  # it is the one that counts, until a later one comes in
            make().status()
        report = publisher.publish(given.version, sources)
        account = {"error": "", "transports": list(report.transports.values()), "ms": report.ms}
    except Exception as error:  # told to whoever asked for the fault
        status = 1
        account = {"error": f"{type(error).__name__}: {error}", "notes": list(getattr(error, "__notes__", ()))}
    given.account.write_text(json.dumps(account), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
