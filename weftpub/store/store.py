"""The experts' bytes: written once per generation while the master is in its slot, read by trainer, publisher and
checkpoint.

One `ExpertStore` holds the routed experts of one rank, in FP8 or BF16, in SGLang's layout (`weftpub.store.layout`). Who
may read or write when is `weftpub.store.guard`. A step is::

    with store.writing(generation, on_torn=masters.mark_torn) as step:
        optimizer.step(grads)           # built with writers=store.writer()
    step.report.changed_share
"""

import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from weftpub.canonical import FAMILIES, CanonicalTensor, ModelFamily, Projection
from weftpub.checksums import Checksums
from weftpub.device import resolve_device
from weftpub.errors import ConfigError, GenerationError
from weftpub.masters import ExpertMatrix, format_names
from weftpub.memory import Allocator, TorchAllocator
from weftpub.store.change import ChangeMeter
from weftpub.store.checks import check_master, check_saved, compare_checksums
from weftpub.store.encode import make_encoder
from weftpub.store.guard import GenerationGuard, StoreState
from weftpub.store.layout import BUFFERS, CanonicalEntry, Format, LayerStore, MatrixView, StoreLayout, Wt
from weftpub.store.ledger import PARTS, Ledger
from weftpub.store.memory import StoreMemory
from weftpub.store.report import SealReport, Step, StoreWriter
from weftpub.store.sums import StoreSums, content_digest

__all__ = ["ExpertStore"]

_ALL = slice(None)
_REMEDY = "call rebuild_wt, or write the whole generation"


