"""Shows the text of one choice as it grows: what the frontend sends.

It obeys the engine's cut (FinishInfo) and never decides where a text ends. It holds back what may still
become a stop string, so that nothing that was sent has to be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from engine.messages import FinishInfo
from engine.params import SamplingParams
from engine.text.incremental_decoder import IncrementalDecoder


class TextRenderer:
    """Append-only: the concatenation of what `feed` returns is the text of the choice."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
        # With include_stop the stop string is shown, and what is dropped lies in the text of the last token.
        self._held_stops = () if params.include_stop else params.stop_strings
        self._held = ""

    def feed(self, token_ids: Sequence[int], finish: FinishInfo | None = None) -> str:
        """The text that can be shown now; with `finish`, all that is left."""
        shown_ids = token_ids[:-1] if finish is not None and finish.drop_last_token_text else token_ids
        text = self._held + "".join(map(self._decoder.push, shown_ids))
        if finish is None:
            num_shown = len(text) - self._num_held(text)
        else:
            text += self._decoder.flush()
            num_shown = len(text) - finish.num_chars_to_drop
            assert num_shown >= 0, "the cut drops characters that were sent"
        self._held = text[num_shown:]
        return text[:num_shown]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop string (but not all of it)."""
        longest = max(map(len, self._held_stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._held_stops):
                return length
        return 0
