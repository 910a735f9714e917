"""The norm of a row, as parts of kernels: rms_norm.py's, those that norm rows beside something else, and
resident_linear.py's, which norms the row it multiplies.

All give a row the same bits. A sum of float32 depends on its order, and the order of `tl.sum` on how the compiler lays
out a tile; so rows of up to MAX_PAIRED_SIZE are summed pair by pair, neighbours first: of (a, b, c, d) it is (a + b) +
(c + d), with zeros behind up to a power of two. A kernel may hold a row in pieces of a quarter of MAX_PAIRED_SIZE:
these are subtrees. Wider rows are normed by rms_norm.py alone, and summed as is fastest.

Squares of half types are exact in float32, so it does not matter where the compiler contracts them with a sum.
"""

# mypy: disable-error-code="assignment, misc"
# Kernels grow tuples of tiles.

from __future__ import annotations

from engine.kernels.triton_support import jit, tl

MAX_PAIRED_SIZE = 1024
PIECE_SIZE = MAX_PAIRED_SIZE // 4
_MAX_PAIRED_SIZE = None if tl is None else tl.constexpr(MAX_PAIRED_SIZE)
_LEVELS = None if tl is None else tl.constexpr(10)  # of pairs in such a row


@jit
def _sum_by_pairs(x, WIDTH: tl.constexpr):
    """Of x [1, WIDTH]: [1]. In two dimensions, which the compiler lays out over fewer registers than one."""
    for level in tl.static_range(_LEVELS):
        if WIDTH >> level >= 2:  # a sum of two has one order only
            x = tl.sum(tl.reshape(x, [1, WIDTH >> (level + 1), 2]), axis=2)
    return tl.reshape(x, [1])


@jit
def sum_of_squares(x, WIDTH: tl.constexpr):
    """Of x [WIDTH], a power of two: a scalar or [1], of the type of x."""
    squares = x * x
    return (
        _sum_by_pairs(tl.reshape(squares, [1, WIDTH]), WIDTH)
        if WIDTH <= _MAX_PAIRED_SIZE
        else tl.sum(squares)
    )


@jit
def sum_of_pieces(pieces, PIECES: tl.constexpr):
    """Of the squares of a row in one to four pieces, [1, PIECE_SIZE] each but the last, which ends at some power of
    two: [1], float32."""
    sums = ()
    for piece in tl.static_range(PIECES):
        x = pieces[piece].to(tl.float32)
        sums += (_sum_by_pairs(x * x, x.shape[1]),)
    total = sums[0]
    if PIECES >= 2:
        total += sums[1]
    if PIECES == 3:
        total += sums[2]
    if PIECES == 4:
        total += sums[2] + sums[3]
    return total


@jit
def inverse_rms(sum_of_squares, eps, SIZE: tl.constexpr):
    """By two instructions that leave the compiler no choice."""
    return tl.rsqrt(tl.fma(sum_of_squares, tl.full([], 1.0 / SIZE, sum_of_squares.dtype), eps))


@jit
def weighted(normalised, weight, offset, ROUNDS_FIRST: tl.constexpr, dtype: tl.constexpr):
    """By the form of the norm (rms_norm.py); both, and the result, of the type that sums are made in."""
    return normalised.to(dtype).to(weight.dtype) * weight if ROUNDS_FIRST else normalised * (weight + offset)
