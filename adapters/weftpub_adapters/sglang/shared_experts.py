"""Gives the routed experts of a loaded SGLang model memory that the trainer maps too, before CUDA graphs are captured.

    with experts_apart():                      while SGLang builds and loads the model
        ...
    shared = share_experts(model, folder)      right after, outside of the memory saver's region
    side = engine_side(live_engine, model)     what the receiver drives: the same engine, with the memory's header asked

Every `Parameter` object stays; its data becomes a view of the shared allocation, at an address that never changes. The
allocation is none of the memory saver's, so a release of the `weights` tag neither frees nor touches it.

The memory that SGLang had reserved for the experts is given back, and what came free is measured. The saver's pool
gives nothing back, so experts that may be shared are kept out of it from the start (`shared_experts_pool` says how, and
why that is safe); those that cannot be shared after all are moved into it.

A model that cannot be shared (experts in another order, split over ranks, a driver that forbids it) keeps its own
memory, and is published to by copy.
"""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from weftpub.canonical import FAMILIES
from weftpub.errors import ConfigError, StateError, WeftpubError
from weftpub.memory import SharedAllocation, SharedState, sharing_obstacle
from weftpub.receive import EngineDescription, EngineSide
from weftpub.receive.shared import SharedEngineSide
from weftpub.store import StoreLayout
from weftpub.store.shared import layout_of, shared_catalogue
from weftpub_adapters.sglang.describe import w13_order
from weftpub_adapters.sglang.placement import expert_slots
from weftpub_adapters.sglang.shared_experts_pool import inside_a_region, pool_apart, trimmed

__all__ = [
    "SETTING",
    "ShareSettings",
    "SharedExperts",
    "engine_side",
    "experts_apart",
    "share_experts",
    "share_on_load",
    "shared_of",
]

logger = logging.getLogger(__name__)

SETTING = "weftpub_shared_experts"  # in SGLang's --json-model-override-args
_ATTRIBUTE = "_weftpub_shared_experts"
# SGLang's parameter of a layer -> the store's buffer.
_BUFFERS: Mapping[str, str] = {
    "w13_weight": "w13",
    "w13_weight_scale_inv": "w13_scale",
    "w2_weight": "w2",
    "w2_weight_scale_inv": "w2_scale",
}


