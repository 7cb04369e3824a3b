"""A trainer in one virtual environment publishes into SGLang's own HTTP server in another: Megatron, AWEX and the store
on one side, SGLang alone on the other, and between them HTTP, the sockets of the workers, and shared memory.

The server, its scheduler and its layers are SGLang's; only the forward pass is replaced (see `cpu_engine`): a token is
the one before plus the version of the weights. The trainer is `environment_trainer`.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_engine import ENGINE, SWITCHES, environment
from environments import Environments, prepare
from layouts import BASE
from safetensors.torch import load_file

from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver import DriverDeadlines, HttpEngine

pytestmark = pytest.mark.slow

# A vocabulary that SGLang does not pad: every byte of every parameter is published.
CONFIG = {**BASE, "num_experts": 4, "num_hidden_layers": 1, "max_position_embeddings": 512, "vocab_size": 512}
API_KEY, ADMIN_KEY = "requests", "orders"
SERVER = Path(__file__).with_name("environment_server.py")
TRAINER = Path(__file__).with_name("environment_trainer.py")
TOKENS = 160  # of an answer that a publish falls into
START_S = 300.0  # on a machine that is busy with other tests
OPTIONS = {"fp8_gemm_runner_backend": "--fp8-gemm-backend"}  # whose names are not the settings'


@dataclass
class World:
    """A server, a trainer that has not published yet, and a client of the server."""

    environments: Environments
    folder: Path
    url: str
    trainer: "subprocess.Popen[str]"
    client: HttpEngine
    facts: dict[str, Any]

    def publish(self) -> dict[str, Any]:
        """Have the trainer publish its next version."""
        tell(self.trainer, "")
        return answer(self.trainer, self.folder)

    def served(self, parameter: str) -> str:
        """SHA-256 of a live parameter, by the engine's own word."""
        request = urllib.request.Request(
            f"{self.url}/get_weights_by_name",
            data=json.dumps({"name": parameter}).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(int(number) for number in json.load(response)).hex()


def tell(trainer: "subprocess.Popen[str]", line: str) -> None:
    """Ask the trainer for something."""
    assert trainer.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended, which `answer` says
        trainer.stdin.write(line + "\n")
        trainer.stdin.flush()


def answer(trainer: "subprocess.Popen[str]", folder: Path) -> dict[str, Any]:
    """What it answers; its own deadlines end it if the engine says nothing."""
    assert trainer.stdout is not None
    line = trainer.stdout.readline()
    assert line, "the trainer has ended" + said(folder)
    return json.loads(line)


def said(folder: Path) -> str:
    """The end of what both sides have printed."""
    return "; both sides said:\n" + (folder / "log").read_text(errors="replace")[-8000:]


def await_server(server: "subprocess.Popen[str]", client: HttpEngine, folder: Path) -> None:
    """Return when the server answers."""
    until = time.monotonic() + START_S
    while True:
        try:
            client.server_info()
            return
        except ChannelError as error:
            if "got no answer" not in str(error):
                raise
        assert server.poll() is None, "the server has ended" + said(folder)
        assert time.monotonic() < until, f"the server does not answer after {START_S:.0f} s" + said(folder)
        time.sleep(0.2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("env")
    environments = prepare(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        options = [*arguments(ENGINE), "--port", str(port), "--api-key", API_KEY, "--admin-api-key", ADMIN_KEY]
        server = start(stack, log, environments.engine, SERVER, folder / "config.json", folder / "model", *options)
        trainer = start(stack, log, environments.trainer, TRAINER, folder / "config.json")
        client = HttpEngine(url, API_KEY, admin_key=ADMIN_KEY, deadlines=DriverDeadlines(*(60.0,) * 8))
        stack.callback(client.shutdown)
        await_server(server, client, folder)
        tell(trainer, json.dumps({"url": url, "api_key": API_KEY, "admin_key": ADMIN_KEY, "folder": str(folder)}))
        yield World(environments, folder, url, trainer, client, answer(trainer, folder))


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings of an engine, as its command line has them."""
    found = ["--host", "127.0.0.1", "--skip-server-warmup"]
    for name, value in settings.items():
        found.append(OPTIONS.get(name, f"--{name.replace('_', '-')}"))
        if value is not True:
            found.append(str(value))
    return found


def start(stack: ExitStack, log: Any, python: Path, script: Path, *options: object) -> "subprocess.Popen[str]":
    """A process of another environment; it and all that it started end with the stack."""
    switches = Path(log.name).parent / "switches"
    switches.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.Popen(
        [str(python), str(script), *map(str, options)],
        env={**kept, **environment(1), SWITCHES: str(switches)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if script is TRAINER else log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    stack.callback(end, process)
    return process


def end(process: "subprocess.Popen[str]") -> None:
    """End a process and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not read
                pipe.close()


def expected(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of every parameter of an engine of one rank, from the trainer's tensors: SGLang's layout, spelled out."""
    layer = "model.layers.0."
    heads = [tensors[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
    parameters = {name: tensor for name, tensor in tensors.items() if "_proj." not in name}
    parameters[f"{layer}self_attn.o_proj.weight"] = tensors[f"{layer}self_attn.o_proj.weight"]
    parameters[f"{layer}self_attn.qkv_proj.weight"] = torch.cat(heads)
    for kind in ("weight", "weight_scale_inv"):
        gate, up, down = (
            [tensors[f"{layer}mlp.experts.{n}.{part}_proj.{kind}"] for n in range(CONFIG["num_experts"])]
            for part in ("gate", "up", "down")
        )
        rows = [torch.cat([raw(one), raw(other)]) for one, other in zip(gate, up, strict=True)]
        parameters[f"{layer}mlp.experts.w13_{kind}"] = torch.stack(rows)
        parameters[f"{layer}mlp.experts.w2_{kind}"] = torch.stack([raw(one) for one in down])
    return {name: hashlib.sha256(raw(tensor).numpy().tobytes()).hexdigest() for name, tensor in parameters.items()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, row by row."""
    return tensor.contiguous().view(torch.uint8)


def test_each_environment_holds_one_side_only(world: World) -> None:
    """One environment had both sides' packages, and a version that suited only one of them."""
    trainer, engine = world.facts, json.loads((world.folder / "engine.json").read_text())
    sides = {"sglang": engine, "torch_memory_saver": engine, "megatron.core": trainer, "awex": trainer}
    for package, side in sides.items():
        assert {name: found["found"][package] for name, found in (("trainer", trainer), ("engine", engine))} == {
            "trainer": side is trainer,
            "engine": side is engine,
        }, package
    assert len({trainer["prefix"], engine["prefix"], sys.prefix}) == 3
    for side in (trainer, engine):
        assert side["torch_file"].startswith(side["prefix"])
    assert (trainer["torch"] != engine["torch"]) == world.environments.installed, (trainer["torch"], engine["torch"])


def test_the_engine_serves_the_trainers_bytes(world: World) -> None:
    """The engine started with random weights; a version arrives through drain, release, publish, resume, continue."""
    published = world.publish()
    assert world.client.weight_version() == str(published["version"])
    assert set(published["transports"]) == {"shared_memory"}
    tensors = load_file(world.folder / f"version-{published['version']}.safetensors")
    assert len(published["sha256"]) == len(tensors)
    parameters = expected(tensors)
    assert sum(name.endswith("weight_scale_inv") for name in parameters) == 2
    for name, digest in parameters.items():
        assert world.served(name) == digest, name


def test_answers_name_the_version_that_made_each_token(world: World) -> None:
    """A request is in flight while another version arrives: it ends with tokens of both."""
    old = world.publish()["version"]
    sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    slow, progress = (world.folder / "switches" / name for name in ("slow", "progress"))
    progress.unlink(missing_ok=True)
    slow.touch()
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(world.client.generate, [[9, 1]], sampling)
            until = time.monotonic() + 60
            while not progress.exists():  # some tokens
                assert time.monotonic() < until, "nothing is generated" + said(world.folder)
                time.sleep(0.01)
            new = world.publish()["version"]
            slow.unlink()
            (found,) = asked.result(120)
    finally:
        slow.unlink(missing_ok=True)
    assert [span.version for span in found.versions] == [str(old), str(new)]
    token = 1
    for span in found.versions:
        for made in found.tokens[span.start : span.end]:
            token = (token + int(span.version)) % CONFIG["vocab_size"]
            assert made == token
    assert (len(found.tokens), found.finish) == (TOKENS, "length")
    assert world.client.weight_version() == str(new)
    (later,) = world.client.generate([[9, 1]], {**sampling, "max_new_tokens": 3})
    assert {span.version for span in later.versions} == {str(new)}
    assert later.tokens == (1 + new, 1 + 2 * new, 1 + 3 * new)


@pytest.mark.parametrize(
    ("api_key", "admin_key", "fault"),
    [
        (None, None, "server_info was refused with status 401: the server asks for a key; set api_key"),
        (
            "wrong",
            ADMIN_KEY,
            "server_info was refused with status 401: the server does not know the api_key .*--api-key",
        ),
        (API_KEY, None, "init_weights_update_group was refused .*not know the admin_key .*--admin-api-key"),
        (API_KEY, "wrong", "init_weights_update_group was refused .*not know the admin_key .*--admin-api-key"),
    ],
)
def test_a_wrong_key_is_refused(
    world: World, tmp_path: Path, api_key: str | None, admin_key: str | None, fault: str
) -> None:
    """SGLang takes its API key where it is asked, and its admin key alone where it is told what to do."""
    before = world.client.weight_version()
    client = HttpEngine(world.url, api_key, admin_key=admin_key, deadlines=DriverDeadlines(*(60.0,) * 8))
    with pytest.raises(ChannelError, match=fault):
        client.start_receivers("run", tmp_path / "s")
    client.shutdown()
    assert world.client.weight_version() == before
