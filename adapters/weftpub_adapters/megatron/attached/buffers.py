"""The memory of parameters: expert memory given up while attached, and everything else moved to the host and back, in
both ways.

With the distributed optimizer the DDP keeps parameters in flat buffers; without it (Muon) each parameter owns its
storage.

* `ExpertMemory` frees what the managed experts own, flat buffer or not, and gives it back. Parameters, their views
  and their main
  gradients keep their identity. A managed flat buffer shows an empty `param_data` meanwhile, so that code which
  offloads, reloads or
  gathers buffers finds nothing to do there.
* `ParameterMemory` offloads and reloads the other parameters: through the buffers' own methods ("buffer"), or by
  resizing storages by
  hand as code for older releases does ("resize").
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch

from weftpub.device import pinned
from weftpub.errors import ConfigError, StateError

__all__ = ["BufferApi", "ExpertMemory", "ParameterMemory", "all_buffers"]

BufferApi = Literal["buffer", "resize"]


def all_buffers(ddp: Any) -> list[Any]:
    """Dense and expert-parallel buffers of a DistributedDataParallel."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


class ExpertMemory:
    """Storage of the managed expert parameters.

    Args:
        ddps: the wrapped chunks.
        parameters: the managed parameters.

    Raises:
        ConfigError: a flat buffer or storage is shared with parameters that are not managed. Nothing is changed.
    """

    def __init__(self, ddps: Sequence[Any], parameters: Sequence[torch.nn.Parameter]) -> None:
        managed = {id(parameter) for parameter in parameters}
        self._parameters = list(parameters)
        self._flat = [buffer for ddp in ddps for buffer in all_buffers(ddp) if _managed(buffer, managed)]
        in_flat = {id(p) for buffer in self._flat if buffer.param_data is not None for p in buffer.params}
        self._own = [p for p in self._parameters if id(p) not in in_flat]
        for parameter in self._own:
            size = parameter.numel() * parameter.element_size()
            if parameter.untyped_storage().nbytes() != size:
                raise ConfigError(
                    f"an expert parameter {list(parameter.shape)} shares its storage with others "
                    f"({parameter.untyped_storage().nbytes()} bytes, its own are {size}); call prepare(model) before "
                    "DistributedDataParallel wraps it"
                )
        self._groups = [
            group
            for ddp in ddps
            for group in [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
            if any(_has(self._flat, bucket) for bucket in group.buckets)
        ]
        for group in self._groups:
            if not all(_has(self._flat, bucket) for bucket in group.buckets):
                raise ConfigError(
                    "expert and dense buckets are in one bucket group; build DistributedDataParallel with "
                    "disable_bucketing=False"
                )
        self._param_data: list[torch.Tensor] = []
        self._bucket_data: list[list[torch.Tensor]] = []
        self._released = False

    @property
    def nbytes(self) -> int:
        """Bytes that managed parameters and their flat buffers own now."""
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in self._parameters}
        storages.update({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._flat_tensors()})
        return sum(storages.values())

    @property
    def flat(self) -> bool:
        """Whether the managed parameters lie in flat buffers."""
        return any(buffer.param_data is not None for buffer in self._flat)

    def release(self) -> None:
        """Free the memory; every object stays."""
        if self._released:
            raise StateError("expert parameter memory was released before")
        self._param_data = [buffer.param_data for buffer in self._flat]
        self._bucket_data = [[bucket.param_data for bucket in buffer.buckets] for buffer in self._flat]
        for buffer in self._flat:
            if buffer.param_data is None:
                continue
            # Code that moves buffers looks at these: a host copy from before would be brought back as the experts'
            # weights.
            buffer.param_data_cpu, buffer.param_data_size = None, 0
            buffer.param_data = _empty_like(buffer.param_data)
            for bucket in buffer.buckets:
                bucket.param_data = _empty_like(bucket.param_data)
        for group in self._groups:
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
            group.start_param_sync = _NothingToGather(group)
        self.free()
        self._released = True

    def free(self) -> None:
        """Drop the bytes again after `fill`."""
        for storage in self._storages():
            storage.resize_(0)

    def fill(self) -> None:
        """Memory behind every managed parameter, content undefined; the flat buffers stay hidden."""
        for tensor in self._flat_tensors():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        for parameter in self._own:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())

    def restore(self) -> None:
        """Undo `release`: memory, content undefined, and the buffers' own tensors."""
        self.fill()
        for buffer, data, buckets in zip(self._flat, self._param_data, self._bucket_data, strict=True):
            if data is None:
                continue
            buffer.param_data = data
            for bucket, own in zip(buffer.buckets, buckets, strict=True):
                bucket.param_data = own
        for group in self._groups:
            group.cached_param_buffer_shard_list = [None] * len(group.buckets)
            del group.start_param_sync
        self._released = False

    def _flat_tensors(self) -> list[torch.Tensor]:
        held = self._param_data if self._released or self._param_data else [buffer.param_data for buffer in self._flat]
        return [tensor for tensor in held if tensor is not None]

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for tensor in self._flat_tensors():
            yield tensor.untyped_storage()
        for parameter in self._own:
            yield parameter.untyped_storage()


