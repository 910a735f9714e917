"""How many KV blocks fit, and their allocation. Knows bytes and geometry, not requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from pathlib import Path

import torch

from engine.attention.metadata import LayerKVCache
from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.kv_spec import KVGroupSpec

CPU_SHARE_OF_FREE_MEMORY = 0.25
CPU_BUDGET_LIMIT = 2 * 2**30  # bytes; more must be asked for


def choose_num_blocks(
    config: CacheConfig,
    groups: Sequence[KVGroupSpec],
    *,
    device: torch.device,
    max_model_len: int,
    max_num_seqs: int,
    max_tokens_in_flight: int,
) -> list[int]:
    """Blocks of each group's pool, from one budget, so that requests of the planned length fill all pools at once.

    A request of that length holds all its tokens in a group without a window, and in one with a window at most that
    and its share of the tokens in flight. No pool has less than one request of max_model_len needs that is computed
    token by token. An explicit `num_blocks` is the size of the pools without a window. Raises ConfigError when there
    is no room for that one request.
    """
    sizing = _Sizing(
        block_bytes=[config.block_size * group.bytes_per_token for group in groups],
        shares=[
            group.max_held_blocks(
                min(config.planned_sequence_length, max_model_len),
                -(-max_tokens_in_flight // max_num_seqs),
                config.block_size,
            )
            for group in groups
        ],
        least=[group.max_held_blocks(max_model_len, 1, config.block_size) for group in groups],
        # More blocks than all rows can ever hold would only cost host memory for their bookkeeping.
        most=[
            max_num_seqs * group.max_held_blocks(max_model_len, max_tokens_in_flight, config.block_size)
            for group in groups
        ],
    )
    needs = f"for one request of max_model_len {max_model_len}: " + ", ".join(
        f"{count} blocks of {size} bytes in the group {group.name!r}"
        for group, count, size in zip(groups, sizing.least, sizing.block_bytes, strict=True)
    )
    if config.num_blocks is not None:
        if config.num_blocks < max(sizing.least):
            raise ConfigError(
                f"num_blocks: got {config.num_blocks}, expected at least {max(sizing.least)} {needs}"
            )
        return sizing.in_proportion(config.num_blocks)
    budget = config.kv_cache_bytes or _default_budget(device, config.memory_fraction)
    least_bytes = sizing.cost(sizing.least)
    if budget < least_bytes:
        raise ConfigError(
            f"kv_cache: got {budget} bytes, expected at least {least_bytes} {needs}; raise the KV cache memory or "
            "lower max_model_len"
        )
    return sizing.within(budget)


@dataclass(frozen=True)
class _Sizing:
    """By group: bytes of a block, blocks of a planned request, and bounds of the pool."""

    block_bytes: Sequence[int]
    shares: Sequence[int]
    least: Sequence[int]
    most: Sequence[int]

    def cost(self, num_blocks: Sequence[int]) -> int:
        """Bytes."""
        return sum(map(mul, num_blocks, self.block_bytes))

    def in_proportion(self, num_blocks: int) -> list[int]:
        """`num_blocks` for the largest share, as many for the others as then fill up at the same time.

        Example: 100 blocks, shares [512, 69], at least 20 each -> [100, 20]; 1000 blocks -> [1000, 135].
        """
        largest = max(self.shares)
        return [
            max(-(-num_blocks * share // largest), least)
            for share, least in zip(self.shares, self.least, strict=True)
        ]

    def limited(self, num_blocks: int) -> list[int]:
        """In proportion, as far as all rows can use them."""
        return list(map(min, self.in_proportion(num_blocks), self.most))

    def within(self, budget: int) -> list[int]:
        """The most blocks that `budget` bytes pay for. What a group at a bound leaves is the others'."""
        largest = max(self.shares)
        enough = max(-(-most * largest // share) for most, share in zip(self.most, self.shares, strict=True))
        index = bisect_right(range(enough + 1), budget, key=lambda count: self.cost(self.limited(count)))
        return self.limited(index - 1)


def allocate_caches(
    groups: Sequence[KVGroupSpec],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, LayerKVCache]:
    """One zeroed cache per layer, `num_blocks` by group: on CPU zeros cost nothing until they are written."""
    caches = {}
    for group, count in zip(groups, num_blocks, strict=True):
        shape = (count, block_size, group.num_kv_heads, group.head_size)
        for layer in group.layer_indices:
            caches[layer] = LayerKVCache.of_group(
                group, partial(torch.zeros, shape, dtype=dtype, device=device)
            )
    return caches


def _default_budget(device: torch.device, memory_fraction: float) -> int:
    if device.type == "cpu":
        return min(int(_available_memory() * CPU_SHARE_OF_FREE_MEMORY), CPU_BUDGET_LIMIT)
    free, total = torch.cuda.mem_get_info(device)
    return max(int(total * memory_fraction) - (total - free), 0)


def _available_memory() -> int:
    """Bytes that a new program can take, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("kv_cache_bytes: cannot read the free memory of this system, expected an explicit size")