class ShareSettings(BaseModel):
    """What an engine is told, as the value of `SETTING` in ``--json-model-override-args``.

    Attributes:
        folder: where trainer and engine meet.
        name: of the memory.
        protected: debug mode, see `SharedAllocation.join`.
        apart: make the experts beside the memory saver's pool, so that the memory that they are loaded into comes free.
            False makes them where SGLang does: that memory then stays reserved, and is released with the weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: str
    name: str = "experts"
    protected: bool = False
    apart: bool = True


@dataclass(frozen=True, eq=False)
class SharedExperts:
    """What `share_experts` did.

    Attributes:
        memory: the allocation.
        parameters: parameters that lie in it now.
        reasons: layers that do not, with the reason.
        nbytes: bytes of these parameters.
        given_back: bytes of the GPU that came free, measured; None on a CPU.
        filled: whether this engine put its loaded weights there; else what the trainer has there is served.
        loaded: the generation whose bytes are those that this engine loaded; None if others were there.
    """

    memory: SharedAllocation
    parameters: tuple[str, ...]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    nbytes: int = 0
    given_back: int | None = None
    filled: bool = False
    loaded: int | None = None


@torch.no_grad()
def share_experts(
    model: torch.nn.Module, folder: str, *, name: str = "experts", protected: bool = False
) -> SharedExperts:
    """Rebind the routed experts of a loaded model. Call it in the worker, in SGLang's runtime context, before CUDA
    graphs are captured.

    If a trainer holds the memory already, what is there stays and the loaded weights are dropped: it is the committed
    version, or the next publish makes it one. Otherwise this engine makes the memory from its own layout and puts its
    loaded weights there.

    Args:
        model: the model.
        folder, name: see `SharedAllocation.join`.
        protected: debug mode.

    Raises:
        ConfigError: layout or backend cannot be shared, with the reason. TransportError, ChannelError: the driver, the
            system or the folder forbid it; names the call. The model is unchanged then.
    """
    own = _layout(model)
    if inside_a_region():
        raise ConfigError("experts are shared after the model was loaded, outside of the memory saver's region")
    device = next(model.parameters()).device
    obstacle = sharing_obstacle(device, folder)
    if obstacle is not None:
        raise ConfigError(f"experts cannot be shared: {obstacle}")
    memory, made = _join(folder, name, device, own, protected)
    try:
        targets, reasons = _targets(model, memory)
        if not targets:
            raise ConfigError(f"no layer of experts can be shared: {next(iter(reasons.values()), 'it has none')}")
        filled = made and _fill(memory, targets)
        loaded = _generation_of(memory, targets)
        before = trimmed(device)
        for parameter, target in targets.values():
            parameter.data = target
        given_back = trimmed(device) - before if device.type == "cuda" else None
    except BaseException:
        memory.leave()
        raise
    nbytes = sum(target.nbytes for _, target in targets.values())
    shared = SharedExperts(memory, tuple(targets), reasons, nbytes, given_back, filled, loaded)
    setattr(model, _ATTRIBUTE, shared)
    logger.info(
        "weftpub: %d expert parameters, %d bytes, lie in memory shared with the trainer; %s bytes given back",
        len(targets),
        nbytes,
        given_back,
    )
    return shared


def _fill(memory: SharedAllocation, targets: "_Targets") -> bool:
    """Put the loaded weights into new memory; False if a trainer that joined meanwhile was quicker."""
    try:
        memory.begin(0, first=True)
    except StateError:
        return False
    for parameter, target in targets.values():
        target.view(torch.uint8).copy_(parameter.data.view(torch.uint8))
    if memory.device.type == "cuda":
        torch.cuda.synchronize(memory.device)
    memory.seal()
    return True


@contextmanager
def experts_apart() -> Generator[None]:
    """Inside, SGLang's layers make their routed experts outside of the memory saver's pool. Enter it outside of the
    saver's region.
    """
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    with ExitStack() as stack:
        apart = stack.enter_context(pool_apart())
        for method in (Fp8MoEMethod, UnquantizedFusedMoEMethod):
            original = method.create_weights
            stack.callback(setattr, method, "create_weights", original)
            method.create_weights = _apart(original, apart)
        yield


def _apart(create: Callable[..., None], apart: Callable[[], AbstractContextManager[None]]) -> Callable[..., None]:
    def create_weights(*args: Any, **kwargs: Any) -> None:
        with apart():
            create(*args, **kwargs)

    return create_weights


def share_on_load(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's `ModelRunner.load_model`: load, then share if the engine was started with `SETTING`.

    Whatever is in the way is logged, and the engine starts with experts of its own: publishes copy them.
    """
    config = runner.model_config.hf_config
    wish = getattr(config, SETTING, None)
    if wish is None or getattr(runner, "is_draft_worker", False):
        return original(runner, *args, **kwargs)
    delattr(config, SETTING)  # it is no part of the model, and what describes the model need not know it
    try:
        settings = ShareSettings.model_validate(wish)
    except ValidationError as error:
        logger.warning("weftpub: %s has %d faults; experts are not shared", SETTING, error.error_count())
        return original(runner, *args, **kwargs)
    with experts_apart() if settings.apart else nullcontext():
        result = original(runner, *args, **kwargs)
    try:
        _require_loaded(runner)
        share_experts(runner.model, settings.folder, name=settings.name, protected=settings.protected)
    except WeftpubError as error:
        logger.warning("weftpub: experts are not shared, publishes copy them: %s", error)
    if settings.apart:
        _hand_to_saver(runner)
    return result


