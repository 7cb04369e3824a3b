"""`SglangRollout`: colocated SGLang engines, one a node, driven through `weftpub_adapters.sglang.driver`.

The first rank of a node starts its engine, sends it requests and makes the control calls, on all nodes at the same time
(`weftmoe.rollout.fleet`); every rank publishes its own tensors. With weftpub an engine starts without weights, and
serves nothing before the first publish; no engine serves a version before all hold it. The native path (baseline)
starts it from the checkpoint and uses SGLang's own update from tensors: with several ranks on a node each gathers whole
tensors on its GPU (`weftmoe.rollout.gather`), where the engine's worker of the same number reads them.
"""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import torch

from weftmoe.env import role_environment
from weftmoe.rollout.base import PlanFor, Published, Request, Sample, ShardsFor, Span, Tensors, plain_tensors
from weftmoe.rollout.checks import byte_check
from weftmoe.rollout.engine import UpdatableEngine, process_environment, serialized_bucket
from weftmoe.rollout.fleet import Fleet
from weftmoe.rollout.gather import BucketGather, make_buckets, near_shards
from weftmoe.rollout.served_config import served_config
from weftmoe.schema import Settings
from weftmoe.telemetry.record import ByteCheck
from weftpub.canonical import ModelFamily, family_of
from weftpub.channel import Deadlines
from weftpub.errors import StateError
from weftpub.publisher import Peer, Publisher
from weftpub.publisher.agreement import agree
from weftpub_adapters.sglang import quantization_config
from weftpub_adapters.sglang.driver import ColocatedEngine, DriverDeadlines, TcpAccess, free_bytes
from weftpub_adapters.sglang.shared_experts import SETTING as SHARED_SETTING

__all__ = ["SglangRollout", "engine_arguments", "engine_directory"]

_ENGINE = "sglang"
_TAGS = ("kv_cache", "weights")
_FIRST_PORT, _PORTS = 30000, 20  # SGLang's own, and what it takes from there on
_LINKED = ("*.json", "*.jinja", "*.txt", "*.model")


