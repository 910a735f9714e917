"""Layers against transformers, bit for bit where the formula leaves no choice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from engine.kernels.rotary import rotate
from engine.layers.linear import Linear
from engine.layers.moe import RoutedExperts
from engine.layers.norm import GemmaRMSNorm, RMSNorm
from engine.layers.rotary import ROPE_TYPES, RopeConfig, RotaryEmbedding
from engine.models.decoder_config import DecoderConfig

CPU = torch.device("cpu")
HEAD_SIZE = 64
ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 3.0, "original_max_position_embeddings": 1024},
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def raw_config(**rope_parameters: Any) -> dict[str, Any]:
    return {
        "vocab_size": 32,
        "hidden_size": 4 * HEAD_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 10000.0} | rope_parameters,
    }


def test_every_rope_type_is_compared() -> None:
    assert set(ROPE_TYPES.names()) == {*ROPE_PARAMETERS, "proportional"}


def test_proportional_frequencies_equal_transformers() -> None:
    """Of Gemma 4's full layers: a quarter of the features turn, by exponents over the whole head."""
    parameters = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = Gemma4TextConfig(
        num_hidden_layers=1,
        layer_types=["full_attention"],
        global_head_dim=128,
        rope_parameters={"full_attention": parameters},
    )
    expected = Gemma4TextRotaryEmbedding(config).full_attention_inv_freq
    rope = RopeConfig(
        rope_type="proportional",
        theta=1e6,
        head_size=128,
        max_position_embeddings=4096,
        scaling={"partial_rotary_factor": 0.25},
    )
    frequencies = RotaryEmbedding(rope, dtype=torch.float32, device=CPU).inverse_frequencies
    torch.testing.assert_close(frequencies, expected, rtol=0, atol=0)
    assert (int((frequencies > 0).sum()), len(frequencies)) == (16, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("reference_class", "offset"), [(Gemma3RMSNorm, 1.0), (Gemma4RMSNorm, 0.0)])
def test_gemma_norms_equal_transformers_bit_for_bit(
    reference_class: Any, offset: float, dtype: torch.dtype
) -> None:
    reference = reference_class(HEAD_SIZE, eps=1e-6).to(dtype)
    weight = random(HEAD_SIZE, dtype=dtype, seed=1)
    reference.weight.data.copy_(weight)
    norm = GemmaRMSNorm(HEAD_SIZE, 1e-6, offset=offset, dtype=dtype, device=CPU)
    norm.weight.copy_(weight)
    x = random(7, HEAD_SIZE, dtype=dtype) * 3.0
    tolerance = 0.0 if dtype == torch.bfloat16 else 1e-6  # powers are taken another way; rounding hides it
    torch.testing.assert_close(norm(x), reference(x), rtol=tolerance, atol=tolerance)


def test_routed_experts_equal_the_formula_token_by_token() -> None:
    experts = RoutedExperts(5, 8, 6, activation="gelu_tanh", dtype=torch.float64, device=CPU)
    experts.gate_up.copy_(random(5, 12, 8, dtype=torch.float64, seed=1))
    experts.down.copy_(random(5, 8, 6, dtype=torch.float64, seed=2))
    x, weights = random(9, 8, dtype=torch.float64), random(9, 2, dtype=torch.float64, seed=3)
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(9)])
    output = experts(x, ids, weights)  # nobody chose expert 4
    for token in range(9):
        expected = torch.zeros(8, dtype=torch.float64)
        for choice in range(2):
            gate, up = (experts.gate_up[ids[token, choice]] @ x[token]).chunk(2)
            hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
            expected += weights[token, choice] * (experts.down[ids[token, choice]] @ hidden)
        torch.testing.assert_close(output[token], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rope_type", ROPE_PARAMETERS)
def test_rotation_equals_transformers_bit_for_bit(rope_type: str, dtype: torch.dtype) -> None:
    raw = raw_config(rope_type=rope_type, **ROPE_PARAMETERS[rope_type])
    reference = LlamaRotaryEmbedding(LlamaConfig(**raw))
    ours = RotaryEmbedding(DecoderConfig.from_raw(raw).rope, dtype=dtype, device=CPU)
    torch.testing.assert_close(ours.inverse_frequencies, reference.inv_freq, rtol=0, atol=0)

    positions = torch.tensor([0, 1, 7, 1023, 4095])
    x = random(5, 3, HEAD_SIZE, dtype=dtype)
    cosine, sine = reference(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cosine, sine, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, *ours(positions)), expected[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "extra",
    [
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"attention_factor": 1.3},
        {"beta_fast": 16.0, "beta_slow": 2.0},
        {"truncate": False},
    ],
)
def test_yarn_options_equal_transformers(extra: dict[str, Any]) -> None:
    raw = raw_config(rope_type="yarn", **ROPE_PARAMETERS["yarn"], **extra)
    cosine, sine = LlamaRotaryEmbedding(LlamaConfig(**raw))(torch.zeros(1), torch.tensor([[5, 3000]]))
    ours = RotaryEmbedding(DecoderConfig.from_raw(raw).rope, dtype=torch.float32, device=CPU)
    for our_table, table in zip(ours(torch.tensor([5, 3000])), (cosine, sine), strict=True):
        torch.testing.assert_close(our_table[:, 0], table[0, :, : HEAD_SIZE // 2], rtol=0, atol=0)


def test_rope_parameters_of_both_generations_mean_the_same() -> None:
    new = raw_config(rope_type="llama3", **ROPE_PARAMETERS["llama3"])
    old = new | {
        "rope_parameters": None,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "llama3", **ROPE_PARAMETERS["llama3"]},
    }
    assert DecoderConfig.from_raw(old) == DecoderConfig.from_raw(new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_as_transformers_does(dtype: torch.dtype) -> None:
    ours = RMSNorm(96, 1e-5, dtype=dtype, device=CPU)
    reference = LlamaRMSNorm(96, 1e-5).to(dtype)
    weight = random(96, dtype=dtype, seed=1)
    ours.weight.copy_(weight)
    reference.weight.data.copy_(weight)
    x = random(7, 96, dtype=dtype) * 3
    torch.testing.assert_close(ours(x), reference(x).detach(), rtol=0, atol=0)


def test_norm_of_float64_is_computed_in_float64() -> None:
    norm = RMSNorm(96, 1e-5, dtype=torch.float64, device=CPU)
    norm.weight.fill_(1.0)
    x = random(7, 96, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    assert (norm(x) - expected).abs().max() < 1e-14


def test_parts_of_a_fused_linear_layer_are_its_slices() -> None:
    layer = Linear(3, [("a", 2), ("b", 1)], bias=True, dtype=torch.float32, device=CPU)
    for index, (_, tensor) in enumerate(layer.checkpoint_tensors("p.")):
        tensor.fill_(index)
    assert [name for name, _ in layer.checkpoint_tensors("p.")] == [
        "p.a.weight",
        "p.a.bias",
        "p.b.weight",
        "p.b.bias",
    ]
    assert layer(torch.ones(1, 3)).tolist() == [[0 * 3 + 1, 0 * 3 + 1, 2 * 3 + 3]]