def _require_loaded(runner: Any) -> None:
    """ConfigError if SGLang loads weights into the parameters later: over what a trainer has in the memory by then."""
    if getattr(runner, "startup_weight_load", None) is not None:
        raise ConfigError(
            "this engine loads its weights after its model was made (startup_weight_load_mode 'overlap'), which would "
            "write over what is shared; start it with startup_weight_load_mode 'serial'"
        )


@torch.no_grad()
def _hand_to_saver(runner: Any) -> None:
    """Move the experts that are not shared into the memory saver's pool, so that a release frees them, too."""
    saver: Any = getattr(runner, "memory_saver_adapter", None)
    if saver is None or not saver.enabled:
        return
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.runtime_context import get_exec

    shared = shared_of(runner.model)
    done = () if shared is None else shared.parameters
    own = [
        getattr(module, kind)
        for name, module in runner.model.named_modules()
        if isinstance(module, FusedMoE)
        for kind in _BUFFERS
        if getattr(module, kind, None) is not None and f"{name}.{kind}" not in done
    ]
    if not own:
        return
    with saver.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=get_exec().features.enable_weights_cpu_backup):
        for parameter in own:
            parameter.data = parameter.data.clone()
    if own[0].device.type == "cuda":
        torch.cuda.empty_cache()


def shared_of(model: torch.nn.Module) -> SharedExperts | None:
    """What was shared of a model, None if nothing was."""
    return getattr(model, _ATTRIBUTE, None)


def engine_side(engine: EngineSide, model: torch.nn.Module, version: int | None = None) -> EngineSide:
    """The engine as its receiver must drive it: `engine` itself, or a `SharedEngineSide` around it.

    Args:
        engine: over the same model.
        model: the model.
        version: the published version that the engine serves already, None if none.

    Raises:
        ConfigError: the memory's header says that the bytes are of another version; or nothing was committed there, and
            they are not those that this engine loaded. TornError: it says that they must not be served.
    """
    shared = shared_of(model)
    if shared is None:
        return engine
    if version is not None:
        _require_version(shared, version)
        shared.memory.start_serving()
    return _SharedSide(engine, shared)


class _SharedSide(SharedEngineSide):
    """Says in its description what was shared, and how much memory that gave back."""

    def __init__(self, engine: EngineSide, shared: SharedExperts) -> None:
        super().__init__(engine, shared.memory)
        self._shared = shared

    def describe(self) -> EngineDescription:
        found = super().describe()
        shared = {
            "nbytes": self._shared.nbytes,
            "given_back": self._shared.given_back,
            "filled": self._shared.filled,
            "reasons": dict(self._shared.reasons),
        }
        return found.model_copy(update={"settings": {**found.settings, "shared_experts": shared}})


def _require_version(shared: SharedExperts, version: int) -> None:
    """See that the shared bytes are `version`; ConfigError if they are not.

    What was committed is known by its header. Where nothing was, the bytes must be those that this engine loaded, as
    the version is that of what it loaded: a trainer that came first has other ones there, or has written since.
    """
    remedy = "start the receivers without a version, and publish"
    standing = shared.memory.standing()
    if standing.committed is not None:
        if standing.committed.version != version:
            raise ConfigError(
                f"the engine was said to serve version {version}, but version {standing.committed.version} was "
                f"committed last in the memory that its experts share; {remedy}"
            )
        return
    if standing.state is not SharedState.SEALED or standing.generation != shared.loaded:
        raise ConfigError(
            f"the engine was said to serve version {version}, but no version was committed in the memory that its "
            f"experts share, and the bytes there (generation {standing.generation}, {standing.state}) are not those "
            f"that it loaded; {remedy}"
        )
    shared.memory.commit(version)


def _generation_of(memory: SharedAllocation, targets: "_Targets") -> int | None:
    """The sealed generation in the memory if its bytes are those of the loaded parameters, else None."""
    before = memory.standing()
    same = before.state is SharedState.SEALED and all(
        torch.equal(parameter.data.view(torch.uint8), target.view(torch.uint8))
        for parameter, target in targets.values()
    )
    after = memory.standing()
    return before.generation if same and (after.state, after.generation) == (before.state, before.generation) else None


