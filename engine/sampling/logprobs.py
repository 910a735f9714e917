"""Log probabilities under the raw distribution of the target: before masks, penalties and temperature.

The same for drawn tokens and for tokens of the prompt. Everything stays on the device until `to_positions`,
which works on tensors that were copied to the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.kernels.select_largest import select_largest_reference
from engine.messages import PositionLogprobs, TokenLogprob


@dataclass(frozen=True, kw_only=True)
class LogprobsTensors:
    """Rank 1 is the most likely: 1 + the number of strictly larger logits, so equal logits share a rank."""

    token_ids: torch.Tensor  # [m] int64
    logprobs: torch.Tensor  # [m] float
    ranks: torch.Tensor  # [m] int64
    top_token_ids: torch.Tensor  # [m, N] int64; by descending logit, then ascending id
    top_logprobs: torch.Tensor  # [m, N] float
    top_ranks: torch.Tensor  # [m, N] int64
    logits_rows: Sequence[int]  # [m] on the host, ascending: where the entries stand in the logits

    @property
    def num_rows(self) -> int:
        return len(self.logits_rows)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> LogprobsTensors:
        """The same with `function` applied to each tensor (a copy to the host)."""
        return LogprobsTensors(
            token_ids=function(self.token_ids),
            logprobs=function(self.logprobs),
            ranks=function(self.ranks),
            top_token_ids=function(self.top_token_ids),
            top_logprobs=function(self.top_logprobs),
            top_ranks=function(self.top_ranks),
            logits_rows=self.logits_rows,
        )

    @staticmethod
    def concatenate(parts: Sequence[LogprobsTensors]) -> LogprobsTensors:
        """One after the other, with rows numbered from 0. All have the same N."""
        return LogprobsTensors(
            token_ids=torch.cat([part.token_ids for part in parts]),
            logprobs=torch.cat([part.logprobs for part in parts]),
            ranks=torch.cat([part.ranks for part in parts]),
            top_token_ids=torch.cat([part.top_token_ids for part in parts]),
            top_logprobs=torch.cat([part.top_logprobs for part in parts]),
            top_ranks=torch.cat([part.top_ranks for part in parts]),
            logits_rows=range(sum(part.num_rows for part in parts)),
        )

    def to_positions(self, first_logits_row: int, count: int, num_top: int) -> list[PositionLogprobs]:
        """`count` successive logits rows with their `num_top` most likely tokens. Host tensors only."""
        first = bisect_left(self.logits_rows, first_logits_row)
        span = slice(first, first + count)
        assert list(self.logits_rows[span]) == list(range(first_logits_row, first_logits_row + count))
        tokens = _entries(self.token_ids[span], self.logprobs[span], self.ranks[span])
        tops = _entries(
            self.top_token_ids[span, :num_top].flatten(),
            self.top_logprobs[span, :num_top].flatten(),
            self.top_ranks[span, :num_top].flatten(),
        )
        width = min(num_top, self.top_token_ids.shape[1])
        return [
            PositionLogprobs(token=token, top=tops[index * width : (index + 1) * width])
            for index, token in enumerate(tokens)
        ]


def compute_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, logits_rows: Sequence[int] | None = None
) -> LogprobsTensors:
    """logits [m, vocab] float32 or float64, token_ids [m] int64. `logits_rows` None: 0..m-1."""
    num_rows, vocab_size = logits.shape
    logprobs = logits.log_softmax(dim=-1)
    own_logits = logits.gather(1, token_ids[:, None])
    num_top = min(num_top, vocab_size)
    if num_top > 0:
        top_logits, top_token_ids = select_largest_reference(logits, num_top)
    else:
        top_logits, top_token_ids = logits[:, :0], token_ids.new_empty(num_rows, 0)
    return LogprobsTensors(
        token_ids=token_ids,
        logprobs=logprobs.gather(1, token_ids[:, None])[:, 0],
        ranks=(logits > own_logits).sum(dim=-1) + 1,
        top_token_ids=top_token_ids,
        top_logprobs=logprobs.gather(1, top_token_ids),
        top_ranks=(top_logits[:, None, :] > top_logits[:, :, None]).sum(dim=-1) + 1,
        logits_rows=range(num_rows) if logits_rows is None else logits_rows,
    )


def _entries(token_ids: torch.Tensor, logprobs: torch.Tensor, ranks: torch.Tensor) -> list[TokenLogprob]:
    columns = (token_ids.tolist(), logprobs.tolist(), ranks.tolist())  # sync: host memory
    return [TokenLogprob(*entry) for entry in zip(*columns, strict=True)]
