"""Whole decode steps as CUDA graphs: gathered from the rows, computed, sampled, written back to the rows.

Of a step that only decodes greedily and makes no drafts, the host decides nothing but which rows take part. So their
ids are all that is copied in, and one tensor is copied out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.batch.input_batch import BatchLayout, lay_out_decode
from engine.cudagraph import BatchDescriptor, CudaGraphManager, Recorder, decode_descriptors
from engine.device import to_device
from engine.worker.graphs import MAX_GRAPH_CONTEXT


class DecodeStepGraphs(CudaGraphManager):
    """`run_step`: both parts of a step, to its packed results. Row `max_num_seqs` is nobody's: it pads."""

    def __init__(
        self,
        run_step: Callable[[BatchLayout], torch.Tensor],
        *,
        max_num_seqs: int,
        max_seq_len: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        super().__init__(decode_descriptors(max_num_seqs, 0), recorder)
        self._run_step = run_step
        self._padding_row = max_num_seqs
        self._max_seq_len = min(max_seq_len, MAX_GRAPH_CONTEXT)
        self._rows = torch.full((max_num_seqs,), self._padding_row, dtype=torch.int64, device=device)
        self._results: dict[BatchDescriptor, torch.Tensor] = {}

    def find(self, num_reqs: int, max_seq_len: int) -> BatchDescriptor | None:
        """The graph for so many requests, none longer than that."""
        if max_seq_len > self._max_seq_len:
            return None
        return self.dispatch(num_reqs, num_reqs, 1)

    def step(self, descriptor: BatchDescriptor, row_list: list[int]) -> torch.Tensor:
        """Replay for these rows. Returns their packed results, valid until the next step."""
        rows = np.full(descriptor.num_reqs, self._padding_row, dtype=np.int64)
        rows[: len(row_list)] = row_list
        self._rows[: descriptor.num_reqs].copy_(to_device(rows, self._rows.device))
        self.replay(descriptor)
        return self._results[descriptor][: len(row_list)]

    def run(self, descriptor: BatchDescriptor) -> None:
        layout = lay_out_decode(self._rows[: descriptor.num_reqs], self._max_seq_len)
        self._results[descriptor] = self._run_step(layout)
