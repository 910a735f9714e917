"""Plain decoding: k = 0 in the same loop."""

from __future__ import annotations

from engine.spec_decode.speculator import BaseSpeculator, DraftTokens, ProposalInputs, no_drafts


class NullSpeculator(BaseSpeculator):
    """Proposes nothing."""

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        return no_drafts(inputs)
