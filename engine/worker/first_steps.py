"""What an engine does before it is ready, so that it answers the first requests at once.

Graphs of decodes are captured. Prompts, and other ways of sampling, would be compiled while the first request of the
kind waits: so a few steps that are nobody's go through the runner, where nothing is launched
(engine/kernels/compile_ahead.py). They take row 0, which the first request sets anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from engine.draft_method import DraftMethod
from engine.kernels.compile_ahead import compile_ahead
from engine.messages import ModelInfo
from engine.params import SamplingParams
from engine.step import NewRow, ScheduledRequest, StepPlan
from engine.worker.model_runner import ModelRunner

NUM_GRAPHS = 4  # the others follow while the engine waits for requests
PROMPT_TOKENS = 128  # more than any tile of a decode has
SAMPLING = (
    SamplingParams(max_tokens=1, temperature=0.0),
    SamplingParams(max_tokens=1, temperature=1.0),
    SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=40),
)


def prepare_first_steps(runner: ModelRunner, methods: Sequence[DraftMethod], info: ModelInfo) -> None:
    """Before any request."""

    def run() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):  # a step that needs so much will say so
            for plan in first_steps(methods, info):
                runner.launch_verify(runner.launch_target(plan))

    if info.device.startswith("cuda"):
        compile_ahead(run)
    runner.capture_first(NUM_GRAPHS)


def first_steps(methods: Sequence[DraftMethod], info: ModelInfo) -> Iterator[StepPlan]:
    """Each is the whole prompt of one request: without drafts in every way of sampling, with those of each method."""
    num_tokens = min(PROMPT_TOKENS, info.max_num_batched_tokens, info.max_model_len - 1)
    drafters = [(method.name, method.max_drafts) for method in methods if not method.is_host]
    kinds = [(params, "none", 0) for params in SAMPLING]
    kinds += [(params, *drafter) for drafter in drafters for params in SAMPLING[:2]]
    for params, method, num_drafts in kinds:
        new = NewRow(
            row=0,
            request_id="",
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            token_limit=num_tokens + 1,
            params=params,
            stop_ids=(),
        )
        prompt = ScheduledRequest(
            row=0,
            num_tokens=num_tokens,
            start=0,
            max_seq_len=num_tokens,
            method=method,
            num_next_drafts=num_drafts,
        )
        yield StepPlan(step=0, scheduled=[prompt], new_rows=[new])