class ExpertStore:
    """The routed experts of one rank.

    Args:
        layers, experts, hidden, intermediate, format, family: see `StoreLayout`; `experts` are global ids.
        preset: name of the quantizer in `weftpub_kernels.PRESETS`; None means te_fp32 in FP8, and is all there is in
            BF16.
        device: where the bytes live.
        allocator: where the memory comes from; torch's by default.
        wt: "store" keeps every layer's W^T; "rebuild" keeps one layer's, and makes it from W whenever a layer is read
            whose W^T it is not: the W^T views of one layer are then valid until another layer is read.
        measure_change: count the bytes that each generation changed.
        lease_timeout: seconds that `begin`, `load`, `offload` and `reload` wait for readers, and readers for a seal.
        name: for errors.

    Raises:
        ConfigError: sizes, format or preset cannot work; or, from weftpub_kernels, UnknownPresetError or
            UnfitPresetError for a preset that is not known or may not be published.
    """

    def __init__(
        self,
        layers: Sequence[int],
        experts: Sequence[int],
        hidden: int,
        intermediate: int,
        *,
        preset: str | None = None,
        format: Format = "fp8",
        device: torch.device | str | None = "cpu",
        allocator: Allocator | None = None,
        wt: Wt = "store",
        family: ModelFamily = FAMILIES["Qwen3MoeForCausalLM"],
        measure_change: bool = True,
        lease_timeout: float = 60.0,
        name: str = "expert store",
    ) -> None:
        if wt not in ("store", "rebuild"):
            raise ConfigError(f"wt: expected 'store' or 'rebuild', found {wt!r}")
        self.layout = StoreLayout(tuple(layers), tuple(experts), hidden, intermediate, format, family)
        self.device = resolve_device(device)
        self.wt: Wt = wt
        self._name = f"{name} ({self.device})"
        self._encoder = make_encoder(self.layout, preset, self.device)
        memory = allocator if allocator is not None else TorchAllocator()
        self._memory = StoreMemory(self.layout, self.device, memory, wt)
        self._guard = GenerationGuard(self._name, lease_timeout, memory.witness())
        self._ledger = Ledger(self.layout.matrices)
        self._index = {matrix.name: i for i, matrix in enumerate(self.layout.matrices)}
        self._entries = tuple(self.layout.entries())
        self._canonical = tuple(self._canonical_tensor(entry) for entry in self._entries)
        self._sums = StoreSums(self.layout, self._canonical, self.device)
        self._writer = StoreWriter(self._write)
        largest = max(sum(tensor.nbytes for tensor in self._published(index)) for index in range(len(self._index)))
        self._meter = ChangeMeter(largest, self.device, memory) if measure_change else None
        self._comparable = False  # whether the bytes about to be overwritten are a generation
        self._written = np.zeros(len(self._index), dtype=np.bool_)
        self._checksums = Checksums.of({})
        self._shared_wt_of: tuple[int, int] | None = None  # layer position and generation in the shared W^T buffers
        self._host_copy = False

    # What it is.

    @property
    def state(self) -> StoreState:
        return self._guard.state

    @property
    def generation(self) -> int | None:
        """The sealed generation, or None while there is none to read."""
        return self._guard.generation

    @property
    def preset(self) -> str | None:
        """Name of the quantizer; None in BF16."""
        return self._encoder.preset

    @property
    def resident(self) -> bool:
        """Whether the bytes are on the device."""
        return self._guard.resident

    @property
    def checksums(self) -> Mapping[str, int]:
        """Canonical name to 64-bit checksum, of the sealed generation."""
        self._guard.require_sealed("checksums")
        return self._checksums

    def entries(self) -> tuple[CanonicalEntry, ...]:
        """Names, shapes and dtypes of the canonical tensors; also before the first generation, for a plan."""
        return self._entries

    def footprint(self) -> dict[str, int]:
        """Bytes on the device when resident, by kind: "w", "scale", "wt", "scale_t"."""
        return self._memory.footprint()

    # Writing a generation.

    def begin(self, generation: int, *, timeout: float | None = None, recover: bool = False) -> None:
        """Start writing `generation`; waits for readers that hold the sealed one.

        Args:
            timeout: seconds to wait for readers; by default `lease_timeout`.
            recover: start from any state, torn included, with any generation: the caller writes every matrix again from
                masters that a checkpoint made whole. What was there is given up at once.

        Raises:
            GenerationError: not greater than the sealed one. StateError: one is being written, or the memory is
                offloaded. TornError: load a checkpoint first. DeadlineError: names the readers that did not end.
        """
        self._require_number(generation)
        if recover:
            self._guard.begin_recovery(generation, timeout)
            self._ledger.forget(PARTS, _ALL)
        else:
            self._guard.begin(generation, timeout)
        self._comparable = self._ledger.generation("w", 0) is not None
        self._written[:] = False
        self._encoder.reset()
        if self._meter is not None:
            self._meter.reset()

    def writer(self) -> StoreWriter:
        """The callable that optimizers hand each complete updated master to; the same one for every step."""
        return self._writer

    def require_sealable(self) -> None:
        """What `seal` would raise, asked before: for ranks that seal together or not at all. Waits for the device.

        Raises:
            GenerationError, NonFiniteError (weftpub_kernels): as `seal`. Nothing is sealed or torn by it.
        """
        self._require_written("require_sealable")
        self._encoder.raise_if_nonfinite()

    def seal(self) -> SealReport:
        """Make the written generation readable.

        Raises:
            GenerationError: matrices were not written; lists them, and they can still be written.
            NonFiniteError (weftpub_kernels): a master held NaN or Inf; names it. The store is torn then.
        """
        generation = self._require_written("seal")
        try:
            self._encoder.raise_if_nonfinite()
            report = self._report(generation)
        except Exception as error:
            self.mark_torn(f"sealing generation {generation} failed: {error}")
            raise
        self._checksums = report.checksums
        self._guard.seal(content_digest(report.checksums))
        return report

    def cancel(self) -> None:
        """Give up a generation of which nothing was written, as after a skipped step; the sealed one is readable again.

        Raises:
            GenerationError: matrices were written, so old and new bytes are mixed. StateError: a recovery cannot go
                back.
        """
        generation = self._guard.require_writing("cancel")
        if self._written.any():
            raise GenerationError(
                f"{self._name}: {int(self._written.sum())} matrices of generation {generation} are written already; "
                "write the others, or mark_torn and load a checkpoint"
            )
        self._guard.cancel()

    def mark_torn(self, reason: str) -> None:
        """Declare the bytes a mixture that nobody may read; `load`, or `begin` with recover=True, opens the store
        again.
        """
        self._guard.tear(reason)

    @contextmanager
    def writing(
        self,
        generation: int,
        *,
        timeout: float | None = None,
        on_torn: Callable[[str], None] | None = None,
        recover: bool = False,
    ) -> Generator[Step]:
        """`begin`, the block, `seal`. If block or seal raise, the store is torn, unless nothing was written yet.

        Args:
            timeout, recover: as for `begin`.
            on_torn: called with the reason, to declare the masters torn as well.
        """
        step = Step()
        self.begin(generation, timeout=timeout, recover=recover)
        try:
            yield step
            step.finish(self.seal())
        except BaseException as error:
            if self.state is StoreState.WRITING and not self._written.any() and not recover:
                self.cancel()
                raise
            if self.state is not StoreState.TORN:
                self.mark_torn(f"generation {generation} failed half-way: {error}")
            if on_torn is not None:
                on_torn(self._guard.torn_reason)
            raise

    def load(
        self, generation: int, tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, int] | None = None
    ) -> None:
        """Replace every byte by those of saved canonical tensors and seal; W^T is made from W. Opens a torn store.

        Args:
            tensors: canonical name to weight or scale, on any device.
            checksums: what the bytes must have, checked on the device after the copy.

        Raises:
            ConfigError: names, dtypes or shapes differ, or the generation is no number; nothing was changed.
            ChecksumError: the bytes arrived changed; the store is torn.
            StateError: the memory is offloaded. DeadlineError: readers did not end.
        """
        self._require_number(generation)
        check_saved(self._entries, tensors)
        self._guard.begin_recovery(generation)
        try:
            self._ledger.forget(PARTS, _ALL)
            for item in self._canonical:
                item.tensor.view(torch.uint8).copy_(tensors[item.name].contiguous().view(torch.uint8))
            self._ledger.book(("w", "scale"), _ALL, generation)
            found = self._compute_checksums()
            if checksums is not None:
                compare_checksums(checksums, found, f"{self._name}: loading")
            self._transpose_all(generation)
        except BaseException as error:
            self.mark_torn(f"loading generation {generation} failed: {error}")
            raise
        self._checksums = found
        self._guard.seal(content_digest(found))

    # Reading a generation.

    @contextmanager
    def reading(
        self, generation: int | None = None, *, purpose: str = "reader", timeout: float | None = None
    ) -> Generator[int]:
        """Hold the sealed generation (that one and no other, if given): its bytes neither change nor move in the block.

        While a generation is being written this waits for its seal. Yields the generation held.

        Raises:
            GenerationError: empty, or another generation is sealed. DeadlineError: the seal did not come in time.
            TornError, StateError: torn, or offloaded.
        """
        with self._guard.reading(purpose, generation, timeout) as held:
            yield held

    def layer(self, layer: int) -> LayerStore:
        """Buffers of one layer, of the sealed generation in all of W, W^T and scales.

        Raises:
            GenerationError: a part is of another generation, such as a stale W^T; names it.
            ConfigError: not held here. TornError, StateError: torn, or offloaded.
        """
        position = self._position(layer)
        each = len(self.layout.matrices) // len(self.layout.layers)
        self._require_readable(position, slice(position * each, (position + 1) * each))
        return self._memory.layer(position)

    def matrix(self, matrix: ExpertMatrix) -> MatrixView:
        """Views of one matrix, of the sealed generation in all parts; errors as `layer`."""
        index = self._find(matrix.name)
        self._require_readable(self._memory.position(index), slice(index, index + 1))
        return self._memory.matrix(index)

    def canonical(self) -> Iterator[CanonicalTensor]:
        """Every canonical tensor as a view, weight before its scale; none is copied.

        Each step checks that the generation is still the one that the iteration began with; hold a lease (`reading`) to
        make sure that it stays.
        """
        generation = self._guard.require_sealed("canonical")
        self._ledger.require(self._own_parts, _ALL, generation, _REMEDY)
        for item in self._canonical:
            self._guard.require_sealed("canonical", generation)
            yield item

    def buffers(self, layer: int) -> LayerStore:
        """Buffers of one layer whatever they hold, to build tensors over this memory before the first generation."""
        return self._memory.layer(self._position(layer))

    def sha256(self) -> dict[str, str]:
        """Canonical name to hex SHA-256 of the tensor's bytes; reads everything through the host."""
        return {item.name: hashlib.sha256(_host_bytes(item.tensor)).hexdigest() for item in self.canonical()}

    def verify(self) -> None:
        """Compute every checksum again; ChecksumError names the tensors whose bytes changed since the seal."""
        self._guard.require_sealed("verify")
        compare_checksums(self._checksums, self._compute_checksums(), f"{self._name}: verifying")

    # W^T.

    def rebuild_wt(self) -> None:
        """Make every W^T and transposed scale from W and scales, exactly; enqueued on the current stream."""
        self._transpose_all(self._guard.require_sealed("rebuild_wt"))

    def check_wt(self) -> None:
        """Compare every W^T and transposed scale with W and scales, byte by byte.

        Raises:
            GenerationError: names the matrix and the place of the first difference.
        """
        for matrix in self.layout.matrices:
            difference = self.matrix(matrix).transpose_difference()
            if difference is not None:
                raise GenerationError(f"{matrix.name}: {difference}; call rebuild_wt")

    # Moving the bytes.

    def offload(self, *, keep: bool = True, timeout: float | None = None) -> None:
        """Free the device memory; every Tensor object and view stays, and must not be read until `reload`.

        Memory that an engine maps too is neither freed nor copied; a store that has some always keeps the rest.

        Args:
            keep: copy W and scales to the host. False drops them: `reload` then needs the masters. W^T is never kept.

        Raises:
            StateError: offloaded already, or a generation is being written. DeadlineError: readers did not end.
        """
        with self._guard.moving("offload", resident=False, timeout=timeout):
            self._host_copy = (keep or self._memory.shares_any) and self.generation is not None
            if self._host_copy:
                self._memory.to_host()
            self._ledger.forget(PARTS, _ALL)
            self._shared_wt_of = None
            self._memory.release()

    def reload(
        self,
        masters: Callable[[str], torch.Tensor] | None = None,
        *,
        rebuild_wt: bool = True,
        timeout: float | None = None,
    ) -> None:
        """Bring the sealed generation back into the same Tensor objects, maybe at other addresses, and check it.

        Args:
            masters: matrix name to float32 master on the store's device; needed if `offload(keep=False)` dropped the
                bytes, which are then made again from the masters of that generation.
            rebuild_wt: make W^T from W. Without it every read is refused until `rebuild_wt` is called.

        Raises:
            StateError: not offloaded. ConfigError: bytes were dropped and no masters were given.
            ChecksumError: the bytes are not the sealed ones; the store is torn, its memory is there: `load` opens it.
        """
        generation = self.generation
        if generation is not None and not self._host_copy and masters is None and not self.resident:
            raise ConfigError(f"{self._name}: reload needs the masters, because offload(keep=False) dropped the bytes")
        with self._guard.moving("reload", resident=True, timeout=timeout) as moved:
            self._memory.restore()
            moved()
            if generation is None:
                return
            if self._host_copy:
                self._memory.from_host()
            elif masters is not None:
                self._encode_all(masters)
            self._ledger.book(("w", "scale"), _ALL, generation)
            compare_checksums(self._checksums, self._compute_checksums(), f"{self._name}: reloading")
            if rebuild_wt:
                self._transpose_all(generation)

    # Inside.

    @property
    def _own_parts(self) -> tuple[str, ...]:
        """Parts that have memory of their own for every matrix."""
        if self.layout.format == "bf16":
            return ("w",)
        return ("w", "scale") if self._memory.shared_wt else PARTS

    def _require_written(self, action: str) -> int:
        """The generation being written; GenerationError unless every matrix of it is there."""
        generation = self._guard.require_writing(action)
        missing = [matrix.name for matrix in self._ledger.behind(self._own_parts, generation)]
        if missing:
            raise GenerationError(
                f"{self._name}: generation {generation} lacks {len(missing)} of {len(self._written)} matrices: "
                f"{format_names(missing)}; write them, or mark_torn and load a checkpoint"
            )
        return generation

    def _write(self, name: str, master: torch.Tensor) -> None:
        generation = self._guard.require_writing(f"writing {name}")
        index = self._find(name)
        check_master(self.layout, self.layout.matrices[index], master, self.device)
        if self._written[index]:
            raise GenerationError(f"{name}: written twice in generation {generation}; a matrix is written exactly once")
        self._written[index] = True
        self._ledger.forget(PARTS, slice(index, index + 1))
        meter, published = self._meter if self._comparable else None, self._published(index)
        if meter is not None:
            meter.keep(published)
        self._encoder.write(index, master, self._memory.matrix(index))
        if meter is not None:
            meter.count(published)
        self._shared_wt_of = None  # the encoder wrote W^T too, into the shared buffers where they are shared
        self._ledger.book(self._own_parts, slice(index, index + 1), generation)

    def _encode_all(self, masters: Callable[[str], torch.Tensor]) -> None:
        self._encoder.reset()
        for index, matrix in enumerate(self.layout.matrices):
            master = masters(matrix.name)
            check_master(self.layout, matrix, master, self.device)
            self._encoder.write(index, master, self._memory.matrix(index))
        self._encoder.raise_if_nonfinite()

    def _transpose_all(self, generation: int) -> None:
        self._shared_wt_of = None
        if self.layout.format == "fp8" and not self._memory.shared_wt:
            for position in range(len(self.layout.layers)):
                self._memory.transpose(position)
            self._ledger.book(("wt", "scale_t"), _ALL, generation)

    def _require_readable(self, position: int, matrices: slice) -> None:
        generation = self._guard.require_sealed("reading")
        self._ledger.require(self._own_parts, matrices, generation, _REMEDY)
        if self._memory.shared_wt and self._shared_wt_of != (position, generation):
            self._memory.transpose(position)
            self._shared_wt_of = (position, generation)

    def _report(self, generation: int) -> SealReport:
        total = self._sums.nbytes
        changed = None if self._meter is None else self._meter.total() if self._comparable else total
        sums: dict[Projection, torch.Tensor] = {
            p: tiles for p in BUFFERS if (tiles := self._encoder.tile_sums(p)) is not None
        }
        return SealReport(generation, len(self._index), changed, total, self._sums.fused(sums))

    def _compute_checksums(self) -> Checksums:
        return self._sums.read()

    def _require_number(self, generation: int) -> None:
        if type(generation) is not int or not 0 <= generation < 1 << 63:
            raise ConfigError(f"{self._name}: generations are whole numbers from 0, found {generation!r}")

    def _position(self, layer: int) -> int:
        if layer not in self.layout.layers:
            raise ConfigError(f"{self._name}: holds layers {list(self.layout.layers)}, not {layer}")
        return self.layout.layers.index(layer)

    def _find(self, name: str) -> int:
        if name not in self._index:
            raise ConfigError(
                f"{self._name}: holds no matrix {name!r}; it holds fc1 and fc2 of layers {list(self.layout.layers)} "
                f"and global experts {list(self.layout.experts)}"
            )
        return self._index[name]

    def _published(self, index: int) -> list[torch.Tensor]:
        view = self._memory.matrix(index)
        return [view.w] if view.scale is None else [view.w, view.scale]

    def _canonical_tensor(self, entry: CanonicalEntry) -> CanonicalTensor:
        view = self._memory.matrix(self._index[entry.matrix.name])
        return CanonicalTensor(entry.name, self.layout.view(entry, view), entry.role)


def _host_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).cpu().numpy())
