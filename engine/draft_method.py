"""What the scheduler knows of a loaded draft method: plain data, no torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class DraftMethod(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per loaded method, by its registry name."""

    name: str
    max_drafts: int  # k: the default, and the most a request may ask
    kv_groups: tuple[int, ...] = ()  # indices of its own KV groups
    catch_up: Literal["nothing", "tokens", "hidden"] = "nothing"
    """What its KV needs of steps in which it does not draft. tokens: it is fed them when it is chosen again. hidden: it
    has to see every step, since it reads the target's hidden states."""
    is_host: bool = False
    """It drafts on the host, from confirmed tokens: a request that it drafts for has one step in flight at most."""
    is_replayed: bool = False
    """Its drafts depend on tokens alone: how good they would have been is found out from the text that came."""
    max_context: int | None = None  # tokens of context that it can draft in; None: as many as the target

    @property
    def has_own_kv(self) -> bool:
        return bool(self.kv_groups)

    @property
    def keeps_up(self) -> bool:
        """Does it see every step of its requests? Its KV of a block's last token then depends on the token after the
        block, which thus belongs to the block's name.
        """
        return self.catch_up == "hidden"

    @property
    def catches_up(self) -> bool:
        """Is it behind its requests while others draft for them?"""
        return self.catch_up == "tokens"

    @property
    def num_lookahead_slots(self) -> int:
        """KV slots behind the confirmed tokens that it may write to in groups that keep up."""
        return self.max_drafts if self.keeps_up else 0
