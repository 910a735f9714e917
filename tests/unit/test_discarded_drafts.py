"""Accepted drafts that the client does not get: behind a stop, or beyond the limit where a device ran past it."""

from __future__ import annotations

import pytest

from tests.support.scheduler_harness import SchedulerHarness, make_request


@pytest.mark.parametrize("max_tokens", range(2, 16))
@pytest.mark.parametrize("depth", [1, 2])
def test_each_draft_is_rejected_emitted_or_discarded_for_one_reason(depth: int, max_tokens: int) -> None:
    """The last run ends at max_tokens; at two steps in flight with more drafts than there was room for."""
    harness = SchedulerHarness(k=3, depth=depth)
    received = harness.run(make_request("a", [9, 8, 7], max_tokens=max_tokens))["a"]
    assert len(received.token_ids) == max_tokens
    for seen in received.spec:
        assert seen.num_verifier_accepted == seen.num_drafted
        assert seen.num_discarded_after_stop == 0
        assert seen.num_accepted + seen.num_discarded_over_limit == seen.num_drafted
        assert seen.num_emitted in (seen.num_accepted, seen.num_accepted + 1)
    assert all(seen.num_discarded_over_limit == 0 for seen in received.spec[:-1])
    if depth == 1:
        assert all(seen.num_discarded_over_limit == 0 for seen in received.spec)
    if depth == 2 and max_tokens == 7:  # 1 of the prefill, 4, and 2 of a run of 4
        assert received.spec[-1].num_discarded_over_limit == 1
