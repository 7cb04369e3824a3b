"""The plan: who sends which box of which tensor to whom, and where it lies there. Pure data and checks; no GPU, socket
or process group.

`Plan` and its parts are the data, `make_plan` joins two layouts, `check_plan` proves a plan (made here or elsewhere),
`explain_illegal_tp` says which sizes would work, and `cut_pieces` turns a receiver's moves into pieces that fit a
staging buffer.
"""

from weftpub.plan.check import check_part, check_plan
from weftpub.plan.dtypes import dtype_name, torch_dtype
from weftpub.plan.legal import explain_illegal_tp, legal_ep, legal_tp, require_legal_tp
from weftpub.plan.make import make_plan
from weftpub.plan.pieces import Chunk, Piece, PieceTable, cut_pieces
from weftpub.plan.types import BLOCK, SCALE_SUFFIX, Destination, Move, Plan, PlanPart, Shard, ViewSpec
from weftpub.plan.views import ParameterSpec, check_views, layout_digest

__all__ = [
    "BLOCK",
    "SCALE_SUFFIX",
    "Chunk",
    "Destination",
    "Move",
    "ParameterSpec",
    "Piece",
    "PieceTable",
    "Plan",
    "PlanPart",
    "Shard",
    "ViewSpec",
    "check_part",
    "check_plan",
    "check_views",
    "cut_pieces",
    "dtype_name",
    "explain_illegal_tp",
    "layout_digest",
    "legal_ep",
    "legal_tp",
    "make_plan",
    "require_legal_tp",
    "torch_dtype",
]
