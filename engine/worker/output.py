"""From device tensors of a finished step to plain data, without making the device or the next step wait.

On CUDA the small result tensors leave as soon as the step has produced them: on a copy stream, or, where the next step
will write to where they lie, on the step's own. `result` waits for that copy alone. On CPU everything is there already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from engine.kernels.pack_results import (
    ACCEPTED,
    BAD,
    BAD_DRAFT,
    DRAFTED,
    EMITTED,
    NEXT_DRAFTS,
    NUM_COUNTS,
)
from engine.messages import PositionLogprobs
from engine.sampling.logprobs import LogprobsTensors
from engine.step import GraphKind, RowResult, ScheduledRequest, StepOutput


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What leaves the device. `results` [num_reqs, NUM_COUNTS + k_max + 1] int64, see
    engine/kernels/pack_results.py."""

    results: torch.Tensor
    next_drafts: torch.Tensor | None = None  # [num_reqs, k] int64, -1 where there is none; for those who ask
    logprobs: LogprobsTensors | None = None  # by logits row
    prompt_logprobs: Mapping[int, LogprobsTensors] = field(default_factory=dict)  # by batch index


class PendingOutput:
    """The result of a launched step, on its way to the host."""

    def __init__(
        self,
        step: int,
        scheduled: Sequence[ScheduledRequest],
        tensors: StepTensors,
        *,
        draft_methods: list[str],
        drafter_errors: list[bool],
        num_logprobs: list[int | None],
        num_prompt_logprobs: Mapping[int, int],
        phase_seconds: dict[str, float],
        graph_kind: GraphKind,
        num_padding_tokens: int,
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self._step = step
        self._scheduled = scheduled
        self._draft_methods = draft_methods
        self._drafter_errors = drafter_errors
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._phase_seconds = phase_seconds
        self._graph_kind: GraphKind = graph_kind
        self._num_padding_tokens = num_padding_tokens
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._host = tensors
            return
        compute_stream = torch.cuda.current_stream(copy_stream.device)
        if copy_stream != compute_stream:
            copy_stream.wait_stream(compute_stream)
        with torch.cuda.stream(copy_stream):
            self._host = _to_host(tensors, copy_stream)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepOutput:
        """Wait for the copy and build the output, in the order of the plan."""
        if self._event is not None:
            began_at = time.perf_counter()
            self._event.synchronize()  # sync: this step's copy, nothing that was launched behind it
            self._phase_seconds["wait"] = time.perf_counter() - began_at
        host = self._host
        results = host.results.tolist()  # sync: host memory
        rows = [
            RowResult(
                token_ids=result[NUM_COUNTS : NUM_COUNTS + result[EMITTED]],
                num_drafted=result[DRAFTED],
                num_accepted=result[ACCEPTED],
                draft_method=draft_method,
                nan_target=result[BAD] != 0,
                nan_draft=result[BAD_DRAFT] != 0,
                drafter_error=drafter_error,
                num_next_drafts=result[NEXT_DRAFTS],
            )
            for result, draft_method, drafter_error in zip(
                results, self._draft_methods, self._drafter_errors, strict=True
            )
        ]
        if host.next_drafts is not None:
            for row, next_drafts in zip(rows, host.next_drafts.tolist(), strict=True):  # sync: host memory
                row.next_draft_ids = next_drafts[: row.num_next_drafts]
        if host.logprobs is not None:
            self._add_logprobs(rows, host.logprobs)
        for index in host.prompt_logprobs:
            rows[index].prompt_logprobs = self._prompt_logprobs(index)
        return StepOutput(
            step=self._step,
            rows=rows,
            phase_seconds=self._phase_seconds,
            graph_kind=self._graph_kind,
            num_padding_tokens=self._num_padding_tokens,
        )

    def _add_logprobs(self, rows: list[RowResult], logprobs: LogprobsTensors) -> None:
        first_logit = 0
        for row, entry, num_top in zip(rows, self._scheduled, self._num_logprobs, strict=True):
            if not entry.samples:
                continue
            if num_top is not None:
                row.logprobs = logprobs.to_positions(first_logit, len(row.token_ids), num_top)
            first_logit += 1 + entry.num_drafts

    def _prompt_logprobs(self, index: int) -> list[PositionLogprobs]:
        tensors = self._host.prompt_logprobs[index]
        return tensors.to_positions(0, tensors.num_rows, self._num_prompt_logprobs[index])


def _to_host(tensors: StepTensors, stream: torch.cuda.Stream) -> StepTensors:
    """Asynchronous copies into pinned memory; the sources stay alive until the stream has read them."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(stream)
        return tensor.to("cpu", non_blocking=True)

    return StepTensors(
        results=copy(tensors.results),
        next_drafts=None if tensors.next_drafts is None else copy(tensors.next_drafts),
        logprobs=None if tensors.logprobs is None else tensors.logprobs.map(copy),
        prompt_logprobs={index: entry.map(copy) for index, entry in tensors.prompt_logprobs.items()},
    )


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for results on their way to the host; None where there is nothing to copy."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
