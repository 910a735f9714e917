"""Requests that leave method and k to the policy get the tokens of plain decoding, whoever drafts when."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from tests.support.tiny_drafters import Workshop, shared_workshop

METHODS = ("ngram", "suffix", "eagle")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("setting", ["greedy", "seeded"])
def test_auto_changes_nothing(setting: str, depth: int, workshop: Workshop) -> None:
    core = workshop.core([workshop.drafter(method) for method in METHODS], depth=depth, max_prefill_chunk=7)
    used = set()
    for _ in range(3):  # the policy learns on
        choices = [("auto", None), ("auto", 2), ("eagle", 3), ("auto", None), ("none", None)]
        results = Harness(core).run(workshop.requests(setting, choices))
        for index, (name, result) in enumerate(results.items()):
            plain = workshop.plain(setting)[name]
            assert (result.token_ids, result.finish) == (plain.token_ids, plain.finish), name
            if choices[index % len(choices)][0] == "auto":
                used |= {item.method for item in result.spec}
    assert used == set(METHODS)