class SglangRollout:
    """Implements `weftmoe.rollout.Rollout`.

    Args:
        settings: the run's.
        model: checkpoint directory.
        hf_config: its config.json.
        stops: tokens that end a completion.
        run_id: of this start.
        work: for the commit record and the engine's view of the model.
        shared: folder where trainer and engine meet to map one memory for the experts; None copies them.
        resumed: step of the checkpoint that this start goes on from, or 0.
    """

    def __init__(
        self,
        settings: Settings,
        model: Path,
        hf_config: Mapping[str, Any],
        stops: tuple[int, ...],
        run_id: str,
        work: Path,
        shared: str | None = None,
        resumed: int = 0,
    ) -> None:
        self._settings, self._model, self._hf_config = settings, model, hf_config
        self._stops, self._run_id, self._work, self._shared = stops, run_id, work, shared
        self._resumed = resumed
        self._fleet = Fleet(run_id, settings.rollout.engines, wait=settings.publish.deadline)
        self._place = self._fleet.place
        self._name = self._place.named(_ENGINE)
        self._stack = ExitStack()
        self._handle: UpdatableEngine | None = None
        self._engine: ColocatedEngine | None = None
        self._publisher: Publisher | None = None
        self._gather: BucketGather | None = None
        self._rounds = count()
        self._descriptions: list[Any] = []
        self._away = False
        self._version = -1

    @property
    def _family(self) -> ModelFamily:
        return family_of(self._settings.model.architecture)

    @property
    def _native(self) -> bool:
        return self._settings.publish.path == "native"

    @property
    def description(self) -> str:
        form = "fp8" if self._settings.variant == "fp8" else "bf16"
        rollout = self._settings.rollout
        return f"{self._place.words}SGLang, tp {rollout.tensor} dp {rollout.data} ep {rollout.expert}, {form} experts"

    @property
    def notes(self) -> tuple[str, ...]:
        if self._native:
            return ("weights went to the engine by SGLang's own update from tensors; nothing checked their bytes",)
        return ()

    def start(self) -> None:
        """Start the engines; with weftpub their receivers too. On return they are at rest, their memory released."""
        self._work.mkdir(parents=True, exist_ok=True)
        self._fleet.act("start of the engine", self._start_engine, self._settings.rollout.ready_timeout)
        if not self._native:
            self._start_publisher()
        self.drain()
        if self._publisher is not None:
            self._descriptions = self._publisher.describe()
        self.release()

    def _start_engine(self) -> None:
        if self._handle is None:
            directory = engine_directory(self._work, self._model, self._settings)
            arguments = engine_arguments(
                self._settings, directory, self._shared, resumed=self._resumed, engine=self._place.node
            )
            with process_environment(role_environment(self._settings, "engine")):
                self._handle = UpdatableEngine.start(name=self._name, deadlines=self._deadlines(), **arguments)
            self._stack.callback(self._handle.shutdown)

    def connect(self, plan_for: PlanFor, shards_for: ShardsFor) -> None:
        """Plan from what the engine said about itself before its memory was released; or say which buckets travel."""
        if self._publisher is not None:
            self._publisher.set_plan(plan_for(self._descriptions))
        elif self._place.each > 1 or self._family.joined:
            publish = self._settings.publish
            near = near_shards(shards_for(), self._place.hosts[self._place.node])
            buckets = make_buckets(near, most=publish.bucket_mib << 20, family=self._family)
            device = torch.device("cuda", torch.cuda.current_device())
            group, process_group = self._fleet.near_group()
            self._gather = BucketGather(buckets, group, device, seconds=publish.deadline, process_group=process_group)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        return self._fleet.generate(requests, self._answer, self._settings.rollout.generate_timeout)

    def attend(self, seconds: float) -> BaseException | None:
        return self._fleet.attend(self._answer, seconds)

    def dismiss(self) -> None:
        self._fleet.dismiss()

    def _answer(self, requests: Sequence[Request]) -> list[Sample]:
        handle = self._required()
        answers = handle.generate(
            [request.tokens for request in requests],
            [self._sampling(request) for request in requests],
            logprobs=True,
            seconds=self._settings.rollout.generate_timeout,
        )
        samples = []
        for number, answer in enumerate(answers):
            if answer.finish not in ("stop", "length"):
                raise StateError(f"request {number} of {len(requests)} ended with {answer.finish!r}: {answer.meta}")
            spans = tuple(Span(self._number(s.version), s.start, s.end) for s in answer.versions if s.end != s.start)
            finish: Any = answer.finish
            samples.append(Sample(answer.tokens, answer.logprobs, finish, spans))
        return samples

    def score(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, ...]]:
        return self._fleet.score(sequences, self._scores, self._settings.rollout.generate_timeout)

    def _scores(self, sequences: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[float, ...]]:
        handle, seconds = self._required(), self._settings.rollout.generate_timeout
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        # One at a time: other requests in a batch would change the last bits.
        return [
            handle.generate([tokens], sampling, score_from=[first], seconds=seconds)[0].scores
            for tokens, first in sequences
        ]

    def drain(self) -> None:
        mode = self._settings.rollout.drain
        if self._engine is not None:
            self._engine.drain(mode)
            return

        def drained(handle: UpdatableEngine) -> None:
            handle.pause(mode)
            if not handle.flush():
                raise StateError("SGLang's cache cannot be flushed; requests still hold it")

        deadlines = self._deadlines()
        self._each("drain", drained, deadlines.drain + deadlines.flush)

    def release(self) -> None:
        if self._engine is not None:
            self._engine.release(_TAGS)
        else:
            self._each("release", lambda handle: handle.release(_TAGS), self._deadlines().release)
        self._away = True

    def publish(self, version: int, sources: Tensors, checksums: Mapping[str, int] | None) -> Published:
        _return_cached_memory()
        began = time.perf_counter()
        if self._engine is None:
            return self._publish_native(version, plain_tensors(sources), began)
        report = self._engine.publish(version, sources, checksums, verify_sha256=self._settings.publish.verify_sha256)
        self._version = version
        calls = {f"engine_{name}": spent for name, spent in self._engine.ms.items()}
        return Published(version, {**report.ms, **calls}, byte_check(report))

    def resume(self) -> None:
        _return_cached_memory()
        if self._engine is not None:
            self._engine.resume()
        elif self._away:
            self._each("resume", lambda handle: handle.resume(["kv_cache"]), self._deadlines().resume)
        self._away = False

    def continue_(self) -> None:
        if self._engine is not None:
            self._engine.continue_()
        else:
            self._each("continue", lambda handle: handle.continue_(), self._deadlines().control)

    def close(self) -> None:
        self._stack.close()

    def _start_publisher(self) -> None:
        def started(access: TcpAccess | None) -> list[Peer]:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="weftmoe-"))
            first = self._place.node * self._settings.rollout.tensor
            return self._required().start_receivers(self._run_id, folder, first_rank=first, tcp=access)

        peers = self._fleet.peers("start of the receivers", started, self._settings.rollout.ready_timeout)
        publish = self._settings.publish
        group = self._fleet.group()
        publisher = Publisher(
            self._run_id,
            None,
            peers,
            commit_path=self._work / f"committed-{self._run_id}.json",
            group=group,
            deadlines=Deadlines.all(publish.deadline),
            max_staging_bytes=publish.staging_mib << 20,
        )
        self._publisher = self._stack.enter_context(publisher)
        # Smokes share one GPU: what is free there says nothing about this engine's few megabytes.
        measure = _unmeasured if self._settings.smoke.enabled else free_bytes
        self._engine = ColocatedEngine(
            self._handle,
            publisher,
            group=group,
            deadlines=self._deadlines(),
            measure=measure,
            spread=self._place.nodes > 1,
        )

    def _publish_native(self, version: int, sources: Mapping[str, torch.Tensor], began: float) -> Published:
        publish, deadlines = self._settings.publish, self._deadlines()
        bucket, seconds = publish.bucket_mib << 20, publish.deadline
        if self._away:
            self._each("resume of the weights", lambda handle: handle.resume(["weights"]), deadlines.resume)
        gather = self._gather
        if gather is None:  # each node's only rank has whole tensors
            most = seconds * len(sources)  # of which no message takes longer
            self._each(
                "update", lambda handle: handle.load_tensors(sources.items(), bucket=bucket, seconds=seconds), most
            )
        else:
            self._each("begin of the update", lambda handle: handle.begin_update(seconds), seconds)
            group = self._fleet.group()
            group.begin(f"native-{next(self._rounds)}")

            def gathered() -> None:
                gather.run(
                    sources,
                    serialized_bucket,
                    lambda payloads: self._required().load_bucket(payloads, seconds),
                    delivery=seconds,
                )

            longest = 3 * seconds * len(gather.buckets)
            agree(group, "update", longest, gathered, lambda _: None, allowance=longest)
            self._each("end of the update", lambda handle: handle.end_update(seconds), seconds)
        self._each("weight version", lambda handle: handle.set_weight_version(str(version)), deadlines.control)
        self._version = version
        spent = {"total": (time.perf_counter() - began) * 1e3}
        return Published(version, spent, ByteCheck(method="none"))

    def _each(self, phase: str, action: Callable[[UpdatableEngine], None], seconds: float) -> None:
        """Have each node's first rank act on its engine, as `Fleet.act`."""
        self._fleet.act(phase, lambda: action(self._required()), seconds)

    def _sampling(self, request: Request) -> dict[str, Any]:
        """Everything is said: the model's generation_config.json must not change the distribution."""
        chosen = self._settings.rollout.sampling
        parameters: dict[str, Any] = {
            "temperature": chosen.temperature,
            "top_p": chosen.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "max_new_tokens": request.limit,
            "stop_token_ids": list(self._stops),
        }
        if chosen.stop:
            parameters["stop"] = list(chosen.stop)
        if self._settings.train.deterministic:
            parameters["sampling_seed"] = request.seed % 2**31
        return parameters

    def _number(self, version: str) -> int:
        if not version.isdigit():
            raise StateError(f"the engine answered from weights of version {version!r}, which no publish gave it")
        return int(version)

    def _deadlines(self) -> DriverDeadlines:
        rollout, publish = self._settings.rollout, self._settings.publish
        return DriverDeadlines(
            start=rollout.ready_timeout,
            drain=rollout.generate_timeout,
            release=publish.deadline,
            resume=publish.deadline,
        )

    def _required(self) -> UpdatableEngine:
        if self._handle is None:
            raise StateError("only the first rank of a node has its engine, once it is started")
        return self._handle


