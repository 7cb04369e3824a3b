"""How calls and requests reach an engine: over HTTP against a server that answers as SGLang's does, and the desk that
holds, restarts and gives up requests.
"""

import asyncio
import dataclasses
import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from weftpub.errors import ChannelError, ConfigError, DeadlineError, StateError
from weftpub_adapters.sglang.driver import (
    Completion,
    DriverDeadlines,
    EngineHandle,
    HttpEngine,
    WorkerStanding,
    local,
)
from weftpub_adapters.sglang.driver.loop import LoopThread
from weftpub_adapters.sglang.driver.model_directory import write_engine_directory
from weftpub_adapters.sglang.driver.requests import Ask, RequestDesk
from weftpub_adapters.sglang.plugin import ReceiverSettings
from weftpub_adapters.sglang.plugin.settings import TcpSettings

SOON = DriverDeadlines(*(30.0,) * 8)
LENGTH = {"type": "length", "length": 2}


class Server:
    """SGLang's endpoints, as far as a handle uses them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.version = "default"
        self.flushes = True
        self.status = 200
        self.started: tuple[int, Any] = (400, {"success": False, "message": "no such backend: weftpub"})
        self.headers: list[str | None] = []
        self.hold = False  # keep answers to generate back
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer._answer(self, json.loads(data) if data else None)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, handler: Any, body: Any) -> None:
        path = handler.path.lstrip("/")
        self.calls.append((path, body))
        self.headers.append(handler.headers.get("Authorization"))
        status, content = self._respond(path, body)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "text/plain" if isinstance(content, bytes) else "application/json")
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _respond(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "generate":
            wait_for(lambda: not self.hold)
            meta = {"finish_reason": LENGTH, "weight_version": self.version}
            if body["return_logprob"]:
                meta["output_token_logprobs"] = [[-0.25, 7, None], [-0.5, 8, None]]
                start = body.get("logprob_start_len", -1)
                meta["input_token_logprobs"] = [
                    [None, 1, None],
                    *([-1.0, 2, None] for _ in body["input_ids"][start + 1 :]),
                ]
            return 200, {"output_ids": [7, 8], "text": "", "meta_info": meta}
        if path.startswith("flush_cache"):
            return (200, b"Cache flushed.") if self.flushes else (400, b"Timed out waiting for idle state.")
        if path == "model_info":
            return 200, {"weight_version": self.version}
        if path == "server_info":
            return 200, {"version": "0.5.22", "enable_memory_saver": True}
        if path == "init_weights_update_group":
            return self.started
        if path == "update_weight_version":
            self.version = body["new_version"]
        return self.status, {"message": "ok"} if self.status == 200 else {"error": {"message": "not idle"}}


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture
def engine(server: Server) -> Iterator[HttpEngine]:
    found = HttpEngine(server.url, "key", deadlines=SOON)
    yield found
    found.shutdown()


def test_calls_travel_as_sglang_names_them_and_no_request_is_aborted(server: Server, engine: HttpEngine) -> None:
    """SGLang's own version update over HTTP aborts every request in flight unless it is told not to."""
    assert isinstance(engine, EngineHandle)
    engine.pause("retract")
    assert engine.flush()
    engine.release(["kv_cache"])
    engine.resume(["kv_cache"])
    engine.set_weight_version("9")
    assert engine.weight_version() == "9"
    engine.continue_()
    assert server.calls == [
        ("pause_generation", {"mode": "retract"}),
        ("flush_cache?timeout=0", None),
        ("release_memory_occupation", {"tags": ["kv_cache"]}),
        ("resume_memory_occupation", {"tags": ["kv_cache"]}),
        ("update_weight_version", {"new_version": "9", "abort_all_requests": False}),
        ("model_info", None),
        ("continue_generation", {"torch_empty_cache": False}),
    ]
    assert set(server.headers) == {"Bearer key"}


