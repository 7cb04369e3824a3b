"""Staged optimizers: Muon and AdamW whose FP32 masters and state stay in host memory and are updated in GPU slots."""

from weftpub.optim.adamw import AdamWHyperparameters, StagedAdamW, adamw_update_
from weftpub.optim.base import Hyperparameters, MasterStep, Override, StagedOptimizer, StepReport
from weftpub.optim.gradients import check_gradients, clip_grad_norm, gradient_norms
from weftpub.optim.muon import MuonHyperparameters, StagedMuon, muon_update_

__all__ = [
    "AdamWHyperparameters",
    "Hyperparameters",
    "MasterStep",
    "MuonHyperparameters",
    "Override",
    "StagedAdamW",
    "StagedMuon",
    "StagedOptimizer",
    "StepReport",
    "adamw_update_",
    "check_gradients",
    "clip_grad_norm",
    "gradient_norms",
    "muon_update_",
]
