"""Rows behind a tensor's own, for products that compute more rows than they are asked for.

Where the library sums in the wanted order only at some numbers of rows (engine/layers/exact_products.py), its input
gets rows that nobody reads. Whatever their memory holds is as good as anything else, so a copy is avoided where the
input was allocated with some to spare.
"""

from __future__ import annotations

import torch

SPARE_UP_TO = 128  # rows; beyond, up to a multiple of the half


def empty_with_spare_rows(num_rows: int, num_features: int, like: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_features], uninitialized, in the dtype and on the device of `like`."""
    step = SPARE_UP_TO // 2
    capacity = max(-(-num_rows // step) * step, SPARE_UP_TO)
    return torch.empty(capacity, num_features, dtype=like.dtype, device=like.device)[:num_rows]


def with_spare_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [fewer, features], contiguous, with `num_rows` rows; the last are whatever stands there."""
    num_features = x.shape[1]
    end = x.storage_offset() + num_rows * num_features
    if end * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((num_rows, num_features), (num_features, 1))
    return torch.cat((x, x.new_empty(num_rows - len(x), num_features)))
