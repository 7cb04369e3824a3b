"""The expert store: one generation of W, W^T and scales, in memory it was given."""

from weftpub.store.encode import check_preset
from weftpub.store.guard import StoreState
from weftpub.store.layout import CanonicalEntry, LayerStore, MatrixView, StoreLayout
from weftpub.store.report import SealReport, Step, StoreWriter
from weftpub.store.store import ExpertStore

__all__ = [
    "CanonicalEntry",
    "ExpertStore",
    "LayerStore",
    "MatrixView",
    "SealReport",
    "Step",
    "StoreLayout",
    "StoreState",
    "StoreWriter",
    "check_preset",
]
