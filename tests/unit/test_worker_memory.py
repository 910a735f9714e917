"""How many blocks fit, and what is said when not even one request does."""

from __future__ import annotations

import msgspec
import pytest
import torch

from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.kv_spec import KVGroupSpec
from engine.worker import memory
from engine.worker.memory import allocate_caches, choose_num_blocks

CPU = torch.device("cpu")


def group(
    name: str = "full",
    layers: tuple[int, ...] = (0, 1),
    heads: int = 2,
    size: int = 4,
    window: int | None = None,
    extra_window_keys: int = 0,
) -> KVGroupSpec:
    """float64: 2 (K and V) * heads * size * 8 bytes a layer and token."""
    return KVGroupSpec(
        name=name,
        layer_indices=layers,
        num_kv_heads=heads,
        head_size=size,
        bytes_per_token=len(layers) * 2 * heads * size * 8,
        window=window,
        extra_window_keys=extra_window_keys,
    )


def choose(
    *groups: KVGroupSpec,
    max_model_len: int = 100,
    max_num_seqs: int = 1000,
    max_tokens_in_flight: int = 1000,
    **config: int,
) -> list[int]:
    return choose_num_blocks(
        CacheConfig(**{"block_size": 16, **config}),  # type: ignore[arg-type]
        groups or (group(),),
        device=CPU,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_tokens_in_flight=max_tokens_in_flight,
    )


def test_as_many_blocks_as_the_bytes_hold() -> None:
    block_bytes = 16 * 256
    assert choose(kv_cache_bytes=50 * block_bytes) == [50]
    assert choose(kv_cache_bytes=51 * block_bytes - 1) == [50]


def test_a_block_costs_the_bytes_of_all_groups() -> None:
    block_bytes = 16 * (256 + 128)
    assert choose(group(), group("own", (0,)), kv_cache_bytes=50 * block_bytes) == [50, 50]


def test_no_more_blocks_than_all_rows_can_fill() -> None:
    assert choose(kv_cache_bytes=2**40, max_model_len=33, max_num_seqs=5) == [15]


def test_a_given_number_of_blocks_is_taken() -> None:
    assert choose(num_blocks=7, kv_cache_bytes=1) == [7]


def test_exactly_one_request_is_enough() -> None:
    assert choose(num_blocks=7, max_model_len=112) == [7]


@pytest.mark.parametrize(
    ("config", "got"),
    [
        ({"num_blocks": 6}, "num_blocks: got 6, expected at least 7"),
        ({"kv_cache_bytes": 7 * 4096 - 1}, "kv_cache: got 28671 bytes, expected at least 28672"),
        ({"kv_cache_bytes": 1}, "kv_cache: got 1 bytes, expected at least 28672"),
    ],
)
def test_less_than_one_request_is_refused(config: dict[str, int], got: str) -> None:
    needs = "for one request of max_model_len 100: 7 blocks of 4096 bytes in the group 'full'"
    with pytest.raises(ConfigError, match=f"{got} {needs}"):
        choose(**config)


