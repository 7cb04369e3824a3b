"""Checkpoints: a published version for engines, and a trainer's state to resume from."""

from weftpub.checkpoint.export import ExportReport, export_hf
from weftpub.checkpoint.files import LazyTensors
from weftpub.checkpoint.state import SavedState, Stateful, load_state, save_state

__all__ = ["ExportReport", "LazyTensors", "SavedState", "Stateful", "export_hf", "load_state", "save_state"]
