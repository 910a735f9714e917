"""Lookup methods after the fact: what they would have drafted for a text is known once the text is.

Their drafts depend on tokens alone, so how good they are needs no verification. A replay holds what its method would
know of one request; it knows no verifications and draws no conclusions. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class LookupReplay(ABC):
    """One request's text, read from its beginning."""

    max_prompt_tokens: int | None = None  # newest tokens of a prompt that are searched; None: all

    @abstractmethod
    def read(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the text."""

    @abstractmethod
    def propose(self, max_drafts: int) -> list[int]:
        """What the method drafts behind the tokens that were read."""


class LookupMethod(ABC):
    """What a draft method is besides, if it only looks up."""

    @abstractmethod
    def replay(self, cache_salt: str) -> LookupReplay:
        """For a new request. It shares what the method has learnt from others of that salt."""
