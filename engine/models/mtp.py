"""The multi-token prediction layer (DeepSeek-V3, arXiv:2412.19437, section 2.2): one more layer of the target's kind
over (embedding of x_{p+1}, hidden h_p). It stands in the target's checkpoint, behind the target's own layers.

u = eh_proj([enorm(E[x_{p+1}]), hnorm(h_p)]); y = shared_head.norm(layer(u)). y is what the target's head reads and what
is fed back as h_{p+1}, so the one layer serves any number of drafts. Embedding and head are the target's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from engine.attention.backend import AttentionContext
from engine.errors import CheckpointError
from engine.kv_spec import KVGroupSpec
from engine.layers.linear import Linear
from engine.models.base import CausalLM
from engine.models.moe_decoder import MoEDecoder
from engine.models.weights import load_strict


class MTPDraftModel(nn.Module):
    """Raises CheckpointError for a target that has no such layer, or several of them."""

    def __init__(self, target: CausalLM) -> None:
        super().__init__()
        if not isinstance(target, MoEDecoder):
            raise CheckpointError(
                f"mtp: got {type(target).__name__}, expected a target whose family has MTP layers"
            )
        if (count := target.config.num_mtp_layers) != 1:
            raise CheckpointError(f"mtp: num_nextn_predict_layers: got {count}, expected 1 MTP layer")
        self.max_position_embeddings = target.max_position_embeddings
        self._target = (target,)  # in a tuple: the target is no part of this module
        size = target.hidden_size
        self.embedding_norm = target.make_norm()
        self.hidden_norm = target.make_norm()
        self.fc = Linear(2 * size, [("eh_proj", size)], bias=False, dtype=target.dtype, device=target.device)
        self.layer = target.make_layer(0, has_experts=True)
        self.norm = target.make_norm()

    def kv_group(self, name: str) -> KVGroupSpec:
        return self._target[0].kv_group(name, 1)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        attention: AttentionContext,
    ) -> torch.Tensor:
        """input_ids, positions: [num_tokens] int64; hidden_states: [num_tokens, hidden_size]; returns the same."""
        target = self._target[0]
        x = self.fc(self.embedding_norm.pair(target.embed(input_ids), self.hidden_norm, hidden_states))
        output: torch.Tensor = self.norm(self.layer(x, target.rotary(positions), attention))
        return output

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Out of the target's checkpoint. Raises CheckpointError for missing, unknown or misshapen tensors."""
        prefix = f"model.layers.{self._target[0].num_layers}."
        own = self._own_tensors(prefix, weights)
        load_strict(type(self).__name__, dict(self._checkpoint_tensors(prefix)), own)

    def _own_tensors(
        self, prefix: str, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Without the copies of what is shared; raises CheckpointError when they are none, or there is nothing else."""
        target = self._target[0]
        shared = {
            f"{prefix}embed_tokens.weight": target.embedding.weight,
            f"{prefix}shared_head.head.weight": target.head.weight,
        }
        is_empty = True
        for name, tensor in target.plain_tensors(item for item in weights if item[0].startswith(prefix)):
            if name not in shared:
                is_empty = False
                yield name, tensor
            elif not torch.equal(tensor.to(shared[name]), shared[name]):
                raise CheckpointError(f"{name}: got other values than the target's, expected a copy")
        if is_empty:
            raise CheckpointError(
                f"mtp: the checkpoint has no tensors {prefix}*, expected those of the MTP layer that "
                f"num_nextn_predict_layers {target.config.num_mtp_layers} announces"
            )

    def _checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.embedding_norm.checkpoint_tensors(f"{prefix}enorm")
        yield from self.hidden_norm.checkpoint_tensors(f"{prefix}hnorm")
        yield from self.fc.checkpoint_tensors(prefix)
        yield from self.layer.checkpoint_tensors(prefix)
        yield from self.norm.checkpoint_tensors(f"{prefix}shared_head.norm")
