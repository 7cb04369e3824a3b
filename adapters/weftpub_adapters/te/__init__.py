"""TransformerEngine: grouped expert GEMMs on the store's own FP8 bytes, FP8 around the routed experts and nothing else.

Importing this package does not import TransformerEngine; building a `GroupedForward` or a counter does. Works with
transformer-engine 2.20.2
on GPUs of compute capability 9.0 (its block-scaled GEMMs on other GPUs convert the weights first).
"""

from weftpub_adapters.te.counters import count_fp8_gemms, count_weight_quantizations
from weftpub_adapters.te.grouped import GroupedForward
from weftpub_adapters.te.scales import GemmScales
from weftpub_adapters.te.weights import StoreWeights

__all__ = ["GemmScales", "GroupedForward", "StoreWeights", "count_fp8_gemms", "count_weight_quantizations"]
