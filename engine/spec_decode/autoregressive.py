"""Draft models that draft token by token: draft prefill (step 0) over the step's tokens, then a decode loop.

A subclass is a loader plus hook overrides. The families differ in what the prefill pairs up:
- with the target's hidden states (EAGLE, MTP): row p is (h_p, x_{p+1}); step 0 yields the first draft already.
- an independent model: row p is x_p; the prefill only fills the cache, and the loop runs k steps from the last token.
  What it computes need not be the step's tokens: it catches up with what it missed (`ProposalInputs.draft_feeds`).
- over the target's cache (Gemma 4): there is nothing to fill; every step, the first too, is one row per request, and
  what happened in steps without drafts does not matter.
Rejected tokens need no clean-up: positions start again from the last confirmed token, and later rows overwrite.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionContext
from engine.attention.metadata import AttentionInputs
from engine.config import SpeculatorConfig
from engine.cudagraph import BatchLimits, CaptureQueue
from engine.device import to_device
from engine.kernels.draft_history import last_token, read_history, record_draft
from engine.kernels.draft_positions import draft_positions
from engine.models.loader import LoadedModel
from engine.spec_decode.cudagraph_managers import (
    DecodeSpeculatorCudaGraphManager,
    DraftState,
    PrefillSpeculatorCudaGraphManager,
    PrefillTokens,
)
from engine.spec_decode.speculator import BaseSpeculator, DraftContext, DraftTokens, ProposalInputs, no_drafts
from engine.step import DraftFeed

DraftHidden = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class DraftModelSpeculator(BaseSpeculator):
    """A draft method with weights. Built before the KV cache is sized, bound to it afterwards."""

    _context: DraftContext

    @classmethod
    @abstractmethod
    def load_draft_model(cls, config: SpeculatorConfig, target: LoadedModel, device: torch.device) -> Self:
        """The extension point: build the method with its drafter, of the checkpoint that the configuration names, and
        with what it shares with the target. Raises ConfigError or CheckpointError."""

    def bind(self, context: DraftContext) -> None:
        """Called once, when the KV cache exists and before the first `propose`."""
        indices = context.group_indices
        assert indices == tuple(range(indices[0], indices[0] + len(indices))), (
            "a drafter's groups stand together"
        )
        self._context = context


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """Hooks: what a draft step computes, how drafts are drawn, whether positions advance, and what is launched before
    and after both parts. All of them may be captured: launches only, and nothing read on the host."""

    _prefill_graphs: PrefillSpeculatorCudaGraphManager | None = None
    _loop_graphs: DecodeSpeculatorCudaGraphManager | None = None

    @property
    def advance_draft_positions(self) -> bool:
        """Does each draft step take the next position and write KV there?"""
        return True

    @property
    def model_returns_tuple(self) -> bool:
        """Does the model return (hidden for logits, hidden fed back)? Else one tensor serves as both."""
        return False

    @abstractmethod
    def draft_forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> DraftHidden:
        """One pass of the draft model over ragged tokens. input_ids, positions: [num_tokens] int64;
        hidden_states: [num_tokens, hidden_size], of the target or fed back; without a meaning, and of any length, for
        a model that catches up by tokens."""

    def feed_back(self, hidden: torch.Tensor) -> torch.Tensor:
        """What a draft step starts from, out of what the one before returned for that: [num_reqs, ...] each."""
        return hidden

    @abstractmethod
    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw a draft per request. hidden: [num_reqs, draft_hidden_size]; positions: [num_reqs] int64, of the
        tokens being drawn; returns target token ids [num_reqs] int64."""

    def before_draft_prefill(self, tokens: PrefillTokens) -> None:
        """What a method launches in front of its draft prefill, captured with it. So with the three that follow."""

    def after_draft_prefill(self, state: DraftState) -> None:
        """`state`: of the last valid row of each request."""

    def before_draft_decode(self, inputs: ProposalInputs, state: DraftState) -> None:
        """Once in front of the draft loop."""

    def after_draft_decode(self, drafts: torch.Tensor) -> None:
        """drafts: [num_reqs, k] int64, as they were drawn."""

    def prefill_hidden(self, inputs: ProposalInputs) -> torch.Tensor:
        """Hidden states that the draft prefill starts from: [num_tokens, hidden_size]."""
        return inputs.hidden_states

    def init_cudagraph_managers(self, captures: CaptureQueue, limits: BatchLimits) -> None:
        context = self._context
        if self.needs.draft_kv == "own":
            self._prefill_graphs = PrefillSpeculatorCudaGraphManager(
                self._run_prefill,
                num_groups=len(context.groups),
                block_tables=context.block_tables,
                limits=limits,
                captures=captures,
            )
        self._loop_graphs = DecodeSpeculatorCudaGraphManager(
            self._loop,
            max_drafts=limits.decode_query_len - 1,
            block_tables=context.block_tables,
            limits=limits,
            captures=captures,
        )

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        if self.needs.draft_kv == "own":
            first = self._prefill(inputs)  # also for k = 0: its cache must not have holes
        else:
            hidden = inputs.hidden_states[inputs.last_row_indices]
            first = DraftState(hidden, hidden)
        if max(inputs.wanted) == 0:
            return no_drafts(inputs)
        descriptor = None
        if self._loop_graphs is not None and not inputs.in_graph:
            descriptor = self._loop_graphs.find(inputs, first)
        if self._loop_graphs is None or descriptor is None:
            drafts = self._loop(inputs, first)
        else:
            drafts = self._loop_graphs.draft(descriptor, inputs, first)
        return DraftTokens(drafts, inputs.num_speculative_tokens)

    def _loop(self, inputs: ProposalInputs, state: DraftState) -> torch.Tensor:
        """All draft steps, launches only: [num_reqs, k] int64. `state`: of the prefill, or of the target."""
        k, rows, history = max(inputs.wanted), inputs.rows, inputs.request_rows.token_history
        self.before_draft_decode(inputs, state)
        token_ids, drawn_at = last_token(history, rows, inputs.request_rows.num_tokens)
        drafts: list[torch.Tensor] = []
        attention: AttentionContext | None = None
        positions = drawn_at
        while len(drafts) < k:
            if drafts:
                token_ids, positions = record_draft(history, rows, positions, drafts[-1])
                state = DraftState(state.for_logits, self.feed_back(state.feedback))
            if drafts or not self._starts_with_draft:
                if attention is None or self.advance_draft_positions:
                    attention = self._decode_attention(inputs, drawn_at, len(drafts))
                state = self._decode(inputs, state, token_ids, attention)
            drafts.append(self.sample_draft(state.for_logits, inputs, positions))
        result = torch.stack(drafts, dim=1)
        self.after_draft_decode(result)
        return result

    @property
    def _starts_with_draft(self) -> bool:
        return self.needs.draft_kv == "own" and self.needs.first_draft_from_prefill

    def _prefill(self, inputs: ProposalInputs) -> DraftState:
        """Run the step's tokens, or what the drafter is fed instead; keep the last valid row of each request."""
        attention, last_rows = self._own_groups(inputs.attention), inputs.last_row_indices
        if any(inputs.draft_feeds):
            attention, last_rows = self._fed_tokens(inputs)
        shift = 1 if self.needs.first_draft_from_prefill else 0
        # Of a token behind the history's known end the result is void, and overwritten before it is read.
        input_ids = read_history(
            inputs.request_rows.token_history,
            inputs.rows,
            attention.query_start_loc,
            attention.positions,
            shift=shift,
            max_query_len=max(attention.query_lens),
        )
        tokens = PrefillTokens(input_ids, self.prefill_hidden(inputs), attention, last_rows)
        descriptor = None
        if self._prefill_graphs is not None and not inputs.in_graph:
            descriptor = self._prefill_graphs.find(tokens)
        if self._prefill_graphs is None or descriptor is None:
            return self._run_prefill(tokens)
        return self._prefill_graphs.prefill(descriptor, tokens)

    def _run_prefill(self, tokens: PrefillTokens) -> DraftState:
        self.before_draft_prefill(tokens)
        context = self._attention_context(tokens.attention)
        positions = tokens.attention.positions
        output = self.draft_forward(tokens.input_ids, positions, tokens.hidden_states, context)
        state = self._state(output, tokens.last_rows)
        self.after_draft_prefill(state)
        return state

    def _fed_tokens(self, inputs: ProposalInputs) -> tuple[AttentionInputs, torch.Tensor]:
        """The tokens of `draft_feeds`, the step's where there is none; and the last valid row of each request.

        Rows behind a request's last valid token store nothing, and stand where that token does: nobody reads them.
        Example: DraftFeed(4, 9) and 12 tokens valid after the step: positions 4..11, 11, the row of the last one is 7.
        """
        rows, step, context = inputs.rows, inputs.attention, self._context
        feeds = [
            feed or DraftFeed(-1, query_len)
            for feed, query_len in zip(inputs.draft_feeds, step.query_lens, strict=True)
        ]
        query_lens = [feed.num_tokens for feed in feeds]
        planned = np.array([[feed.start for feed in feeds], query_lens], dtype=np.int64)
        planned_starts, lens = to_device(planned, rows.device).unbind()
        starts = torch.where(
            planned_starts < 0, step.positions[step.query_start_loc[:-1].long()], planned_starts
        )
        first_rows = F.pad(lens.cumsum(0), (1, 0))  # [num_reqs + 1] int64
        reqs = torch.arange(len(feeds), device=rows.device)
        reqs = torch.repeat_interleave(reqs, lens, output_size=sum(query_lens))
        positions = starts[reqs] + torch.arange(len(reqs), device=rows.device) - first_rows[reqs]
        ends = torch.minimum(starts + lens, inputs.request_rows.num_computed_tokens[rows].to(torch.int64))
        attention = AttentionInputs(
            query_lens=query_lens,
            max_seq_lens=[
                length if feed.start < 0 else feed.start + feed.num_tokens
                for feed, length in zip(feeds, step.max_seq_lens, strict=True)
            ],
            query_start_loc=first_rows.to(torch.int32),
            seq_lens=ends.to(torch.int32),
            positions=torch.minimum(positions, ends[reqs] - 1),
            block_tables=tuple(step.block_tables[group] for group in context.group_indices),
            slot_mappings=tuple(
                context.block_tables.slot_mapping(group, rows[reqs], positions, ends[reqs])
                for group in context.group_indices
            ),
            block_size=step.block_size,
        )
        return attention, first_rows[:-1] + ends - starts - 1

    def _decode(
        self,
        inputs: ProposalInputs,
        state: DraftState,
        token_ids: torch.Tensor,
        attention: AttentionContext,
    ) -> DraftState:
        """One token per request: the newest draft, or the last confirmed token when there is none yet."""
        output = self.draft_forward(token_ids, attention.inputs.positions, state.feedback, attention)
        return self._state(output, None)

    def _decode_attention(
        self, inputs: ProposalInputs, drawn_at: torch.Tensor, step: int
    ) -> AttentionContext:
        """Of draft step `step`, whose token stands at `drawn_at - 1 + step`; a row pairs it with the hidden state
        before it, so with hidden input the row's position is one less. Where positions do not advance, it serves all.
        """
        rows, context = inputs.rows, self._context
        first_group, num_groups = context.group_indices[0], len(context.group_indices)
        offset = 2 if self.needs.first_draft_from_prefill else 1
        place = draft_positions(
            drawn_at,
            inputs.num_speculative_tokens,
            rows,
            inputs.request_rows.token_limit,
            context.block_tables.stacked[first_group : first_group + num_groups],
            block_size=inputs.attention.block_size,
            step=step,
            offset=offset if self.advance_draft_positions else offset + step,
            stores=self.needs.draft_kv == "own",
        )
        num_ahead = step + 1 if self.advance_draft_positions else 0
        return self._attention_context(
            AttentionInputs(
                query_lens=[1] * inputs.num_reqs,
                max_seq_lens=[length + num_ahead for length in inputs.attention.max_seq_lens],
                query_start_loc=place.query_start_loc,
                seq_lens=place.seq_lens,
                positions=place.positions,
                block_tables=tuple(inputs.attention.block_tables[group] for group in context.group_indices),
                slot_mappings=place.slot_mappings.unbind(),
                block_size=inputs.attention.block_size,
            )
        )

    def _state(self, output: DraftHidden, indices: torch.Tensor | None) -> DraftState:
        if self.model_returns_tuple:
            assert isinstance(output, tuple)
            for_logits, feedback = output
        else:
            assert isinstance(output, torch.Tensor)
            for_logits = feedback = output
        if indices is None:
            return DraftState(for_logits, feedback)
        last = for_logits[indices]
        return DraftState(last, last if feedback is for_logits else feedback[indices])

    def _own_groups(self, inputs: AttentionInputs) -> AttentionInputs:
        """The step's tokens with the block tables that the drafter uses."""
        indices = self._context.group_indices
        return replace(
            inputs,
            block_tables=tuple(inputs.block_tables[group] for group in indices),
            slot_mappings=tuple(inputs.slot_mappings[group] for group in indices),
        )

    def _attention_context(self, inputs: AttentionInputs) -> AttentionContext:
        context = self._context
        return AttentionContext(context.backend, inputs, context.groups, context.caches)
