"""The cut: the one place that decides where the tokens of a request end.

A verification yields a run of tokens; whatever ends the request first *within* the run wins, and nothing
after it is emitted, cached, counted or shown. Pure and torch-free. It does not render: the frontend does
that, by what FinishInfo says.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.grammar.matcher import GrammarMatcher
from engine.messages import FinishInfo
from engine.params import SamplingParams
from engine.request import CutRun, RunCutter
from engine.text.incremental_decoder import IncrementalDecoder


class Cut(msgspec.Struct, frozen=True, gc=False):
    """Emit the first `num_kept` tokens of the run; the request ends with them if `finish` is set."""

    num_kept: int
    finish: FinishInfo | None


class RequestCutter:
    """Follows one request over all its runs; lives as long as the request, preemptions included.

    On each token, in this order: end token, stop token, stop string, then max_tokens and the context limit,
    so a stop beats a limit on the same token. A stop string counts if it ends in the text of a token that
    is at least the min_tokens-th. Stop strings need `decoder`; without one they are not looked for.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        num_prompt_tokens: int,
        max_model_len: int,
        decoder: IncrementalDecoder | None,
    ) -> None:
        self._params = params
        self._hides_text = not params.include_stop
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._end_ids = self._eos_token_ids | self._stop_token_ids
        self._max_emitted = min(params.max_tokens, max_model_len - num_prompt_tokens)
        self._decoder = decoder if params.stop_strings else None
        self._num_lookback_chars = max(map(len, params.stop_strings), default=1) - 1
        self._lookback = ""  # the last characters before the next token: a stop string may have begun in them
        self._num_emitted = 0
        self._is_finished = False

    def cut(self, run: Sequence[int]) -> Cut:
        """Take the next run. Must not be called again after a cut with `finish`."""
        assert not self._is_finished, "a finished request has no more tokens"
        has_room = self._num_emitted + len(run) < self._max_emitted
        if has_room and self._decoder is None and self._end_ids.isdisjoint(run):
            self._num_emitted += len(run)
            return Cut(len(run), None)
        for index, token_id in enumerate(run):
            self._num_emitted += 1
            finish = self._finish_at(token_id)
            if finish is not None:
                self._is_finished = True
                return Cut(index + 1, finish)
        return Cut(len(run), None)

    def _finish_at(self, token_id: int) -> FinishInfo | None:
        if token_id in self._eos_token_ids:
            return FinishInfo(reason="stop", eos_token_id=token_id, drop_last_token_text=self._hides_text)
        if token_id in self._stop_token_ids:
            return FinishInfo(reason="stop", stop_token_id=token_id, drop_last_token_text=self._hides_text)
        if self._decoder is not None:
            finish = self._find_stop_string(self._decoder, self._decoder.push(token_id))
            if finish is not None:
                return finish
        if self._num_emitted >= self._max_emitted:
            return FinishInfo(reason="length")
        return None

    def _find_stop_string(self, decoder: IncrementalDecoder, new_text: str) -> FinishInfo | None:
        """Look in all new characters and as many older ones as a stop string can have begun in.

        Example: stop "END", lookback "xE", new text "ND!y": the window is "xEND!y", the match is [1, 4),
        and 2 characters are dropped with `include_stop`, 5 without.
        """
        window = self._lookback + new_text
        num_old = len(self._lookback)
        self._lookback = window[max(0, len(window) - self._num_lookback_chars) :]
        if not new_text or self._num_emitted < self._params.min_tokens:
            return None
        found: list[tuple[int, int, str]] = []  # start, -length: the earliest, then the longest
        for stop in self._params.stop_strings:
            start = window.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                found.append((start, -len(stop), stop))
        if not found:
            return None
        start, _, stop = min(found)
        end = start + len(stop) if self._params.include_stop else start
        rendered = window + decoder.flush()
        return FinishInfo(reason="stop", stop_string=stop, num_chars_to_drop=len(rendered) - end)


class GrammarCutter:
    """Moves the request's matcher on, and ends the request where its grammar is complete and nothing can follow. That
    beats a limit on the same token, and is beaten by an end token, a stop token or a stop string.
    """

    def __init__(self, inner: RunCutter, matcher: GrammarMatcher) -> None:
        self._inner = inner
        self._matcher = matcher

    def cut(self, run: list[int]) -> CutRun:
        cut = self._inner.cut(run)
        is_stopped = cut.finish is not None and cut.finish.reason == "stop"
        # The token that stops a request need not be one of the grammar's.
        num_matched = cut.num_kept - 1 if is_stopped else cut.num_kept
        for index, token_id in enumerate(run[:num_matched]):
            self._matcher.advance(token_id)
            if self._matcher.is_complete:
                return Cut(index + 1, FinishInfo(reason="stop", is_constraint_met=True))
        return cut