def test_answers_scores_and_refusals(server: Server, engine: HttpEngine) -> None:
    (answer,) = engine.generate([[1, 2, 3, 4]], {"max_new_tokens": 2}, logprobs=True, score_from=[2])
    assert (answer.tokens, answer.logprobs, answer.scores) == ((7, 8), (-0.25, -0.5), (-1.0, -1.0))
    assert server.calls[-1][1]["logprob_start_len"] == 1
    server.flushes = False
    assert not engine.flush()
    server.status = 500
    with pytest.raises(ChannelError, match=r"release_memory_occupation was answered with status 500: .*not idle"):
        engine.release(["weights"])
    for prompts, arguments in (([[]], {}), ([[1, 2]], {"score_from": [0]}), ([[1, 2]], {"score_from": [2]})):
        with pytest.raises(ConfigError, match=r"no token|score_from"):
            engine.generate(prompts, {}, **arguments)
    with pytest.raises(ConfigError, match="2 prompts came with 1 sets"):
        engine.generate([[1], [2]], [{}])


def test_a_server_without_the_plugin_says_so(server: Server, engine: HttpEngine, tmp_path: Path) -> None:
    with pytest.raises(ChannelError, match="receivers did not start: no such backend"):
        engine.start_receivers("run", tmp_path / "s")
    settings = ReceiverSettings.read(tmp_path / "s")
    assert (settings.run_id, settings.engine, settings.version) == ("run", "sglang", None)
    server.started = (200, {"success": True, "message": "Succeeded to initialize custom process group."})
    with pytest.raises(ChannelError, match="expected the receivers' addresses"):
        engine.start_receivers("run", tmp_path / "s")


