"""How many blocks fit, and what is said when not even one request does."""

from __future__ import annotations

import pytest
import torch

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.kv_spec import KVGroupSpec
from engine.worker import memory
from engine.worker.memory import allocate_caches, choose_num_blocks

CPU = torch.device("cpu")


def group(name: str = "full", layers: tuple[int, ...] = (0, 1), heads: int = 2, size: int = 4) -> KVGroupSpec:
    """float64: 2 (K and V) * heads * size * 8 bytes a layer and token."""
    return KVGroupSpec(
        name=name,
        layer_indices=layers,
        num_kv_heads=heads,
        head_size=size,
        bytes_per_token=len(layers) * 2 * heads * size * 8,
    )


def choose(*groups: KVGroupSpec, max_model_len: int = 100, max_num_seqs: int = 1000, **config: int) -> int:
    return choose_num_blocks(
        CacheConfig(**{"block_size": 16, **config}),  # type: ignore[arg-type]
        groups or (group(),),
        device=CPU,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
    )


def test_as_many_blocks_as_the_bytes_hold() -> None:
    block_bytes = 16 * 256
    assert choose(kv_cache_bytes=50 * block_bytes) == 50
    assert choose(kv_cache_bytes=51 * block_bytes - 1) == 50


def test_a_block_costs_the_bytes_of_all_groups() -> None:
    block_bytes = 16 * (256 + 128)
    assert choose(group(), group("own", (0,)), kv_cache_bytes=50 * block_bytes) == 50


def test_no_more_blocks_than_all_rows_can_fill() -> None:
    assert choose(kv_cache_bytes=2**40, max_model_len=33, max_num_seqs=5) == 15


def test_a_given_number_of_blocks_is_taken() -> None:
    assert choose(num_blocks=7, kv_cache_bytes=1) == 7


def test_exactly_one_request_is_enough() -> None:
    assert choose(num_blocks=7, max_model_len=112) == 7


@pytest.mark.parametrize(
    ("config", "got"),
    [({"num_blocks": 6}, 6), ({"kv_cache_bytes": 6 * 4096 + 4095}, 6), ({"kv_cache_bytes": 1}, 0)],
)
def test_less_than_one_request_is_refused(config: dict[str, int], got: int) -> None:
    message = rf"got room for {got} blocks of 16 tokens \(4096 bytes each\), expected at least 7 .* max_model_len 100"
    with pytest.raises(ConfigError, match=message):
        choose(**config)


def test_without_a_budget_a_share_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 4 * 1000 * 4096)
    assert choose() == 1000
    monkeypatch.setattr(memory, "_available_memory", lambda: 2**50)
    assert choose(max_num_seqs=2**30) == memory.CPU_BUDGET_LIMIT // 4096
    monkeypatch.setattr(memory, "_available_memory", lambda: 4096)
    with pytest.raises(ConfigError, match="got room for 0 blocks"):
        choose()


def test_each_layer_gets_its_own_zeroed_cache() -> None:
    caches = allocate_caches([group(), group("own", (2,), heads=1, size=8)], 3, 16, torch.float64, CPU)
    assert caches.keys() == {0, 1, 2}
    assert caches[0].key.shape == caches[1].value.shape == (3, 16, 2, 4)
    assert caches[2].key.shape == (3, 16, 1, 8)
    tensors = [tensor for cache in caches.values() for tensor in (cache.key, cache.value)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert all(tensor.dtype == torch.float64 and not tensor.any() for tensor in tensors)
