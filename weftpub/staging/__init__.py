"""Staging: FP32 masters travel from host memory through GPU slots and back, updated and written out on the way."""

from weftpub.staging.lanes import Lane, Lanes, open_lanes
from weftpub.staging.pipeline import StagedMaster, StagingPipeline, Work, Writer
from weftpub.staging.slots import Slot, SlotPool, SlotState

__all__ = [
    "Lane",
    "Lanes",
    "Slot",
    "SlotPool",
    "SlotState",
    "StagedMaster",
    "StagingPipeline",
    "Work",
    "Writer",
    "open_lanes",
]
