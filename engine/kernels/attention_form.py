"""How attention over a paged cache is cut into programs: what decides a row's bits, and what only its speed.

Measured by `python -m benchmarks.gpu_kernels --attention --tune` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.triton_support import next_power_of_2, shared_memory_bytes, wide_tiles_sum_alike

MAX_SHORT_QUERY_LEN = 16  # query tokens of a request; longer chunks have parallelism enough
# Requests times KV heads: about one for each multiprocessor, and contexts need no splits.
ENOUGH_PROGRAMS = 128
# Keys; longer contexts are split among more programs: lengths differ, and the longest would be waited for.
MAX_WHOLE_CONTEXT = 2048
MAX_SCRATCH_ELEMENTS = 1 << 28  # of the weighted sums of segments: 1 GiB, and kernels count them in 32 bits


@dataclass(frozen=True)
class Form:
    """How a launch is cut into programs."""

    num_rows: int  # of a tile of queries: tokens times heads of a group
    span: int  # segments of a program; 0: all
    num_warps: int
    num_stages: int
    # Of a thread, where the compiler would take so many that fewer programs run.
    max_registers: int | None = None


@dataclass(frozen=True)
class HeadShape:
    """What of attention is the model's, and the same in every launch of a layer."""

    group: int  # query heads of a KV head
    head_size: int
    item_bytes: int

    @property
    def row_bytes(self) -> int:
        """Of a head, padded as the kernel pads it."""
        return max(16, next_power_of_2(self.head_size)) * self.item_bytes


def segment_size(shape: HeadShape, device: torch.device) -> int:
    """Keys of a segment. It decides how results are rounded, so nothing of a step may count here."""
    if shape.row_bytes <= 128:
        return 128
    size = 64
    while size > 16 and (2 * size + 32) * shape.row_bytes + 8192 > shared_memory_bytes(device):
        size //= 2  # a tile of keys, one of values, the queries
    return size


def choose_form(
    shape: HeadShape,
    device: torch.device,
    *,
    num_reqs: int,
    num_kv_heads: int,
    max_query_len: int,
    max_seq_len: int,
) -> Form:
    """max_query_len, max_seq_len: upper bounds over the requests, in tokens. Decides speed and scratch memory only."""
    if max_query_len > MAX_SHORT_QUERY_LEN:
        is_wide = shape.row_bytes <= 512 and wide_tiles_sum_alike(device)
        tile_rows = _rows_that_fit(64 if is_wide else 32, shape, device)
        return Form(tile_rows, 0, 4 if shape.row_bytes <= 256 else 8, 2)
    num_programs = num_reqs * num_kv_heads
    num_rows = num_programs * max_query_len * shape.group
    num_elements = num_rows * -(-max_seq_len // segment_size(shape, device)) * shape.head_size
    enough = ENOUGH_PROGRAMS if max_seq_len <= MAX_WHOLE_CONTEXT else 4 * ENOUGH_PROGRAMS
    if num_programs < enough and num_elements < MAX_SCRATCH_ELEMENTS:
        return Form(16, 1, 4 if shape.row_bytes <= 256 else 8, 1)
    is_tall = max_query_len * next_power_of_2(shape.group) > 16
    # Large heads: with one program on each multiprocessor eight warps are faster, with several of them four.
    num_warps = 4 if shape.row_bytes <= (512 if num_programs > 2 * ENOUGH_PROGRAMS else 256) else 8
    is_crowded = shape.row_bytes == 256 and not is_tall  # four programs on a multiprocessor instead of three
    tile_rows = _rows_that_fit(32 if is_tall else 16, shape, device)
    return Form(tile_rows, 0, num_warps, 2, 128 if is_crowded else None)


def _rows_that_fit(num_rows: int, shape: HeadShape, device: torch.device) -> int:
    """Fewer where shared memory is small: it holds a segment's keys and values, the queries and the weights."""
    segment = segment_size(shape, device)

    def num_bytes() -> int:
        return (2 * segment + num_rows) * shape.row_bytes + num_rows * segment * shape.item_bytes

    while num_rows > 16 and num_bytes() > shared_memory_bytes(device):
        num_rows //= 2
    return num_rows
