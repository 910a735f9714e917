"""The speculator contracts: what a draft method says of itself, what it may see, what it returns.

Nothing here knows a method by name. A speculator proposes on the device, without a host sync; its drafts never decide
the text (engine/kernels/emit_runs.py does), so a wrong draft costs time and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import AttentionBackend
from engine.attention.metadata import AttentionInputs, LayerKVCache
from engine.batch.block_tables import BlockTables
from engine.batch.request_rows import RequestRows
from engine.cudagraph import BatchLimits, CaptureQueue
from engine.device import to_device
from engine.kernels.usable_drafts import usable_drafts
from engine.kv_spec import KVGroupSpec
from engine.sampling.draft_distributions import DraftDistributions
from engine.sampling.features import BatchFeatures
from engine.sampling.states import SamplingStates
from engine.step import DraftFeed


@dataclass(frozen=True, kw_only=True)
class SpeculatorNeeds:
    """Capabilities, asked for by the runner and the scheduler instead of a method's name."""

    hidden: Literal["none", "last", "all"] = "none"  # rows of the target's final hidden states
    aux_layers: tuple[int, ...] = ()  # target layers whose inputs are wanted
    draft_kv: Literal["none", "target", "own"] = "none"
    catch_up: Literal["nothing", "tokens", "hidden"] = "nothing"  # what rows need of steps without drafts
    first_draft_from_prefill: bool = True  # draft step 0 yields the first draft; else the loop runs k steps
    extra_window_keys: int = 0  # older keys than the target's window that it reads of a sliding layer's cache


@dataclass(frozen=True, kw_only=True)
class ProposalInputs:
    """The step that was just verified, seen from a drafter. Requests in batch order."""

    row_list: list[int]  # request rows, on the host
    methods: list[str]  # the draft method of each request
    wanted: list[
        int
    ]  # k wanted of each request at most, known on the host; all 0: only keep up with the target
    num_wanted: torch.Tensor  # [num_reqs] int64; k wanted of each request
    rows: torch.Tensor  # [num_reqs] int64
    attention: AttentionInputs  # the step's tokens; block tables and slots of every KV group
    request_rows: RequestRows  # updated: history and counts include this step's tokens
    states: SamplingStates
    hidden_states: torch.Tensor  # [num_tokens, hidden_size], after the target's final norm
    aux_hidden_states: Mapping[int, torch.Tensor]  # target layer -> its input, [num_tokens, hidden_size]
    num_sampled: torch.Tensor  # [num_reqs] int64; tokens emitted, 0 for an unfinished prefill
    num_rejected: torch.Tensor  # [num_reqs] int64; scheduled tokens whose KV is void
    draft_feeds: Sequence[DraftFeed | None] = ()  # what drafters that catch up compute; empty: None for all
    draft_distributions: DraftDistributions | None = None
    """Given when drafts must be drawn with noise of their own, and what they were drawn from recorded here."""
    fixed_features: BatchFeatures | None = None  # given in a captured step, where the host knows no rows
    in_graph: bool = False  # a captured step runs this: drafters must launch, not replay graphs of their own

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @cached_property
    def features(self) -> BatchFeatures:
        """What the requests ask of the sampler, one logits row each. Made once, not once a draft: it copies from the
        host."""
        return self.fixed_features or self.states.features(self.row_list)

    @property
    def last_row_indices(self) -> torch.Tensor:
        """[num_reqs] int64: the token of each request whose KV is the last valid one.

        Example: 4 scheduled tokens from token index 10 on, 1 rejected: 10 + 4 - 1 - 1 = 12.
        """
        return self.attention.query_start_loc[1:] - self.num_rejected - 1

    @cached_property
    def num_speculative_tokens(self) -> torch.Tensor:
        """[num_reqs] int64: k wanted, as far as the request can still use it: the next verification also emits a
        token of the target. 0 for requests that have not emitted a token yet."""
        return usable_drafts(self.num_wanted, self.num_sampled, self.rows, self.request_rows)

    def select(self, requests: list[int]) -> ProposalInputs:
        """The same for some of the requests, by ascending batch index; this object itself for all of them."""
        if len(requests) == self.num_reqs:
            return self
        index = to_device(np.array(requests, dtype=np.int64), self.rows.device)
        tokens = to_device(_token_indices(self.attention.query_lens, requests), self.rows.device)
        return replace(
            self,
            row_list=[self.row_list[request] for request in requests],
            methods=[self.methods[request] for request in requests],
            wanted=[self.wanted[request] for request in requests],
            num_wanted=self.num_wanted[index],
            rows=self.rows[index],
            attention=self.attention.select(requests, index, tokens),
            hidden_states=self.hidden_states[tokens],
            aux_hidden_states={layer: aux[tokens] for layer, aux in self.aux_hidden_states.items()},
            num_sampled=self.num_sampled[index],
            num_rejected=self.num_rejected[index],
            draft_feeds=[self.draft_feeds[request] for request in requests] if self.draft_feeds else (),
        )


@dataclass(frozen=True)
class DraftTokens:
    """Proposals for the next verification."""

    token_ids: torch.Tensor  # [num_reqs, k] int64; -1 where there is none
    num_draft_tokens: torch.Tensor  # [num_reqs] int64


@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What the engine lends a draft model once the KV cache exists: its own KV groups, or the target's."""

    backend: AttentionBackend
    block_tables: BlockTables
    group_indices: tuple[int, ...]  # of `groups` among all groups of the engine
    groups: Sequence[KVGroupSpec]
    caches: Mapping[int, LayerKVCache]  # by layer index, of the drafter or of the target


class BaseSpeculator(ABC):
    """A draft method."""

    needs: SpeculatorNeeds = SpeculatorNeeds()
    max_context: int | None = None  # tokens of context that it can draft in; None: as many as the target

    @abstractmethod
    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        """Draft for the active rows. Rows without a proposal get num_draft_tokens 0."""

    def kv_groups(self) -> Sequence[KVGroupSpec]:
        """KV groups of its own, with the drafter's own layer indices."""
        return ()

    def init_cudagraph_managers(self, captures: CaptureQueue, limits: BatchLimits) -> None:  # noqa: B027
        """Graphs may be captured from now on; called once, after the KV cache exists. Most methods have none."""


def no_drafts(inputs: ProposalInputs) -> DraftTokens:
    """Drafts of width 0 for every row."""
    return DraftTokens(inputs.num_sampled.new_empty(inputs.num_reqs, 0), torch.zeros_like(inputs.num_sampled))


def _token_indices(query_lens: list[int], requests: list[int]) -> npt.NDArray[np.int64]:
    """Tokens of some requests. Example: query_lens [3, 2, 2], requests [0, 2] -> [0, 1, 2, 5, 6]."""
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    return np.concatenate([np.arange(starts[request], starts[request + 1]) for request in requests])
