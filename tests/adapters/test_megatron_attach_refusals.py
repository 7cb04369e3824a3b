"""Every setting that cannot work is refused by name, with the one that does, before anything is changed."""

import sys
import types
from typing import Any

import pytest
import torch

from weftpub.errors import ConfigError
from weftpub_adapters.megatron.attached import AttachSettings, check_dispatcher
from weftpub_adapters.megatron.attached.refusals import (
    check_optimizer_config,
    check_transformer_config,
    check_wrapper_config,
)

TRANSFORMER = {
    "moe_mlp_glu_interleave_size": (None, 32, "all"),
    "moe_single_grouped_weight": (False, True, "all"),
    "fp8_param": (False, True, "all"),
    "fp8": (None, "e4m3", "fp8"),
    "fp4": (None, "e2m1", "fp8"),
    "use_transformer_engine_op_fuser": (False, True, "fp8"),
    "delay_wgrad_compute": (False, True, "fp8"),
    "overlap_dispatch_backward_with_experts_wgrad": (False, True, "fp8"),
    "moe_latent_size": (None, 64, "fp8"),
    "gated_linear_unit": (True, False, "fp8"),
    "cuda_graph_impl": ("none", "local", "fp8"),
}
WRAPPER = {
    "use_megatron_fsdp": (False, True, "all"),
    "fp8_param_gather": (False, True, "all"),
    "fp4_param_gather": (False, True, "all"),
    "reuse_grad_buf_for_mxfp8_param_ag": (False, True, "all"),
    "nccl_ub": (False, True, "fp8"),
}
COMMON = {
    "fp16": (False, True, "all"),
    "bf16": (True, False, "all"),
    "decoupled_weight_decay": (True, False, "all"),
    "main_params_dtype": (torch.float32, torch.float16, "all"),
    "exp_avg_dtype": (torch.float32, torch.uint8, "all"),
    "exp_avg_sq_dtype": (torch.float32, torch.uint8, "all"),
    "optimizer_cuda_graph": (False, True, "all"),
    "use_layer_wise_distributed_optimizer": (False, True, "all"),
    "overlap_param_gather_with_optimizer_step": (False, True, "all"),
}
ADAM = {
    "use_distributed_optimizer": (True, False, "all"),
    "use_precision_aware_optimizer": (True, False, "all"),
    "optimizer_cpu_offload": (True, False, "all"),
    "optimizer_offload_fraction": (1.0, 0.5, "all"),
}
MUON = {
    "use_distributed_optimizer": (False, True, "all"),
    "optimizer_cpu_offload": (False, True, "all"),
    "muon_scalar_optimizer": ("adam", "lion", "all"),
}
TABLES = [
    (check_transformer_config, TRANSFORMER, {}),
    (check_wrapper_config, WRAPPER, {}),
    (check_optimizer_config, COMMON | ADAM, {"optimizer": "adam"}),
    (check_optimizer_config, COMMON | MUON, {"optimizer": "muon"}),
]
CASES = [(check, table, extra, name) for check, table, extra in TABLES for name in table]