def _layout(model: torch.nn.Module) -> StoreLayout:
    """The layout of a store of exactly this rank's experts; ConfigError if its layers cannot be one."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    if w13_order(model) != "gate":
        raise ConfigError("this engine keeps up rows before gate rows; the trainer's fc1 is gate over up")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, FusedMoE)}
    split = sorted({module.moe_tp_size for module in layers.values()} - {1})
    if split:
        raise ConfigError(
            f"this engine splits every expert over {split[0]} ranks (moe_tp_size); the trainer keeps experts whole: "
            "set ep_size to tp_size"
        )
    slots = expert_slots(model)
    first = next(iter(layers))
    module = layers[first]
    if len(set(slots[first])) != len(slots[first]):
        raise ConfigError(f"{first}: this rank holds an expert twice; the trainer holds it once")
    architecture = type(model).__name__
    return StoreLayout(
        layers=tuple(one.layer_id for name, one in layers.items() if slots[name] == slots[first]),
        experts=tuple(slots[first]),
        hidden=module.w2_weight.shape[1],
        intermediate=module.w2_weight.shape[2],
        format="fp8" if module.w13_weight.dtype == torch.float8_e4m3fn else "bf16",
        family=FAMILIES.get(architecture, FAMILIES["Qwen3MoeForCausalLM"]),
    )


def _join(
    folder: str, name: str, device: torch.device, own: StoreLayout, protected: bool
) -> tuple[SharedAllocation, bool]:
    """The memory that a trainer holds, whatever it holds, or new memory of this layout; and whether this made it."""
    try:
        return SharedAllocation.join(folder, name, device, create=False, protected=protected), False
    except ConfigError:  # nobody has it yet
        memory = SharedAllocation.join(folder, name, device, shared_catalogue(own), protected=protected)
        return memory, memory.created


type _Targets = dict[str, tuple[torch.nn.Parameter, torch.Tensor]]


def _targets(model: torch.nn.Module, memory: SharedAllocation) -> tuple[_Targets, dict[str, str]]:
    """Parameter name to the parameter and its place in the memory; layers without one, with the reason."""
    layout = layout_of(memory.catalogue)
    targets: _Targets = {}
    reasons: dict[str, str] = {}
    for name, held in expert_slots(model).items():
        module = model.get_submodule(name)
        layer: Any = module.layer_id
        start = _run(layout.experts, held)
        if layer not in layout.layers or start is None:
            reasons[name] = (
                f"{name}: layer {layer} with experts {_few(held)} is no run of what the memory holds: layers "
                f"{_few(layout.layers)} with experts {_few(layout.experts)}"
            )
            continue
        found: _Targets = {}
        for kind, buffer in _BUFFERS.items():
            parameter: Any = getattr(module, kind, None)
            if parameter is None:
                continue
            target = memory.tensor(f"layers.{layer}.{buffer}")[start : start + len(held)]
            if (target.shape, target.dtype) != (parameter.shape, parameter.dtype) or not parameter.is_contiguous():
                reasons[name] = (
                    f"{name}.{kind}: the engine has {parameter.dtype} {list(parameter.shape)}, the memory "
                    f"{target.dtype} {list(target.shape)}"
                )
            found[f"{name}.{kind}"] = parameter, target
        if name not in reasons:
            targets.update(found)
    return targets, reasons


def _run(experts: Sequence[int], held: Sequence[int]) -> int | None:
    """Where `held` lies in `experts` as one run, None if it does not."""
    start = experts.index(held[0]) if held and held[0] in experts else len(experts)
    return start if list(experts[start : start + len(held)]) == list(held) else None


def _few(numbers: Sequence[int]) -> str:
    return str(list(numbers)) if len(numbers) <= 8 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
