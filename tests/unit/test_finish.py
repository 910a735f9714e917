"""The cut: where in a run of tokens a request ends, for every cause, index and split into runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.finish import Cut, RequestCutter
from engine.messages import FinishInfo
from engine.params import SamplingParams
from engine.text.incremental_decoder import IncrementalDecoder
from tests.support.text_tokenizers import of_tokens

EOS = 90
STOP_ID = 91
SMILE = ["\udcf0", "\udc9f", "\udc99", "\udc82"]  # 🙂, byte by byte
VOCABULARY = ["a", "b", "ab", "ba", " ha", "x", "END", "E", "N", "D!", "ND", "END!END", *SMILE]
TOKENIZER = of_tokens(*VOCABULARY)
ID = {token: i for i, token in enumerate(VOCABULARY)}


def ids(*tokens: str) -> list[int]:
    return [ID[token] for token in tokens]


def cutter(*, num_prompt_tokens: int = 3, max_model_len: int = 1000, **params: Any) -> RequestCutter:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    decoder = IncrementalDecoder(TOKENIZER, [], True) if sampling.stop_strings else None
    return RequestCutter(sampling, (EOS,), num_prompt_tokens, max_model_len, decoder)


def test_a_run_without_an_end_is_kept_whole() -> None:
    assert cutter().cut([1, 2, 3]) == Cut(3, None)
    assert cutter().cut([]) == Cut(0, None)


def test_end_token_inside_the_accepted_prefix() -> None:
    cut = cutter().cut([1, 2, EOS, 4, 5, 6])
    assert cut == Cut(3, FinishInfo(reason="stop", eos_token_id=EOS, drop_last_token_text=True))


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("token_id", [EOS, STOP_ID])
def test_the_first_end_or_stop_token_wins_at_every_index(
    index: int, include_stop: bool, token_id: int
) -> None:
    run = [1, 2, 3, 4, 5, 6]
    run[index] = token_id
    cut = cutter(stop_token_ids=(STOP_ID,), include_stop=include_stop).cut([*run, EOS, STOP_ID])
    assert cut.num_kept == index + 1
    assert cut.finish == FinishInfo(
        reason="stop",
        eos_token_id=EOS if token_id == EOS else None,
        stop_token_id=STOP_ID if token_id == STOP_ID else None,
        drop_last_token_text=not include_stop,
    )


def test_ignore_eos_goes_on_unless_the_client_named_the_token_itself() -> None:
    assert cutter(ignore_eos=True).cut([1, EOS, 2]) == Cut(3, None)
    cut = cutter(ignore_eos=True, stop_token_ids=(EOS,)).cut([1, EOS, 2])
    assert cut == Cut(2, FinishInfo(reason="stop", stop_token_id=EOS, drop_last_token_text=True))


@pytest.mark.parametrize("limit", range(1, 7))
def test_max_tokens_ends_inside_a_run(limit: int) -> None:
    assert cutter(max_tokens=limit).cut([1, 2, 3, 4, 5, 6]) == Cut(limit, FinishInfo(reason="length"))


@pytest.mark.parametrize("room", range(1, 7))
def test_prompt_and_output_end_exactly_at_the_context(room: int) -> None:
    subject = cutter(num_prompt_tokens=20 - room, max_model_len=20)
    assert subject.cut([1, 2, 3, 4, 5, 6]) == Cut(room, FinishInfo(reason="length"))


def test_a_stop_beats_a_limit_on_the_same_token() -> None:
    causes: list[tuple[list[int], str, int | str]] = [
        ([1, EOS], "eos_token_id", EOS),
        ([1, STOP_ID], "stop_token_id", STOP_ID),
        (ids("a", "END"), "stop_string", "END"),
    ]
    for run, cause, value in causes:
        subject = cutter(
            max_tokens=2,
            num_prompt_tokens=8,
            max_model_len=10,
            stop_token_ids=(STOP_ID,),
            stop_strings=("END",),
        )
        finish = subject.cut(run).finish
        assert finish is not None
        assert finish.reason == "stop"
        assert getattr(finish, cause) == value


def test_limits_count_over_runs() -> None:
    subject = cutter(max_tokens=5)
    assert subject.cut([1, 2]) == Cut(2, None)
    assert subject.cut([3, 4]) == Cut(2, None)
    assert subject.cut([5, 6]) == Cut(1, FinishInfo(reason="length"))


def test_a_stop_string_of_several_tokens_ends_ids_and_text_at_the_same_token() -> None:
    run = ids("x", " ha", " ha", " ha", " ha", "x")
    cut = cutter(stop_strings=(" ha ha ha",)).cut(run)
    assert cut == Cut(4, FinishInfo(reason="stop", stop_string=" ha ha ha", num_chars_to_drop=9))
    kept = cutter(stop_strings=(" ha ha ha",), include_stop=True).cut(run)
    assert kept == Cut(4, FinishInfo(reason="stop", stop_string=" ha ha ha", num_chars_to_drop=0))


@pytest.mark.parametrize("index", range(8))
def test_a_stop_string_is_found_in_any_token_of_a_long_run(index: int) -> None:
    run = ids(*["a"] * 8)
    run[index] = ID["END"]
    assert cutter(stop_strings=("END",)).cut(run) == Cut(
        index + 1, FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=3)
    )


@pytest.mark.parametrize("split", range(5))
def test_a_stop_string_spans_tokens_and_steps(split: int) -> None:
    run = ids("x", "E", "N", "D!", "x")
    subject = cutter(stop_strings=("END",))
    first = subject.cut(run[:split])
    cut = first if first.finish is not None else subject.cut(run[split:])
    kept = cut.num_kept if cut is first else split + cut.num_kept
    assert kept == 4
    assert cut.finish == FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=4)


def test_text_after_the_stop_string_in_its_token_is_dropped_even_if_the_stop_is_kept() -> None:
    finish = cutter(stop_strings=("END",), include_stop=True).cut(ids("x", "END!END")).finish
    assert finish == FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=4)


def test_a_stop_string_of_a_character_in_pieces_ends_with_its_last_byte() -> None:
    run = ids("a", *SMILE, "b")
    cut = cutter(stop_strings=("🙂",)).cut(run)
    assert cut == Cut(5, FinishInfo(reason="stop", stop_string="🙂", num_chars_to_drop=1))


def test_half_a_character_after_the_stop_string_is_counted_as_it_will_be_rendered() -> None:
    tokenizer = of_tokens("END\udcf0")
    params = SamplingParams(max_tokens=9, stop_strings=("END",))
    cut = RequestCutter(params, (), 1, 100, IncrementalDecoder(tokenizer, [], True)).cut([0])
    assert cut.finish == FinishInfo(reason="stop", stop_string="END", num_chars_to_drop=4)


def test_the_earliest_stop_string_wins_then_the_longest() -> None:
    assert _stop_string(("b", "ab", "x"), "x") == "x"
    assert _stop_string(("D", "END", "ND"), "END") == "END"
    assert _stop_string(("EN", "END"), "END") == "END"
    assert _stop_string(("b", "a"), "ab") == "a"


def test_stop_strings_count_from_the_min_tokens_th_token_on() -> None:
    run = ids("END", "x", "END", "x")
    assert cutter(stop_strings=("END",), min_tokens=1).cut(run).num_kept == 1
    assert cutter(stop_strings=("END",), min_tokens=2).cut(run).num_kept == 3
    assert cutter(stop_strings=("END",), min_tokens=3).cut(run).num_kept == 3
    assert cutter(stop_strings=("END",), min_tokens=4).cut(run) == Cut(4, None)
    spanning = cutter(stop_strings=("END",), min_tokens=3).cut(ids("E", "N", "D!"))
    assert spanning.num_kept == 3


def test_a_stop_string_before_min_tokens_is_not_found_later_beside_a_longer_one() -> None:
    """Of the longer one's length is the text that is looked at again."""
    run = ids("ab", "x", "x", "ab")
    assert cutter(stop_strings=("ab", "ab END"), min_tokens=2).cut(run).num_kept == 4
    assert cutter(stop_strings=("ab", "ab END"), min_tokens=3).cut(run[:3]) == Cut(3, None)


