"""The loaded speculators: runs each on the requests that use it, checks its drafts and writes them into the rows.

It is also where a drafter's faults end. A method that raises, or that returns something else than drafts, leaves its
requests without drafts for one step; the target's tokens and the drafts of other methods are not touched. Drafts that
are no tokens are dropped with what follows them. A method that keeps up may have lost KV entries when it raised:
its later drafts for these tokens, also through prefix hits, may be worse, and the text stays what it is.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from engine.cudagraph import BatchLimits, CaptureQueue
from engine.device import to_device
from engine.kernels.check_drafts import check_drafts
from engine.spec_decode.null import NullSpeculator
from engine.spec_decode.speculator import BaseSpeculator, DraftTokens, ProposalInputs, SpeculatorNeeds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckedDrafts(DraftTokens):
    """Drafts that are tokens, and what went wrong."""

    is_bad: torch.Tensor  # [num_reqs] bool; a draft that was proposed, and wanted, is no token
    has_failed: list[bool]  # the request's method raised


class SpeculatorSet(BaseSpeculator):
    """Speculators by method name. Requests of no loaded method get the null speculator's drafts: none."""

    def __init__(self, speculators: Mapping[str, BaseSpeculator], vocab_size: int) -> None:
        self._speculators = dict(speculators)
        self._null = NullSpeculator()
        self._vocab_size = vocab_size
        self.num_failures: Counter[tuple[str, str]] = Counter()  # (method, class of the exception) -> steps
        self.needs_by_method = {method: speculator.needs for method, speculator in speculators.items()}
        layers = {layer for speculator in speculators.values() for layer in speculator.needs.aux_layers}
        wants_all = any(speculator.needs.hidden == "all" for speculator in speculators.values())
        self.needs = SpeculatorNeeds(hidden="all" if wants_all else "last", aux_layers=tuple(sorted(layers)))

    def init_cudagraph_managers(self, captures: CaptureQueue, limits: BatchLimits) -> None:
        for speculator in self._speculators.values():
            speculator.init_cudagraph_managers(captures, limits)

    def propose(self, inputs: ProposalInputs, keeps_up: Sequence[str] = ()) -> CheckedDrafts:
        """Draft for the next step; the drafts also stand in the rows, behind the confirmed tokens.

        `keeps_up`: per request, a method that shall see the step without drafting, beside the one that drafts.
        """
        if inputs.draft_distributions is not None:
            inputs.draft_distributions.clear(inputs.rows)
        drafts = self._nothing(inputs)
        for method, speculator in self._speculators.items():
            followed = [index for index, name in enumerate(keeps_up) if name == method]
            if followed:
                silent = _without_drafts(inputs.select(followed))
                self._propose_safely(method, speculator, silent, is_kept=False)
            requests = [index for index, name in enumerate(inputs.methods) if name == method]
            if requests:
                own = self._propose_safely(method, speculator, inputs.select(requests), is_kept=True)
                drafts = _insert(drafts, requests, own)
        return drafts

    def propose_uniformly(self, method: str, inputs: ProposalInputs) -> CheckedDrafts | None:
        """`propose` for a batch whose requests all use `method`, or none. Launches only, so that it may be captured;
        what a method raises, it raises. None: there are no drafts."""
        if inputs.draft_distributions is not None:
            inputs.draft_distributions.clear(inputs.rows)
        if method not in self._speculators:
            return None
        return self._check(inputs, self._speculators[method].propose(inputs), is_kept=True)

    def _propose_safely(
        self, method: str, speculator: BaseSpeculator, inputs: ProposalInputs, *, is_kept: bool
    ) -> CheckedDrafts:
        try:
            return self._check(inputs, speculator.propose(inputs), is_kept=is_kept)
        except Exception as error:  # a drafter's fault must not cost the target's tokens of this step
            kind = (method, type(error).__name__)
            self.num_failures[kind] += 1
            if self.num_failures[kind] == 1:
                logger.exception(
                    "draft method %s failed; its requests go on without drafts in such steps. "
                    "Logged once per kind of exception",
                    method,
                )
            nothing = self._nothing(inputs)
            return replace(nothing, has_failed=[True] * inputs.num_reqs)

    def _nothing(self, inputs: ProposalInputs) -> CheckedDrafts:
        """That the rows hold no drafts is left by their verification."""
        return self._check(inputs, self._null.propose(inputs), is_kept=False)

    def _check(self, inputs: ProposalInputs, drafts: DraftTokens, *, is_kept: bool) -> CheckedDrafts:
        """Keep the leading drafts that are token ids, at most as many as wanted, also in the rows; -1 elsewhere.

        Raises ValueError when there is not one row of drafts per request.
        """
        token_ids, num_reqs = drafts.token_ids, inputs.num_reqs
        if token_ids.shape[:-1] != (num_reqs,) or drafts.num_draft_tokens.shape != (num_reqs,):
            raise ValueError(
                f"got drafts of shape {tuple(token_ids.shape)} and counts of shape "
                f"{tuple(drafts.num_draft_tokens.shape)}, expected [{num_reqs}, k] and [{num_reqs}]"
            )
        standing, num_valid, is_bad = check_drafts(
            token_ids,
            drafts.num_draft_tokens,
            inputs.num_speculative_tokens,
            self._vocab_size,
            inputs.rows,
            inputs.request_rows if is_kept else None,
        )
        return CheckedDrafts(standing, num_valid, is_bad, [False] * num_reqs)


def _without_drafts(inputs: ProposalInputs) -> ProposalInputs:
    """The same requests, which only have to keep up."""
    return replace(inputs, wanted=[0] * inputs.num_reqs, num_wanted=torch.zeros_like(inputs.num_wanted))


def _insert(drafts: CheckedDrafts, requests: list[int], own: CheckedDrafts) -> CheckedDrafts:
    """Put one method's drafts at its requests. Widths may differ."""
    index = to_device(np.array(requests, dtype=np.int64), own.token_ids.device)
    width = max(drafts.token_ids.shape[1], own.token_ids.shape[1])
    has_failed = list(drafts.has_failed)
    for request, failed in zip(requests, own.has_failed, strict=True):
        has_failed[request] = failed
    return CheckedDrafts(
        _pad(drafts.token_ids, width).index_copy(0, index, _pad(own.token_ids, width)),
        drafts.num_draft_tokens.index_copy(0, index, own.num_draft_tokens),
        drafts.is_bad.index_copy(0, index, own.is_bad),
        has_failed,
    )


def _pad(token_ids: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(token_ids, (0, width - token_ids.shape[1]), value=-1)
