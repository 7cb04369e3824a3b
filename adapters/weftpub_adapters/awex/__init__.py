"""AWEX at plan time: canonical names and the transfer plan come from its real converters, resolvers and plan builder.

Used in the trainer's (or driver's) process only. Engines are described as plain data and get the plan as plain data;
AWEX is imported when the first of these functions runs, and its registry is as it was when the function returns.
"""

from weftpub_adapters.awex.engine import EngineShards, engine_shards
from weftpub_adapters.awex.plan import build_plan, plan_is_current, plan_publish
from weftpub_adapters.awex.seams import SUPPORTED_VERSIONS, require_supported
from weftpub_adapters.awex.sources import SourceMapping, canonical_sources
from weftpub_adapters.awex.trainer import TrainerShards, trainer_shards

__all__ = [
    "SUPPORTED_VERSIONS",
    "EngineShards",
    "SourceMapping",
    "TrainerShards",
    "build_plan",
    "canonical_sources",
    "engine_shards",
    "plan_is_current",
    "plan_publish",
    "require_supported",
    "trainer_shards",
]
