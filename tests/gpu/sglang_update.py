"""SGLang's own way to put new weights into a serving model, with nothing of its server around it: the trainer's side
serializes CUDA IPC handles as its `Engine` does, the engine's side runs `WeightUpdater.update_weights_from_tensor` as
its scheduler does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["WAYS", "apply_update", "as_bucket", "as_named", "update_from_tensors"]


def as_named(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, Any]:
    """Named tensors, one handle each; the payload, and what must live until it was applied."""
    from sglang.srt.utils import MultiprocessingSerializer

    return MultiprocessingSerializer.serialize(list(tensors.items())), tensors


def as_bucket(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, Any]:
    """All tensors copied into one; the payload, and what must live until it was applied."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    made = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    data = {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}
    return MultiprocessingSerializer.serialize(data), made


# Name to how a payload is made, and the load format that it needs.
WAYS: Mapping[str, tuple[Callable[[Mapping[str, torch.Tensor]], tuple[bytes, Any]], str | None]] = {
    "named tensors": (as_named, None),
    "flattened bucket": (as_bucket, "flattened_bucket"),
}


def update_from_tensors(served: Any, payload: bytes, load_format: str | None, device: torch.device) -> tuple[bool, str]:
    """What SGLang's worker does with a payload, on a `ServedModel`; its answer. Does not wait for the GPU."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.utils import MultiprocessingSerializer

    with served.active():
        updater = WeightUpdater(
            tp_rank=0,
            device=device.type,
            gpu_id=0,
            model_config=None,
            custom_weight_loaders={},
            get_model=lambda: served.model,
            update_model_fields=lambda **_: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: None,
        )
        good, message = updater.update_weights_from_tensor(MultiprocessingSerializer.deserialize(payload), load_format)
        return good, message


def apply_update(served: Any, payload: bytes, load_format: str | None, device: torch.device) -> str:
    """Run the update on a `ServedModel`, and wait for the GPU.

    Returns:
        SGLang's message if it failed, else "".
    """
    good, message = update_from_tensors(served, payload, load_format, device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return "" if good else message
