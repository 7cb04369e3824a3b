"""`python weftmoe_nodes.py NODES COMMAND...`: run.sh for each of several nodes, which one machine stands for.

Node I sees the machine's GPU of that number alone (as many GPUs a node as `--gpus` says). Signals go to all nodes, as
srun passes them on; the exit code is the largest of theirs, as srun's. All nodes end when one fails.
"""

import os
import signal
import socket
import subprocess
import sys
import time

_GRACE_S = 100.0


def main(nodes: int, command: list[str]) -> int:
    gpus = int(command[command.index("--gpus") + 1])
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = [str(n) for n in range(nodes * gpus)] if seen is None else [one for one in seen.split(",") if one]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    for node in range(nodes):
        environment = dict(os.environ)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(known[node * gpus : (node + 1) * gpus])
        place = ["--node-rank", str(node), "--master", f"127.0.0.1:{port}"]
        running.append(subprocess.Popen([*command, *place], env=environment))
    until = float("inf")
    while any(process.poll() is None for process in running):
        if until == float("inf") and any(process.poll() for process in running):
            until = time.monotonic() + _GRACE_S  # the others notice it by themselves
        if time.monotonic() > until:
            pass_on(signal.SIGTERM, None)
            until += _GRACE_S
        time.sleep(0.1)
    return max(abs(process.returncode) for process in running)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
