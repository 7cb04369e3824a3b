"""The torch sampler's process (`python -m weftmoe.rollout.worker`): SGLang's real model under the driver's control.

Weights come over weftpub's channel into the live parameters (or, for a baseline, from files through SGLang's own
loader); this process never sees the trainer's tensors. It knows no Megatron and no planner.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from weftmoe.rollout.base import Request
from weftmoe.rollout.forward_hybrid import decoder_of, live_place
from weftmoe.rollout.sampling import Distribution, draw, score
from weftmoe.rollout.served_config import served_config
from weftpub.errors import StateError
from weftpub_demo.control import Control, Handler

__all__ = ["SamplerRank", "main"]


class SamplerRank:
    """One rank that holds the whole model, samples from it, and can be published to. With a folder to meet in, its
    experts lie in memory that the trainer maps, too.
    """

    def __init__(
        self,
        model: Path,
        *,
        name: str,
        format: Literal["fp8", "bf16"],
        distribution: Distribution,
        stops: list[int],
        shared: str | None = None,
        rank: int = 0,
    ) -> None:
        from weftpub_adapters.sglang import SGLangEngine, build_model
        from weftpub_adapters.sglang.shared_experts import engine_side, share_experts

        config = served_config(json.loads((model / "config.json").read_text(encoding="utf-8")))
        served = build_model(config, format=format, device="cpu")
        self._in_place: dict[str, torch.Tensor] = {}
        if shared is not None:
            with served.active():
                done = share_experts(served.model, shared)
            parameters = dict(served.model.named_parameters())
            self._in_place = {name: parameters[name].data for name in done.parameters}
        self.engine = SGLangEngine(served, name=name, rank=rank)
        self._side = engine_side(self.engine, served.model)
        self._decoder = decoder_of(self.engine.served)
        self._distribution = distribution
        self._stops = frozenset(stops)
        self._open = ExitStack()  # what stays open until the process ends

    def handlers(self) -> dict[str, Handler]:
        """Everything that the driver may ask."""
        return {
            "hello": self.hello,
            "listen": self.listen,
            "release": self.release,
            "reload": self.reload,
            "load": self.load,
            "commit": self.commit,
            "generate": self.generate,
            "score": self.score,
        }

    def hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answered once the model is built."""
        return {"pid": os.getpid(), "planner": sorted({"awex", "megatron"} & sys.modules.keys())}

    def listen(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve publishers of a run from a thread of its own."""
        from weftpub.channel import CurveKeys
        from weftpub.receive import Receiver, ReceiverThread

        receiver = Receiver(self._side, run_id=request["run_id"])
        given = request["keys"]  # over this process's own pipe; None for a Unix socket
        keys = None if given is None else CurveKeys(given[0], given[1], tuple(given[2]))
        return {"address": self._open.enter_context(ReceiverThread(receiver, request["address"], keys=keys)).address}

    def release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Give up the memory of all weights but those that the trainer maps, too."""
        self._decoder.drop()
        self._side.pause()
        self.engine.offload()
        self._bind()
        return {}

    def reload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Take memory for all weights, filled with NaN bytes: whatever a publish forgets shows."""
        self.engine.reload()
        self._bind()
        return {}

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Let SGLang's own loader read a file of some tensors, and compare them with the live parameters, as far as it
        is known which of them they are.

        Raises:
            StateError: a parameter has other bytes afterwards.
        """
        from safetensors.torch import load_file

        served, tensors = self.engine.served, load_file(request["file"])
        with served.active(), torch.no_grad():
            served.model.load_weights(iter(tensors.items()))
        places = {name: live_place(served.model, served.hf_config, name) for name in tensors}
        live = {name: place for name, place in places.items() if place is not None}
        wrong = [name for name, place in live.items() if not torch.equal(place, tensors[name])]
        if wrong:
            raise StateError(
                f"SGLang's loader left other bytes in {len(wrong)} of {len(live)} tensors than it was given: "
                f"{sorted(wrong)[:4]}"
            )
        return {"pieces": len(live), "bytes": sum(place.nbytes for place in live.values())}

    def commit(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve what was loaded as a version.

        Raises:
            StateError: elements were not loaded: they are NaN, as `reload` left them.
        """
        parameters = self.engine.served.model.parameters()
        poisoned = sum(int(parameter.data.float().isnan().sum()) for parameter in parameters)
        if poisoned:
            raise StateError(f"SGLang's loader left {poisoned} elements unwritten; the model is not complete")
        self.engine.post_process()
        self.engine.commit(request["version"])
        self.engine.resume()
        return {"version": self.engine.version}

    def generate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Complete prompts with the served version."""
        version = self._serve()
        wanted = [Request(tuple(tokens), limit, seed) for tokens, limit, seed in request["requests"]]
        drawn = draw(self._decoder, wanted, self._distribution, self._stops)
        return {
            "version": version,
            "samples": [[one.tokens, one.logprobs, "stop" if one.stopped else "length"] for one in drawn],
        }

    def score(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Log-probabilities of given tokens by the served version."""
        version = self._serve()
        sequences = [(tokens, first) for tokens, first in request["sequences"]]
        return {"version": version, "logprobs": score(self._decoder, sequences, self._distribution)}

    def _bind(self) -> None:
        """Shared memory is none of the engine's own: it stays, whatever becomes of that."""
        parameters = dict(self.engine.served.model.named_parameters())
        for name, tensor in self._in_place.items():
            parameters[name].data = tensor

    def _serve(self) -> int:
        if not self.engine.serving or self.engine.version is None:
            raise StateError(f"{self.engine.name} does not serve (version {self.engine.version}); publish first")
        if not self._decoder.fresh:
            self._decoder.refresh()
        return self.engine.version


def main() -> None:
    """Serve until the driver closes standard input."""
    control = Control()  # before everything that takes seconds: from here on this process leaves with its driver
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory; only its config.json is read")
    parser.add_argument("--name", required=True, help="of the engine, for messages")
    parser.add_argument("--format", choices=("fp8", "bf16"), required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--top-p", type=float, required=True)
    parser.add_argument("--stop", type=int, nargs="*", default=[], help="tokens that end a completion")
    parser.add_argument("--rank", type=int, default=0, help="receiver rank among all engines")
    parser.add_argument("--shared", help="folder where experts are shared with the trainer")
    options = parser.parse_args()
    rank = SamplerRank(
        options.model,
        name=options.name,
        format=options.format,
        distribution=Distribution(options.temperature, options.top_p),
        stops=options.stop,
        shared=options.shared,
        rank=options.rank,
    )
    control.serve(rank.handlers())


if __name__ == "__main__":
    main()
