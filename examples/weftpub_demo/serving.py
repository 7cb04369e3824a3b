"""What a receiver does for the driver: lose its weight memory, look for poison, load a directory, compute a layer.

Answers are plain data. Weights reach the live parameters in one of two ways: published over weftpub's channel, or, in
the baseline, read from a checkpoint directory by SGLang's own loader.
"""

import json
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open

from weftpub.receive import Receiver, ReceiverThread
from weftpub_adapters.sglang import SGLangEngine, build_model
from weftpub_demo.control import Handler

__all__ = ["ServingRank"]


class ServingRank:
    """One rank of the demo's engine: tensor parallel `ranks`, of which every rank holds its own experts whole."""

    def __init__(
        self, model: Path, *, name: str, rank: int, ranks: int, format: Literal["fp8", "bf16"], device: str
    ) -> None:
        hf_config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        served = build_model(hf_config, tp_size=ranks, ep_size=ranks, rank=rank, format=format, device=device)
        self.engine = SGLangEngine(served, name=name)
        self._open = ExitStack()  # what stays open until the process ends

    def handlers(self) -> dict[str, Handler]:
        """Everything that the driver may ask."""
        return {
            "hello": self.hello,
            "listen": self.listen,
            "offload": self.offload,
            "probe": self.probe,
            "load": self.load,
            "status": self.status,
        }

    def hello(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answered once the model is built."""
        return {"pid": os.getpid(), "planner": sorted({"awex", "megatron"} & sys.modules.keys())}

    def listen(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve publishers of a run at this rank's address, from a thread of its own."""
        rank = self.engine.served.parallel.rank
        receiver = Receiver(self.engine, run_id=request["run_id"])
        thread = self._open.enter_context(ReceiverThread(receiver, request["addresses"][rank]))
        return {"address": thread.address}

    def status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank serves, and how many elements of its weights are NaN."""
        return {"version": self.engine.version, "serving": self.engine.serving, "poisoned": self._poisoned()}

    def offload(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Drop the memory of every weight and make it anew, filled with NaN bytes; says how many moved and how
        many elements are not NaN."""
        self.engine.pause()
        # Held until the new memory exists, so that no address can come back by chance and make a stale view look right.
        before = self._parameters()
        self.engine.offload()
        self.engine.reload()
        after = self._parameters()
        return {
            "parameters": len(after),
            "moved": sum(before[name].data_ptr() != tensor.data_ptr() for name, tensor in after.items()),
            "clean": sum(tensor.numel() for tensor in after.values()) - self._poisoned(),
        }

    def load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Let SGLang's own loader read a checkpoint directory, and serve it as a version."""
        served = self.engine.served
        path = Path(request["directory"]) / "model.safetensors"
        with safe_open(path, framework="pt") as file, served.active(), torch.no_grad():
            served.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        self.engine.post_process()
        self.engine.commit(request["version"])
        self.engine.resume()
        return {"version": self.engine.version}

    def probe(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compute this rank's share of one layer from the live bytes, for the given tokens and routing."""
        result = self.engine.probe_layer(
            request["layer"],
            torch.tensor(request["hidden"], dtype=torch.float32),
            torch.tensor(request["expert_ids"]),
            torch.tensor(request["expert_weights"], dtype=torch.float32),
        )
        return {"sha256": result.sha256, "output": result.output.tolist()}

    def _parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.data for name, parameter in self.engine.served.model.named_parameters()}

    def _poisoned(self) -> int:
        # Through float32: isnan is not there for every FP8 dtype on every device.
        return sum(int(tensor.to(torch.float32).isnan().sum()) for tensor in self._parameters().values())
