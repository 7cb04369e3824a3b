"""What every staged optimizer promises: refusals change nothing, reports tell, failures tear, resumes are exact."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError, NonFiniteGradientError, TornError
from weftpub.masters import MasterSet
from weftpub.optim import (
    AdamWHyperparameters,
    MuonHyperparameters,
    Override,
    StagedAdamW,
    StagedMuon,
    StagedOptimizer,
    StepReport,
)
from weftpub.staging import SlotPool, StagingPipeline
from weftpub.staging.lanes import HostLanes


@dataclass(frozen=True)
class Kind:
    """One optimizer, and how to build it."""

    cls: type[StagedOptimizer[Any]]
    settings: Callable[..., Any]

    def build(
        self,
        weights: dict[str, torch.Tensor],
        writer: Any,
        *,
        device: str = "cpu",
        overrides: Any = None,
        **settings: Any,
    ) -> StagedOptimizer[Any]:
        masters = MasterSet.from_tensors(weights, self.cls.STATES)
        pipeline = StagingPipeline.for_masters(masters, device, slots=2)
        return self.cls(masters, pipeline, writer, self.settings(**settings), overrides=overrides)


@pytest.fixture(params=["muon", "adamw"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return {"muon": Kind(StagedMuon, MuonHyperparameters), "adamw": Kind(StagedAdamW, AdamWHyperparameters)}[
        request.param
    ]


def everything(optimizer: StagedOptimizer[Any]) -> dict[str, bytes]:
    """All bytes that a step may change."""
    return {
        f"{name}.{key}": tensor.numpy().tobytes()
        for name, master in optimizer.masters.items()
        for key, tensor in master.tensors().items()
    } | {f"{name}.step": master.step.to_bytes(4) for name, master in optimizer.masters.items()}


def test_a_report_tells_norms_and_changes(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer, lr=0.01)
    for number in (1, 2, 3):
        grads = gradients_of(weights, number)
        report = optimizer.step(grads)
        assert (report.step, report.updated) == (number, len(weights))
        assert report.grad_norm == pytest.approx(
            float(torch.cat([g.flatten() for g in grads.values()]).norm()), rel=1e-5
        )
        assert report.grad_norms.keys() == report.master_changed.keys() == weights.keys()
        assert all(report.master_changed.values())
        assert report.stalled == ()
        assert not report.none_changed
        assert all(master.step == number for master in optimizer.masters.values())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_learning_rate_of_zero_changes_no_master_byte(
    weight_decay: float, kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    optimizer = kind.build(weights, writer, weight_decay=weight_decay)
    before = optimizer.masters.sha256()
    report = optimizer.step(gradients_of(weights, 0), lr=0.0)
    assert optimizer.masters.sha256() == before
    assert not any(report.master_changed.values())
    assert report.stalled == (), "with a learning rate of zero nothing has to change"


def test_a_zero_gradient_without_decay_changes_no_master_byte(kind: Kind, weights: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer, weight_decay=0.0)
    before = optimizer.masters.sha256()
    report = optimizer.step({name: torch.zeros_like(w) for name, w in weights.items()})
    assert optimizer.masters.sha256() == before
    assert not any(report.master_changed.values())
    assert report.grad_norm == 0.0
    assert report.stalled == ()


def test_an_update_that_never_reaches_the_master_is_seen(
    kind: Kind, weights: Any, gradients_of: Any, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer ran for days while its updates went to a copy: loss moved with the data alone, and nothing complained.

    Unchanged masters are an error only when they had to change; here one matrix, then all, miss their update.
    """
    optimizer = kind.build(weights, writer, lr=0.01)
    right, (first, *_) = kind.cls.run_one, weights

    def lost_for(names: Any) -> Callable[..., None]:
        def run_one(self: Any, staged: Any, gradient: Any, settings: Any) -> None:
            target = staged._replace(weight=staged.weight.clone()) if staged.name in names else staged
            right(self, target, gradient, settings)

        return run_one

    monkeypatch.setattr(kind.cls, "run_one", lost_for({first}))
    report = optimizer.step(gradients_of(weights, 0))
    assert report.stalled == (first,)
    assert not report.none_changed
    monkeypatch.setattr(kind.cls, "run_one", lost_for(set(weights)))
    report = optimizer.step(gradients_of(weights, 1))
    assert report.stalled == tuple(weights)
    assert report.none_changed


