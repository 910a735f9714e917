"""Keeps only the tokens that a packed mask allows, in the rows that have one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.device import to_device


def mask_tokens(logits: torch.Tensor, bitmask: bytes, rows: Sequence[int] | None) -> torch.Tensor:
    """logits [n, vocab] float, not changed; -inf where a token is not allowed in the result. bitmask: [m, words]
    little-endian int32, bit b of word w is token 32 * w + b. rows: the m rows of logits that it is for; None: all.
    """
    num_rows, vocab_size = len(logits) if rows is None else len(rows), logits.shape[1]
    packed = np.frombuffer(bytearray(bitmask), dtype="<i4").reshape(num_rows, -1)
    words = to_device(packed, logits.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    is_masked = bits.view(num_rows, -1)[:, :vocab_size] == 0
    if rows is None:
        return logits.masked_fill(is_masked, float("-inf"))
    index = to_device(np.array(rows, dtype=np.int64), logits.device)
    return logits.index_copy(0, index, logits[index].masked_fill(is_masked, float("-inf")))