def test_without_a_budget_a_share_of_the_free_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available_memory", lambda: 4 * 1000 * 4096)
    assert choose() == [1000]
    monkeypatch.setattr(memory, "_available_memory", lambda: 2**50)
    assert choose(max_num_seqs=2**30) == [memory.CPU_BUDGET_LIMIT // 4096]
    monkeypatch.setattr(memory, "_available_memory", lambda: 4096)
    with pytest.raises(ConfigError, match="got 1024 bytes, expected at least 28672"):
        choose()


FULL, SLIDING = group("full", (0,)), group("sliding", tuple(range(1, 11)), window=1024, extra_window_keys=1)
BYTES = 16 * FULL.bytes_per_token  # of a block; one behind the window costs ten times as much
LONG = {"max_model_len": 65536, "max_num_seqs": 64, "max_tokens_in_flight": 64 * 16}


def test_requests_of_the_planned_length_fill_all_pools_at_once() -> None:
    """8192 tokens are 512 blocks; 1024 keys, 1 of a drafter and 15 more in flight lie in 66 blocks at the worst."""
    full, sliding = choose(FULL, SLIDING, kv_cache_bytes=20 * (512 + 66 * 10) * BYTES, **LONG)
    assert (full, sliding) == (20 * 512, 20 * 66)
    full, sliding = choose(
        FULL, SLIDING, kv_cache_bytes=20 * 660 * BYTES + 10240 * BYTES, planned_sequence_length=16384, **LONG
    )
    assert full / 1024 == pytest.approx(sliding / 66, abs=1)
    assert (
        choose(FULL, SLIDING, kv_cache_bytes=4400 * BYTES, planned_sequence_length=512, max_model_len=512)
        == [400] * 2
    )


def test_the_budget_is_kept_and_used() -> None:
    for budget in (10**7, 123456789, 10**8):
        full, sliding = choose(FULL, SLIDING, kv_cache_bytes=budget, **LONG)
        assert budget - 11 * BYTES < (full + 10 * sliding) * BYTES <= budget


def test_what_a_group_at_its_limit_leaves_is_the_others() -> None:
    """Four rows can hold 4 windows with all that is in flight, and 4 times 65536 tokens."""
    limits = {**LONG, "max_num_seqs": 4, "max_tokens_in_flight": 64}
    full, sliding = choose(FULL, SLIDING, kv_cache_bytes=10_000 * BYTES, **limits)
    assert (full, sliding) == (10_000 - 10 * 4 * 69, 4 * 69)
    assert choose(FULL, SLIDING, kv_cache_bytes=2**40, **limits) == [4 * 4096, 4 * 69]


def test_a_given_number_of_blocks_is_that_of_the_groups_without_a_window() -> None:
    drafter = msgspec.structs.replace(FULL, name="draft", is_drafter=True)
    assert choose(FULL, SLIDING, drafter, num_blocks=5120, **LONG) == [5120, 660, 5120]


@pytest.mark.parametrize("max_model_len", [40, 100, 1000, 1100, 3000])
@pytest.mark.parametrize("window", [1, 16, 1000, 2000])
def test_a_full_group_with_room_for_one_request_leaves_room_for_its_window(
    window: int, max_model_len: int
) -> None:
    num_blocks = -(-max_model_len // 16)
    sliding = group("sliding", window=window)
    full, few = choose(group(), sliding, num_blocks=num_blocks, max_model_len=max_model_len)
    assert full == num_blocks
    assert few >= sliding.max_held_blocks(max_model_len, 1, 16)


def test_no_pool_is_smaller_than_one_long_request_needs() -> None:
    """65536 tokens are 4096 blocks, and the 1025 keys of one query with its drafter lie in 65 at the worst."""
    least = (4096 + 10 * 65) * BYTES
    assert choose(FULL, SLIDING, kv_cache_bytes=least, **LONG) == [4096, 65]
    needs = r"4096 blocks of 2048 bytes in the group 'full', 65 blocks of 20480 bytes in the group 'sliding'"
    with pytest.raises(ConfigError, match=rf"got {least - 1} bytes, expected at least {least} .* {needs}"):
        choose(FULL, SLIDING, kv_cache_bytes=least - 1, **LONG)


def test_each_layer_gets_its_own_zeroed_cache() -> None:
    caches = allocate_caches([group(), group("own", (2,), heads=1, size=8)], [3, 5], 16, torch.float64, CPU)
    assert caches.keys() == {0, 1, 2}
    assert caches[0].key.shape == caches[1].value.shape == (3, 16, 2, 4)
    assert caches[2].key.shape == (5, 16, 1, 8)
    tensors = [tensor for cache in caches.values() for tensor in (cache.key, cache.value)]
    assert len({tensor.data_ptr() for tensor in tensors}) == 6
    assert all(tensor.dtype == torch.float64 and not tensor.any() for tensor in tensors)
