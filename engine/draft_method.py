"""What the scheduler knows of a loaded draft method: plain data, no torch."""

from __future__ import annotations

import msgspec


class DraftMethod(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per loaded method, by its registry name."""

    name: str
    max_drafts: int  # k: the default, and the most a request may ask
    kv_group: int | None = None  # index of its own KV group; None: it has none
    keys_next_token: bool = False
    """Its KV of a block's last token depends on the token after the block, which thus belongs to the block's name."""
    is_host: bool = False
    """It drafts on the host, from confirmed tokens: a request that it drafts for has one step in flight at most."""
    max_context: int | None = None  # tokens of context that it can draft in; None: as many as the target

    @property
    def num_lookahead_slots(self) -> int:
        """KV slots behind the confirmed tokens that drafting may write to."""
        return self.max_drafts if self.kv_group is not None else 0