def test_workers_that_rest_are_told_apart_from_those_that_refuse(server: Server, engine: HttpEngine) -> None:
    """Every group of data-parallel attention answers for all workers."""
    workers = [
        {"rank": 0, "resting": True, "error": "chunk 3 failed | torn", "publisher": "a" * 32},
        {"rank": 1, "resting": True, "error": "", "publisher": ""},
        {"rank": 2, "resting": False, "error": "", "publisher": "a" * 32, "doing": "3 being computed"},
    ]
    server.started = (200, {"success": True, "message": " | ".join([json.dumps(workers)] * 2)})
    assert engine.workers() == (
        WorkerStanding(0, True, "chunk 3 failed | torn", "a" * 32),
        WorkerStanding(1, True, "", ""),
        WorkerStanding(2, False, "", "a" * 32, "3 being computed"),
    )
    assert server.calls[-1][1]["backend"] == "weftpub-standing"
    for message in ("", "[] | ", "Succeeded to initialize custom process group."):
        server.started = (200, {"success": True, "message": message})
        with pytest.raises(ChannelError, match="expected the receivers' addresses"):
            engine.workers()
    server.started = (400, {"success": False, "message": "no receiver was ever started"})
    with pytest.raises(ChannelError, match="does not say whether it computes requests: no receiver"):
        engine.workers()


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("text/html", b"<html>Welcome</html>", "text instead of JSON, so not by SGLang: '<html>Welcome"),
        ("application/json", b'{"weight_version": ', "broken JSON"),
        ("application/json", b"\xff\xfe", "broken JSON"),
        ("application/octet-stream", b"\xff\xfe\x00", "text instead of JSON"),
    ],
)
def test_an_answer_that_is_not_sglangs_is_an_error_of_the_engine(
    server: Server, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch, kind: str, data: bytes, words: str
) -> None:
    """A proxy's page with status 200 passed for a pause, and half an answer raised what no driver expects."""

    def answer(handler: Any, _: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    monkeypatch.setattr(server, "_answer", answer)
    for call in (engine.weight_version, engine.server_info, lambda: engine.release(["weights"])):
        with pytest.raises(ChannelError, match=words):
            call()


def test_an_address_that_is_none_is_an_error_of_the_engine() -> None:
    engine = HttpEngine("nonsense", deadlines=SOON)
    with pytest.raises(ChannelError, match="engine sglang at nonsense: model_info got no answer"):
        engine.weight_version()
    engine.shutdown()


def test_a_server_that_is_gone_is_named(server: Server, engine: HttpEngine) -> None:
    server.close()
    with pytest.raises(ChannelError, match=rf"engine sglang at {server.url}: model_info got no answer"):
        engine.weight_version()


def test_a_pause_that_failed_does_not_keep_the_engine_paused(server: Server, engine: HttpEngine) -> None:
    """The server had paused and its answer was lost: requests waited for an engine that nobody meant to be paused."""
    server.status = 500
    with pytest.raises(ChannelError, match="pause_generation"):
        engine.pause("retract")
    assert [path for path, _ in server.calls] == ["pause_generation", "continue_generation"]
    server.status = 200
    assert engine.generate([[1]], {"max_new_tokens": 2}, seconds=60.0)[0].tokens == (7, 8)


@pytest.mark.parametrize("told", [True, False])
def test_a_drain_that_comes_to_its_end_says_what_requests_do(server: Server, told: bool) -> None:
    """A grammar took minutes to compile. After ten of them a driver heard that answers were still being generated."""
    workers = [{"rank": 0, "resting": False, "error": "", "doing": "1 waiting for a grammar to be compiled"}]
    if told:
        server.started = (200, {"success": True, "message": json.dumps(workers)})
    server.flushes = False
    engine = HttpEngine(server.url, deadlines=dataclasses.replace(SOON, drain=0.1))
    words = r"answers are still being generated; .*, or use mode 'retract'"
    with pytest.raises(DeadlineError, match=words) as raised:
        engine.pause("drain")
    reason = "(requests of rank 0: 1 waiting for a grammar to be compiled)"
    assert (reason in str(raised.value)) is told
    engine.shutdown()


def test_settings_count_only_from_a_file_of_ones_own(tmp_path: Path) -> None:
    """Whoever reaches the HTTP port names a folder; what is in it must be the engine's own user's."""
    tcp = TcpSettings(host="10.0.0.7", public="p" * 40, secret="s" * 40, admitted=("a" * 40,))
    settings = ReceiverSettings.checked(run_id="run", engine="sglang", first_rank=2, version=5, tcp=tcp)
    assert "s" * 40 not in repr(settings)
    settings.write(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700
    assert ReceiverSettings.read(tmp_path / "s") == settings
    path = tmp_path / "s" / "receivers.json"
    path.chmod(0o666)
    with pytest.raises(ChannelError, match="that nobody else writes"):
        ReceiverSettings.read(tmp_path / "s")
    path.chmod(0o640)
    with pytest.raises(ChannelError, match="holds a secret key and has mode 640"):
        ReceiverSettings.read(tmp_path / "s")
    path.chmod(0o600)
    path.write_text('{"run_id": "run", "engine": "sglang", "command": "rm"}')
    with pytest.raises(ChannelError, match="not receiver settings"):
        ReceiverSettings.read(tmp_path / "s")
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ChannelError, match="cannot be read"):
        ReceiverSettings.read(tmp_path / "s")
    (tmp_path / "s").chmod(0o755)
    with pytest.raises(ChannelError, match="others can enter"):
        ReceiverSettings.read(tmp_path / "s")
    with pytest.raises(ConfigError, match="engine"):
        ReceiverSettings.checked(run_id="run", engine="a b")
    with pytest.raises(ChannelError, match="no such folder"):
        ReceiverSettings.read(tmp_path / "made" / "by" / "request")
    assert not (tmp_path / "made").exists()


class Slow:
    """SGLang's tokenizer manager and scheduler as they treat requests and aborts, after the source of 0.5.23.

    The tokenizer manager passes one abort of a request on and ignores later ones (`ReqState.abort_sent`); while it is
    paused it keeps requests that it has not passed on. The scheduler ignores the abort of a request that it does not
    have; a paused one gives a request back at once, and says of one that waits for its grammar that it was wrong.
    """

    def __init__(self) -> None:
        self.asked: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self.prompts: list[list[int]] = []
        self.version = 1
        self.scheduled: dict[str, list[str]] = {}  # requests that the scheduler has; the versions of their tokens
        self.aborted: set[str] = set()  # whose abort was passed on
        self.on_the_way = False  # whether requests stay in the tokenizer manager
        self.compiling: set[str] = set()  # requests that wait for their grammar

    async def send(self, request: str, ask: Ask) -> dict[str, Any]:
        self.prompts.append(ask.prompt)
        if not self.on_the_way:
            self.scheduled[request] = []
        answer = self.asked[request] = asyncio.get_running_loop().create_future()  # last: tests wait for it
        return await answer

    async def cancel(self, request: str) -> None:
        if request in self.aborted or request not in self.asked:
            return
        self.aborted.add(request)
        if request in self.compiling:  # SGLang answers with a status of 400
            future = self.asked.pop(request)
            future.get_loop().call_soon_threadsafe(future.set_exception, ChannelError("Aborted by AbortReq."))
        elif request in self.scheduled:
            self.answer(request, {"type": "abort", "message": "aborted"})

    def arrive(self) -> None:
        """Requests that were on the way reach the scheduler."""
        self.scheduled.update({request: [] for request in self.asked.keys() - self.scheduled.keys()})

    def compute(self) -> None:
        """A token for every request."""
        for tokens in self.scheduled.values():
            tokens.append(str(self.version))

    def answer(self, request: str, reason: dict[str, Any]) -> None:
        future = self.asked.pop(request)
        tokens = self.scheduled.pop(request)
        spans = [
            {"version": version, "start": tokens.index(version), "end": tokens.index(version) + tokens.count(version)}
            for version in dict.fromkeys(tokens)
        ]
        meta = {"finish_reason": reason, "weight_version": str(self.version), "weight_versions": spans}
        found = {"output_ids": [1] * len(tokens), "meta_info": meta}
        future.get_loop().call_soon_threadsafe(future.set_result, found)

    def answer_all(self) -> None:
        for request in list(self.scheduled):
            self.answer(request, {"type": "length"})


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


@dataclass
class Desk:
    """A desk, the engine behind it, and threads that ask it."""

    engine: Slow
    desk: RequestDesk
    loop: LoopThread
    pool: ThreadPoolExecutor

    def ask(self, prompt: list[int]) -> Future[Completion]:
        count = len(self.engine.asked)
        asked = self.pool.submit(
            lambda: self.desk.generate(
                [prompt], {}, logprobs=False, score_from=None, seconds=60.0, require_alive=lambda: None
            )[0]
        )
        if self.desk._open.is_set():
            wait_for(lambda: len(self.engine.asked) == count + 1)
        return asked

    def wait(self, work: Any, phase: str, seconds: float = 30.0) -> None:
        self.loop.call(work, peer="engine", phase=phase, seconds=seconds, cause="")


@pytest.fixture
def desk() -> Iterator[Desk]:
    engine, loop = Slow(), LoopThread("test")
    with ThreadPoolExecutor(4) as pool:
        yield Desk(engine, RequestDesk("sglang", loop, engine.send, engine.cancel), loop, pool)
        loop.close()


def test_requests_are_held_drained_and_restarted_from_their_prompts(desk: Desk) -> None:
    engine = desk.engine
    first = desk.ask([1])
    engine.compute()
    desk.desk.hold()
    wait_for(lambda: not desk.desk._open.is_set())
    second = desk.ask([2])
    with pytest.raises(DeadlineError, match="engine: no answer in phase drain"):
        desk.wait(desk.desk.ended(), "drain", 0.3)
    assert engine.prompts == [[1]]
    desk.wait(desk.desk.take_back(), "restart")
    wait_for(lambda: desk.desk.running == 0)
    assert not first.done()
    engine.version = 2
    desk.desk.admit()
    wait_for(lambda: len(engine.asked) == 2)
    engine.compute()
    engine.answer_all()
    assert (first.result(30).attempts, second.result(30).attempts) == (2, 1)
    assert [[span.version for span in one.result(30).versions] for one in (first, second)] == [["2"], ["2"]]
    assert sorted(engine.prompts) == [[1], [1], [2]]
    third = desk.ask([3])
    engine.answer(next(iter(engine.asked)), {"type": "abort"})
    assert third.result(30).finish == "abort"
    desk.loop.close()
    with pytest.raises(StateError, match="shut down"):
        desk.desk.generate([[4]], {}, logprobs=False, score_from=None, seconds=1.0, require_alive=lambda: None)


def test_a_restart_waits_for_no_request_that_is_still_on_its_way(desk: Desk) -> None:
    """An abort that came before its request was lost, the same abort again was ignored by SGLang, and a restart waited
    for the whole answer, or until its deadline."""
    engine = desk.engine
    engine.on_the_way = True
    first = desk.ask([1])
    desk.desk.hold()
    desk.wait(desk.desk.take_back(), "restart")
    engine.arrive()
    engine.version = 2
    desk.desk.admit()
    engine.compute()
    engine.answer_all()
    answer = first.result(30)
    assert ([span.version for span in answer.versions], answer.attempts) == (["2"], 1)


def test_a_request_that_cannot_be_aborted_again_begins_again(desk: Desk) -> None:
    """Its abort was lost at one publish, and ignored at the next: it kept tokens of the version before."""
    engine = desk.engine
    engine.on_the_way = True
    first = desk.ask([1])
    desk.wait(desk.desk.take_back(), "restart")
    engine.arrive()
    engine.compute()
    engine.on_the_way = False
    desk.wait(desk.desk.take_back(), "restart")
    engine.version = 2
    engine.compute()
    engine.answer_all()
    wait_for(lambda: len(engine.asked) == 1)
    engine.compute()
    engine.answer_all()
    answer = first.result(30)
    assert ([span.version for span in answer.versions], answer.attempts) == (["2"], 2)
    assert engine.prompts == [[1], [1]]


def test_requests_that_wait_for_their_grammar_are_taken_back_or_given_up(desk: Desk) -> None:
    """SGLang answers the abort of such a request as if it had been wrong, and it was lost."""
    engine = desk.engine
    engine.on_the_way = True
    first = desk.ask([1])
    engine.compiling = set(engine.asked)
    desk.wait(desk.desk.take_back(), "restart")
    wait_for(lambda: len(engine.prompts) == 2)
    wait_for(lambda: len(engine.asked) == 1)
    engine.compiling = set(engine.asked)
    desk.wait(desk.desk.give_up(), "abort")
    for request in list(engine.asked):
        desk.wait(engine.cancel(request), "abort")
    answer = first.result(30)
    assert (answer.finish, answer.tokens, answer.attempts) == ("abort", (), 2)
    wrong = desk.ask([2])
    engine.compiling = set(engine.asked)
    for request in list(engine.asked):
        desk.wait(engine.cancel(request), "test")
    with pytest.raises(ChannelError, match="AbortReq"):
        wrong.result(30)


def test_a_restart_pauses_before_it_aborts(server: Server, engine: HttpEngine) -> None:
    """What an abort misses in a paused engine has no token yet."""
    server.hold = True
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.generate, [[1]], {"max_new_tokens": 2}, seconds=60.0)
        wait_for(lambda: engine.in_flight == 1)
        engine.pause("restart")
        assert [path for path, _ in server.calls if path != "generate"] == ["pause_generation", "abort_request"]
        (request,) = {body["rid"] for path, body in server.calls if path in ("generate", "abort_request")}
        assert request.startswith("weftpub-")
        server.hold = False
        engine.continue_()
        assert asked.result(60)[0].tokens == (7, 8)


