"""What a client reads of a choice: append-only, nothing of a stop string, all of the text at the end."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.finish import RequestCutter
from engine.messages import FinishInfo
from engine.params import SamplingParams
from engine.text.incremental_decoder import IncrementalDecoder
from engine.text.renderer import TextRenderer
from tests.support.text_tokenizers import of_tokens

SMILE = ["\udcf0", "\udc9f", "\udc99", "\udc82"]  # 🙂, byte by byte
VOCABULARY = ["a", "b", "ab", " ha", "x", "END", "E", "N", "D!", "<end>", *SMILE]
TOKENIZER = of_tokens(*VOCABULARY)
END = VOCABULARY.index("<end>")
LENGTH = FinishInfo(reason="length")


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


def renderer(**params: Any) -> TextRenderer:
    return TextRenderer(TOKENIZER, SamplingParams(**{"max_tokens": 100, **params}), [])


def test_text_comes_with_its_tokens_when_nothing_can_be_a_stop_string() -> None:
    subject = renderer(stop_strings=("END",))
    assert subject.feed(ids("a", "b")) == "ab"
    assert subject.feed(ids("x")) == "x"
    assert subject.feed([], LENGTH) == ""


def test_the_beginning_of_a_stop_string_waits_and_comes_out_whole_on_a_mismatch() -> None:
    subject = renderer(stop_strings=("END",))
    assert subject.feed(ids("a", "E")) == "a"
    assert subject.feed(ids("N")) == ""
    assert subject.feed(ids("x")) == "ENx"
    assert subject.feed(ids("E")) == ""
    assert subject.feed(ids("E")) == "E"  # the second may still begin one
    assert subject.feed([], LENGTH) == "E"


def test_the_stop_string_is_not_shown() -> None:
    subject = renderer(stop_strings=("END",))
    assert subject.feed(ids("x", "E")) == "x"
    assert (
        subject.feed(ids("N", "D!"), FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=4)) == ""
    )


def test_with_include_stop_nothing_waits_and_only_what_follows_is_dropped() -> None:
    subject = renderer(stop_strings=("END",), include_stop=True)
    assert subject.feed(ids("x", "E", "N")) == "xEN"
    assert subject.feed(ids("D!"), FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=1)) == "D"


def test_content_before_a_stop_token_of_the_same_step_is_kept() -> None:
    stop = FinishInfo(reason="stop", stop_token_id=END, drop_last_token_text=True)
    assert renderer().feed(ids("a", "b", "<end>"), stop) == "ab"
    shown = FinishInfo(reason="stop", stop_token_id=END)
    assert renderer(include_stop=True).feed(ids("a", "b", "<end>"), shown) == "ab<end>"


def test_half_a_character_is_shown_only_at_the_end() -> None:
    subject = renderer()
    assert subject.feed(ids("a", *SMILE[:3])) == "a"
    assert subject.feed([], LENGTH) == "\ufffd"


def test_a_cancelled_request_shows_what_was_held_back() -> None:
    subject = renderer(stop_strings=("END",))
    assert subject.feed(ids("x", "E")) == "x"
    assert subject.feed([], FinishInfo(reason="cancelled")) == "E"


def test_a_stop_string_before_min_tokens_is_plain_text() -> None:
    subject = renderer(stop_strings=("END",), min_tokens=3)
    assert subject.feed(ids("END")) == "END"


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(VOCABULARY) - 1), max_size=24),
    stops=st.lists(st.text("abENDx! h🙂", min_size=1, max_size=5), max_size=3, unique=True).map(tuple),
    chunks=st.lists(st.integers(1, 5), min_size=24, max_size=24),
    max_tokens=st.integers(1, 24),
    include_stop=st.booleans(),
)
def test_the_stream_is_the_text_that_the_cut_leaves_however_it_is_chunked(
    tokens: list[int], stops: tuple[str, ...], chunks: list[int], max_tokens: int, include_stop: bool
) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_strings=stops, include_stop=include_stop)
    cut = RequestCutter(params, (END,), 1, 1000, IncrementalDecoder(TOKENIZER, [], True)).cut(tokens)
    kept = tokens[: cut.num_kept]
    finish = cut.finish or FinishInfo(reason="cancelled")
    subject = TextRenderer(TOKENIZER, params, [])
    shown = ""
    for size in chunks:
        chunk, kept = kept[:size], kept[size:]
        shown += subject.feed(chunk, None if kept else finish)
        if not kept:
            break
    visible = tokens[: cut.num_kept - finish.drop_last_token_text]
    whole = TOKENIZER.decode(visible)
    assert shown == whole[: len(whole) - finish.num_chars_to_drop]
    if not include_stop:
        assert not any(stop in shown for stop in stops)
