"""The masks of a step: one row for each draft position, for all families of tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.grammar.bitmask import MaskedRequest, MaskMaker
from engine.grammar.matcher import GrammarMatcher
from engine.grammar.vocabulary import GrammarVocabulary
from engine.params import Constraint
from engine.sampling.token_masks import mask_tokens
from tests.support.text_tokenizers import FAMILIES, byte_id, of_tokens, special_id

TEXTS = ("a", "b", "c", "ab", "x", "<end>")
A, B, C, AB, X, END = range(len(TEXTS))
NUM_TOKENS = len(TEXTS)
ANYTHING = set(range(NUM_TOKENS))


def matcher_of(
    regex: str, tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int] = (END,)
) -> GrammarMatcher:
    vocabulary = GrammarVocabulary(tokenizer, vocab_size, ends)
    return GrammarMatcher(vocabulary.compile(Constraint(kind="regex", text=regex)))


def allowed(words: np.ndarray, vocab_size: int = NUM_TOKENS) -> list[set[int]]:
    bits = np.unpackbits(words.astype("<u4").view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    return [set(map(int, np.flatnonzero(row))) for row in bits]


def masks_of(
    regex: str, draft_ids: Sequence[int], num_rows: int, stop_ids: Sequence[int] = (END,)
) -> list[set[int]]:
    matcher = matcher_of(regex, of_tokens(*TEXTS), NUM_TOKENS)
    words, _ = MaskMaker(NUM_TOKENS).make([MaskedRequest(matcher, num_rows, list(draft_ids), stop_ids)])
    return allowed(words)


def test_each_draft_position_has_its_own_mask() -> None:
    assert masks_of("ab?c", [A, B], 3) == [{A, AB}, {B, C}, {C}]


def test_behind_a_draft_that_does_not_fit_nothing_is_decided() -> None:
    assert masks_of("ab?c", [A, X, C], 4) == [{A, AB}, {B, C}, ANYTHING, ANYTHING]


def test_behind_the_end_nothing_is_decided() -> None:
    assert masks_of("ab?c", [AB, C, X], 4) == [{A, AB}, {C}, ANYTHING, ANYTHING]


def test_rows_without_drafts_decide_nothing() -> None:
    assert masks_of("ab?c", [], 3) == [{A, AB}, ANYTHING, ANYTHING]


def test_stop_ids_may_stand_where_the_output_may_end() -> None:
    assert masks_of("a(bc?)?", [A, B], 3) == [{A, AB}, {B, END}, {C, END}]
    assert masks_of("a(bc?)?", [A, B], 3, stop_ids=(END, X)) == [{A, AB}, {B, END, X}, {C, END, X}]
    assert masks_of("a(bc?)?", [A, B], 3, stop_ids=()) == [{A, AB}, {B}, {C}]


def test_an_end_token_is_no_text() -> None:
    """Whatever it is written like."""
    assert END not in masks_of("a[<>a-z]*", [A], 2, stop_ids=())[1]


def test_how_many_drafts_are_left() -> None:
    tokenizer = of_tokens(*TEXTS)
    requests = [
        MaskedRequest(matcher_of("ab?c", tokenizer, NUM_TOKENS), 4, draft_ids, (END,))
        for draft_ids in ([A, B, C], [A, X, C], [X, A, B], [])
    ]
    words, nums_allowed = MaskMaker(NUM_TOKENS).make(requests)
    assert nums_allowed == [3, 1, 0, 0]
    assert len(words) == 16
    ended = MaskedRequest(matcher_of("ab?", tokenizer, NUM_TOKENS), 3, [A, END], (END,))
    assert MaskMaker(NUM_TOKENS).make([ended])[1] == [2]


def test_masks_move_no_matcher() -> None:
    matcher = matcher_of("(ab)+c", of_tokens(*TEXTS), NUM_TOKENS)
    maker = MaskMaker(NUM_TOKENS)
    request = MaskedRequest(matcher, 4, [A, B, C], (END,))
    first = maker.make([request])[0]
    assert np.array_equal(first, maker.make([request])[0])
    for token_id in (A, B, AB):
        matcher.advance(token_id)
        assert not matcher.is_complete
    matcher.advance(C)
    assert matcher.is_complete


def test_a_matcher_that_cannot_go_on_allows_nothing() -> None:
    matcher = matcher_of("ab", of_tokens(*TEXTS), NUM_TOKENS)
    matcher.advance(X)
    assert matcher.error
    assert not matcher.is_complete
    words, _ = MaskMaker(NUM_TOKENS).make([MaskedRequest(matcher, 2, [A], (END,))])
    assert allowed(words) == [set(), ANYTHING]


@pytest.mark.parametrize("extra", [-3, 0, 40], ids=["smaller", "equal", "larger"])
@pytest.mark.parametrize("family", FAMILIES)
def test_masks_hold_for_any_tokenizer_and_model_vocabulary(family: str, extra: int) -> None:
    """Those of the model that are no tokens of the tokenizer are never allowed, nor are special ones."""
    tokenizer = FAMILIES[family]()
    vocab_size = tokenizer.get_vocab_size() + extra
    matcher = matcher_of("(the )?fox.*", tokenizer, vocab_size, ends=())
    words, _ = MaskMaker(vocab_size).make([MaskedRequest(matcher, 1, [], ())])
    (ids,) = allowed(words, vocab_size)
    pieces = {tokenizer.decode([token_id]) for token_id in ids}
    assert pieces
    assert all(
        "the fox".startswith(piece.strip()) or piece.startswith(("f", "t", " f", " t")) for piece in pieces
    )
    matcher.advance(tokenizer.token_to_id("f") or byte_id(tokenizer, ord("f")))
    assert not matcher.error
    for token in "ox":
        matcher.advance(tokenizer.token_to_id(token))
    words, _ = MaskMaker(vocab_size).make([MaskedRequest(matcher, 1, [], ())])
    (ids,) = allowed(words, vocab_size)
    assert special_id(tokenizer) not in ids
    assert max(ids) < tokenizer.get_vocab_size()


def test_only_the_rows_that_have_a_mask_are_changed() -> None:
    logits = torch.arange(12, dtype=torch.float64).view(3, 4)
    words = np.array([[0b0101], [0b1000]], dtype="<i4")
    masked = mask_tokens(logits, words.tobytes(), [2, 0])
    never = float("-inf")
    assert masked.tolist() == [[never, never, never, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, never, 10.0, never]]
    assert logits[0].tolist() == [0.0, 1.0, 2.0, 3.0]
