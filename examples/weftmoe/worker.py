"""One trainer rank under torchrun: reads the settings that the launcher wrote down, and trains."""

import sys
from pathlib import Path

from weftmoe import settings as composed
from weftmoe.disk import cannot_write
from weftmoe.env import require_environment
from weftpub.errors import WeftpubError

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the rank; weftpub's own errors, and those of disks, become one message and exit code 1.

    Args:
        arguments: the path of the settings.
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
    except WeftpubError as error:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"weftmoe: {type(error).__name__}: {error}{notes}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        said = cannot_write(error, out)
        if said is None:
            raise
        print(f"weftmoe: {said}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
