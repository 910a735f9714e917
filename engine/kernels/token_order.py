"""The order of a row's tokens as integers: by descending logit, of equal logits the lower id first.

    key = ordered(value) * 2^ID_BITS + (2^ID_BITS - 1 - id)

where `ordered` maps floats to int32 so that larger floats have larger integers, and 0.0 and -0.0 the same one. Keys of
a row are distinct, a larger key stands earlier. A choice of tokens is a lower bound of keys, the best token a maximum:
neither depends on how a row is divided among programs. NaN counts as +inf, which marks a row as unusable.
"""

from __future__ import annotations

from engine.kernels.triton_support import jit, tl

NO_KEY = -(1 << 62)  # below all keys: no token stands there. In kernels a literal: they know no globals
MAX_ID_BITS = 29


def id_bits(num_ids: int) -> int:
    """ID_BITS for ids below `num_ids`."""
    bits = max((num_ids - 1).bit_length(), 1)
    assert bits <= MAX_ID_BITS
    return bits


@jit
def key_of(values, ids, ID_BITS: tl.constexpr):
    """values float32, ids integers -> int64."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << ID_BITS) + ((1 << ID_BITS) - 1 - ids.to(tl.int64))


@jit
def value_of(keys, ID_BITS: tl.constexpr):
    """int64 -> float32."""
    ordered = (keys >> ID_BITS).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def id_of(keys, ID_BITS: tl.constexpr):
    """int64 -> int64."""
    return (1 << ID_BITS) - 1 - (keys & ((1 << ID_BITS) - 1))


@jit
def load_tokens(logits_ptr, ids_ptr, columns, num_columns, HAS_IDS: tl.constexpr):
    """Of a row that the pointers are at: values float32, ids. Columns behind the row: -inf, 0."""
    is_there = columns < num_columns
    values = tl.load(logits_ptr + columns, mask=is_there, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("inf"))
    ids = tl.load(ids_ptr + columns, mask=is_there, other=0) if HAS_IDS else columns
    return values, ids