def engine_directory(work: Path, model: Path, settings: Settings) -> Path:
    """The model as the engine is to see it: its language model's configuration and tokenizer, with links to its weights
    where the engine begins with them, and for FP8 experts the scheme that leaves every other linear in BF16.
    """
    view = work / "model"
    view.mkdir(parents=True, exist_ok=True)
    for pattern in _LINKED:
        for path in model.glob(pattern):
            target = view / path.name
            if not path.name.endswith(".index.json") and path.name != "config.json":
                target.write_bytes(path.read_bytes())
    if settings.publish.path == "native":
        for path in model.glob("*.safetensors*"):
            target = view / path.name
            target.unlink(missing_ok=True)
            target.symlink_to(path.resolve())
    config = served_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
    if settings.variant == "fp8":
        config["quantization_config"] = quantization_config(config)
    (view / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return view


def engine_arguments(
    settings: Settings, directory: Path, shared: str | None = None, *, resumed: int = 0, engine: int = 0
) -> dict[str, Any]:
    """Arguments of `sglang.Engine`.

    Args:
        settings: the run's.
        directory: of the model.
        shared: the folder where its workers meet the trainer's ranks, on each GPU for a memory of its own.
        resumed: step of the checkpoint that this start goes on from, or 0.
        engine: its number among the run's.
    """
    rollout, native = settings.rollout, settings.publish.path == "native"
    arguments: dict[str, Any] = {
        "model_path": str(directory),
        "load_format": "auto" if native else "dummy",  # with weftpub the first publish brings the weights
        "dtype": "bfloat16",
        "skip_tokenizer_init": not rollout.sampling.stop,
        "tp_size": rollout.tensor,
        "ep_size": rollout.expert,
        "moe_runner_backend": rollout.moe_runner,
        "fp8_gemm_runner_backend": rollout.fp8_gemm_runner,
        "context_length": settings.length.context,
        "max_running_requests": rollout.max_running,
        "mem_fraction_static": rollout.memory_fraction,
        "disable_radix_cache": not rollout.radix_cache,
        "enable_memory_saver": True,
        "sampling_backend": "pytorch",
        "sampling_defaults": "openai",
        "grammar_backend": "none",
        "random_seed": _random_seed(settings.seed, resumed, engine),
        "log_level": "error",
        # Prompts of a step are computed once; their graphs would take a minute to capture.
        "disable_prefill_cuda_graph": True,
        # Seeds of requests count, and a request does not depend on its company.
        "enable_deterministic_inference": settings.train.deterministic,
    }
    if family_of(settings.model.architecture).joined:
        # A model with shared experts, which are published on their own.
        arguments["disable_shared_experts_fusion"] = True
    batches = rollout.cuda_graph_batches
    arguments["cuda_graph_max_bs_decode"] = rollout.cuda_graph_max_batch if batches is None else max(batches)
    if batches is not None:
        arguments["cuda_graph_bs_decode"] = list(batches)
    if settings.smoke.enabled:
        # A cache for what can run at once, whatever the GPU has: several smokes may share one.
        arguments["max_total_tokens"] = rollout.max_running * settings.length.context
    if rollout.moe_a2a != "none":
        arguments["moe_a2a_backend"] = rollout.moe_a2a
    if rollout.dp_attention:
        arguments |= {"enable_dp_attention": True, "dp_size": rollout.data}
    if engine:
        # From which SGLang counts ports with DP attention: "nodes" that are tried on one machine must not meet.
        arguments["port"] = _FIRST_PORT + _PORTS * (engine % 100)
    if rollout.attention_backend is not None:
        arguments["attention_backend"] = rollout.attention_backend
    if not rollout.cuda_graph:
        arguments["disable_cuda_graph"] = True
    if shared is not None:
        arguments["json_model_override_args"] = json.dumps({SHARED_SETTING: {"folder": shared}})
        arguments["log_level"] = "warning"  # which says why a worker does not share
    return arguments


def _random_seed(*parts: int) -> int:
    """Where an engine's random numbers begin: a resumed run must not draw those of its first steps again, nor two
    engines the same ones. 31 bits, as numpy takes no more than 32.
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _unmeasured(device: str) -> None:
    """Nothing is known about what is free."""


def _return_cached_memory() -> None:
    """Give torch's cached blocks back to the GPU, and buckets that the engine's workers have let go of: the engine in
    the other process needs real memory.
    """
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
