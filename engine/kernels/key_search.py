"""Where the kept tokens of a row end: the key (token_order.py) down to which a number of tokens, or a mass, is reached.

Parts of the kernels in truncation.py, which says how they work together. `needed`, counts and masses are int64; a mass
is in units of 2^-40 of the largest token's.
"""

from __future__ import annotations

from engine.kernels.token_order import key_of, load_tokens, value_of
from engine.kernels.triton_support import jit, tl


@jit
def probabilities(values, largest, temperature):
    """Relative to that of the largest, which is finite. float32."""
    return tl.exp2((values - largest) * (1.4426950408889634 / temperature))


@jit
def measure(keys, largest, temperature, BY_MASS: tl.constexpr, ID_BITS: tl.constexpr):
    """What each token counts, [...] int64: 1, or its probability. Nothing where there is none."""
    is_there = keys > -(1 << 62)
    if BY_MASS:
        relative = probabilities(value_of(keys, ID_BITS), largest, temperature)
        return tl.where(is_there, (relative * 1099511627776.0).to(tl.int64), 0)
    return is_there.to(tl.int64)


@jit
def last_kept(keys, measures, needed, low, high, above, STOPS: tl.constexpr):
    """The largest b of [low, high) with above + sum(measures[keys >= b]) >= needed, or low. All keys are below `high`.
    STOPS: at any b that meets the number exactly."""
    reached = needed - 1
    while (high - low > 1) & ((not STOPS) | (reached != needed)):
        middle = low + (high - low) // 2
        reached = above + tl.sum(tl.where(keys >= middle, measures, 0), axis=0)
        low = tl.where(reached >= needed, middle, low)
        high = tl.where(reached >= needed, high, middle)
    return low


@jit
def keys_between(
    logits_ptr,
    ids_ptr,
    start,
    low,
    high,
    NUM_COLUMNS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Those of a chunk that are in [low, high), [CHUNK] int64, -2^62 elsewhere."""
    columns = start + tl.arange(0, CHUNK)
    values, ids = load_tokens(logits_ptr, ids_ptr, columns, NUM_COLUMNS, HAS_IDS)
    keys = key_of(values, ids, ID_BITS)
    return tl.where((columns < NUM_COLUMNS) & (keys >= low) & (keys < high), keys, -(1 << 62))


@jit
def find_edge(
    listed,
    seam,
    needed,
    logits_ptr,
    ids_ptr,
    scratch_ptr,
    largest,
    temperature,
    BY_MASS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr,
    UNION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest key at which the measures of it and of all larger keys reach `needed`; one below all if none does.
    Keys above `seam` are all in `listed`."""
    high = tl.max(listed, axis=0) + 1
    measures = measure(listed, largest, temperature, BY_MASS, ID_BITS)
    is_known = listed > seam
    known = tl.sum(tl.where(is_known, measures, 0), axis=0)
    edge = seam
    if (known >= needed) | (seam == -(1 << 62)):
        edge = last_kept(listed, measures, needed, seam, high, 0, not BY_MASS)
    else:
        high = seam + 1
        low = key_of(
            tl.full((), float("-inf"), tl.float32), (1 << ID_BITS) - 1 + tl.zeros_like(known), ID_BITS
        )
        num_inside = NUM_COLUMNS - tl.sum(is_known.to(tl.int64), axis=0)  # keys in [low, high)
        step = 0
        while num_inside > CAPACITY:
            middle = low + (high - low) // 2
            if step % 2 == 0:  # halve the values; every other step the keys, so that it ends
                guess = key_of(
                    0.5 * value_of(low, ID_BITS) + 0.5 * value_of(high, ID_BITS), tl.zeros_like(low), ID_BITS
                )
                middle = tl.where((guess > low) & (guess < high), guess, middle)
            counts = tl.zeros([CHUNK], tl.int64)
            sums = tl.zeros([CHUNK], tl.int64)
            for start in range(0, NUM_COLUMNS, CHUNK):
                keys = keys_between(
                    logits_ptr, ids_ptr, start, middle, high, NUM_COLUMNS, HAS_IDS, ID_BITS, CHUNK
                )
                counts += (keys > -(1 << 62)).to(tl.int64)
                sums += measure(keys, largest, temperature, BY_MASS, ID_BITS)
            count, reached = tl.sum(counts, axis=0), known + tl.sum(sums, axis=0)
            if reached >= needed:
                low = middle
                num_inside = count
            else:
                high = middle
                known = reached
                num_inside -= count
            step += 1
        num_found = tl.zeros([], tl.int32)
        tl.debug_barrier()  # the scratch holds the lists: all have read them
        for start in range(0, NUM_COLUMNS, CHUNK):
            keys = keys_between(logits_ptr, ids_ptr, start, low, high, NUM_COLUMNS, HAS_IDS, ID_BITS, CHUNK)
            is_inside = (keys > -(1 << 62)).to(tl.int32)
            places = num_found + tl.cumsum(is_inside, axis=0) - 1
            tl.store(scratch_ptr + places, keys, mask=is_inside > 0)
            num_found += tl.sum(is_inside, axis=0)
        tl.debug_barrier()
        lanes = tl.arange(0, UNION)
        inside = tl.load(scratch_ptr + lanes, mask=lanes < num_found, other=-(1 << 62))
        measures = measure(inside, largest, temperature, BY_MASS, ID_BITS)
        edge = last_kept(inside, measures, needed, low, high, known, not BY_MASS)
    return edge
