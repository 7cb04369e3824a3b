"""What travels: the manifest, the control messages and the offers of memory. Plain data only.

The names here are those that planners, tests and tools need; the control messages are in `weftpub.wire.messages`.
"""

from weftpub.wire.description import EngineDescription, parameter_specs
from weftpub.wire.identity import Identity, gpu_uuid, local_identity
from weftpub.wire.manifest import Manifest, ManifestEntry
from weftpub.wire.offers import CudaIpcOffer, InProcessOffer, Offer, SharedMemoryOffer

__all__ = [
    "CudaIpcOffer",
    "EngineDescription",
    "Identity",
    "InProcessOffer",
    "Manifest",
    "ManifestEntry",
    "Offer",
    "SharedMemoryOffer",
    "gpu_uuid",
    "local_identity",
    "parameter_specs",
]
