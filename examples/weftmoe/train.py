"""The trainer of a run, one process per rank: `main(settings)`, or `python -m weftmoe.train SETTINGS.yaml`.

`run.sh` and `weftmoe.launch` resolve the settings, set each role's environment and start the ranks with torchrun.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weftmoe.rundir import EXIT_AGAIN
from weftmoe.schema import Settings

if TYPE_CHECKING:
    from weftmoe.loop.run import RunResult

__all__ = ["main"]


def main(settings: Settings) -> int:
    """Train as the settings say, and print one last line.

    Returns:
        0, or `EXIT_AGAIN` of a run that was told to end before its last step.

    Raises:
        WeftpubError: what failed, and what to do about it.
    """
    # Loads torch, Megatron and the engine's adapter; whoever imports this module may still want to set things up.
    from weftmoe.loop.run import run

    result = run(settings)
    if result.first:
        _say_what_next(settings, result)
        reward = "" if result.reward is None else f" reward={result.reward:.3f}"
        how = "STOPPED" if result.stopped else "OK"
        print(f"WEFTMOE {how} steps={result.steps} version={result.version}{reward}", flush=True)
    return EXIT_AGAIN if result.stopped else 0


def _say_what_next(settings: Settings, result: "RunResult") -> None:
    """On standard error: where the run's numbers are; and, of one that had been done before, how to go on."""
    if result.reward is None and result.steps >= settings.steps:
        print(f"weftmoe: no step was left of {settings.steps}; --steps with a larger number goes on", file=sys.stderr)
    if result.steps < settings.steps and not result.stopped:
        print(
            f"weftmoe: data.epochs={settings.data.epochs} ended the run after step {result.steps} of {settings.steps}; "
            "a larger one goes on",
            file=sys.stderr,
        )
    if settings.telemetry.jsonl:
        out = shlex.quote(str(settings.out))
        print(f"weftmoe: `weftpub report {out}` draws and sums up {settings.out / 'steps.jsonl'}", file=sys.stderr)


def _command() -> int:
    from weftmoe.settings import read
    from weftpub.errors import WeftpubError

    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return main(read(Path(sys.argv[1])))
    except WeftpubError as error:
        print(f"weftmoe: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(_command())
