"""The three places where Megatron looks up its optimizers by name, and the staged classes put there.

    megatron.core.optimizer.emerging_optimizers._EMERGING_OPTIMIZERS["muon"]                   ->
    StagedTensorParallelMuon
    megatron.core.optimizer.Float16OptimizerWithFloat16Params                                  -> StagedFloat16Optimizer
    megatron.core.optimizer.HybridDeviceOptimizer, and the one in its distrib_optimizer        -> StagedHybridDevice

No file of Megatron is touched. The staged classes are subclasses that behave as stock for every model that is not
prepared, so they may
stay in place; `uninstall` puts the stock ones back. The hybrid optimizer has two references and the
DistributedOptimizer tests instances
against its own, so both change together.
"""

import dataclasses

__all__ = ["install", "installed", "uninstall"]

_stock: dict[str, object] = {}


def installed() -> bool:
    """Whether the staged classes are in place."""
    return bool(_stock)


def install() -> None:
    """Put the staged classes in place; a second call changes nothing."""
    if _stock:
        return
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer, emerging_optimizers

    from weftpub_adapters.megatron.attached.float16 import StagedFloat16Optimizer
    from weftpub_adapters.megatron.attached.step_adamw import StagedHybridDevice
    from weftpub_adapters.megatron.attached.step_muon import StagedTensorParallelMuon

    registry = emerging_optimizers._EMERGING_OPTIMIZERS
    _stock.update(
        muon=registry.get("muon"),
        float16=optimizers.Float16OptimizerWithFloat16Params,
        hybrid=optimizers.HybridDeviceOptimizer,
    )
    if registry.get("muon") is not None:
        registry["muon"] = dataclasses.replace(registry["muon"], optimizer_cls=StagedTensorParallelMuon)
    optimizers.Float16OptimizerWithFloat16Params = StagedFloat16Optimizer
    optimizers.HybridDeviceOptimizer = StagedHybridDevice
    distrib_optimizer.HybridDeviceOptimizer = StagedHybridDevice


def uninstall() -> None:
    """Put Megatron's classes back. Optimizers that were built meanwhile keep working."""
    if not _stock:
        return
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer, emerging_optimizers

    if _stock["muon"] is not None:
        emerging_optimizers._EMERGING_OPTIMIZERS["muon"] = _stock["muon"]
    optimizers.Float16OptimizerWithFloat16Params = _stock["float16"]
    optimizers.HybridDeviceOptimizer = _stock["hybrid"]
    distrib_optimizer.HybridDeviceOptimizer = _stock["hybrid"]
    _stock.clear()
