"""Draft models that draft token by token: draft prefill (step 0) over the step's tokens, then a decode loop.

A subclass is a loader plus hook overrides. The two families differ in what the prefill pairs up:
- with the target's hidden states (EAGLE, MTP): row p is (h_p, x_{p+1}); step 0 yields the first draft already.
- an independent model: row p is x_p; the prefill only fills the cache, and the loop runs k steps from the last token.
Rejected tokens need no clean-up: positions start again from the last confirmed token, and later rows overwrite.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from engine.attention.backend import AttentionContext
from engine.attention.metadata import AttentionInputs
from engine.spec_decode.speculator import BaseSpeculator, DraftContext, DraftTokens, ProposalInputs, no_drafts

DraftHidden = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DraftState:
    """What one draft step leaves for the next, one row per request."""

    for_logits: torch.Tensor  # [num_reqs, draft_hidden_size]
    feedback: torch.Tensor  # [num_reqs, hidden_size]


class DraftModelSpeculator(BaseSpeculator):
    """A draft method with weights. Built before the KV cache is sized, bound to it afterwards."""

    _context: DraftContext

    def bind(self, context: DraftContext) -> None:
        """Called once, when the KV cache exists and before the first `propose`."""
        self._context = context


class AutoRegressiveSpeculator(DraftModelSpeculator):
    """Hooks: what a draft step computes, how drafts are drawn, and whether positions advance."""

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
        hidden_states: [num_tokens, hidden_size], of the target or fed back."""

    @abstractmethod
    def sample_draft(
        self, hidden: torch.Tensor, inputs: ProposalInputs, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw a draft per request. hidden: [num_reqs, draft_hidden_size]; positions: [num_reqs] int64, of the
        tokens being drawn; returns target token ids [num_reqs] int64."""

    def prefill_hidden(self, inputs: ProposalInputs) -> torch.Tensor:
        """Hidden states that the draft prefill starts from: [num_tokens, hidden_size]."""
        return inputs.hidden_states

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        k = max(inputs.wanted)
        state = self._prefill(inputs)
        if k == 0:
            return no_drafts(inputs)
        drawn_at = inputs.request_rows.num_tokens[inputs.rows].to(torch.int64)  # [num_reqs]
        drafts: list[torch.Tensor] = []
        while len(drafts) < k:
            if drafts or not self.needs.first_draft_from_prefill:
                state = self._decode(inputs, state, drafts, drawn_at)
            drafts.append(self._draw(state, inputs, drawn_at + len(drafts)))
        return DraftTokens(torch.stack(drafts, dim=1), inputs.num_speculative_tokens())

    def _draw(self, state: DraftState, inputs: ProposalInputs, positions: torch.Tensor) -> torch.Tensor:
        """The next draft of each request, [num_reqs] int64. It also stands in the history, behind the confirmed
        tokens, so that penalties and bad words at the next position see it as they will in the verification."""
        draft = self.sample_draft(state.for_logits, inputs, positions)
        # An unusable draft (-1) ends the request's drafts; the history holds token ids only.
        rows = inputs.request_rows
        rows.write_tokens(inputs.rows, positions, draft.clamp(min=0)[:, None], torch.ones_like(positions))
        return draft

    def _prefill(self, inputs: ProposalInputs) -> DraftState:
        """Run the step's tokens; keep the last valid row of each request."""
        attention = self._own_group(inputs.attention)
        shift = 1 if self.needs.first_draft_from_prefill else 0
        lens = torch.diff(attention.query_start_loc).to(torch.int64)
        token_rows = torch.repeat_interleave(inputs.rows, lens, output_size=len(attention.positions))
        # Of a token behind the history's known end the result is void, and overwritten before it is read.
        input_ids = inputs.request_rows.token_history[token_rows, attention.positions + shift].to(torch.int64)
        output = self.draft_forward(
            input_ids, attention.positions, self.prefill_hidden(inputs), self._attention_context(attention)
        )
        return self._state(output, inputs.last_row_indices)

    def _decode(
        self, inputs: ProposalInputs, state: DraftState, drafts: list[torch.Tensor], drawn_at: torch.Tensor
    ) -> DraftState:
        """One token per request: the newest draft, or the last confirmed token when there is none yet.

        The token stands at `drawn_at - 1 + len(drafts)`; a row pairs it with the hidden state before it, so with
        hidden input the row's position is one less.
        """
        step = len(drafts)
        rows, history = inputs.rows, inputs.request_rows
        offset = 2 if self.needs.first_draft_from_prefill else 1
        positions = drawn_at - offset + (step if self.advance_draft_positions else 0)
        positions = positions.clamp(min=0)  # requests that have no token yet: their drafts are not used
        # -1 is an unusable draft: it and all behind it are dropped, so any token does.
        input_ids = (
            drafts[-1].clamp(min=0) if drafts else history.token_history[rows, drawn_at - 1].to(torch.int64)
        )
        context = self._context
        # A request that wants fewer drafts than the batch has slots for its own ones only.
        is_wanted = step < inputs.num_speculative_tokens()
        limits = torch.where(is_wanted, history.token_limit[rows].to(torch.int64), 0)
        slots = context.block_tables.slot_mapping(context.group_index, rows, positions, limits)
        group_table = inputs.attention.block_tables[context.group_index]
        attention = AttentionInputs(
            query_lens=[1] * inputs.num_reqs,
            max_seq_lens=[length + step + 1 for length in inputs.attention.max_seq_lens],
            query_start_loc=torch.arange(inputs.num_reqs + 1, dtype=torch.int32, device=rows.device),
            seq_lens=(positions + 1).to(torch.int32),
            positions=positions,
            block_tables=(group_table,),
            slot_mappings=(slots,),
            block_size=inputs.attention.block_size,
        )
        output = self.draft_forward(input_ids, positions, state.feedback, self._attention_context(attention))
        return self._state(output, None)

    def _state(self, output: DraftHidden, indices: torch.Tensor | None) -> DraftState:
        if self.model_returns_tuple:
            assert isinstance(output, tuple)
            for_logits, feedback = output
        else:
            assert isinstance(output, torch.Tensor)
            for_logits = feedback = output
        if indices is None:
            return DraftState(for_logits, feedback)
        return DraftState(for_logits[indices], feedback[indices])

    def _own_group(self, inputs: AttentionInputs) -> AttentionInputs:
        """The step's tokens with the drafter's block table alone."""
        group = self._context.group_index
        return AttentionInputs(
            query_lens=inputs.query_lens,
            max_seq_lens=inputs.max_seq_lens,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            positions=inputs.positions,
            block_tables=(inputs.block_tables[group],),
            slot_mappings=(inputs.slot_mappings[group],),
            block_size=inputs.block_size,
        )

    def _attention_context(self, inputs: AttentionInputs) -> AttentionContext:
        context = self._context
        return AttentionContext(context.backend, inputs, (context.group,), context.caches)
