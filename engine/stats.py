"""Counts and times that travel from the engine to the frontend's metrics; plain data, no torch."""

from __future__ import annotations

from typing import Literal

import msgspec


class SpecObservation(msgspec.Struct, frozen=True, kw_only=True):
    """One verification of one request that had drafts, after the cut.

    Example, k = 5 and the run [d1, d2, EOS(d3), d4, d5, bonus]: num_emitted 3, num_accepted 3,
    num_discarded_after_stop 2, num_verifier_accepted 5.
    """

    method: str
    num_drafted: int  # valid drafts offered to the verifier, 1..k
    num_verifier_accepted: int  # what the verifier accepted, before the cut
    num_accepted: int  # accepted drafts among the emitted tokens
    num_emitted: int  # tokens emitted by this verification = its acceptance length
    num_discarded_over_limit: int = 0  # accepted drafts for which max_tokens or the context had no room
    num_discarded_by_grammar: int = (
        0  # the draft behind the accepted ones is none that the grammar allows, and the rest
    )

    @property
    def num_discarded_after_stop(self) -> int:
        return self.num_verifier_accepted - self.num_accepted - self.num_discarded_over_limit


class StepStats(msgspec.Struct, kw_only=True):
    """One step of the engine. Times in seconds, by phase (schedule, prepare, target, verify, draft, capture, wait,
    output)."""

    step: int = 0
    num_scheduled_tokens: int = 0
    num_decode_requests: int = 0
    phase_seconds: dict[str, float] = {}
    graph_kind: Literal["full", "eager"] = "eager"  # how the target ran
    num_padding_tokens: int = 0  # computed for nobody, as the graph was larger than the step
    num_preempted: int = 0
    num_not_overlapped: int = (
        0  # requests that had to wait for the step before: their drafts are made on the host
    )
    not_drafted: dict[str, int] = {}  # reason -> decoding requests of this step that had no draft to verify


class EngineStats(msgspec.Struct, kw_only=True):
    """Load of the engine at one moment. Blocks are those of the KV group of which the largest share is used."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not yet computed
    num_blocks: int = 0
    num_free_blocks: int = 0  # free and holding nothing of use
    num_cached_blocks: int = 0  # free, but still findable by hash
    num_preemptions_total: int = 0

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks - self.num_cached_blocks

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks referenced by live requests, 0..1."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0
