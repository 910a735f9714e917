"""The vocabulary as the grammar library sees it, and grammars compiled for it.

The bytes of a token are those that the renderer shows (engine/text/token_pieces.py), so what is matched is what the
client reads. End tokens are no text: an id behind the vocabulary stands for "the output may end here", and which tokens
end it is the request's matter.
"""

from __future__ import annotations

from collections.abc import Iterable

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from engine.errors import InvalidRequestError
from engine.grammar.source import LIMITS, native_grammar
from engine.params import Constraint
from engine.text.token_pieces import token_pieces

_END_TEXT = b"<|end of output|>"


class GrammarVocabulary:
    """`vocab_size` is the model's; the tokenizer may have more tokens, or fewer. Takes seconds for a large one."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        wrapper = TokenizerWrapper(_TokenTable(tokenizer, vocab_size, eos_token_ids))
        self._native = LLTokenizer(wrapper, n_vocab=vocab_size + 1, eos_token=vocab_size)

    def compile(self, constraint: Constraint) -> LLMatcher:
        """A matcher at the beginning. Raises InvalidRequestError for what is no grammar, or too large a one."""
        matcher = LLMatcher(self._native, native_grammar(constraint), log_level=0, limits=LIMITS)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()  # may turn out to be too complex here
        if matcher.is_error():
            raise InvalidRequestError(constraint.kind, f"cannot be used: {_summary(matcher.get_error())}")
        if int.from_bytes(mask, "little") & ((1 << self.vocab_size) - 1) == 0:
            raise InvalidRequestError(constraint.kind, "allows no text that the model's vocabulary can begin")
        return matcher


class _TokenTable:
    """What llguidance reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        pieces = token_pieces(tokenizer)
        ends = set(eos_token_ids)
        special = [
            token_id for token_id in range(vocab_size) if token_id in ends or pieces.is_special(token_id)
        ]
        names = {token_id: (tokenizer.id_to_token(token_id) or "").encode() for token_id in special}
        self._tokenizer = tokenizer
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.special_token_ids = [*special, vocab_size]
        texts = (names.get(token_id, pieces.piece(token_id)) for token_id in range(vocab_size))
        self.tokens = [*texts, _END_TEXT]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _summary(message: str) -> str:
    """The library's message on one line: it quotes the grammar on further ones."""
    lines = [line.strip() for line in message.strip().splitlines()]
    return " ".join(line for line in lines if line)[:500]
