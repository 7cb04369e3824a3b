"""The buffers of a store and their views: allocated once, moved to the host and back under the same Tensor objects, W^T
made from W. Buffers that an engine maps too never move.
"""

from collections.abc import Iterator

import torch

from weftpub.device import pinned
from weftpub.errors import ConfigError, StateError
from weftpub.memory import Allocator
from weftpub.store.layout import BUFFERS, LayerStore, MatrixView, StoreLayout, Wt
from weftpub_kernels import transpose

__all__ = ["StoreMemory"]


class StoreMemory:
    """Memory alone: knows shapes and bytes, no generation and no state.

    Args:
        wt: "store" gives every layer its own transposed buffers; "rebuild" gives all layers one set together, which
            holds the transposes of the layer that `transpose` was called for last, and saves (layers - 1) / layers of
            W^T's bytes.
    """

    def __init__(self, layout: StoreLayout, device: torch.device, allocator: Allocator, wt: Wt) -> None:
        self.layout = layout
        self.device = device
        self.shared_wt = wt == "rebuild" and layout.format == "fp8"
        self._allocator = allocator
        self._names: dict[int, str] = {}
        self._published = [self._allocate(f"layers.{layer}", layout.buffer_shapes()) for layer in layout.layers]
        if self.shared_wt:
            self._transposed = [self._allocate("layers.shared", layout.transposed_shapes())] * len(layout.layers)
        else:
            self._transposed = [
                self._allocate(f"layers.{layer}", layout.transposed_shapes()) for layer in layout.layers
            ]
        self._host: list[dict[str, torch.Tensor]] | None = None
        self._layers = [self._layer_store(position) for position in range(len(layout.layers))]
        self._views = [self._matrix_view(index) for index in range(len(layout.matrices))]

    def layer(self, position: int) -> LayerStore:
        """Buffers of the layer at `position` in the layout."""
        return self._layers[position]

    def matrix(self, index: int) -> MatrixView:
        """Views of `layout.matrices[index]`."""
        return self._views[index]

    def position(self, index: int) -> int:
        """Position of the layer that matrix `index` lies in."""
        return index // (len(self.layout.experts) * len(BUFFERS))

    def transpose(self, position: int) -> None:
        """Write the transposed buffers of one layer from its W and scales; enqueued on the current stream."""
        published, transposed = self._published[position], self._transposed[position]
        if transposed:  # none in BF16
            for name in BUFFERS.values():
                w, scale = published[name], published[f"{name}_scale"]
                transpose(w, transposed[f"{name}_t"], scale, transposed[f"{name}_scale_t"])

    def footprint(self) -> dict[str, int]:
        """Bytes on the device when resident, by kind: "w", "scale", "wt", "scale_t"."""
        sizes: dict[str, int] = dict.fromkeys(("w", "scale", "wt", "scale_t"), 0)
        for name, tensor in self._all():
            scale, transposed = "scale" in name, name.endswith("_t")
            kind = ("scale_t" if transposed else "scale") if scale else ("wt" if transposed else "w")
            sizes[kind] += tensor.numel() * tensor.element_size()
        return sizes

    @property
    def shares_any(self) -> bool:
        """Whether some of W and scales is shared, and stays where it is through an offload."""
        return any(self._is_shared(tensor) for layer in self._published for tensor in layer.values())

    def to_host(self) -> None:
        """Copy W and scales into host buffers, kept for the next time; returns when the bytes have arrived. What is
        shared stays on the device and is not copied.
        """
        if self._host is None:
            self._host = [
                {
                    name: pinned(tensor.shape, tensor.dtype, pin=self.device.type == "cuda")
                    for name, tensor in layer.items()
                    if not self._is_shared(tensor)
                }
                for layer in self._published
            ]
        for host, device in zip(self._host, self._published, strict=True):
            for name, kept in host.items():
                _bytes(kept).copy_(_bytes(device[name]), non_blocking=True)
        self._synchronize()

    def from_host(self) -> None:
        """Copy what `to_host` kept back; enqueued on the current stream."""
        if self._host is None:
            raise StateError("no host copy to reload from; it was dropped at offload")
        for host, device in zip(self._host, self._published, strict=True):
            for name, kept in host.items():
                _bytes(device[name]).copy_(_bytes(kept), non_blocking=True)

    def release(self) -> None:
        """Give the memory of every buffer that is not shared back to the device; Tensor objects and views stay."""
        self._synchronize()  # nothing that was enqueued may still read what is freed
        for name, tensor in self._movable():
            self._allocator.release(name, tensor)
        self._allocator.trim()

    def restore(self) -> None:
        """Memory behind every buffer again; content undefined where it was released."""
        for name, tensor in self._movable():
            self._allocator.restore(name, tensor)

    def _allocate(
        self, prefix: str, shapes: dict[str, tuple[tuple[int, int, int], torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        buffers: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            tensor = self._allocator.allocate(f"{prefix}.{name}", shape, dtype, self.device)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ConfigError(
                    f"{prefix}.{name}: expected a contiguous {dtype} {list(shape)} from the allocator, found "
                    f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; see weftpub.memory.Allocator"
                )
            self._names[id(tensor)] = f"{prefix}.{name}"
            buffers[name] = tensor
        return buffers

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        transposed = self._transposed[:1] if self.shared_wt else self._transposed
        for buffers in (*self._published, *transposed):
            for tensor in buffers.values():
                yield self._names[id(tensor)], tensor

    def _movable(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self._all() if not self._allocator.shares(name))

    def _is_shared(self, tensor: torch.Tensor) -> bool:
        return self._allocator.shares(self._names[id(tensor)])

    def _layer_store(self, position: int) -> LayerStore:
        published, transposed = self._published[position], self._transposed[position]
        get = {**published, **transposed}.get
        return LayerStore(
            layer=self.layout.layers[position],
            w13=published["w13"],
            w2=published["w2"],
            w13_t=transposed["w13_t"] if transposed else published["w13"].transpose(1, 2),
            w2_t=transposed["w2_t"] if transposed else published["w2"].transpose(1, 2),
            w13_scale=get("w13_scale"),
            w2_scale=get("w2_scale"),
            w13_scale_t=get("w13_scale_t"),
            w2_scale_t=get("w2_scale_t"),
        )

    def _matrix_view(self, index: int) -> MatrixView:
        matrix = self.layout.matrices[index]
        expert = self.layout.experts.index(matrix.expert)
        position = self.position(index)
        name = BUFFERS[matrix.projection]
        published, transposed = self._published[position], self._transposed[position]
        w = published[name][expert]
        if not transposed:
            return MatrixView(w, w.t(), None, None)
        return MatrixView(
            w,
            transposed[f"{name}_t"][expert],
            published[f"{name}_scale"][expert],
            transposed[f"{name}_scale_t"][expert],
        )

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)
