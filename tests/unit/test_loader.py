"""What loads, and what is refused with which message: directories, configs, tensors, dummy weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.messages import LoadProgress
from engine.models.loader import LoadedModel, load_model
from tests.support.tiny_models import TINY_EOS_TOKEN_ID, make_tiny_checkpoint

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype="float32")


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def load(path: Path | str, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **options), device=CPU)


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def edit_tensors(path: Path, edit: Callable[[Tensors], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


# ---- what loads


def test_parameters_and_bytes_are_those_of_the_file(saved: Path) -> None:
    loaded = load(saved)
    tensors = load_file(saved / "model.safetensors")
    assert loaded.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert loaded.weight_bytes == 4 * loaded.num_parameters
    assert loaded.architecture == "LlamaForCausalLM"
    assert loaded.dtype == torch.float32


def test_fused_projections_are_the_checkpoint_s_one_after_the_other(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    parameters = dict(load(saved).model.named_parameters())
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"]
    assert torch.equal(
        parameters["layers.1.attention.qkv.weight"], torch.cat([tensors[name] for name in names])
    )


def test_end_ids_are_those_of_both_configs(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [7, 5], "temperature": 0.6}')
    loaded = load(checkpoint)
    assert loaded.eos_token_ids == (TINY_EOS_TOKEN_ID, 5, 7)


def test_an_end_id_that_no_logit_stands_for_is_left_out(checkpoint: Path) -> None:
    """It is never drawn, and masking it until `min_tokens` would write outside the logits."""
    edit_config(checkpoint, eos_token_id=[-1, 5, 320])
    assert load(checkpoint).eos_token_ids == (TINY_EOS_TOKEN_ID, 5)


def test_a_generation_config_is_optional(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").unlink()
    loaded = load(checkpoint)
    assert loaded.eos_token_ids == (TINY_EOS_TOKEN_ID,)


@pytest.mark.parametrize(
    ("asked", "entries", "expected"),
    [
        ("auto", {"dtype": "float64"}, torch.float64),
        ("auto", {"dtype": None, "torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"dtype": None}, torch.float32),
        ("auto", {"dtype": None, "text_config": {"dtype": "float64"}}, torch.float64),
        ("float16", {"dtype": "float64"}, torch.float16),
    ],
)
def test_dtype_is_what_was_asked_or_saved(
    checkpoint: Path, asked: str, entries: dict[str, object], expected: torch.dtype
) -> None:
    edit_config(checkpoint, **entries)
    loaded = load(checkpoint, dtype=asked)
    assert loaded.dtype == expected
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}


def test_rotary_frequencies_stay_float32_in_half_types(saved: Path) -> None:
    model = load(saved, dtype="bfloat16").model
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_an_index_of_several_files_loads(checkpoint: Path) -> None:
    expected = dict(load(checkpoint).model.named_parameters())
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, parameter in load(checkpoint).model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_progress_reaches_one(saved: Path) -> None:
    seen: list[LoadProgress] = []
    load_model(ModelConfig(model=str(saved)), device=CPU, on_progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: torch.zeros(4)}))
    load(checkpoint)


def test_a_tied_head_may_be_repeated_if_it_is_equal(tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path, "qwen2", dtype="float32", tie=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": embedding.clone()}))
    load(path)
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match=r"unequal to the tensor they are tied to: lm_head\.weight"):
        load(path)


def test_dummy_weights_need_no_file_and_repeat_by_seed(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    weights = [
        next(load(checkpoint, load_format="dummy", seed=seed).model.parameters()) for seed in (3, 3, 4)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_uniform_dummy_weights_are_small_in_norms_too(checkpoint: Path) -> None:
    """What other engines call dummy weights: a step draws less power with them, so only with them times compare."""
    model = load(checkpoint, load_format="dummy", dummy_weights="uniform").model
    for parameter in model.parameters():
        assert 0.0005 < parameter.abs().max() <= 0.001
        assert parameter.unique().numel() > min(parameter.numel() // 2, 100)


# ---- what is refused


def test_unknown_missing_and_misshapen_tensors_are_all_named_at_once(checkpoint: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(1)
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(31)
        tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(32, dtype=torch.int8)

    edit_tensors(checkpoint, spoil)
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint)
    message = str(caught.value)
    assert "unknown: model.layers.0.mlp.extra.weight" in message
    assert "missing: model.layers.1.self_attn.k_proj.weight;" in message
    assert "model.norm.weight (got shape [31], expected [32])" in message
    assert "model.layers.2.input_layernorm.weight (got torch.int8, expected a floating-point type)" in message


def test_of_a_checkpoint_of_another_model_the_first_tensors_are_named(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({f"h.{i:02}": torch.zeros(1) for i in range(40)}))
    with pytest.raises(CheckpointError, match=r"unknown: h\.00, h\.01, .*, h\.11 and 28 more$"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures: got 'GPT2LMHeadModel', expected one of DeepseekV2ForCausalLM",
        ),
        ({"architectures": None}, r"architectures: got None, expected a list of one name"),
        ({"hidden_act": "gelu"}, r"hidden_act: got 'gelu', expected 'silu'"),
        ({"hidden_size": "32"}, r"hidden_size: got '32', expected a positive whole number"),
        ({"num_hidden_layers": 0}, r"num_hidden_layers: got 0, expected a positive whole number"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: got 3, expected a divisor of 4"),
        ({"head_dim": 7}, r"head_dim: got 7, expected an even number"),
        ({"rms_norm_eps": None}, r"rms_norm_eps: got None, expected a number"),
        ({"tie_word_embeddings": "yes"}, r"tie_word_embeddings: got 'yes', expected true or false"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config: got 'gptq', expected"),
        ({"sliding_window": 64}, r"sliding_window: got 64 in use, expected full attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types: got .*'sliding_attention'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor: got 0\.5, expected 1\.0"),
        ({"rope_parameters": "x"}, r"rope_parameters: got 'x', expected an object"),
        ({"rope_parameters": {"rope_type": "spiral"}}, r"rope_type: got 'spiral', expected one of default"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_parameters\.factor: missing"),
        ({"dtype": "int8"}, r"dtype: got 'int8', expected one of float64"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    checkpoint: Path, entries: dict[str, object], message: str
) -> None:
    edit_config(checkpoint, **entries)
    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


@pytest.mark.parametrize(
    "entries", [{"sliding_window": 64, "use_sliding_window": False}, {"sliding_window": None}]
)
def test_a_sliding_window_that_is_not_used_is_no_obstacle(
    checkpoint: Path, entries: dict[str, object]
) -> None:
    edit_config(checkpoint, **entries)
    load(checkpoint)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\x01"])
def test_a_corrupt_config_is_named(checkpoint: Path, content: str) -> None:
    (checkpoint / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json: "):
        load(checkpoint)


def test_a_missing_config_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load(checkpoint)


@pytest.mark.parametrize("size", [0, 4, 100, 20_000])
def test_a_truncated_safetensors_file_is_named(checkpoint: Path, size: int) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load(checkpoint)


def test_a_directory_without_weights_is_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights: expected model\.safetensors"):
        load(checkpoint)


@pytest.mark.parametrize(
    "index",
    ['{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": "gone.safetensors"}}', "{}"],
)
def test_a_wrong_index_is_named(checkpoint: Path, index: str) -> None:
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"weight_map|gone\.safetensors"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["/no/such/model", "./model", "gone.gguf", "a/b/c"])
def test_a_path_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: no such file or directory"):
        load(name)


def test_a_hub_id_that_cannot_be_had_is_named() -> None:
    """The tests run with the hub offline, as a machine without network would."""
    with pytest.raises(CheckpointError, match="nobody/no-such-model: neither a local path nor to be had"):
        load("nobody/no-such-model")


def test_a_file_that_is_no_checkpoint_is_named(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got a file, expected a directory"):
        load(checkpoint / "model.safetensors")
