"""From device tensors of a finished step to plain data, without making the device or the next step wait.

On CUDA the small result tensors leave on a copy stream as soon as the step has produced them; `result` waits for
that copy alone. On CPU everything is there already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.batch.input_batch import InputBatch
from engine.messages import PositionLogprobs
from engine.sampling.logprobs import LogprobsTensors
from engine.step import RowResult, StepOutput


@dataclass(frozen=True, kw_only=True)
class StepTensors:
    """What leaves the device."""

    token_ids: torch.Tensor  # [num_reqs, k_max + 1] int64, -1 beyond the run
    num_emitted: torch.Tensor  # [num_reqs] int64
    num_drafts: torch.Tensor  # [num_reqs] int64; valid drafts that were verified
    num_accepted: torch.Tensor  # [num_reqs] int64
    num_next_drafts: torch.Tensor  # [num_reqs] int64; valid drafts made in this step
    is_bad: torch.Tensor  # [num_reqs] bool
    is_bad_draft: torch.Tensor  # [num_reqs] bool; of the drafts made in this step
    logprobs: LogprobsTensors | None  # by logits row
    prompt_logprobs: Mapping[int, LogprobsTensors]  # by batch index


class PendingOutput:
    """The result of a launched step, on its way to the host."""

    def __init__(
        self,
        step: int,
        batch: InputBatch,
        tensors: StepTensors,
        *,
        draft_methods: list[str],
        drafter_errors: list[bool],
        num_logprobs: list[int | None],
        num_prompt_logprobs: Mapping[int, int],
        phase_seconds: dict[str, float],
        copy_stream: torch.cuda.Stream | None,
    ) -> None:
        self._step = step
        self._scheduled = batch.scheduled
        self._draft_methods = draft_methods
        self._drafter_errors = drafter_errors
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._phase_seconds = phase_seconds
        self._event: torch.cuda.Event | None = None
        if copy_stream is None:
            self._host = tensors
            return
        copy_stream.wait_stream(torch.cuda.current_stream(copy_stream.device))
        with torch.cuda.stream(copy_stream):
            self._host = _to_host(tensors, copy_stream)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(copy_stream)

    def result(self) -> StepOutput:
        """Wait for the copy and build the output, in the order of the plan."""
        if self._event is not None:
            self._event.synchronize()  # sync: the copy stream only, never the compute stream
        host = self._host
        token_ids = host.token_ids.tolist()  # sync: host memory
        num_emitted = host.num_emitted.tolist()  # sync: host memory
        num_drafts = host.num_drafts.tolist()  # sync: host memory
        num_accepted = host.num_accepted.tolist()  # sync: host memory
        num_next_drafts = host.num_next_drafts.tolist()  # sync: host memory
        is_bad = host.is_bad.tolist()  # sync: host memory
        is_bad_draft = host.is_bad_draft.tolist()  # sync: host memory
        rows = []
        first_logit = 0
        for index, entry in enumerate(self._scheduled):
            emitted = num_emitted[index]
            row = RowResult(
                token_ids=token_ids[index][:emitted],
                num_drafted=num_drafts[index],
                num_accepted=num_accepted[index],
                draft_method=self._draft_methods[index],
                nan_target=is_bad[index],
                nan_draft=is_bad_draft[index],
                drafter_error=self._drafter_errors[index],
                num_next_drafts=num_next_drafts[index],
            )
            num_top = self._num_logprobs[index]
            if host.logprobs is not None and num_top is not None and entry.samples:
                row.logprobs = host.logprobs.to_positions(first_logit, emitted, num_top)
            if index in host.prompt_logprobs:
                row.prompt_logprobs = self._prompt_logprobs(index)
            rows.append(row)
            first_logit += 1 + entry.num_drafts if entry.samples else 0
        return StepOutput(step=self._step, rows=rows, phase_seconds=self._phase_seconds)

    def _prompt_logprobs(self, index: int) -> list[PositionLogprobs]:
        tensors = self._host.prompt_logprobs[index]
        return tensors.to_positions(0, tensors.num_rows, self._num_prompt_logprobs[index])


def _to_host(tensors: StepTensors, stream: torch.cuda.Stream) -> StepTensors:
    """Asynchronous copies into pinned memory; the sources stay alive until the stream has read them."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        tensor.record_stream(stream)
        return tensor.to("cpu", non_blocking=True)

    return StepTensors(
        token_ids=copy(tensors.token_ids),
        num_emitted=copy(tensors.num_emitted),
        num_drafts=copy(tensors.num_drafts),
        num_accepted=copy(tensors.num_accepted),
        num_next_drafts=copy(tensors.num_next_drafts),
        is_bad=copy(tensors.is_bad),
        is_bad_draft=copy(tensors.is_bad_draft),
        logprobs=None if tensors.logprobs is None else tensors.logprobs.map(copy),
        prompt_logprobs={index: entry.map(copy) for index, entry in tensors.prompt_logprobs.items()},
    )


def make_copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for results on their way to the host; None where there is nothing to copy."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
