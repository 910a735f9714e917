"""Training rows: token sequences of one length, each holding one or more documents that do not see each other.

A row is padded with documents of one token that nothing is learned from, so every row of a batch is full.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.device import to_device


@dataclass(frozen=True)
class Document:
    """What is learned from it are the tokens behind the first `num_context`."""

    token_ids: Sequence[int]
    num_context: int = 1


@dataclass(frozen=True)
class Batch:
    """Rows on the device; flattened, token n of row r is number r * row_length + n."""

    token_ids: torch.Tensor  # [num_rows, row_length] int64
    positions: torch.Tensor  # [num_rows, row_length] int64, within the document
    is_learned: torch.Tensor  # [num_rows, row_length] bool; is this token to be predicted?

    @property
    def starts(self) -> torch.Tensor:
        """[num_rows, row_length] int64: index within the row of the first token of each token's document."""
        return torch.arange(self.positions.shape[1], device=self.positions.device) - self.positions

    def ahead(self, values: torch.Tensor, steps: int) -> torch.Tensor:
        """values: [num_rows, row_length, ...] by token -> those of the token `steps` further on in the row; the last
        ones come round from the start."""
        return values.roll(-steps, dims=1)

    def is_same_document_ahead(self, steps: int) -> torch.Tensor:
        """[num_rows, row_length] bool: is the token `steps` further on of the same document?"""
        same = self.ahead(self.starts, steps) == self.starts
        same[:, self.positions.shape[1] - steps :] = False
        return same


class Rows:
    """Rows in host memory, any number of them."""

    def __init__(
        self,
        token_ids: npt.NDArray[np.int32],  # [num_rows, row_length]
        positions: npt.NDArray[np.int32],
        is_learned: npt.NDArray[np.bool_],
    ) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.is_learned = is_learned

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_learned(self) -> int:
        """Tokens that something is learned from."""
        return int(self.is_learned.sum())

    def batch(self, indices: npt.NDArray[np.int64], device: torch.device) -> Batch:
        return Batch(
            token_ids=to_device(self.token_ids[indices].astype(np.int64), device),
            positions=to_device(self.positions[indices].astype(np.int64), device),
            is_learned=to_device(self.is_learned[indices], device),
        )


def pack_documents(documents: Iterable[Document], row_length: int, seed: int, pad_id: int = 0) -> Rows:
    """Documents in an order drawn by the seed, as many to a row as fit; one that is too long is cut at its end, and
    left out if nothing is to be learned from what is left.

    Of the 32 rows that are open at a time, a document goes to the first with room for it.
    """
    kept = [
        document for document in documents if document.num_context < min(len(document.token_ids), row_length)
    ]
    order = np.random.default_rng(seed).permutation(len(kept))
    open_rows: list[list[Document]] = []
    lengths: list[int] = []
    done: list[list[Document]] = []
    for index in order:
        document = kept[index]
        size = min(len(document.token_ids), row_length)
        place = next((i for i, length in enumerate(lengths) if length + size <= row_length), None)
        if place is None:
            if len(open_rows) == 32:
                fullest = max(range(len(lengths)), key=lengths.__getitem__)
                done.append(open_rows.pop(fullest))
                lengths.pop(fullest)
            open_rows.append([document])
            lengths.append(size)
        else:
            open_rows[place].append(document)
            lengths[place] += size
    return _fill(done + open_rows, row_length, pad_id)


def _fill(packed: Sequence[Sequence[Document]], row_length: int, pad_id: int) -> Rows:
    shape = (len(packed), row_length)
    token_ids = np.full(shape, pad_id, dtype=np.int32)
    positions = np.zeros(shape, dtype=np.int32)
    is_learned = np.zeros(shape, dtype=np.bool_)
    for row, documents in enumerate(packed):
        start = 0
        for document in documents:
            size = min(len(document.token_ids), row_length - start)
            token_ids[row, start : start + size] = document.token_ids[:size]
            positions[row, start : start + size] = np.arange(size)
            is_learned[row, start + document.num_context : start + size] = True
            start += size
    return Rows(token_ids, positions, is_learned)


class Prose:
    """One long stream of tokens, of which windows are drawn; documents begin with a `bos` token."""

    def __init__(self, stream: npt.NDArray[np.uint16], bos_id: int) -> None:
        self.stream = stream  # [num_tokens]
        self._bos_id = bos_id

    def rows(self, starts: npt.NDArray[np.int64], row_length: int) -> Rows:
        """The windows that begin at `starts`; a window begins with `bos`, wherever it was cut."""
        window = starts[:, None] + np.arange(row_length)
        token_ids = self.stream[window].astype(np.int32)
        token_ids[:, 0] = self._bos_id
        indices = np.broadcast_to(np.arange(row_length, dtype=np.int32), token_ids.shape)
        first = np.where(token_ids == self._bos_id, indices, 0)
        positions = indices - np.maximum.accumulate(first, axis=1)
        return Rows(token_ids, positions, positions > 0)
