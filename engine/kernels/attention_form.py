"""How attention over a paged cache is cut into programs: what decides a row's bits, and what only its speed.

Measured by `python -m benchmarks.gpu_kernels --attention --tune` on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.kernels.triton_support import next_power_of_2, shared_memory_bytes, wide_tiles_sum_alike

MAX_SHORT_QUERY_LEN = 16  # query tokens of a request; longer chunks have parallelism enough
NUM_MULTIPROCESSORS = 128  # about
MAX_SHORT_PROMPT = 2048  # keys; tiles for longer ones are high, and keys are read more seldom
MAX_SCRATCH_ELEMENTS = 1 << 28  # of the weighted sums of segments: 1 GiB, and kernels count them in 32 bits
DEEP = 5  # stages: segments are loaded while others are computed with; with 2, once their memory is free


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

    @property
    def wave(self) -> int:
        """Programs that compute at once, each with memory for several segments."""
        return NUM_MULTIPROCESSORS * (3 if self.row_bytes <= 256 else 1)


def segment_size(shape: HeadShape, device: torch.device) -> int:
    """Keys of a segment. It decides how results are rounded, so nothing of a step may count here."""
    if shape.row_bytes <= 128:
        return 128
    size = 64
    while size > 16 and (2 * size + 32) * shape.row_bytes + 8192 > shared_memory_bytes(device):
        size //= 2  # a tile of keys, one of values, the queries
    return size


def num_segments_of(max_seq_len: int, window: int | None, max_query_len: int, segment: int) -> int:
    """Most segments with keys that the rows of a request see."""
    num_segments = -(-max_seq_len // segment)
    return num_segments if window is None else min(num_segments, (window + max_query_len - 2) // segment + 2)


def choose_form(
    shape: HeadShape,
    device: torch.device,
    *,
    num_reqs: int,
    num_kv_heads: int,
    max_query_len: int,
    max_seq_len: int,
    window: int | None = None,
) -> Form:
    """max_query_len, max_seq_len: upper bounds over the requests, in tokens. Decides speed and scratch memory only."""
    if max_query_len > MAX_SHORT_QUERY_LEN:
        return _fitted(_form_of_prompts(shape, device, max_seq_len), shape, device)
    num_segments = num_segments_of(max_seq_len, window, max_query_len, segment_size(shape, device))
    num_pairs = num_reqs * num_kv_heads
    num_rows = max_query_len * next_power_of_2(shape.group)  # of a pair
    num_programs = num_pairs * -(-num_rows // 16)
    num_elements = num_pairs * max_query_len * shape.group * num_segments * shape.head_size
    is_split = num_programs < shape.wave * 3 // 8 or num_programs * num_segments <= shape.wave * 5 // 3
    if is_split and num_elements < MAX_SCRATCH_ELEMENTS:
        return _form_of_parts(shape, num_pairs * num_segments, num_rows)
    is_tall = num_rows > 16 and num_programs > shape.wave
    if is_tall:
        num_programs = num_pairs * -(-num_rows // 32)
    is_deep = num_programs <= shape.wave
    num_warps = 4 if shape.row_bytes <= (256 if is_deep else 512) else 8
    # As many programs as fit with the memory of one segment.
    max_registers = 128 if is_tall and not is_deep and shape.row_bytes == 256 else None
    form = Form(32 if is_tall else 16, 0, num_warps, DEEP if is_deep else 2, max_registers)
    return _fitted(form, shape, device)


def _form_of_parts(shape: HeadShape, num_parts: int, num_rows: int) -> Form:
    """Of contexts split among programs. num_parts: segments, of all requests and KV heads; num_rows: of each."""
    is_tall = num_rows > 16 and num_parts * -(-num_rows // 16) > shape.wave
    tile_rows = 32 if is_tall else 16
    has_few = num_parts * -(-num_rows // tile_rows) <= shape.wave
    is_wide = tile_rows * shape.row_bytes > 16384 or (has_few and shape.row_bytes > 128)
    return Form(tile_rows, 1, 8 if is_wide else 4, 1)


def _form_of_prompts(shape: HeadShape, device: torch.device, max_seq_len: int) -> Form:
    if shape.row_bytes > 512 or not wide_tiles_sum_alike(device):
        return Form(32, 0, 4 if shape.row_bytes <= 256 else 8, 2)
    if shape.row_bytes > 256:
        return Form(128 if shape.item_bytes == 2 else 64, 0, 8, 2)
    if shape.row_bytes == 256 and shape.item_bytes == 2 and max_seq_len > MAX_SHORT_PROMPT:
        return Form(128, 0, 8, DEEP)
    return Form(64, 0, 4, 2)


def _fitted(form: Form, shape: HeadShape, device: torch.device) -> Form:
    """Where shared memory is small: it holds the keys and values of a segment or, with many stages, of several, the
    queries and the weights."""
    segment = segment_size(shape, device)

    def is_too_large(form: Form) -> bool:
        num_segments = 3 if form.num_stages == DEEP else 1
        row_bytes = (2 * num_segments * segment + form.num_rows) * shape.row_bytes
        return row_bytes + form.num_rows * segment * shape.item_bytes > shared_memory_bytes(device)

    if is_too_large(form):
        form = replace(form, num_stages=2)
    while form.num_rows > 16 and is_too_large(form):
        form = replace(form, num_rows=form.num_rows // 2)
    return form