def test_a_finished_request_takes_no_more_tokens() -> None:
    subject = cutter(max_tokens=1)
    subject.cut([1])
    with pytest.raises(AssertionError):
        subject.cut([2])


@settings(max_examples=300, deadline=None)
@given(
    runs=st.lists(st.lists(st.sampled_from((1, 2, 3, EOS, STOP_ID)), max_size=6), max_size=8),
    max_tokens=st.integers(1, 20),
    room=st.integers(1, 20),
    ignore_eos=st.booleans(),
)
def test_without_stop_strings_any_split_into_runs_ends_at_the_first_end_token_or_limit(
    runs: list[list[int]], max_tokens: int, room: int, ignore_eos: bool
) -> None:
    subject = cutter(
        num_prompt_tokens=40 - room,
        max_model_len=40,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        stop_token_ids=(STOP_ID,),
    )
    end_ids = {STOP_ID} if ignore_eos else {EOS, STOP_ID}
    tokens = [token_id for run in runs for token_id in run]
    ends = (index + 1 for index, token_id in enumerate(tokens) if token_id in end_ids)
    num_until_stop, limit = next(ends, len(tokens) + 1), min(max_tokens, room)
    num_expected = min(num_until_stop, limit, len(tokens))
    num_kept, finish = 0, None
    for run in runs:
        cut = subject.cut(run)
        num_kept, finish = num_kept + cut.num_kept, cut.finish
        if finish is not None:
            break
        assert cut.num_kept == len(run)
    assert num_kept == num_expected
    if num_until_stop <= min(limit, len(tokens)):
        assert finish is not None
        assert finish.reason == "stop"
    else:
        assert finish == (FinishInfo(reason="length") if limit <= len(tokens) else None)


