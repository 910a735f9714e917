"""What a client may ask of the sampler and of speculation, validated; plain data, no torch.

Both the frontend (early, naming the field) and the engine (again, trusting nobody) call `validate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from engine.errors import InvalidRequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS  # each word with and without a leading space
MAX_BAD_WORD_TOKENS = 32
MAX_CHOICES = 64
MAX_CONSTRAINT_CHARS = 65_536  # of a schema, an expression, a grammar, or all choices of an output together
MAX_CONSTRAINT_CHOICES = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one sequence. Neutral values switch a processor off.

    Order at every position: allowed tokens, bad words, min_tokens, logit_bias; penalties; temperature; top_k;
    top_p; min_p; then the draw. `temperature` 0 is greedy: the exact argmax of the processed logits.
    """

    max_tokens: int  # >= 1; tokens to emit at most
    min_tokens: int = 0  # end-of-sequence and stop ids are masked for output indices < min_tokens
    temperature: float = 1.0  # >= 0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # (0, 1]
    min_p: float = 0.0  # [0, 1]; relative to the largest probability
    repetition_penalty: float = 1.0  # > 0; over prompt and output
    presence_penalty: float = 0.0  # [-2, 2]; over output
    frequency_penalty: float = 0.0  # [-2, 2]; over output, times the count
    logit_bias: dict[int, float] = {}  # token id -> [-100, 100], added to the raw logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False  # keep the stop string / the text of the stop token
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # rendering only
    seed: int = 0  # 64 bit, always set: the frontend draws one when the client gave none
    logprobs: int | None = None  # None: none; N: the sampled token and the N most likely
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequestError naming the first field that is out of bounds."""
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_k", self.top_k, 0, None)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                _check_range(field, value, 0, MAX_TOP_LOGPROBS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for token_id, bias in self.logit_bias.items():
            _check_token("logit_bias", token_id, vocab_size)
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        _check_count("bad_words", len(self.bad_words), MAX_BAD_WORD_SEQUENCES, what="token sequences")
        for word in self.bad_words:
            if not word:
                raise InvalidRequestError("bad_words", "got a word without tokens, expected at least one")
            _check_count("bad_words", len(word), MAX_BAD_WORD_TOKENS, what="tokens in a word")
            validate_token_ids("bad_words", word, vocab_size)
        validate_token_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        _check_count("stop", len(self.stop_strings), MAX_STOP_STRINGS, what="stop strings")
        for stop in self.stop_strings:
            if not stop:
                raise InvalidRequestError("stop", "got an empty stop string, expected at least one character")
            _check_count("stop", len(stop), MAX_STOP_STRING_CHARS, what="characters in a stop string")
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS)
        validate_token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)


class SpeculationParams(msgspec.Struct, frozen=True, kw_only=True):
    """Which draft method a request wants. None: the server's default."""

    method: str | None = None  # "none" switches speculation off, "auto" leaves the choice to the policy
    num_speculative_tokens: int | None = None  # k; None: the method's default


class Constraint(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole output has to be. `kind` is also the name of the request's field."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""  # the schema, the expression, the grammar
    choices: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise InvalidRequestError for what is empty or too large. What the text says is not looked at."""
        _check_count(self.kind, len(self.choices), MAX_CONSTRAINT_CHOICES, what="choices")
        num_chars = len(self.text) + sum(map(len, self.choices))
        _check_count(self.kind, num_chars, MAX_CONSTRAINT_CHARS, what="characters")
        if self.kind == "choice" and not self.choices:
            raise InvalidRequestError(self.kind, "got no choices, expected at least one")
        if self.kind not in ("choice", "json_object") and not self.text:
            raise InvalidRequestError(self.kind, "got an empty text")


def validate_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for the first id outside [0, vocab_size). Fast where there is none: streams wait."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        _check_token(field, token_id, vocab_size)


def _check_token(field: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequestError(field, f"got token id {token_id}, expected 0 <= id < {vocab_size}")


def _check_count(field: str, count: int, limit: int, what: str = "entries") -> None:
    if count > limit:
        raise InvalidRequestError(field, f"got {count} {what}, expected at most {limit}")


def _check_range(field: str, value: float, low: float, high: float | None, *, low_open: bool = False) -> None:
    finite = math.isfinite(value)
    if finite and (value > low if low_open else value >= low) and (high is None or value <= high):
        return
    sign = ">" if low_open else ">="
    bound = f"{sign} {low}" + ("" if high is None else f" and <= {high}")
    raise InvalidRequestError(field, f"got {value}, expected {bound}")
