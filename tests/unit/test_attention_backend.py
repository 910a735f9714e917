"""The torch attention backend against attention written out key by key."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.attention import torch_backend
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.attention.registry import make_attention_backend
from engine.attention.torch_backend import TorchAttentionBackend
from engine.errors import ConfigError
from engine.kv_spec import PAD_SLOT_ID, KVGroupSpec
from tests.support.paged_forward import make_attention_inputs

NUM_KV_HEADS, HEADS_PER_KV_HEAD, HEAD_SIZE = 2, 3, 8
NUM_BLOCKS = 400
SCALE = 0.3


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def group(window: int | None = None) -> KVGroupSpec:
    return KVGroupSpec(
        name="test",
        layer_indices=(0,),
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        bytes_per_token=0,
        window=window,
    )


def make_cache(block_size: int, dtype: torch.dtype = torch.float64) -> LayerKVCache:
    shape = (NUM_BLOCKS, block_size, NUM_KV_HEADS, HEAD_SIZE)
    return LayerKVCache(random(*shape, dtype=dtype, seed=1), random(*shape, dtype=dtype, seed=2))


def make_inputs(query_lens: list[int], num_computed: list[int], block_size: int) -> AttentionInputs:
    max_blocks = max(-(-(a + b) // block_size) for a, b in zip(query_lens, num_computed, strict=True))
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
    tables = blocks[: len(query_lens) * max_blocks].view(len(query_lens), max_blocks).to(torch.int32)
    return make_attention_inputs(query_lens, num_computed, tables, block_size)


def make_query(inputs: AttentionInputs, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random(sum(inputs.query_lens), NUM_KV_HEADS * HEADS_PER_KV_HEAD, HEAD_SIZE, dtype=dtype, seed=4)


def attend(
    query: torch.Tensor, cache: LayerKVCache, inputs: AttentionInputs, window: int | None = None
) -> torch.Tensor:
    backend = TorchAttentionBackend()
    (metadata,) = backend.prepare(inputs, [group(window)])
    return backend.attend(query, cache, metadata, SCALE)


def attend_by_hand(
    query: torch.Tensor, cache: LayerKVCache, inputs: AttentionInputs, window: int | None = None
) -> torch.Tensor:
    """One query row and head at a time."""
    output = torch.empty_like(query)
    requests = [request for request, count in enumerate(inputs.query_lens) for _ in range(count)]
    for token, (request, position) in enumerate(zip(requests, inputs.positions.tolist(), strict=True)):
        first = 0 if window is None else max(position - window + 1, 0)
        keys = torch.arange(first, position + 1)
        blocks = inputs.block_tables[0][request, keys // inputs.block_size].to(torch.int64)
        offsets = keys % inputs.block_size
        for head in range(query.shape[1]):
            kv_head = head // HEADS_PER_KV_HEAD
            scores = cache.key[blocks, offsets, kv_head] @ query[token, head] * SCALE
            output[token, head] = scores.softmax(0) @ cache.value[blocks, offsets, kv_head]
    return output


BATCHES = {
    "one decode": ([1], [37]),
    "first token": ([1], [0]),
    "decodes of unequal lengths": ([1, 1, 1], [3, 90, 41]),
    "lengths too far apart to share a call": ([1, 1, 1], [3, 700, 300]),
    "verifications of mixed k": ([1, 3, 1, 3, 2], [9, 20, 31, 8, 0]),
    "a first chunk": ([40], [0]),
    "a later chunk": ([40], [17]),
    "decodes, a short and two long chunks": ([1, 4, 20, 50, 33], [60, 8, 7, 0, 11]),
}


@pytest.mark.parametrize("window", [None, 5, 35, 1000])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("batch", BATCHES)
def test_attention_equals_attention_by_hand(batch: str, block_size: int, window: int | None) -> None:
    query_lens, num_computed = BATCHES[batch]
    if block_size == 1:
        num_computed = [min(count, 30) for count in num_computed]
    inputs = make_inputs(query_lens, num_computed, block_size)
    cache, query = make_cache(block_size), make_query(inputs)
    expected = attend_by_hand(query, cache, inputs, window)
    assert (attend(query, cache, inputs, window) - expected).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)]
)
def test_every_floating_dtype_works(dtype: torch.dtype, tolerance: float) -> None:
    inputs = make_inputs([1, 4, 40], [60, 8, 11], 16)
    cache, query = make_cache(16, dtype), make_query(inputs, dtype)
    output = attend(query, cache, inputs)
    exact = LayerKVCache(cache.key.double(), cache.value.double())
    assert output.dtype == dtype
    assert (output.double() - attend_by_hand(query.double(), exact, inputs)).abs().max() < tolerance


def test_an_upper_bound_of_the_length_changes_nothing() -> None:
    """With steps in flight the host knows only how long a request can be."""
    inputs = make_inputs([1, 4], [20, 9], 16)
    loose = replace(inputs, max_seq_lens=[count + 5 for count in inputs.max_seq_lens])
    cache, query = make_cache(16), make_query(inputs)
    assert (attend(query, cache, loose) - attend(query, cache, inputs)).abs().max() < 1e-14


def test_nothing_behind_a_request_s_last_key_is_read() -> None:
    """Neither unwritten slots of its last block nor other blocks: there may be NaN in them."""
    inputs = make_inputs([1, 2, 40], [3, 18, 5], 16)
    cache, query = make_cache(16), make_query(inputs)
    expected = attend_by_hand(query, cache, inputs)
    own = torch.zeros(NUM_BLOCKS, 16, dtype=torch.bool)
    for request, length in enumerate(inputs.seq_lens.tolist()):
        keys = torch.arange(length)
        own[inputs.block_tables[0][request, keys // 16].to(torch.int64), keys % 16] = True
    for tensor in (cache.key, cache.value):
        tensor[~own] = torch.nan
    assert (attend(query, cache, inputs) - expected).abs().max() < 1e-12


def test_rows_behind_the_block_table_are_finite() -> None:
    """Speculation past the token limit: positions 16..18 of a request whose table ends at 16."""
    inputs = make_inputs([4], [12], 16)
    beyond = replace(
        inputs,
        positions=torch.tensor([15, 16, 17, 18]),
        seq_lens=torch.tensor([19], dtype=torch.int32),
        max_seq_lens=[19],
        slot_mappings=(torch.tensor([3, PAD_SLOT_ID, PAD_SLOT_ID, PAD_SLOT_ID]),),
    )
    cache, query = make_cache(16), make_query(inputs)
    output = attend(query, cache, beyond)
    assert output.isfinite().all()
    first_row = replace(inputs, query_lens=[1], positions=torch.tensor([15]))
    assert (output[0] - attend_by_hand(query[:1], cache, first_row)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 4])
def test_padding_rows_are_finite(window: int | None) -> None:
    inputs = make_inputs([1, 1], [7, 0], 16)
    padded = replace(
        inputs,
        seq_lens=torch.tensor([8, 0], dtype=torch.int32),
        slot_mappings=(torch.tensor([3, PAD_SLOT_ID]),),
    )
    assert attend(make_query(inputs), make_cache(16), padded, window).isfinite().all()


@pytest.mark.parametrize("host_may_read", [True, False])
@pytest.mark.parametrize("slots", [[5, 2, 31], [5, PAD_SLOT_ID, 31], [PAD_SLOT_ID, 0, 7], [PAD_SLOT_ID] * 3])
def test_keys_and_values_go_to_their_slots_and_padding_nowhere(
    slots: list[int], host_may_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not host_may_read:  # what other devices do
        monkeypatch.setattr(torch_backend, "_drop_padding", torch_backend._redirect_padding)
    inputs = replace(make_inputs([1, 1, 1], [4, 5, 6], 16), slot_mappings=(torch.tensor(slots),))
    cache = make_cache(16)
    key, value = random(3, NUM_KV_HEADS, HEAD_SIZE, seed=5), random(3, NUM_KV_HEADS, HEAD_SIZE, seed=6)
    expected_key, expected_value = cache.key.flatten(0, 1).clone(), cache.value.flatten(0, 1).clone()
    for token, slot in enumerate(slots):
        if slot != PAD_SLOT_ID:
            expected_key[slot], expected_value[slot] = key[token], value[token]
    backend = TorchAttentionBackend()
    (metadata,) = backend.prepare(inputs, [group()])
    backend.write_kv(key, value, cache, metadata)
    assert torch.equal(cache.key.flatten(0, 1), expected_key)
    assert torch.equal(cache.value.flatten(0, 1), expected_value)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", BATCHES)
def test_on_cuda_everything_equals_cpu(batch: str) -> None:
    cpu_inputs = make_inputs(*BATCHES[batch], 16)
    cpu_cache, query = make_cache(16), make_query(cpu_inputs)
    key, value = (random(len(query), NUM_KV_HEADS, HEAD_SIZE, seed=seed) for seed in (5, 6))
    outputs = []
    for device in ("cpu", "cuda"):
        inputs = replace(
            cpu_inputs,
            query_start_loc=cpu_inputs.query_start_loc.to(device),
            seq_lens=cpu_inputs.seq_lens.to(device),
            positions=cpu_inputs.positions.to(device),
            block_tables=tuple(table.to(device) for table in cpu_inputs.block_tables),
            slot_mappings=tuple(slots.to(device) for slots in cpu_inputs.slot_mappings),
        )
        cache = LayerKVCache(cpu_cache.key.to(device, copy=True), cpu_cache.value.to(device, copy=True))
        backend = TorchAttentionBackend()
        (metadata,) = backend.prepare(inputs, [group()])
        backend.write_kv(key.to(device), value.to(device), cache, metadata)
        outputs.append(backend.attend(query.to(device), cache, metadata, SCALE).cpu())
    assert (outputs[0] - outputs[1]).abs().max() < 1e-12


def test_the_backend_follows_the_name_or_the_device() -> None:
    cpu = torch.device("cpu")
    assert isinstance(make_attention_backend("auto", cpu), TorchAttentionBackend)
    assert isinstance(make_attention_backend("torch", cpu), TorchAttentionBackend)
    with pytest.raises(ConfigError, match="attention_backend: got 'flash', expected one of torch, triton"):
        make_attention_backend("flash", cpu)


def test_a_backend_that_cannot_compute_on_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than to end the engine with the first request."""
    knobs = pytest.importorskip("triton", reason="triton is not installed on this platform").knobs
    cpu = torch.device("cpu")
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(
        ConfigError, match="attention_backend: got 'triton' on cpu, expected 'torch' or 'auto'"
    ):
        make_attention_backend("triton", cpu)