def test_the_change_flag_sees_a_single_bit() -> None:
    report = StepReport(1, 2, 1.0, {"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": True, "b": False})
    assert report.stalled == ("b",)
    masters = MasterSet({"a": (8, 8)}, StagedAdamW.STATES)

    class OneBit(StagedAdamW):
        def run_one(self, staged: Any, gradient: Any, settings: Any) -> None:
            staged.weight[7, 7] = -0.0

    optimizer = OneBit(masters, StagingPipeline.for_masters(masters, "cpu"), lambda *_: None, AdamWHyperparameters())
    grads = {"a": torch.ones(8, 8)}
    assert optimizer.step(grads).master_changed == {"a": True}, "0.0 became -0.0"
    assert optimizer.step(grads).master_changed == {"a": False}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_changes_nothing(
    value: float, kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    """NaN passed an amax, which ignores it, and became a silent -448 in the published weights."""
    optimizer = kind.build(weights, writer)
    before = everything(optimizer)
    last = list(weights)[-1]
    grads = gradients_of(weights, 0)
    grads[last][12, 34] = value
    with pytest.raises(NonFiniteGradientError, match=rf"{last}' is {value} at row 12, column 34"):
        optimizer.step(grads)
    assert everything(optimizer) == before
    assert writer.seen == {}, "nothing was written"
    assert optimizer.masters.torn is None
    optimizer.step(gradients_of(weights, 0))


def _missing(grads: Any) -> None:
    grads.popitem()


def _unknown(grads: Any) -> None:
    grads["other"] = torch.zeros(3, 3)


def _transposed(grads: Any) -> None:
    name = next(iter(grads))
    grads[name] = grads[name].t()


def _integers(grads: Any) -> None:
    name = next(iter(grads))
    grads[name] = grads[name].to(torch.int64)


@pytest.mark.parametrize("spoil", [_missing, _unknown, _transposed, _integers])
def test_wrong_gradients_change_nothing(spoil: Any, kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer)
    before = everything(optimizer)
    grads = gradients_of(weights, 0)
    spoil(grads)
    with pytest.raises(ConfigError, match="gradient"):
        optimizer.step(grads)
    assert everything(optimizer) == before
    assert writer.seen == {}
    assert optimizer.masters.torn is None


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf")])
def test_a_wrong_learning_rate_changes_nothing(
    lr: float, kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    optimizer = kind.build(weights, writer)
    before = everything(optimizer)
    with pytest.raises(ConfigError, match="lr must be"):
        optimizer.step(gradients_of(weights, 0), lr=lr)
    with pytest.raises(ConfigError, match="learning rates do not match the masters: missing 'layers"):
        optimizer.step(gradients_of(weights, 0), lr={})
    assert everything(optimizer) == before


def test_learning_rates_of_a_step(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    first, second, *_ = weights
    optimizer = kind.build(weights, writer, lr=0.5, overrides={first: Override(lr=0.25)})
    grads = gradients_of(weights, 0)
    assert optimizer.step(grads).learning_rates == dict.fromkeys(weights, 0.5) | {first: 0.25}
    assert optimizer.step(grads, lr=0.125).learning_rates == dict.fromkeys(weights, 0.125) | {first: 0.25}
    own = dict.fromkeys(weights, 0.0625) | {second: 0.03125}
    assert optimizer.step(grads, lr=own).learning_rates == own


def test_one_writer_per_master(kind: Kind, weights: Any, gradients_of: Any) -> None:
    seen: dict[str, str] = {}

    def writer_of(owner: str) -> Callable[[str, torch.Tensor], None]:
        return lambda name, matrix: seen.__setitem__(owner, name)

    optimizer = kind.build(weights, {name: writer_of(name) for name in weights})
    optimizer.step(gradients_of(weights, 0))
    assert seen == {name: name for name in weights}


def test_writers_must_match_the_masters(kind: Kind, weights: Any) -> None:
    names = list(weights)
    writers = dict.fromkeys([*names[1:], "other"], lambda name, matrix: None)
    with pytest.raises(ConfigError, match=rf"missing '{names[0]}', unknown 'other'.*never reach the forward pass"):
        kind.build(weights, writers)
    with pytest.raises(ConfigError, match="must be callable"):
        kind.build(weights, None)


def test_overrides_must_name_masters(kind: Kind, weights: Any, writer: Any) -> None:
    with pytest.raises(ConfigError, match="overrides name no master: 'other'"):
        kind.build(weights, writer, overrides={"other": Override(lr=1.0)})
    with pytest.raises(ConfigError, match="lr must be"):
        Override(lr=-1.0)


def test_masters_need_the_optimizers_states(kind: Kind, weights: Any, writer: Any) -> None:
    masters = MasterSet.from_tensors(weights, ("something",))
    with pytest.raises(ConfigError, match=rf"got \['something'\].*states={kind.cls.__name__}.STATES"):
        kind.cls(masters, StagingPipeline.for_masters(masters, "cpu"), writer, kind.settings())


def test_a_matrix_that_fits_no_slot_is_refused_at_construction(kind: Kind, weights: Any, writer: Any) -> None:
    masters = MasterSet.from_tensors(weights, kind.cls.STATES)
    pool = SlotPool("cpu", 2, numel=100, tensors_per_slot=3)
    with pytest.raises(ConfigError, match=r"fc1' \[128, 96\].*set SlotPool\(numel=12288\)"):
        kind.cls(masters, StagingPipeline("cpu", pool), writer, kind.settings())


def test_write_all_shows_the_masters_and_changes_nothing(kind: Kind, weights: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer)
    before = everything(optimizer)
    assert optimizer.write_all() == len(weights)
    assert all(torch.equal(writer.seen[name], w) for name, w in weights.items())
    assert everything(optimizer) == before


def test_a_failed_write_all_does_not_tear_the_masters(kind: Kind, weights: Any, gradients_of: Any) -> None:
    def write(name: str, matrix: torch.Tensor) -> None:
        raise OSError("the store is full")

    optimizer = kind.build(weights, write)
    with pytest.raises(OSError, match="store is full"):
        optimizer.write_all()
    assert optimizer.masters.torn is None


def test_two_optimizers_share_a_pipeline(weights: Any, gradients_of: Any, writer: Any) -> None:
    matrices = MasterSet.from_tensors(weights, StagedMuon.STATES)
    vectors = MasterSet.from_tensors({"norm": torch.ones(77), "bias": torch.zeros(5)}, StagedAdamW.STATES)
    pool = SlotPool("cpu", 2, numel=128 * 96, tensors_per_slot=3)
    pipeline = StagingPipeline("cpu", pool)
    muon = StagedMuon(matrices, pipeline, writer, MuonHyperparameters())
    adamw = StagedAdamW(vectors, pipeline, writer, AdamWHyperparameters())
    muon.step(gradients_of(weights, 0))
    adamw.step({"norm": torch.ones(77), "bias": torch.ones(5)})
    assert set(writer.seen) == {*weights, "norm", "bias"}


class FailingWriter:
    """Raises at the n-th matrix of a chosen step."""

    def __init__(self, step: int, matrix: int) -> None:
        self.fail_at = (step, matrix)
        self.step, self.matrix = 0, 0

    def __call__(self, name: str, matrix: torch.Tensor) -> None:
        if (self.step, self.matrix) == self.fail_at:
            raise OSError(f"no room for {name}")
        self.matrix += 1


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_a_failure_in_the_middle_tears_the_masters_until_a_load(
    failing: int, kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    """A writer failed on one expert, the exporter logged it and sent a mixture of two steps.

    Now the set is torn: no step, no save, until all of it is recovered; and then the run goes on with the same bytes.
    """
    undisturbed = kind.build(weights, writer, lr=0.01)
    failing_writer = FailingWriter(1, failing)
    optimizer = kind.build(weights, failing_writer, lr=0.01)
    for each in (undisturbed, optimizer):
        each.step(gradients_of(weights, 0))
    checkpoint = optimizer.state_dict()

    failing_writer.step, failing_writer.matrix = 1, 0
    name = list(weights)[failing]
    with pytest.raises(OSError, match=f"no room for {name}"):
        optimizer.step(gradients_of(weights, 1))
    torn = optimizer.masters.torn
    assert torn is not None
    assert f"{kind.cls.KIND} step 2 failed, latest enqueued: matrix '{name}' WRITING" in torn
    assert f"OSError: no room for {name}" in torn

    torn_bytes = everything(optimizer)
    for refused in (
        lambda: optimizer.step(gradients_of(weights, 1)),
        optimizer.state_dict,
        optimizer.write_all,
    ):
        with pytest.raises(TornError, match="Recover all of them with load_state_dict"):
            refused()
    assert everything(optimizer) == torn_bytes

    failing_writer.step = 2
    optimizer.load_state_dict(checkpoint)
    assert optimizer.masters.torn is None
    for step in (1, 2):
        undisturbed.step(gradients_of(weights, step))
        optimizer.step(gradients_of(weights, step))
    assert everything(optimizer) == everything(undisturbed)


def test_a_device_error_tears_the_masters(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    class FailingLanes(HostLanes):
        fail = True

        def drain(self, seconds: float) -> None:
            if self.fail:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

    masters = MasterSet.from_tensors(weights, kind.cls.STATES)
    pipeline = StagingPipeline("cpu", SlotPool.for_masters(masters, "cpu"), lanes=FailingLanes())
    optimizer = kind.cls(masters, pipeline, writer, kind.settings())
    with pytest.raises(RuntimeError, match="illegal memory access"):
        optimizer.step(gradients_of(weights, 0))
    assert "illegal memory access" in str(masters.torn)
    assert all(master.step == 0 for master in masters.values())
    with pytest.raises(TornError):
        optimizer.step(gradients_of(weights, 0))


def test_an_interrupt_tears_the_masters(kind: Kind, weights: Any, gradients_of: Any) -> None:
    def write(name: str, matrix: torch.Tensor) -> None:
        raise KeyboardInterrupt

    optimizer = kind.build(weights, write)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(gradients_of(weights, 0))
    assert "KeyboardInterrupt" in str(optimizer.masters.torn)


def test_torn_masters_do_not_heal_from_their_own_memory(kind: Kind, weights: Any, gradients_of: Any) -> None:
    failing_writer = FailingWriter(1, 1)
    optimizer = kind.build(weights, failing_writer)
    live = optimizer.state_dict(copy=False)
    failing_writer.step = 1
    with pytest.raises(OSError, match="no room"):
        optimizer.step(gradients_of(weights, 0))
    with pytest.raises(TornError, match="view of the torn memory itself"):
        optimizer.load_state_dict(live)


def test_a_resume_gives_the_same_next_bytes(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    """Saved after two steps and loaded into an optimizer built with other settings and other weights."""
    first = next(iter(weights))
    running = kind.build(weights, writer, lr=0.01, weight_decay=0.2, overrides={first: Override(weight_decay=0.0)})
    for step in range(2):
        running.step(gradients_of(weights, step))
    state = copy.deepcopy(running.state_dict())

    resumed = kind.build({name: torch.zeros_like(w) for name, w in weights.items()}, writer, lr=5.0)
    resumed.load_state_dict(state)
    assert everything(resumed) == everything(running)
    assert resumed.hyperparameters == running.hyperparameters
    for step in range(2, 5):
        one, other = running.step(gradients_of(weights, step)), resumed.step(gradients_of(weights, step))
        assert one == other
        assert everything(resumed) == everything(running)


def test_the_state_is_tensors_and_json(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer, overrides={next(iter(weights)): Override(lr=1e-3)})
    optimizer.step(gradients_of(weights, 0))
    state = optimizer.state_dict()
    tensors = {name: {k: v for k, v in saved.items() if k != "step"} for name, saved in state["masters"].items()}
    plain = {name: {"step": saved["step"]} for name, saved in state["masters"].items()}
    through_json = json.loads(json.dumps(state | {"masters": plain}))
    for name, saved in through_json["masters"].items():
        saved.update(tensors[name])
    other = kind.build(weights, writer)
    other.load_state_dict(through_json)
    assert everything(other) == everything(optimizer)
    assert other.hyperparameters == optimizer.hyperparameters
    assert other.overrides == optimizer.overrides


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "sgd"}, "saved by optimizer 'sgd'"),
        ({"extra": 1}, "holds .*'extra'.*expected"),
        ({"hyperparameters": {"lr": 1.0}}, r"holds \['lr'\], expected"),
        ({"overrides": {"other": {"lr": 1.0, "weight_decay": None}}}, "saved overrides name no master: 'other'"),
        ({"masters": {}}, "do not match this set: missing"),
    ],
)
def test_a_foreign_state_changes_nothing(
    change: Any, message: str, kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    optimizer = kind.build(weights, writer)
    state = optimizer.state_dict() | change
    optimizer.step(gradients_of(weights, 0))
    before, settings = everything(optimizer), optimizer.hyperparameters
    with pytest.raises(ConfigError, match=message):
        optimizer.load_state_dict(state)
    assert everything(optimizer) == before
    assert optimizer.hyperparameters == settings


def test_fifty_steps_with_learning_rate_zero_keep_the_masters(
    kind: Kind, weights: Any, gradients_of: Any, writer: Any
) -> None:
    """Log-probabilities drifted over publishes with a learning rate of zero: each step rounded the masters a bit."""
    optimizer = kind.build(weights, writer, lr=0.0)
    before = optimizer.masters.sha256()
    for step in range(50):
        optimizer.step(gradients_of(weights, step % 3))
    assert optimizer.masters.sha256() == before


@pytest.mark.gpu
def test_gpu_resume_gives_the_same_next_bytes(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    running = kind.build(weights, writer, device="cuda", lr=0.01)
    for step in range(2):
        running.step({name: g.cuda() for name, g in gradients_of(weights, step).items()})
    resumed = kind.build({name: torch.zeros_like(w) for name, w in weights.items()}, writer, device="cuda")
    resumed.load_state_dict(running.state_dict())
    for step in range(2, 4):
        grads = {name: g.cuda() for name, g in gradients_of(weights, step).items()}
        assert running.step(grads) == resumed.step(grads)
        assert everything(resumed) == everything(running)


@pytest.mark.gpu
def test_gpu_gradients_may_lie_anywhere(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    """The same values on the GPU, pageable and pinned give the same bytes."""
    grads = gradients_of(weights, 0)
    digests = []
    for placed in (
        {name: g.cuda() for name, g in grads.items()},
        grads,
        {name: g.pin_memory() for name, g in grads.items()},
    ):
        optimizer = kind.build(weights, writer, device="cuda")
        optimizer.step(placed)
        digests.append(optimizer.masters.sha256())
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.gpu
def test_gpu_failure_in_the_middle_tears_and_recovers(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    undisturbed = kind.build(weights, writer, device="cuda")
    failing_writer = FailingWriter(1, 2)
    optimizer = kind.build(weights, failing_writer, device="cuda")
    checkpoint = optimizer.state_dict()
    grads = {name: g.cuda() for name, g in gradients_of(weights, 0).items()}
    failing_writer.step = 1
    with pytest.raises(OSError, match="no room"):
        optimizer.step(grads)
    with pytest.raises(TornError):
        optimizer.step(grads)
    failing_writer.step = 2
    optimizer.load_state_dict(checkpoint)
    undisturbed.step(grads)
    optimizer.step(grads)
    assert everything(optimizer) == everything(undisturbed)


@pytest.mark.gpu
def test_gpu_memory_is_flat_over_fifty_steps(kind: Kind, weights: Any, gradients_of: Any, writer: Any) -> None:
    optimizer = kind.build(weights, writer, device="cuda")
    grads = {name: g.cuda() for name, g in gradients_of(weights, 0).items()}
    for _ in range(3):
        optimizer.step(grads)
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        optimizer.step(grads)
    assert torch.cuda.memory_allocated() <= before
