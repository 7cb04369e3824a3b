"""The process that makes a smoke's model (`python -m weftmoe.smoke.maker`), for `weftmoe.smoke.apart`.

It takes the end of its input as the order to leave, and listens for that before it imports torch.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weftmoe.schema import Smoke
from weftpub_demo.control import Control

__all__ = ["main"]


def main() -> None:
    """Answer requests until the driver is gone."""
    control = Control()

    def make(request: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        from weftmoe.smoke.model import make_model

        control.progress(loaded=True)
        torch.set_num_threads(request["threads"])
        torch.use_deterministic_algorithms(request["deterministic"], warn_only=True)
        warmup = make_model(
            Path(request["directory"]),
            Smoke.model_validate(request["smoke"]),
            seed=request["seed"],
            tokens=request["tokens"],
            device=request["device"],
            architecture=request["architecture"],
            progress=lambda done, total: control.progress(done=done, total=total),
        )
        return asdict(warmup)

    control.serve({"make": make})


if __name__ == "__main__":
    main()
