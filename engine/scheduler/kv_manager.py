"""The KV cache of all groups behind one interface: hits, room, growth, publishing and freeing of a request's
blocks.

It turns group operations into block table updates for the rows. It knows lengths, not why they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_spec import KVGroupSpec
from engine.request import Request
from engine.scheduler.kv_group import KVGroupManager, make_group_manager
from engine.scheduler.prefix_cache import extend_block_hashes, extend_draft_hashes
from engine.step import BlockTableUpdate


@dataclass(slots=True)
class _Held:
    """What one request holds. The same number of slots in every group."""

    num_slots: int
    num_committed_blocks: int  # leading blocks that are findable, or whose content is findable elsewhere


class KVManager:
    """One manager per group, each with a pool of `num_blocks` blocks of its own."""

    def __init__(
        self, groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, *, enable_prefix_cache: bool
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._enable_prefix_cache = enable_prefix_cache
        self._groups = [make_group_manager(spec, num_blocks, block_size) for spec in groups]
        self._held: dict[str, _Held] = {}

    # ---- prefix hits ---------------------------------------------------------------------------------------

    def find_hit(self, request: Request) -> int:
        """Leading blocks of `request.token_ids` that are cached in all groups. At least the last token is
        left.
        """
        if not self._enable_prefix_cache or request.wants_prompt_logprobs:
            return 0
        max_blocks = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, max_blocks * self.block_size)
        # A group may shorten the hit to one that another group cannot serve (windows), hence until it is
        # stable.
        hit, before = max_blocks, -1
        while hit != before:
            before = hit
            for index, group in self._groups_of(request):
                hit = group.longest_hit(_names(request, index), hit)
        return hit

    # ---- room ----------------------------------------------------------------------------------------------

    def start_shortage(self, request: Request, num_hit_blocks: int, reserve: int) -> list[int]:
        """Per group: blocks missing now (<= 0: none) to start with all of `token_ids` and leave `reserve`
        blocks.
        """
        shortage = self._no_shortage()
        for index, group in self._groups_of(request):
            hit_hashes = _names(request, index)[:num_hit_blocks]
            shortage[index] += reserve + group.num_blocks_to_start(hit_hashes, _num_tokens_at_start(request))
        return shortage

    def growth_shortage(self, request: Request, num_tokens: int) -> list[int]:
        """Per group: blocks missing now (<= 0: none) for slots for `num_tokens`."""
        shortage = self._no_shortage()
        if num_tokens > self._held[request.request_id].num_slots:
            for index, group in self._groups_of(request):
                shortage[index] += group.num_blocks_to_grow(request.request_id, num_tokens)
        return shortage

    def num_fenced_blocks(self) -> list[int]:
        """Per group: blocks that become available once the steps in flight are collected."""
        return [group.pool.num_fenced for group in self._groups]

    def num_sole_blocks(self, request: Request) -> list[int]:
        """Per group: blocks that freeing this request gives back."""
        counts = [0] * len(self._groups)
        for index, group in self._groups_of(request):
            counts[index] = group.num_sole_blocks(request.request_id)
        return counts

    def num_slots(self, request: Request) -> int:
        return self._held[request.request_id].num_slots

    # ---- changes -------------------------------------------------------------------------------------------

    def start(self, request: Request, num_hit_blocks: int) -> list[BlockTableUpdate]:
        """Share the blocks of the hit and take blocks for the rest of `token_ids` and what its drafter writes
        behind them; the request must have a row.
        """
        num_tokens = _num_tokens_at_start(request)
        updates = []
        for index, group in self._groups_of(request):
            group.start(request.request_id, _names(request, index)[:num_hit_blocks])
            group.grow(request.request_id, num_tokens)
            table = group.tables[request.request_id]
            updates.append(BlockTableUpdate(index, request.row, 0, list(table)))
        self._held[request.request_id] = _Held(self._round_up(num_tokens), num_hit_blocks)
        return updates

    def grow(self, request: Request, num_tokens: int) -> Sequence[BlockTableUpdate]:
        """Slots for `num_tokens`; there must be room (`growth_shortage`)."""
        held = self._held[request.request_id]
        if num_tokens <= held.num_slots:
            return ()
        updates = []
        for index, group in self._groups_of(request):
            table = group.tables[request.request_id]
            start = len(table)
            group.grow(request.request_id, num_tokens)
            updates.append(BlockTableUpdate(index, request.row, start, table[start:]))
        held.num_slots = self._round_up(num_tokens)
        return updates

    def commit(self, request: Request, num_tokens: int) -> None:
        """The KV of the first `num_tokens` confirmed tokens is valid: their full blocks may be found by
        others.
        """
        held = self._held[request.request_id]
        num_blocks = num_tokens // self.block_size
        if num_blocks <= held.num_committed_blocks or not self._enable_prefix_cache:
            return
        self._extend_hashes(request, num_tokens)
        for index, group in self._groups_of(request):
            names = _names(request, index)[:num_blocks]
            group.commit(request.request_id, names, held.num_committed_blocks)
        held.num_committed_blocks = num_blocks

    def free(self, request: Request, fence_step: int, *, keep_findable: bool) -> None:
        """Give all blocks back, not to be handed out before `fence_step` is collected."""
        del self._held[request.request_id]
        for _, group in self._groups_of(request):
            group.free(request.request_id, fence_step, keep_findable=keep_findable)

    def release(self, step: int) -> None:
        """`step` was collected."""
        for group in self._groups:
            group.pool.release(step)

    # ---- figures -------------------------------------------------------------------------------------------

    def occupancy(self) -> tuple[int, int]:
        """(used, cached) blocks of the group that is fullest: it decides who can be admitted. Cached blocks are free
        and findable.
        """
        return max((group.pool.num_used, group.pool.num_cached) for group in self._groups)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every group's books and slot counts hold."""
        for group in self._groups:
            group.check_integrity()
            assert group.tables.keys() <= self._held.keys(), (
                "a group has a table of a request that is not live"
            )
            for request_id, table in group.tables.items():
                assert self._held[request_id].num_slots == len(table) * self.block_size, request_id

    def _groups_of(self, request: Request) -> list[tuple[int, KVGroupManager]]:
        return [(index, self._groups[index]) for index in request.kv_groups]

    def _no_shortage(self) -> list[int]:
        return [-group.pool.num_available for group in self._groups]

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        extend_block_hashes(
            request.block_hashes, request.token_ids, num_tokens, self.block_size, request.message.cache_salt
        )
        if _has_draft_names(request):
            extend_draft_hashes(
                request.draft_block_hashes, request.block_hashes, request.token_ids, self.block_size
            )

    def _round_up(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size) * self.block_size


def _num_tokens_at_start(request: Request) -> int:
    return min(len(request.token_ids) + request.num_lookahead_slots, request.token_limit)


def _has_draft_names(request: Request) -> bool:
    return request.draft_method is not None and request.draft_method.keys_next_token


def _names(request: Request, group: int) -> Sequence[bytes]:
    """Of the request's leading full blocks, as this group keeps them."""
    method = request.draft_method
    is_keyed = method is not None and method.keys_next_token and method.kv_group == group
    return request.draft_block_hashes if is_keyed else request.block_hashes
