"""An SGLang engine of this process that also takes weights by SGLang's own update, which the baseline uses."""

import base64
import os
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing import reductions

from weftmoe.rollout.gather import Bucket
from weftpub.errors import ChannelError
from weftpub_adapters.sglang.driver import LocalEngine

__all__ = ["UpdatableEngine", "process_environment", "serialized_bucket"]


class UpdatableEngine(LocalEngine):
    """A `LocalEngine` that also loads tensors."""

    def load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]], *, bucket: int, seconds: float) -> None:
        """SGLang's own update: named tensors, in buckets, into the model through its loader.

        Args:
            tensors: by Hugging Face name.
            bucket: most bytes of one message.
            seconds: for each message.
        """
        self.begin_update(seconds)
        for part in _buckets(tensors, bucket):
            self._update(self._load(part), seconds)
        self.end_update(seconds)

    def begin_update(self, seconds: float) -> None:
        """Announce buckets."""
        self._session("begin_weight_update", "BeginWeightUpdateReqInput", seconds)

    def load_bucket(self, payloads: Sequence[str], seconds: float) -> None:
        """Load one bucket of whole tensors.

        Args:
            payloads: of `serialized_bucket`, one for each of the engine's workers, in their order: each reads its own.
            seconds: for all of them to have read it.

        Raises:
            ChannelError: as many workers there are not, or one refused.
        """
        workers = int(self._manager.server_args.tp_size)
        if len(payloads) != workers:
            raise ChannelError(
                f"{self.where}: {len(payloads)} ranks have packed a bucket, and the engine has {workers} workers; make "
                "rollout.tensor the number of trainer ranks"
            )
        self._update(self._send_update([base64.b64decode(one) for one in payloads], "flattened_bucket"), seconds)

    def end_update(self, seconds: float) -> None:
        """All buckets are there."""
        self._session("end_weight_update", "EndWeightUpdateReqInput", seconds)

    def _update(self, call: Coroutine[Any, Any, tuple[Any, ...]], seconds: float) -> None:
        self._expect(self._call(call, "native weight update", seconds), "native weight update")

    def _session(self, call: str, kind: str, seconds: float) -> None:
        from sglang.srt.managers import io_struct

        request = getattr(io_struct, kind)()
        self._expect(self._call(getattr(self._manager, call)(request, None), call, seconds), call)

    def _expect(self, answer: tuple[Any, ...], call: str) -> None:
        if not answer[0]:
            raise ChannelError(f"{self.where}: {call} failed: {answer[1]}")

    async def _load(self, part: list[tuple[str, torch.Tensor]]) -> tuple[Any, ...]:
        from sglang.srt.utils import MultiprocessingSerializer

        ranks = int(self._manager.server_args.tp_size)
        payloads: list[Any] = [MultiprocessingSerializer.serialize(part) for _ in range(ranks)]
        return await self._send_update(payloads, None)

    async def _send_update(self, payloads: list[bytes], load_format: str | None) -> tuple[Any, ...]:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=False
        )
        answer: tuple[Any, ...] = await self._manager.update_weights_from_tensor(request, None)
        return answer


def serialized_bucket(bucket: Bucket, buffer: torch.Tensor) -> str:
    """A bucket as SGLang's workers read it: a handle of its memory, and where each tensor lies in it; in base64.

    The worker on the buffer's GPU has to read it, once: then the memory can be let go of, which torch keeps until it
    was.
    """
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata = [
        FlattenedTensorMetadata(
            name=whole.name,
            shape=torch.Size(whole.shape),
            dtype=whole.dtype,
            start_idx=whole.start,
            end_idx=whole.start + whole.nbytes,
            numel=whole.nbytes,
        )
        for whole in bucket.tensors
    ]
    payload: Any = MultiprocessingSerializer.serialize({"flattened_tensor": _Handle(buffer), "metadata": metadata})
    return base64.b64encode(payload).decode("ascii")


class _Handle:
    """Pickled as the handle of a tensor's memory, which names the GPU by its UUID: each process counts those that it
    sees, and SGLang's workers understand both. SGLang's own way is to have torch do so for the whole process, which
    could then pickle no tensor of the CPU any more.
    """

    _DEVICE = 6  # of the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        reduce = getattr(reductions, "_reduce_tensor_original", reductions.reduce_tensor)
        rebuild, arguments = reduce(self._tensor)
        if self._tensor.is_cuda:
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[: self._DEVICE], uuid, *arguments[self._DEVICE + 1 :])
        return rebuild, arguments


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
