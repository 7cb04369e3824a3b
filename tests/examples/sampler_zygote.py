"""Torch samplers as forked processes of one that has imported SGLang: `python sampler_zygote.py SOCKET` serves, and
`python -S sampler_zygote.py SOCKET ARGUMENT...` is the sampler's process as whoever starts it sees it: it hands its
standard streams over, and ends as the sampler ends. Importing SGLang for each of a dozen would take minutes.

The argument `--fail VERSION` has a sampler fail as it verifies that version.
"""

import os
import signal
import socket
import struct
import sys


def serve(path: str) -> None:
    """Fork a sampler for everybody who connects, until standard input ends."""
    import select

    import torch

    torch.set_num_threads(1)
    import weftmoe.rollout.worker as worker
    from weftpub_adapters.sglang import build_model  # noqa: F401

    for module in ("sglang.srt.models.qwen3_moe", "sglang.srt.server_args", "sglang.srt.layers.quantization.fp8"):
        __import__(module)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listening.accept()
        if os.fork():
            connection.close()
            continue
        listening.close()
        become(connection, worker)


def become(connection: socket.socket, worker: object) -> None:
    """The forked sampler: with the other process's streams and arguments, until it ends."""
    data, streams, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    arguments = data.decode().split("\0")
    if "--fail" in arguments:
        at = arguments.index("--fail")
        fail_at(int(arguments[at + 1]), worker)
        del arguments[at : at + 2]
    connection.sendall(struct.pack("<i", os.getpid()))
    sys.argv = ["worker", *arguments]
    code = 1
    try:
        worker.main()  # type: ignore[attr-defined]
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(code)


def fail_at(version: int, worker: object) -> None:
    """Have this sampler's receiver fail once it has all bytes of a version."""
    from weftpub_adapters.sglang import SGLangEngine

    process, seen = SGLangEngine.post_process, []

    def post_process(self: SGLangEngine) -> None:
        seen.append(1)
        if len(seen) > version:
            raise RuntimeError("this node's engine has no memory for it")
        process(self)

    SGLangEngine.post_process = post_process  # type: ignore[method-assign]


def stand_for(path: str, arguments: list[str]) -> None:
    """Hand the streams over; end when the sampler has."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, ["\0".join(arguments).encode()], [0, 1, 2])
    (pid,) = struct.unpack("<i", connection.recv(4))
    for number in (0, 1):
        os.close(number)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
    connection.recv(1)  # until the sampler's end of it is closed


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        stand_for(sys.argv[1], sys.argv[2:])