def test_an_engine_outside_of_the_main_thread_needs_a_handler_for_its_dead_workers() -> None:
    """SGLang signals a worker's death with SIGQUIT, which by default ends the process: the trainer."""
    # What a shell starts in the background inherits that the signal is ignored.
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        local._require_quit_handler()
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(ConfigError, match="note_death"):
                pool.submit(local._require_quit_handler).result()
            signal.signal(signal.SIGQUIT, local.note_death)
            pool.submit(local._require_quit_handler).result()
            os.kill(os.getpid(), signal.SIGQUIT)
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_the_engines_directory_says_what_is_fp8_and_brings_the_tokenizer(tmp_path: Path) -> None:
    """SGLang takes every linear that its list forgets for FP8; and without a dtype it would choose float16."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"architectures": ["X"], "dtype": "float32"}), encoding="utf-8")
    (source / "tokenizer.json").write_text("{}", encoding="utf-8")
    (source / "model.safetensors").write_bytes(b"weights")
    target = write_engine_directory(tmp_path / "engine", source, "bf16")
    assert sorted(os.listdir(target)) == ["config.json", "tokenizer.json"]
    assert json.loads((target / "config.json").read_text()) == {"architectures": ["X"], "torch_dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="not a model's config"):
        write_engine_directory(tmp_path / "other", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="int4"):
        write_engine_directory(tmp_path / "other", source, "int4")  # type: ignore[arg-type]
