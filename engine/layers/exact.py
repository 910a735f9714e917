"""Switches a model to exact numerics: a token's bits depend neither on its neighbours nor on how many they are.

Norms, rotations, activations and routed experts compute row by row anyway. Here it is the other products; attention is
the backend's part.
"""

from __future__ import annotations

from collections import defaultdict

from torch import nn

from engine.layers.embedding import TokenEmbedding
from engine.layers.exact_products import ExactProducts, Shape, shape_of
from engine.layers.expert_router import ExpertRouter
from engine.layers.latent_attention import LatentAttention
from engine.layers.linear import Linear
from engine.layers.products import Product


def inexact_layers(model: nn.Module) -> list[str]:
    """What the model has that has no exact form: its sums depend on the rows beside."""
    return (
        ["latent attention"] if any(isinstance(layer, LatentAttention) for layer in model.modules()) else []
    )


def make_exact(model: nn.Module) -> ExactProducts:
    """All products of the model from now on. Tries the shapes of its linear layers; that of its head, the first time
    that logits are computed."""
    assert not inexact_layers(model)
    products = ExactProducts()
    same_shape: dict[Shape, list[Linear]] = defaultdict(list)
    for layer in model.modules():
        if isinstance(layer, Linear):
            same_shape[shape_of(layer.weight, layer.bias, layer.activation)].append(layer)
        if isinstance(layer, (Linear, TokenEmbedding)):
            layer.exact = products
        if isinstance(layer, ExpertRouter):
            layer.is_exact = True
    products.try_shapes(
        [
            Product([layer.weight for layer in layers], layers[0].bias, layers[0].activation)
            for layers in same_shape.values()
        ]
    )
    return products