STOPS = st.lists(
    st.text(alphabet="abENDx! h🙂", min_size=1, max_size=5), min_size=1, max_size=3, unique=True
).map(tuple)


@settings(max_examples=400, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(VOCABULARY) - 1) | st.just(EOS), max_size=20),
    stops=STOPS,
    cuts=st.lists(st.integers(1, 6), min_size=20, max_size=20),
    max_tokens=st.integers(1, 20),
    min_tokens=st.integers(0, 6),
    include_stop=st.booleans(),
)
def test_any_split_into_runs_ends_where_rereading_the_text_after_each_token_ends(
    tokens: list[int],
    stops: tuple[str, ...],
    cuts: list[int],
    max_tokens: int,
    min_tokens: int,
    include_stop: bool,
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop_strings=stops,
        include_stop=include_stop,
    )
    subject = RequestCutter(params, (EOS,), 3, 1000, IncrementalDecoder(TOKENIZER, [], True))
    kept: list[int] = []
    finish = None
    rest = tokens
    for size in cuts:
        run, rest = rest[:size], rest[size:]
        cut = subject.cut(run)
        kept += run[: cut.num_kept]
        finish = cut.finish
        if finish is not None:
            break
        assert cut.num_kept == len(run)
    assert (len(kept), finish) == naive_cut(tokens, params)


def naive_cut(tokens: list[int], params: SamplingParams) -> tuple[int, FinishInfo | None]:
    """Decode everything again after each token."""
    old_text = ""
    for num_kept in range(1, len(tokens) + 1):
        if tokens[num_kept - 1] == EOS:
            hidden = not params.include_stop
            return num_kept, FinishInfo(reason="stop", eos_token_id=EOS, drop_last_token_text=hidden)
        rendered = TOKENIZER.decode(tokens[:num_kept])
        text = rendered.removesuffix("\ufffd") if _ends_inside_a_character(tokens[:num_kept]) else rendered
        ends = [
            (start, -len(stop), stop)
            for stop in params.stop_strings
            for start in range(len(text) - len(stop) + 1)
            if text.startswith(stop, start) and start + len(stop) > len(old_text)
        ]
        if ends and num_kept >= params.min_tokens:
            start, _, stop = min(ends)
            end = start + len(stop) if params.include_stop else start
            return num_kept, FinishInfo(
                reason="stop", stop_string=stop, num_chars_to_drop=len(rendered) - end
            )
        if num_kept == params.max_tokens:
            return num_kept, FinishInfo(reason="length")
        old_text = text
    return len(tokens), None


def _ends_inside_a_character(tokens: list[int]) -> bool:
    smile = ids(*SMILE)
    return any(tokens[-length:] == smile[:length] for length in (1, 2, 3))


def _stop_string(stops: tuple[str, ...], *tokens: str) -> str | None:
    finish = cutter(stop_strings=stops).cut(ids(*tokens)).finish
    return None if finish is None else finish.stop_string
