"""What an engine does before it is ready, so that it answers the first requests at once.

Graphs of decodes are captured. Prompts, other ways of sampling and decodes of many requests would be compiled while the
first request of the kind waits: so a few steps that are nobody's go through the runner, where nothing is launched
(engine/kernels/compile_ahead.py). They take the first rows, which requests set anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from engine.draft_method import DraftMethod
from engine.kernels.compile_ahead import compile_ahead
from engine.messages import ModelInfo
from engine.params import SamplingParams
from engine.request import NO_METHOD
from engine.step import NewRow, ScheduledRequest, StepPlan
from engine.worker.model_runner import ModelRunner

NUM_GRAPHS = 4  # the others follow while the engine waits for requests
PROMPT_TOKENS = 128  # more than any tile of a decode has
NUM_DECODES = (32, 128)  # requests
CONTEXT = 512  # tokens, that these may have
SAMPLING = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=40),
)


def prepare_first_steps(runner: ModelRunner, methods: Sequence[DraftMethod], info: ModelInfo) -> None:
    """Before any request: compiles on a GPU, and captures what is captured first."""

    def run() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # a step that needs so much will say so
            for plan in first_steps(methods, info):
                runner.launch_verify(runner.launch_target(plan))

    if torch.device(info.device).type == "cuda":
        compile_ahead(run)
    runner.capture_first(NUM_GRAPHS)


def first_steps(methods: Sequence[DraftMethod], info: ModelInfo) -> Iterator[StepPlan]:
    """A prompt in every way of sampling, and with the drafts of each method; then decodes of many requests, whose
    products and attention take other kernels than those of the few that graphs are captured for."""
    drafters = [(method.name, method.max_drafts) for method in methods if not method.is_host]
    for params in SAMPLING:
        yield _prompt(info, params, NO_METHOD, 0)
    for name, num_drafts in drafters:
        for params in SAMPLING[:2]:
            yield _prompt(info, params, name, num_drafts)
    for num_reqs in NUM_DECODES:
        for name, num_drafts in [(NO_METHOD, 0), *drafters]:
            num_tokens = num_reqs * (1 + num_drafts)
            if num_reqs <= info.max_num_seqs and num_tokens <= info.max_num_batched_tokens:
                yield _decodes(num_reqs, name, num_drafts, min(CONTEXT, info.max_model_len))


def _prompt(info: ModelInfo, params: SamplingParams, method: str, num_drafts: int) -> StepPlan:
    """The whole of it, of one request."""
    num_tokens = min(PROMPT_TOKENS, info.max_num_batched_tokens, info.max_model_len - 1)
    prompt = ScheduledRequest(
        row=0,
        num_tokens=num_tokens,
        start=0,
        max_seq_len=num_tokens,
        method=method,
        num_next_drafts=num_drafts,
    )
    return StepPlan(step=0, scheduled=[prompt], new_rows=[_row(0, num_tokens, params)])


def _decodes(num_reqs: int, method: str, num_drafts: int, max_seq_len: int) -> StepPlan:
    """Greedy, each with drafts to verify and to make."""
    decodes = [
        ScheduledRequest(
            row=row,
            num_tokens=1 + num_drafts,
            num_drafts=num_drafts,
            max_seq_len=max_seq_len,
            method=method,
            num_next_drafts=num_drafts,
        )
        for row in range(num_reqs)
    ]
    rows = [_row(row, 1, SAMPLING[0]) for row in range(num_reqs)]
    return StepPlan(step=0, scheduled=decodes, new_rows=rows)


def _row(row: int, num_tokens: int, params: SamplingParams) -> NewRow:
    return NewRow(
        row=row,
        request_id="",
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        token_limit=num_tokens + 1,
        params=params,
        stop_ids=(),
    )
