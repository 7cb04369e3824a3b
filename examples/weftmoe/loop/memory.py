"""GPU memory of a step: what this process's allocator holds, and what is in use on the devices, whoever holds it."""

from typing import Any

import torch

from weftmoe.loop.ranks import Ranks

__all__ = ["DeviceMemory", "allocator_memory"]


class DeviceMemory:
    """The most bytes in use on any rank's GPU, of all processes there: torch's allocator of one of them knows neither
    the engine nor the contexts and libraries of either. It is read where a phase ends; what comes and goes in between
    is seen as far as torch keeps it cached.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._most = 0

    def look(self) -> None:
        """Read what is in use now."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            self._most = max(self._most, total - free)

    def take(self, ranks: Ranks) -> dict[str, int]:
        """The most since the last call, over all ranks, as "device_used"; empty without GPUs. Collective."""
        self.look()
        most, self._most = self._most, 0
        found = max(ranks.gather(most))
        return {"device_used": found} if found else {}


def allocator_memory(device: torch.device) -> dict[str, Any]:
    """Bytes of this process on its device, as torch's allocator counts them: allocated and reserved now, and the peak
    since the last call.
    """
    if device.type != "cuda":
        return {}
    found = {
        "allocated": torch.cuda.memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
        "peak": torch.cuda.max_memory_allocated(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found
