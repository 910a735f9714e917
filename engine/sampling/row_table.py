"""A list of values per request row, on the device, for parameters that few requests set.

It knows nothing of what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device import to_device


class RowTable:
    """`data` is [max_num_rows, width]; the width is `unit` at first and doubles to fit the longest list."""

    def __init__(
        self, max_num_rows: int, pad: float, dtype: npt.DTypeLike, device: torch.device, *, unit: int = 1
    ) -> None:
        self._pad = pad
        self._dtype = np.dtype(dtype)
        self.data = torch.from_numpy(np.full((max_num_rows, unit), pad, self._dtype)).to(device)

    def set_row(self, row: int, values: Sequence[float]) -> None:
        """Replace the row's list; the rest of the row is padding."""
        while self.data.shape[1] < len(values):
            self.data = torch.cat([self.data, torch.full_like(self.data, self._pad)], dim=1)
        padded = np.full(self.data.shape[1], self._pad, self._dtype)
        padded[: len(values)] = values
        self.data[row].copy_(to_device(padded, self.data.device), non_blocking=True)
