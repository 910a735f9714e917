"""Block hashes name the whole content up to a block's end, and nothing else."""

from __future__ import annotations

import itertools

from engine.scheduler.prefix_cache import extend_block_hashes, extend_draft_hashes


def hashes(tokens: list[int], block_size: int = 4, salt: str = "") -> list[bytes]:
    result: list[bytes] = []
    extend_block_hashes(result, tokens, len(tokens), block_size, salt)
    return result


def test_only_full_blocks_are_hashed() -> None:
    assert [len(hashes(list(range(count)))) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]


def test_extending_step_by_step_gives_the_hashes_of_the_whole() -> None:
    tokens = list(range(20))
    result: list[bytes] = []
    for count in range(21):
        extend_block_hashes(result, tokens, count, 4, "salt")
    assert result == hashes(tokens, salt="salt")


def test_a_hash_depends_on_every_token_before() -> None:
    base = hashes([1, 2, 3, 4, 5, 6, 7, 8])
    other = hashes([1, 2, 3, 9, 5, 6, 7, 8])
    assert base[0] != other[0]
    assert base[1] != other[1]


def test_the_same_tokens_at_another_depth_have_another_hash() -> None:
    first, second = hashes([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_salts_share_nothing() -> None:
    tokens = list(range(12))
    names = [set(hashes(tokens, salt=salt)) for salt in ("", "a", "b")]
    assert all(left.isdisjoint(right) for left, right in itertools.combinations(names, 2))


def test_token_boundaries_matter() -> None:
    """Ids are hashed at a fixed width: [1, 23] and [12, 3] are not the same bytes."""
    assert len({hashes(tokens, 2)[0] for tokens in ([1, 23], [12, 3], [123, 0], [0, 123])}) == 4


def test_hashes_are_at_least_128_bit_and_the_same_in_every_process() -> None:
    (block_hash,) = hashes([1, 2, 3, 4])
    assert len(block_hash) >= 16
    assert block_hash.hex() == "04ac1b53cffa727e7153b552672c6f4a"


def test_a_drafter_that_looks_one_token_ahead_tells_blocks_apart_by_what_follows() -> None:
    names = []
    for last in (8, 9):
        tokens = [1, 2, 3, 4, last]
        hashes: list[bytes] = []
        draft_hashes: list[bytes] = []
        extend_block_hashes(hashes, tokens, 4, 2, "")
        extend_draft_hashes(draft_hashes, hashes, tokens, 2)
        names.append((hashes, draft_hashes))
    (hashes, draft_hashes), (other_hashes, other_draft_hashes) = names
    assert hashes == other_hashes
    assert draft_hashes[0] == other_draft_hashes[0]
    assert draft_hashes[1] != other_draft_hashes[1]
