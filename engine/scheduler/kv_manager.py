"""The KV cache of all groups behind one interface: hits, room, growth, publishing and freeing of a request's
blocks.

The groups of a drafter that catches up stand apart: a request holds blocks there for what the drafter was fed, nobody
waits for them or is preempted for them, and what they lack shortens no hit.

It turns group operations into block table updates for the rows, which wait here for the next step of the request.
It knows lengths, not why they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv_spec import KVGroupSpec
from engine.request import Request
from engine.scheduler.kv_group import KVGroupManager, make_group_manager
from engine.scheduler.prefix_cache import extend_block_hashes, extend_draft_hashes
from engine.scheduler.room_to_make import RoomToMake
from engine.step import BlockTableUpdate


class KVManager:
    """One manager per group, each with a pool of its own: `num_blocks` by group."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        enable_prefix_cache: bool,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = tuple(num_blocks)
        self._enable_prefix_cache = enable_prefix_cache
        self._groups = [
            make_group_manager(spec, count, block_size)
            for spec, count in zip(groups, num_blocks, strict=True)
        ]
        # Of live requests: leading blocks that are findable, or whose content is findable elsewhere.
        self._num_committed: dict[str, int] = {}
        self._num_draft_committed: dict[str, int] = {}  # the same in the groups of a drafter that catches up
        self._updates: dict[str, list[BlockTableUpdate]] = {}  # by request id, until they are taken

    # ---- prefix hits ---------------------------------------------------------------------------------------

    def find_hit(self, request: Request) -> int:
        """Leading blocks of `request.token_ids` of which all groups have what later tokens read. At least the last
        token is left.
        """
        if not self._enable_prefix_cache or request.wants_prompt_logprobs:
            return 0
        max_blocks = (len(request.token_ids) - 1) // self.block_size
        self._extend_hashes(request, max_blocks * self.block_size)
        return self._longest_hit(request, request.kv_groups, max_blocks)

    # ---- room ----------------------------------------------------------------------------------------------

    def longest_request(self, limit: int) -> int:
        """Tokens, at most `limit`, that a request can reach when it is alone."""
        return min(group.longest_request(limit) for group in self._groups)

    def start_shortage(self, request: Request, num_hit_blocks: int, reserve: Sequence[int]) -> list[int]:
        """Per group: blocks missing now (<= 0: none) to start and leave `reserve` blocks: room for all of
        `token_ids`, or for a window of them.
        """
        shortage = self._no_shortage()
        for index, group in self._groups_of(request):
            hit_hashes = _names(request, index)[:num_hit_blocks]
            num_blocks = group.num_blocks_to_start(hit_hashes, _num_tokens_at_start(request))
            shortage[index] += reserve[index] + num_blocks
        return shortage

    def growth_shortage(self, request: Request, num_tokens: int) -> list[int]:
        """Per group: blocks missing now (<= 0: none) for slots for `num_tokens`."""
        shortage = self._no_shortage()
        for index, group in self._groups_of(request):
            shortage[index] += group.num_blocks_to_grow(request.request_id, num_tokens)
        return shortage

    def num_fenced_blocks(self) -> list[int]:
        """Per group: blocks that become available once the steps in flight are collected."""
        return [group.pool.num_fenced for group in self._groups]

    def room_to_make(self, request: Request) -> RoomToMake:
        """For a waiting request to start."""
        num_hit_blocks = self.find_hit(request)
        shortage = self.start_shortage(request, num_hit_blocks, [0] * len(self._groups))
        hits: list[set[int]] = [set() for _ in self._groups]
        for index, group in self._groups_of(request):
            hits[index] = set(group.hit_blocks(_names(request, index)[:num_hit_blocks]))
        for index, group in enumerate(self._groups):
            num_fenced_hits = sum(map(group.pool.is_fenced, hits[index]))
            shortage[index] -= group.pool.num_fenced - num_fenced_hits
        return RoomToMake(self._groups, shortage, hits)

    def num_slots(self, request: Request) -> int:
        """Tokens for which the request has slots in all its groups."""
        request_id = request.request_id
        return min([self._groups[index].num_slots(request_id) for index in request.kv_groups])

    def max_slots(self, request: Request, reserve: Sequence[int]) -> int:
        """The same, if it took all available blocks but `reserve` in each group."""
        return min(
            group.num_slots(request.request_id)
            + max(group.pool.num_available - reserve[index], 0) * self.block_size
            for index, group in self._groups_of(request)
        )

    # ---- changes -------------------------------------------------------------------------------------------

    def start(self, request: Request, num_hit_blocks: int) -> int:
        """Share the blocks of the hit and, in groups without a window, take blocks for the rest of `token_ids` and
        what its drafter writes behind them; the request must have a row. Returns how many leading blocks of the hit a
        drafter that catches up shares too.
        """
        num_tokens = _num_tokens_at_start(request)
        for index, group in self._groups_of(request):
            group.start(request.request_id, _names(request, index)[:num_hit_blocks], num_tokens)
            self._update_all(request, index)
        self._num_committed[request.request_id] = num_hit_blocks
        request.next_commit = 0
        return self._start_drafter(request, num_hit_blocks)

    def try_grow(self, request: Request, num_tokens: int) -> bool:
        """Slots for `num_tokens` in all groups, or nothing when one of them lacks the blocks for that."""
        for index in request.kv_groups:
            group = self._groups[index]
            if group.num_blocks_to_grow(request.request_id, num_tokens) > group.pool.num_available:
                return False
        self.grow(request, num_tokens)
        return True

    def grow(self, request: Request, num_tokens: int) -> None:
        """Slots for `num_tokens` in all groups; there must be room (`growth_shortage`)."""
        self._grow(request, request.kv_groups, num_tokens)

    def max_draft_slots(self, request: Request) -> int:
        """Tokens that a drafter that catches up could store, with all available blocks."""
        groups = [self._groups[index] for index in request.draft_kv_groups]
        return min(
            group.num_slots(request.request_id) + group.pool.num_available * self.block_size
            for group in groups
        )

    def grow_drafter(self, request: Request, num_tokens: int) -> None:
        """Slots for `num_tokens`, at most `max_draft_slots`, for a drafter that catches up."""
        self._grow(request, request.draft_kv_groups, num_tokens)

    def take_updates(self, requests: Iterable[Request]) -> list[BlockTableUpdate]:
        """What changed in the tables of these requests since the last call with them. They are those of the next step,
        which has to apply it: if that fails, so do they, and nobody else misses anything.
        """
        if not self._updates:
            return []
        return [update for request in requests for update in self._updates.pop(request.request_id, ())]

    def commit(self, request: Request, num_tokens: int, fence_step: int) -> None:
        """The KV of the first `num_tokens` confirmed tokens is valid, a drafter's own up to its watermark: their full
        blocks may be found by others, and those that left a window are given back, not to be handed out before
        `fence_step` is collected. Nothing of this changes before `request.next_commit` tokens.
        """
        self._commit(request, request.kv_groups, self._num_committed, num_tokens, fence_step)
        # A drafter that catches up goes on at its watermark: it needs the window there, wherever the target is.
        draft_groups, num_fed = request.draft_kv_groups, request.draft_watermark
        if draft_groups:
            self._commit(request, draft_groups, self._num_draft_committed, num_fed, fence_step)
        else:
            request.next_commit = min(
                [self._groups[index].next_commit(num_tokens) for index in request.kv_groups]
            )

    def free(self, request: Request, fence_step: int, *, keep_findable: bool) -> None:
        """Give all blocks back, not to be handed out before `fence_step` is collected."""
        self._updates.pop(request.request_id, None)
        for indices, committed in (
            (request.kv_groups, self._num_committed),
            (request.draft_kv_groups, self._num_draft_committed),
        ):
            num_committed = committed.pop(request.request_id)
            for index in indices:
                group = self._groups[index]
                if not keep_findable:
                    group.withdraw(_names(request, index)[:num_committed])
                group.free(request.request_id, fence_step)

    def release(self, step: int) -> None:
        """`step` was collected."""
        for group in self._groups:
            group.pool.release(step)

    # ---- figures -------------------------------------------------------------------------------------------

    def occupancy(self) -> tuple[int, int, int]:
        """(used, cached, all) blocks of the group of which the largest share is used: it decides who can be
        admitted. Cached blocks are free and findable.
        """
        pools = [group.pool for group in self._groups]
        fullest = max(
            pools, key=lambda pool: (pool.num_used / pool.num_blocks, pool.num_cached / pool.num_blocks)
        )
        return fullest.num_used, fullest.num_cached, fullest.num_blocks

    def check_integrity(self) -> None:
        """Raise AssertionError unless every group's books hold."""
        for group in self._groups:
            group.check_integrity()
            assert group.tables.keys() <= self._num_committed.keys(), (
                "a group has a table of a request that is not live"
            )

    # ---- inside --------------------------------------------------------------------------------------------

    def _groups_of(self, request: Request) -> list[tuple[int, KVGroupManager]]:
        return [(index, self._groups[index]) for index in request.kv_groups]

    def _start_drafter(self, request: Request, num_hit_blocks: int) -> int:
        hit = self._longest_hit(request, request.draft_kv_groups, num_hit_blocks)
        for index in request.draft_kv_groups:
            group = self._groups[index]
            group.start(request.request_id, _names(request, index)[:hit], 0)
            self._update_all(request, index)
        self._num_draft_committed[request.request_id] = hit
        return hit

    def _longest_hit(self, request: Request, indices: Sequence[int], max_blocks: int) -> int:
        # A group may shorten the hit to one that another group cannot serve (windows), hence until it is
        # stable.
        hit, before = max_blocks, -1
        while hit != before:
            before = hit
            for index in indices:
                hit = self._groups[index].longest_hit(_names(request, index), hit)
        return hit

    def _grow(self, request: Request, indices: Sequence[int], num_tokens: int) -> None:
        for index in indices:
            group = self._groups[index]
            blocks = group.grow(request.request_id, num_tokens)
            if blocks:
                self._update(request, index, group.tables[request.request_id].end - len(blocks), blocks)

    def _commit(
        self,
        request: Request,
        indices: Sequence[int],
        committed: dict[str, int],
        num_tokens: int,
        fence_step: int,
    ) -> None:
        if self._enable_prefix_cache:
            num_blocks, num_committed = num_tokens // self.block_size, committed[request.request_id]
            if num_blocks > num_committed:
                self._extend_hashes(request, num_tokens)
                for index in indices:
                    names = _names(request, index)[:num_blocks]
                    self._groups[index].publish(request.request_id, names, num_committed)
                committed[request.request_id] = num_blocks
        for index in indices:
            self._groups[index].slide(request.request_id, num_tokens, fence_step)

    def _no_shortage(self) -> list[int]:
        return [-group.pool.num_available for group in self._groups]

    def _update(self, request: Request, index: int, start: int, blocks: list[int]) -> None:
        """The row has these blocks from block index `start` on in one group."""
        update = BlockTableUpdate(index, request.row, start, blocks)
        self._updates.setdefault(request.request_id, []).append(update)

    def _update_all(self, request: Request, index: int) -> None:
        table = self._groups[index].tables[request.request_id]
        if table.blocks:
            self._update(request, index, table.first, table.blocks.copy())

    def _extend_hashes(self, request: Request, num_tokens: int) -> None:
        extend_block_hashes(
            request.block_hashes, request.token_ids, num_tokens, self.block_size, request.message.cache_salt
        )
        if _has_draft_names(request):
            extend_draft_hashes(
                request.draft_block_hashes, request.block_hashes, request.token_ids, self.block_size
            )


def _num_tokens_at_start(request: Request) -> int:
    return min(len(request.token_ids) + request.num_lookahead_slots, request.token_limit)


def _has_draft_names(request: Request) -> bool:
    return request.draft_method is not None and request.draft_method.keeps_up


def _names(request: Request, group: int) -> Sequence[bytes]:
    """Of the request's leading full blocks, as this group keeps them."""
    method = request.draft_method
    is_keyed = method is not None and method.keeps_up and group in method.kv_groups
    return request.draft_block_hashes if is_keyed else request.block_hashes
