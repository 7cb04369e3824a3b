"""An SGLang engine of this process that also takes weights by SGLang's own update, which the baseline uses."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver import LocalEngine

__all__ = ["UpdatableEngine", "process_environment"]


class UpdatableEngine(LocalEngine):
    """A `LocalEngine` that also loads tensors."""

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], *, bucket: int, seconds: float) -> None:
        """SGLang's own update: named tensors, in buckets, into the model through its loader.

        Args:
            tensors: by Hugging Face name.
            bucket: most bytes of one message.
            seconds: for each message.
        """
        self._session("begin_weight_update", "BeginWeightUpdateReqInput", seconds)
        for part in _buckets(tensors, bucket):
            self._expect(self._call(self._load(part), "native weight update", seconds), "native weight update")
        self._session("end_weight_update", "EndWeightUpdateReqInput", seconds)

    def _session(self, call: str, kind: str, seconds: float) -> None:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, kind)()
        self._expect(self._call(getattr(self._manager, call)(request, None), call, seconds), call)

    def _expect(self, answer: tuple[Any, ...], call: str) -> None:
        if not answer[0]:
            raise ChannelError(f"{self.where}: {call} failed: {answer[1]}")

    async def _load(self, part: list[tuple[str, torch.Tensor]]) -> tuple[Any, ...]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        ranks = int(self._manager.server_args.tp_size)
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(part) for _ in range(ranks)],
            flush_cache=False,
        )
        answer: tuple[Any, ...] = await self._manager.update_weights_from_tensor(request, None)
        return answer


@contextmanager
def process_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Processes that are started inside get this environment; this process has its own again afterwards."""
    before = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(environment)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]], most: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Runs of tensors of at most `most` bytes; a larger tensor travels alone."""
    part: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if part and size + nbytes > most:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += nbytes
    if part:
        yield part
