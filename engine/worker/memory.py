"""How many KV blocks fit, and their allocation. Knows bytes and geometry, not requests."""

from __future__ import annotations

from collections.abc import Sequence
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
) -> int:
    """Blocks of the pool. Raises ConfigError when not even one request of max_model_len fits."""
    block_bytes = config.block_size * sum(group.bytes_per_token for group in groups)
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    else:
        budget = config.kv_cache_bytes or _default_budget(device, config.memory_fraction)
        # More blocks than all rows can ever reference would only cost host memory for their bookkeeping.
        num_blocks = min(budget // block_bytes, blocks_per_request * max_num_seqs)
    if num_blocks < blocks_per_request:
        raise ConfigError(
            f"kv_cache: got room for {num_blocks} blocks of {config.block_size} tokens "
            f"({block_bytes} bytes each), expected at least {blocks_per_request} for one request of "
            f"max_model_len {max_model_len}; raise the KV cache memory or lower max_model_len"
        )
    return num_blocks


def allocate_caches(
    groups: Sequence[KVGroupSpec], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> dict[int, LayerKVCache]:
    """One zeroed cache per layer: on CPU zeros cost nothing until they are written."""

    def zeros(group: KVGroupSpec) -> torch.Tensor:
        shape = (num_blocks, block_size, group.num_kv_heads, group.head_size)
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        layer: LayerKVCache(zeros(group), zeros(group)) for group in groups for layer in group.layer_indices
    }


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
