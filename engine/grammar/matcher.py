"""Where one request is in its grammar, moved on by confirmed tokens only.

Preemption does not touch it: confirmed tokens stay confirmed. Rejected drafts do not either: who looks at drafts takes
them back.
"""

from __future__ import annotations

from llguidance import LLMatcher


class GrammarMatcher:
    """One per request."""

    def __init__(self, native: LLMatcher) -> None:
        """`native` is this object's own from now on."""
        self.native = native

    @property
    def is_complete(self) -> bool:
        """The output is all that the grammar asks for, and nothing can follow."""
        return self.native.is_stopped() and not self.native.is_error()

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        return self.native.get_error()

    def advance(self, token_id: int) -> None:
        """Take an emitted token. One that the grammar does not allow is an error from then on."""
        self.native.consume_token(token_id)

    def complete_drafts(self, draft_ids: list[int], max_drafts: int) -> list[int]:
        """Those that may follow, up to the first one that may not, and behind them what has to follow."""
        fitting = draft_ids[: self.native.validate_tokens(draft_ids)] if draft_ids else []
        if fitting:
            self.native.consume_tokens(fitting)
        forced = self.native.compute_ff_tokens()
        if fitting:
            self.native.rollback(len(fitting))
        return (fitting + forced)[:max_drafts]
