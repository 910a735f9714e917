"""Which logits rows of a step need which part of the sampler, known on the host: unused parts cost nothing.

A part of the sampler runs on its own rows only, so the other rows stay bit for bit what they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from engine.device import to_device
from engine.params import SamplingParams

SamplingKind = Literal["greedy", "random", "truncated"]
SAMPLING_KINDS: tuple[SamplingKind, ...] = ("greedy", "random", "truncated")
"""How a whole step draws, from the simplest to the most general: each kind also does what those before it do. Random
rows may have min_p, truncated ones top_k and top_p."""


def most_general(kinds: Iterable[SamplingKind]) -> SamplingKind:
    """The simplest that does for all."""
    return max(kinds, key=SAMPLING_KINDS.index, default="greedy")


@dataclass(frozen=True)
class RowSelection:
    """Some logits rows of the step, ascending. `index` is None when it is all of them."""

    indices: Sequence[int]
    index: torch.Tensor | None  # [m] int64

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [m, ...]: a copy, or the tensor itself when all rows are selected."""
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def put_(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write [m, ...] into the selected rows of [n, ...]."""
        if self.index is None:
            tensor.copy_(values)
        else:
            tensor.index_copy_(0, self.index, values)


@dataclass(frozen=True)
class RowTraits:
    """What one request asks of the sampler."""

    uses_allowed_ids: bool
    uses_bias: bool
    uses_bad_words: bool
    uses_penalties: bool
    uses_min_p: bool
    is_random: bool
    num_candidates: int | None  # tokens that top_k or top_p may keep; None: neither is on
    num_logprobs: int | None

    @property
    def kind(self) -> SamplingKind:
        """The simplest kind that draws its tokens."""
        if not self.is_random:
            return "greedy"
        return "random" if self.num_candidates is None else "truncated"

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn out of other logits than the model's."""
        return self.uses_allowed_ids or self.uses_bias or self.uses_bad_words or self.uses_penalties


@dataclass(frozen=True)
class RandomGroup:
    """Rows that are drawn at random in the same way."""

    rows: RowSelection
    num_candidates: int | None  # as in RowTraits, the largest of the group
    any_min_p: bool
    any_greedy: bool = False  # rows of temperature 0 are among them, and keep the largest logit


@dataclass(frozen=True, kw_only=True)
class BatchFeatures:
    """None: no row of the step uses it."""

    num_logits: int
    kind: SamplingKind  # of all rows together
    allowed_ids: RowSelection | None
    bias: RowSelection | None
    bad_words: RowSelection | None
    penalties: RowSelection | None
    logprobs: RowSelection | None
    max_logprobs: int  # largest N of the rows that ask
    random_groups: tuple[RandomGroup, ...]

    @property
    def changes_logits(self) -> bool:
        return any((self.allowed_ids, self.bias, self.bad_words, self.penalties))


def row_traits(params: SamplingParams, vocab_size: int) -> RowTraits:
    """What `params` use, with neutral values switched off."""
    num_candidates = None
    if 0 < params.top_k < vocab_size:
        num_candidates = params.top_k
    elif params.top_p < 1.0:
        num_candidates = vocab_size
    return RowTraits(
        uses_allowed_ids=bool(params.allowed_token_ids),
        uses_bias=bool(params.logit_bias)
        or params.min_tokens > 0
        or any(len(word) == 1 for word in params.bad_words),
        uses_bad_words=any(len(word) > 1 for word in params.bad_words),
        uses_penalties=params.has_penalties,
        uses_min_p=params.min_p > 0.0,
        is_random=not params.is_greedy,
        num_candidates=num_candidates,
        num_logprobs=params.logprobs,
    )


def batch_features(traits: Sequence[RowTraits], device: torch.device) -> BatchFeatures:
    """`traits`: of the request of each logits row of the step."""

    def select(flags: list[bool]) -> RowSelection | None:
        return _select(flags, device)

    logprobs = [trait.num_logprobs for trait in traits if trait.num_logprobs is not None]
    return BatchFeatures(
        num_logits=len(traits),
        kind=most_general(trait.kind for trait in traits),
        allowed_ids=select([trait.uses_allowed_ids for trait in traits]),
        bias=select([trait.uses_bias for trait in traits]),
        bad_words=select([trait.uses_bad_words for trait in traits]),
        penalties=select([trait.uses_penalties for trait in traits]),
        logprobs=select([trait.num_logprobs is not None for trait in traits]),
        max_logprobs=max(logprobs, default=0),
        random_groups=_random_groups(traits, device),
    )


def uniform_features(num_logits: int, kind: SamplingKind, vocab_size: int) -> BatchFeatures:
    """Of logits rows that are all drawn alike, whatever their requests ask within `kind`."""
    group = RandomGroup(
        RowSelection(range(num_logits), None),
        num_candidates=vocab_size if kind == "truncated" else None,
        any_min_p=True,
        any_greedy=True,
    )
    return BatchFeatures(
        num_logits=num_logits,
        kind=kind,
        allowed_ids=None,
        bias=None,
        bad_words=None,
        penalties=None,
        logprobs=None,
        max_logprobs=0,
        random_groups=() if kind == "greedy" else (group,),
    )


def _random_groups(traits: Sequence[RowTraits], device: torch.device) -> tuple[RandomGroup, ...]:
    """Rows that draw from the whole vocabulary, and rows with top_k or top_p."""
    groups = []
    for is_truncated in (False, True):
        flags = [trait.is_random and (trait.num_candidates is not None) == is_truncated for trait in traits]
        rows = _select(flags, device)
        if rows is not None:
            members = [traits[index] for index in rows.indices]
            bounds = [trait.num_candidates for trait in members if trait.num_candidates is not None]
            any_min_p = any(trait.uses_min_p for trait in members)
            groups.append(RandomGroup(rows, max(bounds, default=None), any_min_p))
    return tuple(groups)


def _select(flags: list[bool], device: torch.device) -> RowSelection | None:
    indices = [index for index, flag in enumerate(flags) if flag]
    if not indices:
        return None
    if len(indices) == len(flags):
        return RowSelection(range(len(flags)), None)
    return RowSelection(indices, to_device(np.array(indices, dtype=np.int64), device))
