"""`python -m weftmoe.agent ... -m weftmoe.worker SETTINGS`: torchrun, and what it lacks where runs come again.

SIGUSR1 says that the job will be over soon. Torchrun would end its ranks for it; here they are told, by the same
signal, and have the time to save. Torchrun reports whether all went well, and no more: ranks that stopped before the
last step leave a note in the run's directory, and this process ends with the code that has the job queued again. So it
does, with a code of its own, where a rank was killed or lost its engine or a peer (`weftmoe.endings`).

The signal is blocked in this process and in everything that it starts, from the first moment on: it waits for a rank
that still loads its modules, and cannot end anybody who does not know it.

Torchrun ends a failed or interrupted run with tracebacks of itself, below which nobody finds what a rank said, and
leaves a folder for logs that it was never asked to write. Here one line says which rank ended and how, and the folder
goes.
"""

import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from weftmoe.endings import lost
from weftmoe.loop.stop import NOTICE
from weftmoe.rundir import EXIT_AGAIN, EXIT_LOST, stopped_path

__all__ = ["main"]

_AGAIN_S = 1.0


def main(arguments: list[str]) -> int:
    """Run the ranks; the process's exit code.

    Args:
        arguments: torchrun's. The last one is the path of the settings, in the run's directory.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {NOTICE})
    threading.Thread(target=_pass_on, name="notice", daemon=True).start()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    out = Path(arguments[-1]).parent
    try:
        with tempfile.TemporaryDirectory(prefix="weftmoe-ranks-") as logs:
            torchrun([f"--log-dir={logs}", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"with exit code {failure.exitcode}" if failure.exitcode > 0 else f"by {failure.signal_name()}"
        print(f"weftmoe: rank {rank} was the first to end, {how}; what it said stands above", file=sys.stderr)
        if not lost(failure.exitcode, out):
            return 1
        print("weftmoe: nothing that was set is to blame: started again, the run goes on", file=sys.stderr)
        return EXIT_LOST
    except SignalException as error:
        print(f"weftmoe: ended by {error.sigval.name}, with all ranks", file=sys.stderr)
        return 128 + error.sigval
    return EXIT_AGAIN if stopped_path(out).exists() else 0


def _pass_on() -> None:
    """Wait for the signal, then tell the ranks, again and again: some may not have been started yet."""
    signal.sigwait({NOTICE})
    while True:
        for rank in _children():
            with suppress(ProcessLookupError):
                os.kill(rank, NOTICE)
        signal.sigtimedwait({NOTICE}, _AGAIN_S)


def _children() -> list[int]:
    """Processes that this one has started itself; their own children are theirs to tell."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
