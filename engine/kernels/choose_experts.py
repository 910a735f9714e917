"""A token's experts and their weights from the router's logits, in one launch.

scores = sigmoid(logits) or softmax(logits); the `top_k` experts with the largest score + correction are chosen, largest
first, NaN before all others, of equals the one with the lowest id; their weights are the scores themselves, divided by
their sum where `normalises`, times `scale`. So ids are experts whatever a row holds: rows that pad a batch hold what
was left in memory. Scores in the dtype of the logits, float32 or float64.

With `num_groups`, equal neighbouring parts of the experts, only those of the `num_chosen_groups` best ones are chosen.
A group is worth its best expert, or its two best where there is a correction.

Shapes: logits [num_tokens, num_experts] dense; correction [num_experts]; expert ids [num_tokens, top_k] int64; weights
[num_tokens, top_k] of the logits' dtype. Grid: tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.dependent_launch import begin, launch_options
from engine.kernels.triton_support import jit, next_power_of_2, tl

SMALLEST_SUM = 1e-20  # added where weights are divided by their sum
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How experts are chosen and weighted."""

    num_experts: int
    top_k: int
    num_groups: int = 1  # equal parts of the experts; 1: no groups
    num_chosen_groups: int = 1
    scoring: Scoring
    is_corrected: bool = False  # is there a bias that is added for the choice, not for the weights?
    normalises: bool  # are a token's weights divided by their sum?
    scale: float = 1.0  # of all weights


def choose_experts_reference(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        groups = choice.view(len(choice), routing.num_groups, -1)
        worth = groups.topk(1 if correction is None else 2, dim=-1).values.sum(dim=-1)
        chosen = worth.sort(dim=-1, descending=True, stable=True).indices[:, : routing.num_chosen_groups]
        is_out = torch.ones_like(worth, dtype=torch.bool).scatter(1, chosen, False)
        choice = groups.masked_fill(is_out[:, :, None], float("-inf")).view_as(choice)
    expert_ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k].contiguous()
    weights = scores.gather(1, expert_ids)
    if routing.normalises:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + SMALLEST_SUM)
    return expert_ids, weights * routing.scale


@jit
def _choose_experts_kernel(
    logits_ptr,
    correction_ptr,
    expert_ids_ptr,
    weights_ptr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,  # of a group
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
    group_size = NUM_EXPERTS // NUM_GROUPS
    lanes = tl.arange(0, GROUPS_PAD * SIZE_PAD)
    experts = lanes // SIZE_PAD * group_size + lanes % SIZE_PAD
    valid = (lanes < NUM_GROUPS * SIZE_PAD) & (lanes % SIZE_PAD < group_size)
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
    if NUM_GROUPS > 1:
        by_group = tl.reshape(choice, [GROUPS_PAD, SIZE_PAD])
        worth = tl.max(by_group, axis=1)
        if IS_CORRECTED:
            first = tl.argmax(by_group, axis=1, tie_break_left=True)
            is_first = tl.arange(0, SIZE_PAD)[None, :] == first[:, None]
            worth += tl.max(tl.where(is_first, float("-inf"), by_group), axis=1)
        groups = tl.arange(0, GROUPS_PAD)
        is_out = groups >= 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            best_group = tl.argmax(worth, axis=0, tie_break_left=True)
            is_out = is_out & (groups != best_group)
            worth = tl.where(groups == best_group, float("-inf"), worth)
        choice = tl.reshape(tl.where(is_out[:, None], float("-inf"), by_group), [GROUPS_PAD * SIZE_PAD])
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int64)
    weights = tl.zeros([BLOCK_K], scores.dtype)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(choice, axis=0, tie_break_left=True)
        weight = tl.sum(tl.where(lanes == best, scores, 0.0), axis=0)
        expert = best // SIZE_PAD * group_size + best % SIZE_PAD
        chosen = tl.where(places == place, expert.to(tl.int64), chosen)
        weights = tl.where(places == place, weight, weights)
        choice = tl.where(lanes == best, float("-inf"), choice)
    if NORMALISES:
        weights = weights / (tl.sum(weights, axis=0) + SMALLEST_SUM)
    out = token.to(tl.int64) * TOP_K + places
    tl.store(expert_ids_ptr + out, chosen, mask=places < TOP_K)
    tl.store(weights_ptr + out, weights * SCALE, mask=places < TOP_K)


def choose_experts_triton(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    assert logits.is_contiguous()
    assert num_experts == routing.num_experts
    assert num_experts % routing.num_groups == 0
    expert_ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_tokens, routing.top_k, dtype=logits.dtype, device=logits.device)
    _choose_experts_kernel[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        expert_ids,
        weights,
        NUM_EXPERTS=num_experts,
        NUM_GROUPS=routing.num_groups,
        NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
        TOP_K=routing.top_k,
        GROUPS_PAD=next_power_of_2(routing.num_groups),
        SIZE_PAD=next_power_of_2(num_experts // routing.num_groups),
        BLOCK_K=next_power_of_2(routing.top_k),
        IS_SIGMOID=routing.scoring == "sigmoid",
        IS_CORRECTED=correction is not None,
        NORMALISES=routing.normalises,
        SMALLEST_SUM=SMALLEST_SUM,
        SCALE=routing.scale,
        num_warps=1 if num_experts <= 128 else 4,
        **launch_options(logits.device),
    )
    return expert_ids, weights


def choose_experts(
    logits: torch.Tensor, correction: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the module docstring."""
    choose = choose_experts_triton if logits.is_cuda else choose_experts_reference
    return choose(logits, correction, routing)
