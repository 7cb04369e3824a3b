"""Prepare, attach, train, close: the real Megatron trainer whose experts are the store's bytes."""

import re

import pytest
import torch

from weftpub.errors import ConfigError, DeadlineError, NonFiniteGradientError, StateError, TornError
from weftpub_kernels import NonFiniteError, quantize_pair

pytestmark = pytest.mark.isolated("megatron")

OPTIMIZERS = ("muon", "adam")


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> None:
    from attach_support import start

    start()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_published_bytes_are_the_quantized_masters_after_every_step(optimizer: str) -> None:
    """A trainer quantized BF16-rounded exports while its engine got other bytes: here one quantization of the FP32
    master.
    """
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8")
    with attach(ddp, opt) as attachment:
        for generation in (0, 1, 2):
            assert attachment.generation == generation
            masters = attachment.masters()
            for matrix in attachment.store.layout.matrices:
                expected, found = quantize_pair(masters[matrix.name]), attachment.store.matrix(matrix)
                for name in ("w", "wt", "scale", "scale_t"):
                    one, other = getattr(expected, name), getattr(found, name)
                    assert torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8)), (matrix.name, name)
            train(ddp, opt)
        assert 0 < attachment.last_step.changed_share < 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_attached_experts_own_no_bf16_memory_at_expert_parallel_one(optimizer: str) -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8")
    before = {name: id(p) for name, p in ddp.named_parameters()}
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        assert attachment.expert_storage_bytes == 0
        assert all(p.untyped_storage().nbytes() == 0 for p in attachment.placeholders.values())
        assert {name: id(p) for name, p in ddp.named_parameters()} == before
        gradient = next(iter(attachment.placeholders.values())).main_grad
        assert gradient.dtype == torch.float32
        assert gradient.untyped_storage().nbytes() > 0
    assert all(p.untyped_storage().nbytes() > 0 for p in ddp.parameters())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", ["bf16", "fp8"])
def test_closing_leaves_bf16_weights_and_fp32_masters(optimizer: str, variant: str) -> None:
    from attach_support import build, parameters, train

    from weftpub_adapters.megatron.attached import attach
    from weftpub_adapters.megatron.attached.published import expert_items

    ddp, opt = build(optimizer, variant)
    attachment = attach(ddp, opt)
    train(ddp, opt)
    masters = {name: master.clone() for name, master in attachment.masters().items()}
    items = {item.matrix.name: item.parameter for item in expert_items(attachment.layers)}
    attachment.close()
    for name, parameter in items.items():
        assert torch.equal(parameter, masters[name].bfloat16()), name
    dense = parameters(ddp)
    for name, master in masters.items():
        if name in dense:
            assert torch.equal(dense[name], master.view(dense[name].shape).bfloat16()), name
    with pytest.raises(StateError, match="not open"):
        attachment.metadata()


def test_after_close_the_next_update_is_the_ordinary_one() -> None:
    """Muon, bitwise: a closed trainer and one that was never attached take the same steps."""
    from attach_support import build, parameters, train

    from weftpub_adapters.megatron.attached import attach

    plain, plain_opt = build("muon")
    closed, closed_opt = build("muon", "bf16")
    attachment = attach(closed, closed_opt)
    for _ in range(2):
        assert train(plain, plain_opt) == train(closed, closed_opt)
    attachment.close()
    for _ in range(2):
        assert train(plain, plain_opt) == train(closed, closed_opt)
    found = parameters(closed)
    for name, expected in parameters(plain).items():
        assert torch.equal(found[name], expected), name


def test_closed_adam_holds_the_masters_and_moments() -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("adam", "fp8")
    attachment = attach(ddp, opt)
    for _ in range(2):
        train(ddp, opt)
    units = {
        id(u.key): {k: u.read(k).clone() for k in ("weight", "exp_avg", "exp_avg_sq")}
        for c in attachment._children
        for u in c.units
    }
    attachment.close()
    inner = opt.chained_optimizers[0].optimizer
    assert inner.staged is None
    assert not inner.awaiting
    seen = 0
    for group in inner.param_groups:
        for key in group["params"]:
            state = inner.state[key]
            assert torch.equal(state["master_param"].view(-1), units[id(key)]["weight"].view(-1))
            assert torch.equal(state["exp_avg"].view(-1), units[id(key)]["exp_avg"].view(-1))
            assert int(state["step"]) == 2
            seen += 1
    assert seen == len(units)


