"""Known ways to get an assistant wrong, each done on purpose: the text stays right, so only acceptance can tell.

The detector is what a deployment has, too: acceptance by position, against values recorded when all was right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from engine.attention.backend import AttentionContext
from engine.attention.metadata import AttentionInputs
from tests.support.engine_harness import Harness, Result
from tests.support.tiny_drafters import Workshop, shared_workshop

METHOD = "gemma4_mtp"
K = 4
TOLERANCE = 0.05
GOLDEN = {  # greedy, every prompt of the workshop, k = 4; recorded when test_gemma4_drafts.py passed
    "gemma4_ple": (0.610, 0.453, 0.295, 0.195),
    "gemma4_moe": (0.847, 0.787, 0.693, 0.600),
}

Speculator = Any  # Gemma4Speculator; its methods are replaced


def position_plus_one(speculator: Speculator) -> None:
    forward = speculator.draft_forward
    speculator.draft_forward = lambda ids, positions, *rest: forward(ids, positions + 1, *rest)


def positions_advance(speculator: Speculator) -> None:
    """As in drafters with a cache of their own; their keys are not there."""
    speculator.__class__ = type("Advancing", (type(speculator),), {"advance_draft_positions": True})


def table_of_the_other_group(speculator: Speculator) -> None:
    """Full layers look their blocks up in the table of the sliding group."""
    make_context = speculator._attention_context

    def attention_context(inputs: AttentionInputs) -> AttentionContext:
        sliding = inputs.block_tables[1]
        context: AttentionContext = make_context(replace(inputs, block_tables=(sliding, sliding)))
        return context

    speculator._attention_context = attention_context


def rejected_not_subtracted(speculator: Speculator) -> None:
    """Drafting goes on behind the rejected tokens, and attends to their keys."""
    decode_attention = speculator._decode_attention
    speculator._decode_attention = lambda inputs, drawn_at, step: decode_attention(
        inputs, drawn_at + inputs.num_rejected, step
    )


def hidden_row_of_the_last_draft(speculator: Speculator) -> None:
    """Row k of a verification, instead of the last valid one."""
    propose = speculator.propose
    speculator.propose = lambda inputs: propose(
        replace(inputs, num_rejected=torch.zeros_like(inputs.num_rejected))
    )


def embedding_of_the_drafter(speculator: Speculator) -> None:
    model = speculator._model
    (target_embed,) = model._embed

    def embed(token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        width = target_embed(token_ids).shape[-1]
        own: torch.Tensor = model.head.weight[token_ids] * width**0.5
        return torch.cat((F.pad(own, (0, width - own.shape[-1])), hidden), dim=-1)

    model._embed = (embed,)


def unscaled_embedding(speculator: Speculator) -> None:
    model = speculator._model
    (target_embed,) = model._embed
    factor = model.post_projection.weight.shape[0] ** -0.5
    model._embed = (lambda token_ids, hidden: torch.cat((target_embed(token_ids) * factor, hidden), dim=-1),)


def hidden_before_embedding(speculator: Speculator) -> None:
    weight = speculator._model.pre_projection.weight
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def feedback_before_the_norm(speculator: Speculator) -> None:
    model, raw = speculator._model, []
    model.layers[-1].register_forward_hook(lambda module, args, output: raw.append(output[0]))
    speculator.feed_back = lambda hidden: model.post_projection(raw[-1])


def hidden_of_the_target_in_every_step(speculator: Speculator) -> None:
    """The target's hidden state in every step: the drafter's own output is thrown away."""
    forward, given = speculator.draft_forward, []

    def draft_forward(
        ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        given.append(hidden)
        output: torch.Tensor = forward(ids, positions, hidden, *rest)
        return output

    speculator.draft_forward = draft_forward
    speculator.feed_back = lambda hidden: given[-1]


MUTANTS: tuple[Callable[[Speculator], None], ...] = (
    position_plus_one,
    positions_advance,
    table_of_the_other_group,
    rejected_not_subtracted,
    hidden_row_of_the_last_draft,
    embedding_of_the_drafter,
    unscaled_embedding,
    hidden_before_embedding,
    feedback_before_the_norm,
    hidden_of_the_target_in_every_step,
)


@pytest.mark.parametrize("family", GOLDEN)
def test_acceptance_is_as_recorded(family: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    rates = run(shared_workshop(tmp_path_factory, family), lambda speculator: None)
    assert is_golden(rates, family), rates


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_found_and_loses_nothing(
    mutate: Callable[[Speculator], None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    rates = run(shared_workshop(tmp_path_factory, "gemma4_moe"), mutate)
    assert not is_golden(rates, "gemma4_moe"), rates


def is_golden(rates: tuple[float, ...], family: str) -> bool:
    return all(abs(rate - golden) <= TOLERANCE for rate, golden in zip(rates, GOLDEN[family], strict=True))


def run(workshop: Workshop, mutate: Callable[[Speculator], None]) -> tuple[float, ...]:
    """A batch in which rows are handed on, and blocks are so few that the tables of both groups differ. Returns
    acceptance by position; the text is checked."""
    config = workshop.drafter(METHOD)
    speculator = workshop.draft_model(config)
    mutate(speculator)
    core = workshop.core(
        [config], speculators={METHOD: speculator}, block_size=1, num_blocks=360, max_num_seqs=5
    )
    results = Harness(core).run(workshop.requests("greedy", [(METHOD, K)]))
    for request_id, result in results.items():
        assert result.token_ids == workshop.plain("greedy")[request_id].token_ids, (
            f"{request_id} lost its text"
        )
    return acceptance(results)


def acceptance(results: dict[str, Result]) -> tuple[float, ...]:
    """At position i: verifications that accepted drafts 0..i, of those that had a draft i."""
    seen = [item for result in results.values() for item in result.spec]
    rates = []
    for position in range(K):
        had = [item for item in seen if item.num_drafted > position]
        rates.append(sum(item.num_verifier_accepted > position for item in had) / len(had))
    return tuple(rates)
