"""What a person watches: a record per step to a JSON-lines log, TensorBoard and Weights & Biases, and progress bars."""

from weftmoe.telemetry.flops import FLOPS_SOURCE, ModelShape, training_flops
from weftmoe.telemetry.log import LOG_NAME, RunLog, read_log
from weftmoe.telemetry.progress import PhaseProgress
from weftmoe.telemetry.record import ByteCheck, Counters, KlByPrompt, RunHeader, StepRecord, TurnLengths, turn_lengths
from weftmoe.telemetry.sinks import Sinks, open_sinks
from weftmoe.telemetry.timers import Timers

__all__ = [
    "FLOPS_SOURCE",
    "LOG_NAME",
    "ByteCheck",
    "Counters",
    "KlByPrompt",
    "ModelShape",
    "PhaseProgress",
    "RunHeader",
    "RunLog",
    "Sinks",
    "StepRecord",
    "Timers",
    "TurnLengths",
    "open_sinks",
    "read_log",
    "training_flops",
    "turn_lengths",
]
