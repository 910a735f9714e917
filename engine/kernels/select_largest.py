"""The k largest values of each row and their ids, ordered by (value descending, id ascending).

That order is total, so the result is a function of the row alone: torch.topk leaves open which of several
equal values it returns. Rows with NaN give unspecified ids within the row's range. -inf may be among the k.

Shapes: values [n, m] float; 1 <= k <= m; result values [n, k] of the same dtype, ids [n, k] int64.
"""

from __future__ import annotations

import torch


def select_largest_reference(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring. Sorts the whole row only when k is its width."""
    width = values.shape[-1]
    if k == width:
        ordered = values.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    threshold = values.topk(k, dim=-1).values[:, -1:]
    # All above the threshold come first, then those equal to it by ascending id.
    # Example, k 2, values [5, 7, 5]: threshold 5, keys [3, 4, 1], ids {1, 0}.
    by_id = torch.arange(width, 0, -1, dtype=torch.int32, device=values.device)
    keys = torch.where(values == threshold, by_id, -1).masked_fill_(values > threshold, width + 1)
    ids = keys.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered = values.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)
