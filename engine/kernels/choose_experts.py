"""A token's experts and their weights from the router's logits, in one launch.

scores = sigmoid(logits) or softmax(logits); the `top_k` experts with the largest score + correction are chosen, largest
first, NaN before all others, of equals the one with the lowest id; their weights are the scores themselves, divided by
their sum where `normalises`, times `scale`. So ids are experts whatever a row holds: rows that pad a batch hold what
was left in memory. Without groups of experts. Scores in the dtype of the logits, float32 or float64.

Shapes: logits [num_tokens, num_experts] dense; correction [num_experts]; expert ids [num_tokens, top_k] int64; weights
[num_tokens, top_k] of the logits' dtype. Grid: tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, tl

SMALLEST_SUM = 1e-20  # added where weights are divided by their sum
Scoring = Literal["softmax", "sigmoid"]


def choose_experts_reference(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    normalises: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    expert_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, expert_ids)
    if normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return expert_ids, weights * scale


@jit
def _choose_experts_kernel(
    logits_ptr,
    correction_ptr,
    expert_ids_ptr,
    weights_ptr,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
    NORMALISES: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
    SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    token = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    valid = experts < NUM_EXPERTS
    logits = tl.load(logits_ptr + token.to(tl.int64) * NUM_EXPERTS + experts, mask=valid, other=float("-inf"))
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        shares = tl.exp(logits - tl.max(logits, axis=0))
        scores = shares / tl.sum(shares, axis=0)
    choice = scores
    if IS_CORRECTED:
        choice += tl.load(correction_ptr + experts, mask=valid, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))  # else NaN loses against what pads
    choice = tl.where(valid, choice, float("-inf"))
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int64)
    weights = tl.zeros([BLOCK_K], scores.dtype)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0, tie_break_left=True)
        weight = tl.sum(tl.where(experts == best, scores, 0.0), axis=0)
        chosen = tl.where(places == place, best.to(tl.int64), chosen)
        weights = tl.where(places == place, weight, weights)
        choice = tl.where(experts == best, float("-inf"), choice)
    if NORMALISES:
        weights = weights / (tl.sum(weights, axis=0) + SMALLEST_SUM)
    out = token.to(tl.int64) * TOP_K + places
    tl.store(expert_ids_ptr + out, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + out, weights * SCALE, mask=places < TOP_K)


def choose_experts_triton(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    normalises: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=logits.dtype, device=logits.device)
    _choose_experts_kernel[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        expert_ids,
        weights,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        BLOCK=next_power_of_2(num_experts),
        BLOCK_K=next_power_of_2(top_k),
        IS_SIGMOID=scoring == "sigmoid",
        IS_CORRECTED=correction is not None,
        NORMALISES=normalises,
        SMALLEST_SUM=SMALLEST_SUM,
        SCALE=scale,
        num_warps=1 if num_experts <= 128 else 4,
        **launch_options(logits.device),
    )
    return expert_ids, weights


def choose_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    *,
    top_k: int,
    scoring: Scoring,
    normalises: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring."""
    choose = choose_experts_triton if logits.is_cuda else choose_experts_reference
    return choose(logits, correction, top_k=top_k, scoring=scoring, normalises=normalises, scale=scale)
