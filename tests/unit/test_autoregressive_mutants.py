"""Known ways to get a draft model's loop wrong, each done on purpose: the draft logits are found to be others, and the
text is the same all the same. Without the first, test_autoregressive_drafts.py could not fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionContext
from engine.attention.metadata import AttentionInputs
from engine.spec_decode.speculator import DraftTokens, ProposalInputs
from tests.support.draft_rounds import RoundChecker, record_rounds
from tests.support.engine_harness import Harness
from tests.support.tiny_drafters import Workshop, shared_workshop

Speculator = Any  # AutoRegressiveSpeculator; its methods are replaced
HEADS = ("eagle", "eagle3")


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return shared_workshop(tmp_path_factory)


def position_plus_one(speculator: Speculator) -> None:
    attention = speculator._decode_attention
    speculator._decode_attention = lambda inputs, drawn_at, step: attention(inputs, drawn_at + 1, step)


def hidden_row_of_the_last_draft(speculator: Speculator) -> None:
    """Row k of a verification, instead of the last valid one."""
    propose = speculator.propose
    speculator.propose = lambda inputs: propose(
        replace(inputs, num_rejected=torch.zeros_like(inputs.num_rejected))
    )


def rejected_not_subtracted(speculator: Speculator) -> None:
    """Drafting goes on behind the rejected tokens, and attends to their keys."""
    attention = speculator._decode_attention
    speculator._decode_attention = lambda inputs, drawn_at, step: attention(
        inputs, drawn_at + inputs.num_rejected, step
    )


def reads_the_target_table(speculator: Speculator) -> None:
    """Keys are looked up by the block table of group 0, and stored by that of the drafter's own group."""
    propose, make_context = speculator.propose, speculator._attention_context
    table: list[torch.Tensor] = []

    def propose_watched(inputs: ProposalInputs) -> DraftTokens:
        table[:] = [inputs.attention.block_tables[0]]
        drafts: DraftTokens = propose(inputs)
        return drafts

    def attention_context(inputs: AttentionInputs) -> AttentionContext:
        context: AttentionContext = make_context(replace(inputs, block_tables=(table[0],)))
        return context

    speculator.propose, speculator._attention_context = propose_watched, attention_context


def stores_beyond_its_slots(speculator: Speculator) -> None:
    """A draft step has a slot for every request, whether or not it wants the draft and owns the block."""
    attention = speculator._decode_attention

    def decode_attention(inputs: ProposalInputs, drawn_at: torch.Tensor, step: int) -> AttentionContext:
        rows: Any = SimpleNamespace(**vars(inputs.request_rows))
        rows.token_limit = torch.full_like(rows.token_limit, 10**6)
        wants_all = torch.full_like(inputs.num_wanted, 10**6)
        unlimited = replace(inputs, request_rows=rows, num_wanted=wants_all)
        context: AttentionContext = attention(unlimited, drawn_at, step)
        return context

    speculator._decode_attention = decode_attention


MUTANTS: list[tuple[Callable[[Speculator], None], str]] = [
    *((position_plus_one, method) for method in (*HEADS, "draft_model")),
    *((hidden_row_of_the_last_draft, method) for method in HEADS),
    *((rejected_not_subtracted, method) for method in (*HEADS, "draft_model")),
    *((reads_the_target_table, method) for method in (*HEADS, "draft_model")),
    *((stores_beyond_its_slots, method) for method in (*HEADS, "draft_model")),
]


@pytest.mark.parametrize(("mutate", "method"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_mutant_is_found_and_loses_nothing(
    mutate: Callable[[Speculator], None], method: str, workshop: Workshop
) -> None:
    with pytest.raises(AssertionError, match=r"draft \d of Round"):
        run_and_check(workshop, method, mutate)


@pytest.mark.parametrize("method", [*HEADS, "draft_model"])
def test_without_a_mutation_the_same_run_is_right(method: str, workshop: Workshop) -> None:
    run_and_check(workshop, method, lambda speculator: None)


def run_and_check(workshop: Workshop, method: str, mutate: Callable[[Speculator], None]) -> None:
    """A batch in which the tables of both groups differ, rows are handed on, and requests end while others go on.

    The text is checked first: it must hold for every mutant. Raises AssertionError "draft ..." for wrong logits.
    """
    speculator = workshop.draft_model(workshop.drafter(method))
    mutate(speculator)
    rounds = record_rounds(speculator)
    core = workshop.core(
        [workshop.drafter(method)],
        speculators={method: speculator},
        block_size=1,
        num_blocks=500,
        max_num_seqs=5,
    )
    results = Harness(core).run(
        workshop.requests("greedy", [(method, 5), ("none", None), (method, 1), (method, 3)])
    )
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain("greedy")[request_id].token_ids, (
            f"{request_id} lost its text"
        )
    RoundChecker(workshop, method).check(rounds)
