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
    value_size: int | None = (
        None  # values are the first so many features of the keys; None: stored beside them
    )
    window: int | None = None  # keys a query sees, itself included; None: all
    extra_window_keys: int = (
        0  # keys before the window that a drafter reads, seen from the last confirmed token
    )
    is_drafter: bool = False  # a draft model's own; only requests that use it hold blocks here

    def first_key(self, num_computed_tokens: int) -> int:
        """The first position that is read once so many tokens are confirmed, by any later step and its drafter.

        A later step's first query stands at `num_computed_tokens`, or behind it; its drafter reads from the last
        token confirmed then, which is that query or one behind it.
        Example, window 4, 1 extra key, 10 computed tokens: the query at 10 sees 7..10, the drafter reads 6 too: 6.
        """
        if self.window is None:
            return 0
        return max(num_computed_tokens - self.window + 1 - self.extra_window_keys, 0)

    def max_held_blocks(self, num_tokens: int, num_unconfirmed: int, block_size: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at any time, with slots for at most
        `num_unconfirmed` (>= 1) tokens behind the confirmed ones.

        With a window these are the blocks that `window - 1 + extra_window_keys + num_unconfirmed` neighbouring
        tokens can lie in. Example, window 4, 1 unconfirmed, block_size 4: 4 tokens lie in 2 blocks at most.
        """
        num_blocks = -(-num_tokens // block_size)
        if self.window is None:
            return num_blocks
        num_neighbours = self.window - 1 + self.extra_window_keys + num_unconfirmed
        return min(num_blocks, (num_neighbours + block_size - 2) // block_size + 1)


class KVGroupUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a group costs and has, for people and dashboards."""

    name: str
    window: int | None
    bytes_per_token: int
    num_blocks: int
