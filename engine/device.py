"""How host data reaches the device without making the host wait."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor on the device. On CPU it shares memory with the array.

    On CUDA the copy is asynchronous from a fresh pinned buffer: torch's caching host allocator gives the buffer to
    nobody else before the copy has run, so two steps in flight never share staging memory.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def fill(destination: torch.Tensor, array: npt.NDArray[np.generic]) -> None:
    """Copy the array, of the same shape and dtype, into a dense tensor on a device: one copy, as asynchronous as that
    of `to_device`.
    """
    tensor = torch.from_numpy(array)
    if destination.device.type != "cpu":
        tensor = tensor.pin_memory()
    destination.copy_(tensor, non_blocking=True)
