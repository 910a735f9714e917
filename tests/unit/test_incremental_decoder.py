"""Decoding token by token gives the text of the whole, and never takes back a character."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from engine.errors import CheckpointError
from engine.text.incremental_decoder import IncrementalDecoder, load_tokenizer
from tests.support.text_tokenizers import (
    CORPUS,
    FAMILIES,
    byte_id,
    byte_level,
    gemma,
    llama,
    of_tokens,
    special_id,
)

TOKENIZERS = {name: make() for name, make in FAMILIES.items()}
TEXTS = [
    *CORPUS,
    "  two leading spaces, a tab\tand a trailing one ",
    "🙂",
    "a🙂b👩‍👩‍👧c",
    "你好世界。こんにちは",
    "x   .   y ,  ! ' s n't 've",
    "\n\n    .",
]


def stream(
    tokenizer: Tokenizer, ids: list[int], *, context: list[int] | None = None, skip: bool = True
) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, context or [], skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_concatenation_is_the_text_of_the_whole_at_every_split_of_prompt_and_output(
    family: str, text: str
) -> None:
    tokenizer = TOKENIZERS[family]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    for split in range(len(ids)):
        before = tokenizer.decode(ids[:split])
        if not before.endswith("\ufffd") and whole.startswith(before):
            pieces = stream(tokenizer, ids[split:], context=ids[:split])
            assert "".join(pieces) == whole[len(before) :], (split, ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), family=st.sampled_from(sorted(FAMILIES)), skip=st.booleans())
def test_random_ids_decode_as_the_tokenizer_decodes_them(
    data: st.DataObject, family: str, skip: bool
) -> None:
    tokenizer = TOKENIZERS[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), max_size=24))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    text = "".join(stream(tokenizer, ids, skip=skip))
    if family in ("llama", "gemma") and "\ufffd" in whole:
        # Tokenizer.decode replaces a run of byte tokens as a whole; good characters in it stay here.
        assert len(text) <= len(whole)
    else:
        assert text == whole


@pytest.mark.parametrize("family", ["byte_level", "llama", "gemma"])
def test_a_character_appears_with_its_last_byte(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    smile = [byte_id(tokenizer, byte) for byte in "🙂".encode()]
    assert stream(tokenizer, smile, context=tokenizer.encode("a").ids) == ["", "", "", "🙂", ""]


def test_an_unfinished_character_is_flushed_as_the_whole_text_shows_it() -> None:
    for tokenizer in (byte_level(), gemma()):
        ids = [byte_id(tokenizer, byte) for byte in b"a\xf0\x9f"]
        assert "".join(stream(tokenizer, ids[1:])) == tokenizer.decode(ids[1:])
    assert stream(gemma(), ids) == ["a", "", "", "\ufffd\ufffd"]  # Tokenizer.decode would lose the "a"


def test_invalid_bytes_are_not_held_back() -> None:
    tokenizer = byte_level()
    invalid = byte_id(tokenizer, 0xFF)
    assert stream(tokenizer, [invalid] * 1000)[:1000] == ["\ufffd"] * 1000


def test_spaces_before_punctuation_stay() -> None:
    tokenizer = of_tokens("    ", ".", " ,", " n't")
    assert stream(tokenizer, [0, 1, 2, 3]) == ["    ", ".", " ,", " n't", ""]


def test_the_leading_space_goes_only_at_the_start_of_a_text() -> None:
    tokenizer = llama()
    ids = tokenizer.encode("the fox", add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == "the fox"
    assert "".join(stream(tokenizer, ids, context=ids)) == " the fox"
    special = special_id(tokenizer)
    assert "".join(stream(tokenizer, ids, context=[special])) == "the fox"
    assert "".join(stream(tokenizer, ids, context=[special], skip=False)) == " the fox"


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_left_out_only_when_asked(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    ids = [special_id(tokenizer), *tokenizer.encode("fox", add_special_tokens=False).ids]
    assert "".join(stream(tokenizer, ids, skip=True)) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(stream(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_character_begun_in_the_prompt_is_finished_by_the_output() -> None:
    tokenizer = byte_level()
    smile = [byte_id(tokenizer, byte) for byte in "🙂".encode()]
    assert "".join(stream(tokenizer, smile[2:], context=smile[:2])) == "🙂"


def test_ids_outside_the_vocabulary_are_nothing() -> None:
    assert stream(of_tokens("a", "b"), [0, 99, 1]) == ["a", "", "b", ""]


def test_a_vocabulary_without_decoder_is_joined_by_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    assert "".join(stream(tokenizer, [0, 1, 1])) == tokenizer.decode([0, 1, 1]) == "a b b"


def test_a_long_random_text_comes_back_whole() -> None:
    generator = random.Random(0)
    text = "".join(generator.choice(TEXTS) for _ in range(300))
    tokenizer = TOKENIZERS["byte_level"]
    assert "".join(stream(tokenizer, tokenizer.encode(text).ids)) == text


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
    ids=["wordpiece", "replace after fuse", "strip at the end"],
)
def test_a_decoder_that_cannot_append_is_refused(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoder
    with pytest.raises(CheckpointError, match=r"tokenizer: got the decoder step .* expected ByteLevel"):
        IncrementalDecoder(tokenizer, [], True)


def test_a_tokenizer_loads_from_file_directory_and_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    original = byte_level()
    original.save(str(path))
    for source in (path, str(path), tmp_path, original.to_str()):
        assert load_tokenizer(source).get_vocab() == original.get_vocab()


def test_a_missing_or_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a valid tokenizer file"):
        load_tokenizer(tmp_path)
