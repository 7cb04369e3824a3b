"""SGLang's own HTTP server on a CPU, for `test_two_environments`:

    ENGINE_PYTHON environment_server.py CONFIG MODEL OPTIONS...

writes what its environment is to engine.json and the engine's model directory MODEL from the config file, then runs
``sglang.launch_server`` with the options.
Here SGLang's processes are forks of this one, at the moment at which it would choose to spawn them: each of the three
would take ten seconds and more to import what this one has imported.
"""

import hashlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import torch
from environments import facts

__all__ = ["main", "register"]


def register() -> None:
    """Plugin entry point: the engine says, over its own ``get_weights_by_name``, which bytes a parameter has."""
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

        Qwen3MoeForCausalLM.get_weights_by_name = _digest
        # From torch 2.14 on a build for CUDA would name CUDA's module where there is no GPU.
        torch.get_device_module = lambda _=None: torch.cpu


def _digest(model: Any, name: str, *_: Any, **__: Any) -> list[float]:
    """The 32 bytes of a live parameter's SHA-256, as the numbers that SGLang would answer."""
    live = model.get_parameter(name).detach().contiguous().reshape(-1).view(torch.uint8)
    return [float(byte) for byte in hashlib.sha256(live.numpy().tobytes()).digest()]


def _fork_from_here(folder: Path) -> None:
    """Make a fork of this process the one from which `multiprocessing` forks all others."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "forks"))
        listener.listen()
        alive, hold = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(hold)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
            forkserver.main(os.dup(listener.fileno()), alive, [])
            os._exit(0)
    os.close(alive)
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = str(folder / "forks"), hold, pid


def main(arguments: list[str]) -> None:
    """Run the server until it is ended."""
    config, model, *options = arguments
    Path(model).with_name("engine.json").write_text(json.dumps(facts()), encoding="utf-8")
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    from weftpub_adapters.sglang.driver.model_directory import write_engine_directory

    # Building a model leaves traces in SGLang's runtime context, so that is done in a process of its own.
    writer = get_context("fork").Process(target=write_engine_directory, args=(model, config))
    writer.start()
    writer.join()
    choose = multiprocessing.set_start_method

    def fork(method: str, force: bool = False) -> None:
        _fork_from_here(Path(model).parent)
        choose("forkserver", force)

    multiprocessing.set_start_method = fork
    sys.argv = ["sglang.launch_server", "--model-path", model, *options]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
