"""A sparse output head: tokens are clustered, and only the tokens of the clusters nearest to a hidden state compete.

For a vocabulary of 262,144 in 2,048 clusters, with 32 of them chosen, a row reads 4,096 rows of the head instead of
all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.errors import CheckpointError
from engine.kernels.cluster_logits import cluster_logits, first_of_clusters
from engine.kernels.nearest_clusters import nearest_clusters
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear


class CentroidHead(nn.Module):
    """Chooses among the rows of `head`, which stays in the order of the vocabulary."""

    token_ids: torch.Tensor  # [num_centroids, tokens of a cluster] int64

    def __init__(
        self,
        head: TokenEmbedding,
        num_centroids: int,
        num_chosen: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        vocab_size, hidden_size = head.weight.shape
        if vocab_size % num_centroids or num_chosen > num_centroids:
            raise CheckpointError(
                f"num_centroids: got {num_centroids}, of which {num_chosen} are chosen, expected a divisor of the "
                f"vocabulary of {vocab_size} tokens and at least as many as are chosen"
            )
        parts = [("centroids", num_centroids)]
        self.centroids = Linear(hidden_size, parts, bias=False, dtype=dtype, device=device)
        self.register_buffer(
            "token_ids",
            torch.arange(vocab_size, device=device).view(num_centroids, -1),
            persistent=False,
        )
        self.has_ordering = False
        self._num_chosen = num_chosen
        self._head = (head,)  # in a tuple: it belongs to the model

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [n, hidden_size]. Returns the candidates' logits [n, m], of its dtype, and ids [n, m] int64."""
        return cluster_logits(hidden, self._head[0].weight, self.token_ids, self._nearest(hidden))

    def first_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> the candidates with the largest logit, [n] int64; -1 where logits are unusable."""
        return first_of_clusters(hidden, self._head[0].weight, self.token_ids, self._nearest(hidden))

    def _nearest(self, hidden: torch.Tensor) -> torch.Tensor:
        return nearest_clusters(self.centroids(hidden), self._num_chosen)

    def set_ordering(self, name: str, ordering: torch.Tensor) -> None:
        """ordering: [vocab_size], the token ids cluster by cluster. Raises CheckpointError unless each occurs once."""
        table = self.token_ids
        is_permutation = ordering.numel() == table.numel() and torch.equal(
            ordering.flatten().to(torch.int64).sort().values.cpu(),  # sync: at start-up
            torch.arange(table.numel()),
        )
        if not is_permutation:
            raise CheckpointError(
                f"{name}: got {ordering.numel()} ids, expected each of the {table.numel()} token ids once"
            )
        table.copy_(ordering.view_as(table))
        self.has_ordering = True

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.centroids.checkpoint_tensors(prefix)