def test_muon_with_bf16_experts_is_bitwise_unattached_megatron() -> None:
    """Gradient norm, clipping, weight decay and a learning-rate schedule act as ever, to the last bit."""
    from attach_support import build, parameters, train
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from weftpub_adapters.megatron.attached import attach

    settings = {"weight_decay": 0.1, "clip_grad": 0.5, "min_lr": 1e-4}
    plain, plain_opt = build("muon", config=settings)
    staged, staged_opt = build("muon", "bf16", config=settings)
    schedules = [
        OptimizerParamScheduler(
            opt, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=6, lr_decay_style="cosine",
            start_wd=0.0, end_wd=0.2, wd_incr_steps=6, wd_incr_style="linear",
        )
        for opt in (plain_opt, staged_opt)
    ]  # fmt: skip
    with attach(staged, staged_opt):
        for step in range(4):
            assert train(plain, plain_opt, (step,)) == train(staged, staged_opt, (step,))
            for schedule in schedules:
                schedule.step(1)
        found = parameters(staged)
        for name, expected in parameters(plain).items():
            assert torch.equal(found[name], expected), name


def test_adam_masters_equal_unattached_ones_to_the_norms_last_bit() -> None:
    """Same arithmetic; only the order in which the gradient norm is summed differs, since experts have a buffer of
    their own.
    """
    from attach_support import build, global_name, train

    from weftpub_adapters.megatron.attached import attach

    plain, plain_opt = build("adam")
    staged, staged_opt = build("adam", "bf16")
    with attach(staged, staged_opt) as attachment:
        first = train(plain, plain_opt)
        assert first == train(staged, staged_opt)
        part = plain_opt.chained_optimizers[0]
        names = {id(p): global_name(n, 0) for n, p in plain.named_parameters()}
        masters = {_plain_expert(name): m for name, m in attachment.masters().items()}
        for models, mains in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for model, main in zip(models, mains, strict=True):
                assert torch.equal(masters[names[id(model)]].reshape(-1), main), names[id(model)]
        for _ in range(2):
            plain_loss, plain_norm = train(plain, plain_opt)
            loss, norm = train(staged, staged_opt)
            assert loss == pytest.approx(plain_loss, rel=1e-6)
            assert norm == pytest.approx(plain_norm, rel=1e-6)


@pytest.mark.parametrize("overlap", [False, True])
def test_three_microbatches_count_every_gradient_once(overlap: bool) -> None:
    """An expert's gradient added by the fused path and again by DDP's hook would be doubled; against the BF16
    trainer it is not.
    """
    from attach_support import build, gradients, main_gradients

    from weftpub_adapters.megatron.attached import attach

    ddp_settings = {"overlap_grad_reduce": overlap}
    plain, plain_opt = build("muon", ddp=ddp_settings)
    staged, staged_opt = build("muon", "fp8", ddp=ddp_settings)
    with attach(staged, staged_opt):
        for _ in range(2):  # the second iteration launches reductions from the hooks
            gradients(plain, plain_opt, (1, 2, 3))
            gradients(staged, staged_opt, (1, 2, 3))
        found = main_gradients(staged)
        for name, expected in main_gradients(plain).items():
            if ".experts." in name:
                error = (found[name] - expected).norm() / expected.norm()
                assert error < 0.2, (name, float(error))


def test_full_recomputation_gives_the_same_gradients() -> None:
    from attach_support import build, gradients, main_gradients

    from weftpub_adapters.megatron.attached import attach

    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = []
    for model in ({}, recompute):
        ddp, opt = build("muon", "fp8", model=model)
        with attach(ddp, opt):
            gradients(ddp, opt, (1, 2))
            found.append(main_gradients(ddp))
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


def test_forward_and_backward_leave_the_published_bytes_alone() -> None:
    from attach_support import build, gradients

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        before = attachment.store.sha256()
        gradients(ddp, opt, (1, 2, 3))
        assert attachment.store.sha256() == before
        attachment.store.check_wt()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("where", ["expert", "embedding"])
