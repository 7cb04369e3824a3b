"""One receiver process: `python -m weftpub_demo.receiver`, an SGLang rank under the driver's remote control."""

import argparse
from pathlib import Path

from weftpub_demo.control import Control

__all__ = ["main"]


def main() -> None:
    """Serve until the driver closes standard input."""
    control = Control()  # before everything that takes seconds: from here on this process leaves with its driver
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory; only its config.json is read")
    parser.add_argument("--name", required=True, help="of the engine, for messages")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="size of the expert-parallel group")
    parser.add_argument("--format", choices=("fp8", "bf16"), required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()

    from weftpub_demo.serving import ServingRank

    rank = ServingRank(
        options.model,
        name=options.name,
        rank=options.rank,
        ranks=options.ranks,
        format=options.format,
        device=options.device,
    )
    control.serve(rank.handlers())


if __name__ == "__main__":
    main()
