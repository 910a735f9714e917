"""Switches a model to exact numerics: a token's bits depend neither on its neighbours nor on how many they are.

Norms, rotations and activations compute row by row anyway. Here it is the products; attention is the backend's part.
"""

from __future__ import annotations

from torch import nn

from engine.layers.embedding import TokenEmbedding
from engine.layers.exact_products import ExactProducts
from engine.layers.expert_router import ExpertRouter
from engine.layers.latent_attention import LatentAttention
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts

_INEXACT_LAYERS = (RoutedExperts, ExpertRouter, LatentAttention)


def inexact_layers(model: nn.Module) -> list[str]:
    """Names of the model's layers that have no exact form: their sums depend on the rows beside."""
    return sorted({type(layer).__name__ for layer in model.modules() if isinstance(layer, _INEXACT_LAYERS)})


def make_exact(model: nn.Module) -> ExactProducts:
    """All products of the model from now on. Tries the shapes of its linear layers; that of its head, the first time
    that logits are computed."""
    assert not inexact_layers(model)
    products = ExactProducts()
    for layer in model.modules():
        if isinstance(layer, Linear):
            products.try_shape(layer.weight, layer.bias)
        if isinstance(layer, (Linear, TokenEmbedding)):
            layer.exact = products
    return products
