"""Prompt lookup decoding: drafts are what followed the same words before, in prompt or output. No model, no KV.

Saxena 2023 ("prompt lookup decoding"); the matching rule is in engine/kernels/ngram_lookup.py.
"""

from __future__ import annotations

import torch

from engine.kernels.ngram_lookup import ngram_lookup
from engine.spec_decode.ngram_replay import NgramReplay
from engine.spec_decode.replay import LookupMethod
from engine.spec_decode.speculator import BaseSpeculator, DraftTokens, ProposalInputs, no_drafts


class NgramSpeculator(BaseSpeculator, LookupMethod):
    """`min_n`, `max_n`: shortest and longest tail, in tokens, that must occur before."""

    def __init__(self, min_n: int = 2, max_n: int = 4) -> None:
        self._min_n = min_n
        self._max_n = max_n

    def propose(self, inputs: ProposalInputs) -> DraftTokens:
        k = max(inputs.wanted)
        if k == 0:
            return no_drafts(inputs)
        rows = inputs.request_rows
        # Of a request whose prefill is not over, more is known than its length here; it gets no drafts anyway.
        max_len = max(inputs.attention.max_seq_lens) + 1
        token_ids, found = ngram_lookup(
            rows.token_history,
            inputs.rows,
            rows.num_tokens[inputs.rows].to(torch.int64).clamp(max=max_len),
            max_len=max_len,
            k=k,
            min_n=self._min_n,
            max_n=self._max_n,
        )
        return DraftTokens(token_ids, torch.where(found, inputs.num_speculative_tokens, 0))

    def replay(self, cache_salt: str) -> NgramReplay:
        return NgramReplay(self._min_n, self._max_n)