def test_a_gradient_that_is_not_finite_changes_nothing(optimizer: str, where: str) -> None:
    """NaN went into a master and came out as a silent -448: here the step is refused before its first write.

    The embedding belongs to the inner optimizer that steps last with Muon: the first one must not have written either.
    """
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, "fp8", config={"clip_grad": 0.0})
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        before, masters = attachment.store.sha256(), {n: m.clone() for n, m in attachment.masters().items()}
        gradients(ddp, opt)
        name, parameter = {
            "expert": (r"layers\.1\.experts\.2\.fc2", attachment.placeholders["layers.1.experts.2.fc2"]),
            "embedding": (r"embedding\.word_embeddings", ddp.module.module.embedding.word_embeddings.weight),
        }[where]
        parameter.main_grad[3, 5] = float("nan")
        with pytest.raises(NonFiniteGradientError, match=f"{name}.*row 3, column 5"):
            opt.step()
        assert attachment.generation == 1
        assert attachment.store.sha256() == before
        after = attachment.masters()
        changed = [n for n, m in masters.items() if not torch.equal(after[n], m)]
        assert changed == []
        train(ddp, opt)


def test_a_step_that_fails_half_way_tears_and_a_checkpoint_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8")
    with attach(ddp, opt) as attachment:
        train(ddp, opt)
        saved = [part.state_dict() for part in opt.chained_optimizers]
        saved = _copied(saved)
        before = attachment.store.sha256()
        child = attachment._children[0]
        original, calls = child.core.run_one, []

        def failing(*args: object) -> None:
            calls.append(1)
            if len(calls) == len(child.masters) - 1:
                raise RuntimeError("device lost")
            original(*args)

        monkeypatch.setattr(child.core, "run_one", failing)
        gradients(ddp, opt)
        with pytest.raises(RuntimeError, match="device lost"):
            opt.step()
        monkeypatch.undo()
        with pytest.raises(TornError):
            list(attachment.canonical())
        with pytest.raises(TornError):
            opt.step()
        with attachment.loading():
            for part, state in zip(opt.chained_optimizers, saved, strict=True):
                part.load_state_dict(state)
        assert attachment.store.sha256() == before
        train(ddp, opt)


