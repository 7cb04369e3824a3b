"""One trainer rank under torchrun: reads the settings that the launcher wrote down, and trains."""

import sys
import traceback
from pathlib import Path

from weftmoe import settings as composed
from weftmoe.disk import cannot_write
from weftmoe.endings import exit_code
from weftmoe.env import require_environment
from weftpub.errors import WeftpubError
from weftpub_kernels.errors import KernelError

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the rank; weftpub's own errors, and those of disks, become one message.

    Args:
        arguments: the path of the settings.

    Returns:
        0; 1 of a run that would fail again; `EXIT_LOST` where somebody was lost.
    """
    (path,) = arguments
    out = Path(path).parent
    try:
        settings = composed.read(Path(path))
        require_environment(settings, "trainer")
        # Reads the environment as it is imported.
        from weftmoe import train

        # Told to end is as good an end as any for torchrun, which would call it a failure; the agent looks at the note.
        train.main(settings)
    except Exception as error:  # whatever it is, the agent has to know whether another start would meet it again
        code = exit_code(error, out)
        said = _said(error, out)
        if said is None and code == 1:
            raise
        print(traceback.format_exc() if said is None else f"weftmoe: {said}", file=sys.stderr, flush=True)
        return code
    return 0


def _said(error: Exception, out: Path) -> str | None:
    """An error in words; None for one that its traceback explains best."""
    if isinstance(error, WeftpubError | KernelError):
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        return f"{type(error).__name__}: {error}{notes}"
    return cannot_write(error, out) if isinstance(error, OSError) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
