"""Suffix decoding: longest match, likeliest continuation, bounded memory, tenants apart."""

from __future__ import annotations

import random

import pytest

from engine.config import SpeculatorConfig
from engine.errors import ConfigError
from engine.spec_decode.host import RequestView
from engine.spec_decode.suffix import MAX_OWN_TOKENS, SuffixSpeculator
from engine.spec_decode.suffix_index import MAX_OCCURRENCES, Continuation, SuffixIndex


def view(
    token_ids: list[int], *, name: str = "a", num_prompt_tokens: int = 0, k: int = 5, salt: str = ""
) -> RequestView:
    return RequestView(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt_tokens,
        cache_salt=salt,
        max_drafts=k,
    )


def suffix(min_match: int = 2, min_probability: float = 0.1, max_past_tokens: int = 1000) -> SuffixSpeculator:
    return SuffixSpeculator(min_match, 24, min_probability, max_past_tokens)


def continuation_by_definition(
    texts: list[list[int]], tail: list[int], k: int, *, min_match: int, max_match: int, min_probability: float
) -> list[int]:
    """All positions of all texts, newest first; no index."""
    ends = [(text, end) for text in reversed(texts) for end in range(len(text) - 1, 0, -1)]

    def match(text: list[int], end: int) -> int:
        length = 0
        while length < min(end, len(tail), max_match) and text[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    longest = max((match(text, end) for text, end in ends), default=0)
    alive = [(text, end) for text, end in ends if match(text, end) == longest] if longest >= min_match else []
    drafts: list[int] = []
    probability = 1.0
    while alive and len(drafts) < k:
        children = [text[end] for text, end in alive]
        child = max(dict.fromkeys(children), key=children.count)
        probability *= children.count(child) / len(children)
        if probability < min_probability:
            break
        drafts.append(child)
        alive = [(text, end + 1) for text, end in alive if text[end] == child and end + 1 < len(text)]
    return drafts


# ---- the index ---------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    index = SuffixIndex(min_match=2, max_match=8)
    index.add([5, 6, 7, 5, 6, 8])
    assert index.continue_tail([9, 5, 6], 3, 0.5).token_ids == [8]
    assert index.continue_tail([9, 5, 6], 3, 0.6).token_ids == []
    assert index.continue_tail([9, 5, 6], 3, 0.5).score == pytest.approx(0.5)
    assert index.continue_tail([9, 6], 3, 0.0).token_ids == []


def test_the_longest_match_decides_and_not_the_most_frequent() -> None:
    index = SuffixIndex(min_match=2, max_match=8)
    for text in ([1, 2, 3, 7], [9, 2, 3, 8], [9, 2, 3, 8]):
        index.add(text)
    assert index.continue_tail([1, 2, 3], 1, 0.0).token_ids == [7]
    assert index.continue_tail([4, 2, 3], 1, 0.0).token_ids == [8]


@pytest.mark.parametrize("seed", range(30))
def test_lookups_equal_the_definition(seed: int) -> None:
    generator = random.Random(seed)
    min_match, max_match = generator.choice([(1, 3), (2, 2), (2, 5), (3, 8)])
    index = SuffixIndex(min_match, max_match)
    texts: list[list[int]] = []
    for _ in range(generator.randint(1, 6)):
        texts.append([])
        index.add([])
        for _ in range(generator.randint(1, 4)):
            piece = generator.choices(range(4), k=generator.randint(0, 3))
            texts[-1] += piece
            index.extend(piece)
        if len(texts) > 4:
            texts.pop(0)
            index.remove_oldest()
    assert sum(map(len, texts)) < MAX_OCCURRENCES
    for _ in range(20):
        tail = generator.choices(range(4), k=generator.randint(0, 8))
        k, threshold = generator.randint(0, 6), generator.choice([0.0, 0.3, 0.6, 1.0])
        expected = continuation_by_definition(
            texts, tail, k, min_match=min_match, max_match=max_match, min_probability=threshold
        )
        assert index.continue_tail(tail, k, threshold).token_ids == expected


def test_removing_everything_leaves_nothing() -> None:
    generator = random.Random(0)
    index = SuffixIndex(2, 8)
    for _ in range(50):
        index.add(generator.choices(range(5), k=generator.randint(0, 40)))
    for _ in range(50):
        index.remove_oldest()
    assert (index.num_texts, index.num_anchors) == (0, 0)


# ---- the method --------------------------------------------------------------------------------------------


def test_a_request_finds_its_own_prompt_and_output() -> None:
    method = suffix()
    tokens = [1, 2, 3, 4, 5, 6, 1, 2]
    assert method.propose(view(tokens, num_prompt_tokens=8, k=3)) == [3, 4, 5]
    tokens += [3, 9, 8, 3, 9]
    assert method.propose(view(tokens, num_prompt_tokens=8, k=3)) == [8, 3, 9]


def test_past_outputs_serve_later_requests_and_prompts_do_not() -> None:
    method = suffix()
    method.finish(view([1, 2, 3, 4, 5, 6], num_prompt_tokens=2))
    assert method.propose(view([9, 3, 4], name="b")) == [5, 6]
    assert method.propose(view([9, 1, 2], name="c")) == []


def test_the_length_follows_the_probability() -> None:
    method = suffix(min_probability=0.5)
    for last in (7, 8, 9):
        method.finish(view([1, 2, 3, 4, last, last]))
    assert method.propose(view([0, 1, 2], name="b")) == [3, 4]
    method.finish(view([1, 2, 3, 4, 9, 9]))
    assert method.propose(view([0, 1, 2], name="b")) == [3, 4, 9, 9]


def test_tenants_do_not_see_each_other() -> None:
    method = suffix()
    method.finish(view([1, 2, 3, 4, 5], salt="one"))
    assert method.propose(view([0, 1, 2], name="b", salt="two")) == []
    assert method.propose(view([0, 1, 2], name="c")) == []
    assert method.propose(view([0, 1, 2], name="d", salt="one")) == [3, 4, 5]


def test_memory_is_bounded_over_all_tenants_and_the_oldest_goes_first() -> None:
    method = suffix(max_past_tokens=20)
    for index in range(1000):
        first = 10 * index
        method.propose(view(list(range(first, first + 6)), name=f"r{index}"))
        method.finish(view(list(range(first, first + 6)), name=f"r{index}", salt=f"tenant {index % 2}"))
    assert method._own == {}
    assert sum(past.num_anchors for past in method._past.values()) <= 20
    assert method.propose(view([9990, 9991], name="new", salt="tenant 1")) == [9992, 9993, 9994, 9995]
    assert method.propose(view([9940, 9941], name="old", salt="tenant 0")) == []
    method.finish(view(list(range(100)), salt="long"))
    assert list(method._past) == ["long"]
    assert method.propose(view([97, 98], name="x", salt="long")) == [99]


def test_of_a_long_prompt_the_newest_tokens_are_searched() -> None:
    method = suffix()
    prompt = [1, 2, 3, *range(10, 10 + MAX_OWN_TOKENS), 1, 2]
    assert method.propose(view(prompt, num_prompt_tokens=len(prompt))) == []
    prompt[-10:-7] = [1, 2, 4]
    assert method.propose(view(prompt, name="b", num_prompt_tokens=len(prompt), k=1)) == [4]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": "0"}, "expected 1 <= min_match <= max_match"),
        ({"min_match": "5", "max_match": "4"}, "got min_match 5 and max_match 4"),
        ({"min_percent": "101"}, r"got min_percent 101, expected 0\.\.100"),
        ({"depth": "3"}, "got option 'depth'"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], message: str) -> None:
    from engine.spec_decode.registry import SPECULATORS

    config = SpeculatorConfig(method="suffix", options=options)
    with pytest.raises(ConfigError, match=message):
        SPECULATORS.get("suffix")(config, None, None)  # type: ignore[arg-type]


def test_a_match_counts_no_more_than_the_longest_that_is_looked_for() -> None:
    index = SuffixIndex(1, 2)
    index.add([1, 2, 3, 9])
    index.add([7, 2, 3, 8])
    assert index.continue_tail([1, 2, 3], 1, 0.0).token_ids == [8], "both match by two tokens: the newest"


def test_a_lookup_reads_the_newest_occurrences_only() -> None:
    index = SuffixIndex(1, 4)
    index.add([5, 7])
    for _ in range(MAX_OCCURRENCES):
        index.add([5, 6])
    assert index.continue_tail([5], 1, 0.0) == Continuation([6], 1.0)
