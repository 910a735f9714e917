"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): what is cached of a token is one short row.

The row holds a compressed form of all heads' keys and values, normed, and one rotated key part that the heads share.
How a request attends to such rows, engine/attention/latent.py decides; the two forms' products are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.attention.latent import LatentQuery
from engine.kernels.rotary import rotate
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import Rotation

LATENT_NORM_EPS = 1e-6  # of the two inner norms, whatever the model's own


@dataclass(frozen=True, kw_only=True)
class LatentGeometry:
    """Sizes of one layer, by the names of arXiv:2405.04434: d_c, d_h^R, d_h, and d'_c."""

    num_heads: int
    latent_size: int
    rope_size: int
    plain_size: int  # of a head's key and query, the part that is not rotated
    value_size: int
    query_rank: int | None  # None: queries are not compressed
    scale: float

    @property
    def row_size(self) -> int:
        """Of what is cached a token."""
        return self.latent_size + self.rope_size

    @property
    def query_size(self) -> int:
        """Of a query head."""
        return self.plain_size + self.rope_size


class LatentAttention(nn.Module):
    """Projections in, attention over the latent cache of `layer_index`, projection out."""

    def __init__(
        self,
        geometry: LatentGeometry,
        layer_index: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self._layer_index = layer_index
        num_heads, rank = geometry.num_heads, geometry.query_rank

        def linear(in_features: int, *parts: tuple[str, int]) -> Linear:
            return Linear(in_features, parts, bias=False, dtype=dtype, device=device)

        query_size = num_heads * geometry.query_size
        query_part = ("q_proj", query_size) if rank is None else ("q_a_proj", rank)
        self.down = linear(hidden_size, query_part, ("kv_a_proj_with_mqa", geometry.row_size))
        self.query_norm: RMSNorm | None = None
        self.query_up: Linear | None = None
        if rank is not None:
            self.query_norm = RMSNorm(rank, LATENT_NORM_EPS, dtype=dtype, device=device)
            self.query_up = linear(rank, ("q_b_proj", query_size))
        self.latent_norm = RMSNorm(geometry.latent_size, LATENT_NORM_EPS, dtype=dtype, device=device)
        kv_size = geometry.plain_size + geometry.value_size
        self.up = linear(geometry.latent_size, ("kv_b_proj", num_heads * kv_size))
        self.output = linear(num_heads * geometry.value_size, ("o_proj", hidden_size))

    def attend(self, x: torch.Tensor, rotation: Rotation, context: AttentionContext) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. Returns what `output` is applied to: [num_tokens, num_heads * value_size]."""
        sizes = self.geometry
        query, row = torch.split(self.down(x), [self.down.parts[0][1], sizes.row_size], dim=-1)
        if self.query_norm is not None and self.query_up is not None:
            query = self.query_up(self.query_norm(query))
        heads = query.view(len(x), sizes.num_heads, sizes.query_size)
        plain, rotated = torch.split(heads, [sizes.plain_size, sizes.rope_size], dim=-1)
        latent, shared_key = torch.split(row[:, None], [sizes.latent_size, sizes.rope_size], dim=-1)
        mixed = context.attend_latent(
            self._layer_index,
            LatentQuery(plain, rotate(rotated, *rotation)),
            torch.cat((self.latent_norm(latent), rotate(shared_key, *rotation)), dim=-1),
            self,
            sizes.scale,
        )
        return mixed.flatten(1)

    # ---- LatentForms

    def absorb(self, query: LatentQuery) -> torch.Tensor:
        keys_up, _ = self._up_by_head()
        absorbed = torch.bmm(query.plain.transpose(0, 1), keys_up).transpose(0, 1)
        return torch.cat((absorbed, query.rotated), dim=-1)

    def release(self, mixed: torch.Tensor) -> torch.Tensor:
        _, values_up = self._up_by_head()
        return torch.bmm(mixed.transpose(0, 1), values_up.transpose(1, 2)).transpose(0, 1)

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.geometry
        latent, rotated = torch.split(rows, [sizes.latent_size, sizes.rope_size], dim=-1)
        heads = self.up(latent).view(len(rows), sizes.num_heads, -1)
        plain, value = torch.split(heads, [sizes.plain_size, sizes.value_size], dim=-1)
        key = torch.cat((plain, rotated[:, None].expand(-1, sizes.num_heads, -1)), dim=-1)
        return key, value

    def _up_by_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views: keys [num_heads, plain_size, latent_size], values [num_heads, value_size, latent_size]."""
        sizes = self.geometry
        by_head = self.up.weight.view(sizes.num_heads, -1, sizes.latent_size)
        plain, value = torch.split(by_head, [sizes.plain_size, sizes.value_size], dim=1)
        return plain, value

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.down.checkpoint_tensors(prefix)
        if self.query_norm is not None and self.query_up is not None:
            yield from self.query_norm.checkpoint_tensors(f"{prefix}q_a_layernorm")
            yield from self.query_up.checkpoint_tensors(prefix)
        yield from self.latent_norm.checkpoint_tensors(f"{prefix}kv_a_layernorm")
        yield from self.up.checkpoint_tensors(prefix)
        yield from self.output.checkpoint_tensors(prefix)
