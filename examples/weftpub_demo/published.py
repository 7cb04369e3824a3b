"""The job through weftpub: experts in a store, staged optimizers, and every version published into live parameters.

The plan is AWEX's, made once from the layouts of both real sides. Receivers get it as plain data, over weftpub's
channel, on a socket each in a folder that only this user can enter.
"""

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weftpub.channel import Deadlines, unix_address
from weftpub.optim import AdamWHyperparameters, MuonHyperparameters
from weftpub.publisher import Peer, Publisher
from weftpub_adapters.awex import SourceMapping, plan_publish
from weftpub_adapters.megatron import MegatronTrainer, TrainerProbe, TrainerSettings, initialize_parallel, probe_layer
from weftpub_demo.checks import CheckBook
from weftpub_demo.config import DemoConfig, OptimizerName, Variant
from weftpub_demo.job import CLIP_GRAD, WEIGHT_DECAY, Published, combined_sha256, learning_rate
from weftpub_demo.progress import Progress
from weftpub_demo.receivers import ENGINE, Receivers

__all__ = ["PublishedJob"]

_HELLO_S = 30.0


class PublishedJob:
    """Megatron-core over a store of FP8 or BF16 experts, and a publisher to the receivers."""

    def __init__(
        self,
        config: DemoConfig,
        model: Path,
        receivers: Receivers,
        book: CheckBook,
        run_id: str,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self._book = book
        initialize_parallel()
        self._trainer = MegatronTrainer(model, _trainer_settings(config))
        self._step: Any = None
        for peer, answer in zip(receivers.peers, receivers.call("hello"), strict=True):
            book.require("plain", not answer["planner"], f"{peer} has imported {answer['planner']}")
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weftpub-"))
        peers = [Peer(rank, unix_address(folder, f"receiver-{rank}"), ENGINE) for rank in range(len(receivers.peers))]
        receivers.call("listen", run_id=run_id, addresses=[peer.address for peer in peers])
        # Both listen already: who does not greet soon is gone.
        deadlines = replace(Deadlines.all(config.limit_s), hello=min(_HELLO_S, config.limit_s))
        record = config.work / f"committed-{run_id}.json"
        publisher = Publisher(run_id, None, peers, commit_path=record, deadlines=deadlines)
        self._publisher = stack.enter_context(publisher)
        progress.phase("planning with AWEX")
        trainer = self._trainer
        plan = plan_publish(trainer.model, trainer.store, trainer.hf_config, publisher.describe())
        publisher.set_plan(plan)
        names = {shard.name for shard in plan.sources}
        self._mapping = SourceMapping(trainer.model, trainer.store, trainer.hf_config, names=names)

    def pause(self) -> None:
        """Stop both receivers serving."""
        self._publisher.pause()

    def train(self, tokens: torch.Tensor, labels: torch.Tensor) -> float:
        """Forward and backward through the store's bytes."""
        return self._trainer.forward_backward(tokens, labels)

    def update(self) -> None:
        """The staged step: every master through a slot, the store's next generation written on the way."""
        self._step = self._trainer.step()
        for name, report in self._step.updates.items():
            stalled = f"no master of {name} changed, though {len(report.stalled)} had a gradient"
            self._book.require("updated", not report.none_changed, stalled)

    def publish(self, version: int) -> Published:
        """Publish the store's generation and all other weights; committed by every receiver, or by none."""
        seal = self._step.seal
        before = self._masters()
        start = time.perf_counter()
        sources = self._mapping.buffers()
        made = (time.perf_counter() - start) * 1e3
        report = self._publisher.publish(version, sources, seal.checksums, verify_sha256=True)
        ms = (time.perf_counter() - start) * 1e3
        changed = sorted(name for name, digest in self._masters().items() if digest != before[name])
        self._book.require("masters", not changed, f"{len(changed)} masters changed: {changed[:4]}")
        self._book.passed("checksum", report.pieces)
        self._require_own(report.sha256)
        phases = {"sources": made} | {name: spent for name, spent in report.ms.items() if name != "total"}
        return Published(
            ms=ms,
            phases_ms=phases,
            changed=seal.changed_share,
            sha256=combined_sha256(report.sha256),
            nbytes=report.nbytes,
            transport=", ".join(sorted(set(report.transports.values()))),
        )

    def probe(self, layer: int, tokens: torch.Tensor) -> TrainerProbe:
        """Megatron's own MoE layer over the store; also looks at the layer's W^T."""
        for matrix in self._trainer.store.layout.matrices:
            if matrix.layer == layer:
                difference = self._trainer.store.matrix(matrix).transpose_difference()
                self._book.require("transpose", difference is None, f"{matrix.name}: {difference}")
        return probe_layer(self._trainer, layer, tokens)

    def _require_own(self, served: Mapping[str, str]) -> None:
        """The publisher proved that sent and served bytes agree; here, that the store computes with these bytes too."""
        own = self._trainer.store.sha256()
        wrong = sorted(name for name, digest in own.items() if served.get(name, digest) != digest)
        self._book.require("sha256", not wrong, f"{len(wrong)} tensors of the store differ: {wrong[:4]}")
        self._book.passed("sha256", len(served) - 1)

    def _masters(self) -> dict[str, str]:
        return {
            name: digest
            for optimizer in self._trainer.optimizers.values()
            for name, digest in optimizer.masters.sha256().items()
        }


def _trainer_settings(config: DemoConfig) -> TrainerSettings:
    rate = learning_rate(config)
    muon = MuonHyperparameters(lr=rate, weight_decay=WEIGHT_DECAY) if config.optimizer is OptimizerName.MUON else None
    fp8 = config.variant is Variant.FP8
    return TrainerSettings(
        muon=muon,
        adamw=AdamWHyperparameters(lr=rate, weight_decay=WEIGHT_DECAY),
        clip_grad=CLIP_GRAD,
        format="fp8" if fp8 else "bf16",
        preset=config.preset if fp8 else None,
    )
