"""`TorchRollout`: the sampler's process as a rollout engine, for machines without a GPU.

It samples from the weights that were published into SGLang's real layers, never from the trainer's; arithmetic is plain
torch in FP32, so its numbers say nothing about SGLang's kernels or speed. There is no key/value cache between requests:
`resume` has nothing to bring back.

A baseline's weights are gathered into buckets of whole tensors, as for SGLang's own update, and go through SGLang's own
loader. Unlike there all bytes are compared: what each rank holds with what it gathered, the ranks' buckets with each
other, and what was loaded with the live parameters.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from weftmoe.rollout.base import PlanFor, Published, Request, Sample, ShardsFor, Span, Tensors, plain_tensors
from weftmoe.rollout.checks import byte_check
from weftmoe.rollout.fleet import Fleet
from weftmoe.rollout.gather import Bucket, BucketGather, make_buckets, near_shards, require_equal
from weftmoe.telemetry.record import ByteCheck
from weftpub.canonical import family_of
from weftpub.channel import Deadlines, unix_address
from weftpub.errors import StateError
from weftpub.publisher import Peer, Publisher
from weftpub.publisher.agreement import agree
from weftpub_adapters.sglang.driver import TcpAccess
from weftpub_demo.peer import ReceiverProcess, explain

__all__ = ["SamplerSettings", "TorchRollout"]

_ENGINE = "sampler"
_HELLO_S = 30.0


@dataclass(frozen=True)
class SamplerSettings:
    """What the sampler is asked to be.

    Attributes:
        model: checkpoint directory; only its config.json is read.
        format: of the routed experts.
        path: "weftpub", or "native": SGLang's own loader, from files of buckets.
        stops: tokens that end a completion.
        temperature, top_p: of the sampling distribution.
        work: for logs, the commit record, and the files of the native path.
        environment: of the process, whole.
        ready_s, generate_s, publish_s: limits of waits.
        verify_sha256: compare digests too.
        staging_bytes: most extra memory of a publish.
        bucket_bytes: of a bucket of the native path.
        shared: folder where trainer and sampler meet to map one memory for the experts; None copies them.
        nodes: machines, each with a sampler.
    """

    model: Path
    format: Literal["fp8", "bf16"]
    path: Literal["weftpub", "native"]
    stops: tuple[int, ...]
    temperature: float
    top_p: float
    work: Path
    run_id: str
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ready_s: float = 300.0
    generate_s: float = 600.0
    publish_s: float = 120.0
    verify_sha256: bool = False
    staging_bytes: int = 64 << 20
    bucket_bytes: int = 64 << 20
    shared: str | None = None
    nodes: int = 1


class TorchRollout:
    """Implements `weftmoe.rollout.Rollout`. The first rank of each node has a process; all ranks publish to it."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._fleet = Fleet(settings.run_id, settings.nodes, wait=settings.publish_s)
        self._place = self._fleet.place
        self._name = self._place.named(_ENGINE)
        self._stack = ExitStack()
        self._peer: ReceiverProcess | None = None
        self._publisher: Publisher | None = None
        self._gather: BucketGather | None = None
        self._released = False
        self._rounds = count()

    @property
    def description(self) -> str:
        return f"{self._place.words}torch sampler over SGLang's real layers, {self._settings.format} experts"

    @property
    def notes(self) -> tuple[str, ...]:
        way = (
            "published into SGLang's real layers by weftpub"
            if self._settings.path == "weftpub"
            else "loaded into SGLang's real layers by SGLang's own loader"
        )
        return (
            f"No SGLang server ran: a torch sampler drew the completions, in FP32, from weights {way} in another "
            "process, never from the trainer's",
        )

    def start(self) -> None:
        """Start the process; it builds its model while this process goes on, unless both share memory: then it has made
        that, and put something there, before the trainer writes to it.
        """
        settings = self._settings
        settings.work.mkdir(parents=True, exist_ok=True)
        if not self._place.leads:
            return
        command = [
            *(sys.executable, "-m", "weftmoe.rollout.worker", "--model", str(settings.model), "--name", self._name),
            *("--rank", str(self._place.node), "--format", settings.format, "--temperature", str(settings.temperature)),
            *("--top-p", str(settings.top_p), "--stop", *(str(token) for token in settings.stops)),
            *(() if settings.shared is None else ("--shared", settings.shared)),
        ]
        self._peer = self._stack.enter_context(
            ReceiverProcess(
                f"the torch {self._name}",
                command,
                log=settings.work / "sampler.log",
                environment=_environment(settings.environment),
            )
        )
        if settings.shared is not None:
            self._ask("hello", settings.ready_s)

    def connect(self, plan_for: PlanFor, shards_for: ShardsFor) -> None:
        """Wait for the model, and let it receive."""
        settings, fleet = self._settings, self._fleet
        if settings.path == "native":
            fleet.act("start of the sampler", self._hello, settings.ready_s)
            config = json.loads((settings.model / "config.json").read_text(encoding="utf-8"))
            family = family_of(config["architectures"][0])
            near = near_shards(shards_for(), self._place.hosts[self._place.node])
            buckets = make_buckets(near, most=settings.bucket_bytes, family=family)
            group, process_group = fleet.near_group()
            self._gather = BucketGather(
                buckets,
                group,
                torch.device("cpu"),
                seconds=settings.publish_s,
                verify=True,
                process_group=process_group,
            )
            return
        peers = fleet.peers("start of the sampler", self._listen, settings.ready_s + settings.publish_s)
        publisher = Publisher(
            settings.run_id,
            None,
            peers,
            commit_path=settings.work / f"committed-{settings.run_id}.json",
            group=fleet.group(),
            deadlines=replace(Deadlines.all(settings.publish_s), hello=min(_HELLO_S, settings.publish_s)),
            max_staging_bytes=settings.staging_bytes,
        )
        self._publisher = self._stack.enter_context(publisher)
        publisher.set_plan(plan_for(publisher.describe()))

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        return self._fleet.generate(requests, self._answer, self._settings.generate_s)

    def attend(self, seconds: float) -> BaseException | None:
        return self._fleet.attend(self._answer, seconds)

    def dismiss(self) -> None:
        self._fleet.dismiss()

    def _answer(self, requests: Sequence[Request]) -> list[Sample]:
        plain = [[list(request.tokens), request.limit, request.seed] for request in requests]
        answer = self._ask("generate", self._settings.generate_s, requests=plain)
        return [
            Sample(tuple(tokens), tuple(logprobs), finish, (Span(answer["version"], 0, len(tokens)),))
            for tokens, logprobs, finish in answer["samples"]
        ]

    def score(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, ...]]:
        return self._fleet.score(sequences, self._scores, self._settings.generate_s)

    def _scores(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[list[float]]:
        plain = [[list(tokens), first] for tokens, first in sequences]
        found: list[list[float]] = self._ask("score", self._settings.generate_s, sequences=plain)["logprobs"]
        return found

    def drain(self) -> None:
        """No request is ever in flight here: `generate` returns when all are answered. Stops serving."""
        if self._publisher is not None:
            with self._explained("pause"):
                self._publisher.pause()

    def release(self) -> None:
        """The sampler's weights lose their memory."""
        self._fleet.act("release", lambda: self._ask("release", self._settings.publish_s), self._settings.publish_s)
        self._released = True

    def publish(self, version: int, sources: Tensors, checksums: Mapping[str, int] | None) -> Published:
        began = time.perf_counter()
        if self._released:
            self._fleet.act("reload", lambda: self._ask("reload", self._settings.publish_s), self._settings.publish_s)
        self._released = False
        if self._publisher is None:
            return self._native(version, plain_tensors(sources), began)
        with self._explained(f"publish of version {version}"):
            report = self._publisher.publish(
                version,
                sources,
                checksums,
                verify_sha256=self._settings.verify_sha256,
                resume=False,
            )
        return Published(version, report.ms, byte_check(report))

    def resume(self) -> None:
        """There is no key/value cache to bring back."""

    def continue_(self) -> None:
        if self._publisher is not None:
            with self._explained("resume"):
                self._publisher.resume()

    def close(self) -> None:
        self._publisher = None
        self._stack.close()

    def _native(self, version: int, sources: Mapping[str, torch.Tensor], began: float) -> Published:
        gather, seconds, found = self._gather, self._settings.publish_s, {"pieces": 0, "bytes": 0}
        if gather is None:
            raise StateError("the sampler has not been connected to the trainer")
        path = self._settings.work / "bucket.safetensors"

        def pack(bucket: Bucket, buffer: torch.Tensor) -> str:
            if not self._place.leads:  # whose bytes are compared with those of its node's first rank
                return ""
            save_file({name: tensor.clone() for name, tensor in bucket.named(buffer)}, path)
            return str(path)

        def load(paths: list[str]) -> None:
            answer = self._ask("load", seconds, file=paths[0])
            for name in found:
                found[name] += answer[name]

        from safetensors.torch import save_file

        fleet, group = self._fleet, self._fleet.group()
        group.begin(f"native-{version}-{next(self._rounds)}")
        # One version on all nodes, or none: nobody serves before every node has loaded the same bytes.
        agree(
            group,
            "gathering",
            2 * seconds * len(gather.buckets),
            lambda: gather.run(sources, pack, load, delivery=seconds),
            require_equal,
            allowance=seconds,
        )

        def commit() -> dict[str, int]:
            path.unlink(missing_ok=True)
            self._ask("commit", seconds, version=version)
            return found

        totals = fleet.act("commit", commit, seconds)
        summed = {name: sum(total[name] for total in totals) for name in found}
        check = ByteCheck(method="checksum", matched=True, **summed)
        return Published(version, {"total": (time.perf_counter() - began) * 1e3}, check)

    def _hello(self) -> None:
        hello = self._ask("hello", self._settings.ready_s)
        if hello["planner"]:
            raise StateError(f"the sampler's process has imported {hello['planner']}; engines get plans as data")

    def _listen(self, access: TcpAccess | None) -> list[Peer]:
        """Have this node's sampler listen, to the ranks of this host or to those with keys."""
        self._hello()
        keys = None
        if access is None:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weftmoe-"))
            address = unix_address(folder, "sampler")
        else:
            address = f"tcp://{access.host}:0"
            keys = [access.receivers.public, access.receivers.secret, access.receivers.peers]
        fields = {"run_id": self._settings.run_id, "address": address, "keys": keys}
        bound = self._ask("listen", self._settings.publish_s, **fields)["address"]
        return [Peer(self._place.node, bound, self._name)]

    def _ask(self, do: str, seconds: float, **fields: Any) -> dict[str, Any]:
        if self._peer is None:
            raise StateError("the sampler has not been started")
        return self._peer.call(do, limit_s=seconds, **fields)

    def _explained(self, phase: str) -> Any:
        return nullcontext() if self._peer is None else _naming(self._peer, phase)


class _naming(ExitStack):
    """An error inside the block names the sampler's death and the phase, where that explains it."""

    def __init__(self, peer: ReceiverProcess, phase: str) -> None:
        super().__init__()
        self._peer, self._phase = peer, phase

    def __enter__(self) -> "_naming":
        super().__enter__()
        self.enter_context(explain([self._peer]))(self._phase)
        return self


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """The given environment and SGLang's own switches: no check for a kernel package that a CPU does not need."""
    folders = [str(Path(__file__).parents[2]), *(entry for entry in sys.path if entry)]
    environment = {
        **given,
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("SGLANG_USE_CPU_ENGINE", None)  # it would repack the weights for other kernels
    return environment
