"""What a drafter learns, whichever its kind: at every step the target's distribution, while the drafts are the text.

Row t of step i guesses token t + 2 + i, for which the target's logits stand in row t + 1 + i. Example, row length 5:
step 0 has rows 0..3 against the target's rows 1..4, step 1 has rows 0..2 against rows 2..4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tools.train.rows import Batch

STEP_DECAY = 0.9  # a later step counts less: it is reached only behind accepted drafts


def step_mask(batch: Batch, step: int) -> torch.Tensor:
    """[num_rows, row_length - 1 - step] bool: rows whose guess of this step is learned from."""
    last = batch.positions.shape[1] - 1 - step
    is_learned = batch.is_learned & (batch.positions > 0)
    wanted = batch.ahead(is_learned, step + 2) & batch.is_same_document_ahead(step + 2)
    return wanted[:, :last]


def draft_loss(
    batch: Batch,
    draft_logits: Sequence[torch.Tensor],
    target_logits: torch.Tensor,
    usable: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean cross-entropy of the steps, weighted; soft targets.

    draft_logits: [num_tokens, draft_vocab] by step; target_logits: [num_tokens, draft_vocab]; usable: [num_rows,
    row_length] bool, rows of the target whose token can be drafted at all.
    """
    shape = batch.token_ids.shape
    wanted = target_logits.float().softmax(dim=-1).view(*shape, -1)
    total = weights = torch.zeros((), device=wanted.device)
    for step, logits in enumerate(draft_logits):
        rows = shape[1] - 1 - step
        guesses = logits.view(*shape, -1)[:, :rows].float()
        losses = guesses.logsumexp(dim=-1) - (wanted[:, step + 1 :] * guesses).sum(dim=-1)
        mask = step_mask(batch, step)
        if usable is not None:
            mask = mask & usable[:, step + 1 :]
        weight = STEP_DECAY**step
        total = total + weight * (losses * mask).sum() / mask.sum().clamp(min=1)
        weights = weights + weight
    return total / weights


@torch.no_grad()
def chain_counts(
    batch: Batch, draft_choices: Sequence[torch.Tensor], target_choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows in which drafts 0..i were all the target's choice, rows that have a draft i), [num_steps] int64 each.

    draft_choices: [num_tokens] int64 by step, the most likely token; target_choices: [num_tokens] int64. On text that
    the target wrote greedily these are the drafts that would be accepted.
    """
    shape = batch.token_ids.shape
    wanted = target_choices.view(shape)
    chain = torch.ones(shape, dtype=torch.bool, device=wanted.device)
    accepted, counts = [], []
    for step, choices in enumerate(draft_choices):
        rows = shape[1] - 1 - step
        chain = chain[:, :rows] & (choices.view(shape)[:, :rows] == wanted[:, step + 1 :])
        mask = step_mask(batch, step)
        accepted.append((chain & mask).sum())
        counts.append(mask.sum())
    return torch.stack(accepted), torch.stack(counts)