class _NothingToGather:
    """Stands for `start_param_sync` of a bucket group whose parameters own no memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __call__(self, force_sync: bool = False) -> None:
        self._group.param_gather_dispatched = True


class ParameterMemory:
    """Moves the parameters that weftpub does not manage to the host and back, and gradients away and back.

    Args:
        ddps: the wrapped chunks.
        managed: the expert parameters, which are skipped.
    """

    def __init__(self, ddps: Sequence[Any], managed: Iterable[torch.nn.Parameter]) -> None:
        skip = {id(parameter) for parameter in managed}
        self._ddps = list(ddps)
        self._buffers = [b for ddp in ddps for b in all_buffers(ddp)]
        self._dense = [b for b in self._buffers if b.param_data is not None and not _managed(b, skip)]
        in_flat = {id(p) for b in self._dense for p in b.params}
        self._own = [p for ddp in ddps for p in ddp.parameters() if id(p) not in skip and id(p) not in in_flat]
        self._host: dict[int, torch.Tensor] = {}
        self._resized_by: BufferApi | None = None

    def require_movable(self, what: str) -> None:
        """ConfigError if Megatron captures CUDA graphs: what comes back may lie elsewhere, and a graph that was
        captured before would read and write where it lay.
        """
        for ddp in self._ddps:
            found = getattr(ddp.config, "cuda_graph_impl", "none")
            if found not in (None, "none"):
                raise ConfigError(
                    f"offload of {what} refused: TransformerConfig.cuda_graph_impl={found!r}, and a captured graph "
                    "would keep the addresses that they have now; set it to 'none', or do not offload them"
                )

    def offload(self, api: BufferApi) -> None:
        """Copy to pinned memory and free; returns when the bytes have arrived."""
        self._require_api(api)
        if self._resized_by is not None:
            raise StateError("parameters are offloaded already; reload them first")
        for buffer in self._dense:
            if api == "buffer":
                buffer.offload_to_cpu(move_params=True, move_grads=False)
            else:
                self._to_host(buffer.param_data)
        for parameter in self._own:
            self._to_host(parameter)
        _synchronize()
        if api == "resize":
            for buffer in self._dense:
                buffer.param_data.untyped_storage().resize_(0)
        for parameter in self._own:
            parameter.untyped_storage().resize_(0)
        self._resized_by = api
        _trim()

    def reload(self) -> None:
        """Bring the parameters back into the same tensors, by the way they went."""
        if self._resized_by is None:
            raise StateError("parameters are not offloaded; there is nothing to reload")
        for buffer in self._dense:
            if self._resized_by == "buffer":
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            else:
                self._from_host(buffer.param_data)
        for parameter in self._own:
            self._from_host(parameter)
        self._resized_by = None
        _synchronize()

    def offload_gradients(self) -> None:
        """Free all main gradients, experts' included; they are zero when they come back."""
        _synchronize()
        for buffer in self._buffers:
            buffer.offload_to_cpu(move_params=False, move_grads=True)
        _trim()

    def reload_gradients(self) -> None:
        """Memory behind the main gradients again, zeroed."""
        for buffer in self._buffers:
            buffer.reload_from_cpu(move_params=False, move_grads=True)

    def _require_api(self, api: BufferApi) -> None:
        if api not in ("buffer", "resize"):
            raise ConfigError(f"buffer api {api!r} is unknown; choose 'buffer' or 'resize'")
        if api == "buffer" and any(not hasattr(buffer, "offload_to_cpu") for buffer in self._dense):
            raise ConfigError(
                "this Megatron-core has no offload_to_cpu on its buffers (0.16 added it); use api='resize'"
            )

    def _to_host(self, tensor: torch.Tensor) -> None:
        host = self._host.get(id(tensor))
        if host is None:
            host = self._host[id(tensor)] = pinned(tensor.shape, tensor.dtype, pin=tensor.is_cuda)
        host.copy_(tensor.detach(), non_blocking=True)

    def _from_host(self, tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        tensor.detach().copy_(self._host[id(tensor)], non_blocking=True)


def _managed(buffer: Any, managed: set[int]) -> bool:
    found = [id(p) in managed for p in buffer.params]
    if any(found) and not all(found) and buffer.param_data is not None:
        raise ConfigError(
            f"a flat buffer holds {sum(found)} expert parameters together with {len(found) - sum(found)} others; "
            "call prepare(model) before DistributedDataParallel wraps it"
        )
    return bool(found) and all(found)


def _has(buffers: Iterable[Any], bucket: Any) -> bool:
    return any(bucket is own for buffer in buffers for own in buffer.buckets)


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    empty.cpu_data = torch.empty(0, dtype=tensor.dtype)  # older offload code keeps its host copy here
    return empty


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _trim() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
