"""The receiver's views of the engine's live parameters: made anew for every publish, checked against the plan, and gone
after it.

An engine may move its weights between two publishes (an offload frees them and brings them back elsewhere, a `.data`
swap replaces them). A view that outlived that would write into dead storage, and would keep the dead storage alive. So
nothing here holds a tensor longer than one publish; what is kept between publishes is layouts only.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from weftpub.errors import ChecksumError, PlanError
from weftpub.plan import PlanPart, check_part, check_views, torch_dtype
from weftpub.plan.views import listing
from weftpub.receive.copies import CopyPlans
from weftpub.transport import CopyTable, FlatTensors
from weftpub.transport.tensors import Known
from weftpub.wire.description import EngineDescription, parameter_specs

__all__ = ["BoundPlan", "ReceiveViews"]

type Checksums = np.ndarray[tuple[int], np.dtype[np.uint64]]
type Computing = Callable[[], Checksums]


class BoundPlan:
    """A plan part together with the layout of the parameters it was checked against. Holds no tensor.

    Args:
        part: this rank's part of the plan.
        description: what the engine says about itself now.
        live: its live tensors now.

    Raises:
        PlanError: the plan does not fit these parameters, or leaves some of them unwritten.
    """

    def __init__(self, part: PlanPart, description: EngineDescription, live: Mapping[str, torch.Tensor]) -> None:
        if part.rank != description.rank:
            raise PlanError(f"the plan part is for receiver rank {part.rank}, this engine rank is {description.rank}")
        if part.layout and part.layout != description.layout_digest:
            raise PlanError(
                f"receiver rank {part.rank}: its parameters have changed since the plan was made (layout "
                f"{description.layout_digest[:12]}, planned for "
                f"{part.layout[:12]}); describe the engine and plan again"
            )
        self.part = part
        self.layout_digest = description.layout_digest
        self.layout = {spec.name: spec for spec in parameter_specs(live)}
        differing = [spec.name for spec in description.parameters if self.layout.get(spec.name) != spec]
        if differing:
            raise PlanError(
                f"the engine describes other layouts than its live tensors have: {listing(sorted(differing))}"
            )
        check_part(part)
        check_views(part.destinations, description.layout(), description.exempt)
        self._expected = {s.name: (s.shape, s.stride, torch_dtype(s.dtype)) for s in self.layout.values()}
        self.names = tuple(dict.fromkeys(destination.view.param for destination in part.destinations))
        self.known: Known | None = None  # of parameters that fitted, whose layouts are those that were checked

    def bind(self, plans: CopyPlans, live: Mapping[str, torch.Tensor]) -> "ReceiveViews":
        """Views for one publish; PlanError lists the parameters whose layout is no longer the one that was checked."""
        return ReceiveViews(self, plans, live)

    def require_fit(self, live: Mapping[str, torch.Tensor]) -> None:
        """PlanError lists the parameters whose layout is no longer the one that was checked."""
        fits = self.fits
        differing = [name for name in self.names if not fits(name, live.get(name))]
        if differing:
            faults = [f"{name} ({self.layout[name]} planned, {_layout_of(live.get(name))} now)" for name in differing]
            raise PlanError(
                f"live parameters have changed since the plan was checked: {listing(faults, 4)}; describe the engine "
                "and plan again"
            )

    def fits(self, name: str, tensor: torch.Tensor | None) -> bool:
        """Whether a tensor has the layout that was checked for the parameter `name`."""
        if tensor is None:
            return False
        shape, stride, dtype = self._expected[name]
        return tensor.dtype is dtype and tensor.shape == shape and tensor.stride() == stride


class ReceiveViews:
    """Views of one publish. Made by `BoundPlan.bind`."""

    def __init__(self, bound: BoundPlan, plans: CopyPlans, live: Mapping[str, torch.Tensor]) -> None:
        self._bound = bound
        self._plans = plans
        if not all(name in live for name in bound.names):
            bound.require_fit(live)
        self._flat = FlatTensors(live, bound.names, bound.known)
        if not self._flat.seen:
            bound.require_fit(live)
        bound.known = self._flat.known
        self._live = {name: live[name] for name in bound.names}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the parameters are."""
        return self._flat.devices

    @property
    def known(self) -> Known:
        """Where the parameters are, as of the last bind."""
        return self._flat.known

    @property
    def live(self) -> Mapping[str, torch.Tensor]:
        """The parameters that are written."""
        return self._live

    def scatter(self, table: CopyTable, buffers: Sequence[torch.Tensor]) -> None:
        """Copy pieces from buffers into the parameters; asynchronous on CUDA."""
        table.scatter(self._flat, buffers)

    def check_pointers(self) -> None:
        """PlanError if a parameter has moved since these views were made, by a `.data` swap or a resized storage."""
        moved = self._flat.moved(self._live)
        if moved:
            raise PlanError(
                f"parameters moved in the middle of a publish: {listing(sorted(moved))}; keep the engine paused until "
                "it is committed"
            )

    def begin_to_verify(self) -> "Computing | None":
        """Begin to compute every piece's checksum, unless parameters have moved."""
        return None if self._flat.moved(self._live) else self._compute()

    def verify(self, live: Mapping[str, torch.Tensor], begun: "Computing | None", expected: Checksums) -> None:
        """Compare every piece's checksum with the one that was announced, in the tensors that the engine will serve,
        wherever post-processing has put them.

        Args:
            begun: from `begin_to_verify`; while its device computes, the tensors are looked at.

        Raises:
            ChecksumError: bytes differ; names the tensors.
            PlanError: a parameter has another layout now.
        """
        now = self._bound.bind(self._plans, live)
        if begun is None or now.known is not self.known:
            self._flat, self._live = now._flat, now._live
            begun = self._compute()
        self._compare(begun(), expected)

    def _compute(self) -> "Computing":
        return self._plans.regions.begin_checksums(self._flat, self._plans.table.limit)

    def _compare(self, found: Checksums, expected: Checksums) -> None:
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            names = [
                f"{self._plans.table.describe(int(i))} (expected {expected[i]:016x}, found {found[i]:016x})"
                for i in wrong
            ]
            raise ChecksumError(
                f"{len(wrong)} of {len(found)} pieces differ from what was sent: {listing(names, 4)}; publish again"
            )

    def sha256(self) -> tuple[str, ...]:
        """sha256 of every piece as it lies in the live parameters."""
        return tuple(self._plans.regions.sha256(self._flat))


def _layout_of(tensor: torch.Tensor | None) -> str:
    return "gone" if tensor is None else f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