@pytest.mark.parametrize(
    ("check", "table", "extra", "name"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("variant", ["bf16", "fp8"])
def test_each_setting_is_refused_by_name_with_the_one_that_works(
    check: Any, table: dict[str, Any], extra: dict[str, Any], name: str, variant: str
) -> None:
    settings = AttachSettings(variant=variant)
    works = types.SimpleNamespace(**extra, **{key: value[0] for key, value in table.items()})
    check(works, settings)
    good, bad, applies = table[name]
    setattr(works, name, bad)
    if applies == "fp8" and variant == "bf16":
        check(works, settings)
        return
    with pytest.raises(
        ConfigError, match=rf"{name}={bad!r}.*set it to {good!r}" if not isinstance(bad, torch.dtype) else name
    ):
        check(works, settings)


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sgd' is not staged; use 'adam' or 'muon'"):
        check_optimizer_config(types.SimpleNamespace(optimizer="sgd"), AttachSettings())


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="baseline, bf16, fp8"):
        AttachSettings(variant="fp4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="above zero"):
        AttachSettings(slots=0)


def dispatcher(**changes: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        **{
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": "deepep",
            "tensor_model_parallel_size": 1,
            "expert_model_parallel_size": 2,
            **changes,
        }
    )


def test_the_type_of_the_dispatcher_decides_not_its_unused_backend() -> None:
    """The backend says "deepep" even with alltoall; a check of it alone refuses every machine without DeepEP."""
    for kind in ("alltoall", "allgather"):
        assert check_dispatcher(dispatcher(moe_token_dispatcher_type=kind)) == kind
    with pytest.raises(ConfigError, match="moe_token_dispatcher_type='ring' is unknown"):
        check_dispatcher(dispatcher(moe_token_dispatcher_type="ring"))


def test_flex_without_its_library_says_what_to_install_or_set() -> None:
    with pytest.raises(ConfigError, match=r"'deep_ep', which is not installed.*weftpub\[deepep\].*'alltoall'"):
        check_dispatcher(dispatcher())


def test_flex_with_its_library_passes_through_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("deep_ep")
    module.__spec__ = types.SimpleNamespace(name="deep_ep")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    config = dispatcher()
    before = vars(config).copy()
    assert check_dispatcher(config) == "flex/deepep"
    assert vars(config) == before
    with pytest.raises(ConfigError, match="expert_model_parallel_size"):
        check_dispatcher(dispatcher(expert_model_parallel_size=1))


@pytest.mark.isolated("megatron")
class TestOnTheRealTrainer:
    """What only a model, its wrapper and its optimizer together can show."""

    @pytest.fixture(scope="class", autouse=True)
    def _megatron(self) -> None:
        from attach_support import start

        start()

    def test_unprepared_model_and_optimizer(self) -> None:
        from attach_support import build

        from weftpub_adapters.megatron.attached import attach

        ddp, opt = build("muon")
        with pytest.raises(ConfigError, match=r"not prepared.*call prepare\(model\) before"):
            attach(ddp, opt)

    def test_prepare_after_wrapping(self) -> None:
        from attach_support import build

        from weftpub_adapters.megatron.attached import prepare

        ddp, _ = build("adam")
        with pytest.raises(ConfigError, match="before DistributedDataParallel"):
            prepare(ddp)

    def test_prepare_twice(self) -> None:
        from attach_support import make_model

        from weftpub_adapters.megatron.attached import prepare

        model = make_model()
        prepare(model)
        with pytest.raises(ConfigError, match="prepared already"):
            prepare(model)

    def test_adam_without_the_flags(self) -> None:
        from attach_support import make_model, optimizer_config, wrap
        from megatron.core.optimizer import get_megatron_optimizer

        from weftpub_adapters.megatron.attached import attach, prepare

        model = make_model()
        prepare(model)
        ddp = wrap(model, "adam")
        opt = get_megatron_optimizer(optimizer_config("adam", staged=False), [ddp])
        with pytest.raises(ConfigError, match=r"use_precision_aware_optimizer=False.*set it to True"):
            attach(ddp, opt)

    def test_a_matrix_larger_than_a_slot(self) -> None:
        from attach_support import build, train

        from weftpub_adapters.megatron.attached import attach

        ddp, opt = build("muon", "fp8", slot_numel=1000)
        with pytest.raises(ConfigError, match=r"numel=\d+"):
            attach(ddp, opt)
        storages = [p.untyped_storage().nbytes() for p in ddp.parameters()]
        assert all(storages)
        ddp, opt = build("muon", "fp8", slot_numel=131072)
        with attach(ddp, opt):
            train(ddp, opt)

    @pytest.mark.parametrize(
        ("getter", "optimizer", "message"),
        [
            ("get_expert_data_parallel_world_size", "adam", "over 2 ranks.*set num_distributed_optimizer_instances=2"),
            ("get_expert_data_parallel_world_size", "muon", None),
            ("get_expert_tensor_parallel_world_size", "muon", "parallel_size is 2.*expert_tensor_parallel_size=1"),
        ],
    )
    def test_split_experts_are_for_bf16_alone(
        self, monkeypatch: pytest.MonkeyPatch, getter: str, optimizer: str, message: str | None
    ) -> None:
        from attach_support import build, train
        from megatron.core import parallel_state

        from weftpub_adapters.megatron.attached import attach

        for variant in ("fp8", "bf16"):
            ddp, opt = build(optimizer, variant)
            with monkeypatch.context() as patch:
                patch.setattr(parallel_state, getter, lambda **_: 2)
                if variant == "fp8" and message is not None:
                    with pytest.raises(ConfigError, match=f"{message}.*variant='bf16'"):
                        attach(ddp, opt)
                    continue
                attachment = attach(ddp, opt)
            train(ddp, opt)
            attachment.close()

    def test_attach_twice(self) -> None:
        from attach_support import build

        from weftpub_adapters.megatron.attached import attach

        ddp, opt = build("muon", "fp8")
        with attach(ddp, opt), pytest.raises(ConfigError, match="attached already"):
            attach(ddp, opt)
