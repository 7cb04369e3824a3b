"""The trainer's entry: `python -m weftmoe.train SETTINGS.yaml`, one process per rank.

`run.sh` and `weftmoe.launch` resolve the settings, set each role's environment and start this with torchrun. Exit
codes: 0 all steps done, 1 an error of the run, 2 wrong usage.
"""

import sys
from pathlib import Path

from weftmoe.schema import Settings

__all__ = ["main"]


def main(settings: Settings) -> int:
    """Train as the settings say; the exit code."""
    from weftmoe.loop.run import run
    from weftpub.errors import WeftpubError

    try:
        result = run(settings)
    except WeftpubError as error:
        print(f"weftmoe: {type(error).__name__}: {error}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):
            print(f"  {note}", file=sys.stderr)
        return 1
    reward = "" if result.reward is None else f" reward={result.reward:.3f}"
    print(f"WEFTMOE OK steps={result.steps} version={result.version}{reward}")
    return 0


def _command() -> int:
    from weftmoe.settings import read

    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    return main(read(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(_command())
