"""Rows behind a tensor's own, for products that compute more rows than they are asked for.

Where the library sums in the wanted order only at some numbers of rows (engine/layers/exact_products.py), its input
gets rows that nobody reads. Whatever their memory holds is as good as anything else, so a copy is avoided where the
input was allocated with some to spare.
"""

from __future__ import annotations

import torch

STEP = 128  # rows


def room_for(num_rows: int) -> int:
    """As many rows as the memory of so many has."""
    return -(-num_rows // STEP) * STEP


def empty_with_spare_rows(num_rows: int, num_features: int, like: torch.Tensor) -> torch.Tensor:
    """[num_rows, num_features], uninitialized, in the dtype and on the device of `like`, with `room_for` more."""
    room = room_for(num_rows)
    return torch.empty(room, num_features, dtype=like.dtype, device=like.device)[:num_rows]


def with_spare_rows(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [at most as many, features], contiguous, with `num_rows` rows; the last are whatever stands there."""
    if len(x) == num_rows:
        return x
    num_features = x.shape[1]
    end = x.storage_offset() + num_rows * num_features
    if end * x.itemsize <= x.untyped_storage().nbytes():
        return x.as_strided((num_rows, num_features), (num_features, 1))
    return torch.cat((x, x.new_empty(num_rows - len(x), num_features)))
