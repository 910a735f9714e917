"""Gumbel noise as a pure function of (seed, absolute position, token id, stream): no generator, no state.

With x_max = argmax over ids of (logits + g), tokens are drawn from softmax(logits). Because g depends on
nothing but its key, a request draws the same token alone or in a batch, drafted or not, before and after a
preemption, and a drafter that adds the same g to its own logits mostly draws the target's token. A head over
a part of the vocabulary asks for the noise of just its ids.

Formula, in wrapping 64-bit arithmetic, mix = the finaliser of SplitMix64 (Steele, Lea, Flood 2014):
    key  = mix(mix(seed + (stream + 1) * G) + (position + 1) * G)        G = 0x9E3779B97F4A7C15
    bits = the upper 32 bits of mix(key + (id + 1) * G)
    v    = (bits + 0.5) / 2^32, at most 1 - 2^-24;  E = -log1p(-v);  g = -log(E)
So the ids of a row are consecutive outputs of SplitMix64 started at `key`. Quality: 32 random bits per draw;
v is finest near 0, where g is large (up to 22.9), and that end decides the argmax; near 1, where g is small
(down to -2.8), v has the 24 bits of float32. Probabilities below about 2^-33 cannot be drawn by noise alone.

The integers are the same everywhere; logarithms may differ in their last bits between the reference and the kernel. On
one device all noise is of one of them: CUDA uses the kernel, also inside of others (`row_key` and `gumbel`).

Shapes: seeds, positions [n] int64; token_ids [m] (shared by all rows) or [n, m] int64; result [n, m] float32.
Grid: (rows, blocks of ids).
"""

from __future__ import annotations

import torch

from engine.kernels.triton_support import jit, tl

TARGET_STREAM = 0  # the draw of the token itself, by the target and, on purpose, by drafters
DRAFT_STREAM = 1  # drafts under the ratio rule, which needs them independent of what follows
ACCEPT_STREAM = 2  # whether a draft is accepted, where that is not a comparison of tokens
RESIDUAL_STREAM = 3  # the token at a rejected draft under the ratio rule
_SCRATCH_ELEMENTS = 1 << 16  # done at once: what stays in a core's cache


def _signed(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GAMMA = 0x9E3779B97F4A7C15  # odd, 2^64 divided by the golden ratio
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)
_V_MAX = 1.0 - 2.0**-24
_BLOCK = 1024  # ids of a program


def keyed_gumbel(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, stream: int = TARGET_STREAM
) -> torch.Tensor:
    """See the module docstring. The full vocabulary is token_ids = arange(vocab_size)."""
    if seeds.is_cuda:
        return keyed_gumbel_triton(seeds, positions, token_ids, stream)
    return keyed_gumbel_reference(seeds, positions, token_ids, stream)


def keyed_gumbel_reference(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, stream: int = TARGET_STREAM
) -> torch.Tensor:
    keys = _row_keys(seeds, positions, stream)[:, None]
    steps = (token_ids + 1).mul_(_signed(_GAMMA))
    num_rows, num_ids = len(seeds), token_ids.shape[-1]
    noise = torch.empty(num_rows, num_ids, dtype=torch.float32, device=seeds.device)
    num_columns = max(1, _SCRATCH_ELEMENTS // max(num_rows, 1))
    for first in range(0, num_ids, num_columns):
        columns = slice(first, first + num_columns)
        noise[:, columns] = _gumbel(_mix(keys + steps[..., columns]))
    return noise


def keyed_uniform_reference(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """One number per row in (0, 1): the v of token id 0. Shapes as above; result [n] float32."""
    return _uniform(_mix(_row_keys(seeds, positions, stream) + _signed(_GAMMA)))


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
    """[n] int64."""
    keys = _mix(seeds + _signed((stream + 1) * _GAMMA % 2**64))
    return _mix(keys + (positions + 1) * _signed(_GAMMA))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64; overwrites `state`."""
    scratch = torch.empty_like(state)
    _xor_shifted(state, 30, scratch).mul_(_MULTIPLIER_1)
    _xor_shifted(state, 27, scratch).mul_(_MULTIPLIER_2)
    return _xor_shifted(state, 31, scratch)


def _uniform(state: torch.Tensor) -> torch.Tensor:
    """v of 64 random bits, of which the upper 32 are used; overwrites `state`."""
    bits = state.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=_V_MAX)


def _gumbel(state: torch.Tensor) -> torch.Tensor:
    """g of 64 random bits; overwrites `state`."""
    return _uniform(state).neg_().log1p_().neg_().log_().neg_()


def _xor_shifted(state: torch.Tensor, shift: int, scratch: torch.Tensor) -> torch.Tensor:
    """state ^= state >> shift, in place. torch shifts arithmetically: the mask makes it a logical shift."""
    torch.bitwise_right_shift(state, shift, out=scratch)
    return state.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))


@jit
def _mixed(state):
    """The finaliser of SplitMix64. uint64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@jit
def row_key(seed, position, STREAM: tl.constexpr):
    """int64 of a row -> uint64."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mixed(seed.to(tl.uint64) + tl.full((), STREAM + 1, tl.uint64) * gamma)
    return _mixed(key + (position + 1).to(tl.uint64) * gamma)


@jit
def gumbel(key, ids):
    """uint64 of `row_key`, integers [...] -> g, float32 [...]."""
    gamma = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    bits = (_mixed(key + (ids + 1).to(tl.uint64) * gamma) >> 32).to(tl.uint32)
    v = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    # log1p(-v) = log(u) * v / (1 - u) with u = 1 - v as rounded, whose error the quotient undoes (Kahan).
    u = 1.0 - v
    is_tiny = u == 1.0
    exponential = tl.where(is_tiny, v, -tl.log(u) * v / tl.where(is_tiny, 1.0, 1.0 - u))
    return -tl.log(exponential)


@jit
def _keyed_gumbel_kernel(
    seeds_ptr,
    positions_ptr,
    token_ids_ptr,
    noise_ptr,
    token_ids_stride,
    num_ids,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < num_ids
    ids = tl.load(token_ids_ptr + row * token_ids_stride + columns, mask=is_there, other=0)
    key = row_key(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), STREAM)
    tl.store(noise_ptr + row * num_ids + columns, gumbel(key, ids), mask=is_there)


def keyed_gumbel_triton(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor, stream: int = TARGET_STREAM
) -> torch.Tensor:
    num_rows, num_ids = len(seeds), token_ids.shape[-1]
    noise = torch.empty(num_rows, num_ids, dtype=torch.float32, device=seeds.device)
    assert token_ids.stride(-1) == 1 or num_ids <= 1
    if noise.numel():
        _keyed_gumbel_kernel[(num_rows, -(-num_ids // _BLOCK))](
            seeds.contiguous(),
            positions.contiguous(),
            token_ids,
            noise,
            token_ids.stride(0) if token_ids.dim() > 1 else 0,
            num_ids,
            STREAM=stream,
            BLOCK=_BLOCK,
            enable_fp_fusion=False,  # the same roundings wherever `gumbel` stands
        )
    return noise
