"""The shape of the KV cache as the scheduler sees it: groups of layers that share one block table. No torch."""

from __future__ import annotations

import msgspec

PAD_SLOT_ID = -1  # a slot that stores nothing


class KVGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table: the same tokens are kept for each of them.

    Every block of every group holds `block_size` tokens; `bytes_per_token` sums over the group's layers.
    """

    name: str  # "full", "sliding", or a drafter's own
    layer_indices: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    bytes_per_token: int
    window: int | None = None  # keys a query sees, itself included; None: all
    is_drafter: bool = False  # a draft model's own; only requests that use it hold blocks here
