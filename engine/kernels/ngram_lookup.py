"""Prompt lookup: the continuation of the longest earlier occurrence of a sequence's own tail.

For a row with T known tokens h[0..T-1], the match at p (p <= T - 2) is the largest n <= max_n with
h[p - j] == h[T - 1 - j] for all j < n. The row takes the p with the largest n >= min_n, the latest of equals, and
proposes h[p + 1], h[p + 2], ...; what would lie behind the known tokens is continued with the period T - 1 - p, as if
the repetition went on. Example, max_n 3, h = [1, 2, 3, 9, 1, 2, 3]: p = 2 with n = 3, proposals 9, 1, 2, 3, 9, ...

Shapes: history [num_rows, capacity] int32; rows, num_tokens [num_reqs] int64; result token_ids [num_reqs, k] int64
(-1 where no match) and found [num_reqs] bool. `max_len` bounds num_tokens from above on the host. No host sync.
Grid: one program a request, which reads as far as its own tokens go.
"""

from __future__ import annotations

import torch

from engine.kernels.triton_support import jit, next_power_of_2, tl

BLOCK = 1024  # positions at a time


def ngram_lookup(
    history: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    max_len: int,
    k: int,
    min_n: int,
    max_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring."""
    if history.is_cuda:
        return ngram_lookup_triton(history, rows, num_tokens, k=k, min_n=min_n, max_n=max_n)
    return ngram_lookup_reference(history, rows, num_tokens, max_len=max_len, k=k, min_n=min_n, max_n=max_n)


def ngram_lookup_reference(
    history: torch.Tensor,
    rows: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    max_len: int,
    k: int,
    min_n: int,
    max_n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring."""
    tokens = history[rows, :max_len]
    positions = torch.arange(max_len, device=history.device)
    last = num_tokens - 1
    run = torch.ones_like(tokens, dtype=torch.bool)
    length = torch.zeros_like(tokens, dtype=torch.int64)
    for offset in range(max_n):
        tail = tokens.gather(1, (last - offset).clamp(min=0)[:, None])
        shifted = tokens.roll(offset, dims=1)
        run &= (shifted == tail) & (positions >= offset) & (last >= offset)[:, None]
        length += run
    length = torch.where(positions < last[:, None], length, 0)
    # One key orders by length, then by position; lengths are at most max_n.
    best = (length * max_len + positions).argmax(dim=1)
    found = length.gather(1, best[:, None])[:, 0] >= min_n
    period = (last - best).clamp(min=1)
    steps = torch.arange(k, device=history.device)
    source = (best[:, None] + 1 + steps % period[:, None]).clamp(max=max_len - 1)
    drafts = tokens.gather(1, source).to(torch.int64)
    return torch.where(found[:, None], drafts, -1), found


@jit
def _ngram_lookup_kernel(
    history_ptr,
    rows_ptr,
    num_tokens_ptr,
    drafts_ptr,
    found_ptr,
    stride,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    MIN_N: tl.constexpr,
    MAX_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    history = history_ptr + tl.load(rows_ptr + request) * stride
    last = tl.load(num_tokens_ptr + request).to(tl.int32) - 1
    lanes = tl.arange(0, BLOCK)
    # One key orders by length, then by position: lengths are at most MAX_N.
    best = tl.full([BLOCK], -1, tl.int64)
    for start in range(0, last, BLOCK):
        positions = start + lanes
        runs = positions < last
        length = tl.zeros([BLOCK], tl.int64)
        for offset in tl.static_range(MAX_N):
            tail = tl.load(history + last - offset, mask=last >= offset, other=-1)
            token = tl.load(history + positions - offset, mask=runs & (positions >= offset), other=-2)
            runs = runs & (token == tail)
            length += runs.to(tl.int64)
        best = tl.maximum(best, tl.where(length > 0, (length << 32) + positions, -1))
    key = tl.max(best, axis=0)
    found = key >= (MIN_N << 32)
    match = (key & 0xFFFFFFFF).to(tl.int32)
    steps = tl.arange(0, K_PAD)
    period = tl.maximum(last - match, 1)
    source = match + 1 + steps % period
    # Without a match it is -1, and the first tokens are read instead.
    drafts = tl.load(history + source, mask=steps < K, other=-1).to(tl.int64)
    tl.store(drafts_ptr + request * K + steps, tl.where(found, drafts, -1), mask=steps < K)
    tl.store(found_ptr + request, found)


def ngram_lookup_triton(
    history: torch.Tensor, rows: torch.Tensor, num_tokens: torch.Tensor, *, k: int, min_n: int, max_n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    drafts = torch.empty(len(rows), k, dtype=torch.int64, device=history.device)
    found = torch.empty(len(rows), dtype=torch.bool, device=history.device)
    _ngram_lookup_kernel[(len(rows),)](
        history,
        rows,
        num_tokens,
        drafts,
        found,
        history.stride(0),
        K=k,
        K_PAD=next_power_of_2(k),
        MIN_N=min_n,
        MAX_N=max_n,
        BLOCK=BLOCK,
    )
    return drafts, found
