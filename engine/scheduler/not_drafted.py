"""Why a decoding request had no draft to verify: the values of `StepStats.not_drafted`."""

from __future__ import annotations

DISABLED = "disabled"  # the request, or the server, wants no drafts
K_ZERO = "k_zero"  # the policy finds that drafts do not pay
LIMIT = "limit"  # no room: max_tokens, context, token budget or KV blocks
DRAFTER_LIMIT = "drafter_limit"  # the drafter's own context is shorter
CATCHING_UP = "catching_up"  # the drafter computes what it missed while others drafted
NO_MATCH = "no_match"  # asked for, and nothing was proposed
DRAFTER_ERROR = "drafter_error"  # the method raised, or its output was unusable