@pytest.mark.parametrize("variant", ["bf16", "fp8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_fails_before_its_first_expert_tears_too(
    optimizer: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step failed when it had written some weights of attention, and no expert yet: the experts' store was whole, and
    stayed open, so that a publish would have sent its experts beside weights of the step after them.
    """
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach
    from weftpub_adapters.megatron.attached.plain import PlainWriter

    ddp, opt = build(optimizer, variant)
    attachment = attach(ddp, opt)
    train(ddp, opt)
    gradients(ddp, opt)
    write, written = PlainWriter._write, []

    def fails(self: PlainWriter, name: str, *rest: torch.Tensor) -> None:
        if len(written) == 2:
            raise ArithmeticError("no memory for the third")
        written.append(name)
        write(self, name, *rest)

    monkeypatch.setattr(PlainWriter, "_write", fails)
    with pytest.raises(ArithmeticError, match="no memory for the third"):
        opt.step()
    assert not [name for name in written if "experts" in name]
    assert all(child.masters.torn is not None for child in attachment._children)
    with pytest.raises(TornError, match="no memory for the third"), attachment.reading("publish"):
        pass


@pytest.mark.parametrize(
    ("optimizer", "variant", "name", "value"),
    [
        ("muon", "fp8", "decoder.layers.0.mlp.router.weight", float("nan")),
        ("adam", "fp8", "embedding.word_embeddings.weight", 3.4e38),
        ("muon", "bf16", "layers.1.experts.2.fc2", float("inf")),
    ],
    ids=["router", "beyond-bf16", "bf16-expert"],
)
def test_a_master_that_no_quantizer_reads_is_never_published_unless_it_is_finite(
    optimizer: str, variant: str, name: str, value: float
) -> None:
    """A NaN in a master was ignored by amax and became a silent -448. A router, an embedding or a BF16 expert is not
    even quantized: an attached trainer rounded them into the model, sealed the generation, and the engine would have
    answered nonsense.
    """
    from attach_support import build, gradients, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build(optimizer, variant)
    attachment = attach(ddp, opt)
    train(ddp, opt)
    gradients(ddp, opt)
    (master,) = [m for child in attachment._children for m in child.masters.values() if m.name.split("[")[0] == name]
    master.weight[3, 4] = value
    with pytest.raises(NonFiniteError, match=rf"{re.escape(name)}\S* holds \S+ at row 3, column"):
        opt.step()
    with pytest.raises(TornError), attachment.reading():
        pass
    with pytest.raises(TornError):
        opt.step()


def test_a_row_block_that_is_not_finite_is_found_too() -> None:
    from weftpub_adapters.megatron.attached.host_state import Unit
    from weftpub_adapters.megatron.attached.plain import FiniteWatch, PlainWriter

    target = torch.zeros(4, 2, dtype=torch.bfloat16)
    unit = Unit("embedding", torch.zeros(4, 2), target, {}, None, (4, 2))
    watch = FiniteWatch()
    writer = PlainWriter(unit, watch)
    writer.block(slice(0, 4))("embedding[0:4]", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    writer.block(slice(4, 8))("embedding[4:8]", torch.tensor([[5.0, 6.0], [float("inf"), 8.0]]))
    assert target[:3].tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(NonFiniteError, match=r"embedding\[4:8\] holds inf at row 1, column 0"):
        watch.raise_if_nonfinite()
    watch.reset()
    watch.raise_if_nonfinite()


def test_a_reader_holds_the_next_step_off() -> None:
    from attach_support import build, gradients

    from weftpub_adapters.megatron.attached import attach

    for variant in ("bf16", "fp8"):
        ddp, opt = build("muon", variant, lease_timeout=0.2)
        with attach(ddp, opt) as attachment:
            gradients(ddp, opt)
            held, release = _hold_in_thread(attachment)
            with pytest.raises(DeadlineError, match="publish"):
                opt.step()
            release.set()
            held.join(10)
            assert attachment.generation == 0
            assert opt.step()[0]
            assert attachment.generation == 1


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_megatrons_own_dispatchers_work(dispatcher: str) -> None:
    from attach_support import build, train

    from weftpub_adapters.megatron.attached import attach

    ddp, opt = build("muon", "fp8", model={"moe_token_dispatcher_type": dispatcher})
    with attach(ddp, opt) as attachment:
        first = train(ddp, opt)[0]
        assert train(ddp, opt)[0] < first
        assert attachment.dispatcher == dispatcher
        assert ddp.module.config.moe_token_dispatcher_type == dispatcher


def test_baseline_is_untouched_megatron() -> None:
    from attach_support import make_model, optimizer_config, train, wrap
    from megatron.core.optimizer import get_megatron_optimizer

    from weftpub_adapters.megatron.attached import attach, prepare

    model = make_model()
    prepared = prepare(model, variant="baseline")
    ddp = wrap(model, "adam")
    opt = get_megatron_optimizer(optimizer_config("adam", staged=False), [ddp])
    attachment = attach(ddp, opt, prepared=prepared)
    train(ddp, opt)
    assert not attachment.attached
    assert len(ddp.buffers) == 1
    attachment.close()
    with pytest.raises(ConfigError, match="not prepared"):
        attach(ddp, opt)


def test_metadata_before_attach_is_an_error_and_after_it_is_complete() -> None:
    from attach_support import FIELDS, build, make_model

    from weftpub_adapters.megatron.attached import attach, prepare

    with pytest.raises(StateError, match=r"only after attach"):
        prepare(make_model(), variant="fp8").metadata()
    for variant, per_expert in (("bf16", 3), ("fp8", 6)):
        ddp, opt = build("muon", variant)
        with pytest.raises(StateError, match=r"call attach"):
            opt.chained_optimizers[0].optimizer.step()
        with attach(ddp, opt) as attachment:
            entries = attachment.metadata()
            assert len(entries) == FIELDS.layers * FIELDS.experts * per_expert
            found = {c.name: (c.tensor.dtype, tuple(c.tensor.shape)) for c in attachment.canonical()}
            assert found == {e.name: (e.dtype, e.shape) for e in entries}


def _plain_expert(name: str) -> str:
    parts = name.split(".")
    if len(parts) != 5 or parts[2] != "experts":
        return name
    return f"decoder.layers.{parts[1]}.mlp.experts.local_experts.{parts[3]}.linear_{parts[4]}.weight"


def _copied(value: object) -> object:
    import copy

    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict) or hasattr(value, "keys"):
        return {key: _copied(value[key]) for key in list(value)}  # type: ignore[index]
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return copy.deepcopy(value)


def _hold_in_thread(attachment: object) -> tuple[object, object]:
    import threading

    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        with attachment.reading("publish"):  # type: ignore[attr-defined]
            entered.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(10)
    return thread, release
