"""Gemma 4 checkpoints in every layout that is about, and what is refused with which message."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig, SpeculatorConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.gemma4 import Gemma4ForCausalLM
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.gemma4 import Gemma4Speculator
from engine.spec_decode.registry import init_speculator
from tests.support.gemma4_layouts import TOWERS, as_multimodal, with_dead_kv, with_experts_apart
from tests.support.gemma4_reference import FULL, SLIDING
from tests.support.tiny_gemma4 import (
    GEMMA4_KINDS,
    make_tiny_assistant,
    make_tiny_gemma4_target,
    write_checkpoint,
)
from tests.support.tiny_models import make_tiny_checkpoint

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """<kind>/target and <kind>/assistant, in float32; the assistants know nothing."""
    folder = tmp_path_factory.mktemp("gemma4")
    for kind in GEMMA4_KINDS:
        target = make_tiny_gemma4_target(folder / kind / "target", kind, "float32")
        make_tiny_assistant(folder / kind / "assistant", target, [range(3, 20)], steps=0)
    return folder


@pytest.fixture(params=GEMMA4_KINDS)
def saved(request: pytest.FixtureRequest, folder: Path) -> Path:
    return folder / str(request.param)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The pair with shared layers, to spoil."""
    return Path(shutil.copytree(folder / "ple_shared", tmp_path / "copy"))


def load(path: Path) -> LoadedModel:
    return load_model(ModelConfig(model=str(path)), device=CPU)


def load_assistant(path: Path, target: LoadedModel, **options: str) -> Gemma4Speculator:
    config = SpeculatorConfig(method="gemma4_mtp", model=str(path), options=options)
    speculator = init_speculator(config, target, CPU)
    assert isinstance(speculator, Gemma4Speculator)
    return speculator


def read(path: Path) -> tuple[dict[str, Any], Tensors]:
    return json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")


def edit_config(path: Path, **values: object) -> None:
    """Entries of the text part."""
    raw = json.loads((path / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= values
    (path / "config.json").write_text(json.dumps(raw))


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


def check_same(path: Path, expected: Path) -> LoadedModel:
    """Raises AssertionError unless both have the same geometry and the same parameters."""
    got, wanted = load(path), load(expected)
    assert got.model.kv_groups() == wanted.model.kv_groups()
    parameters = dict(got.model.named_parameters())
    for name, parameter in wanted.model.named_parameters():
        assert torch.equal(parameters.pop(name), parameter), name
    assert not parameters
    return got


# ---- what loads


def test_what_transformers_saves_again_is_the_same_model(saved: Path, tmp_path: Path) -> None:
    """Its config.json has `per_layer_config` in the place of `global_head_dim`; the assistant's too."""
    for part in ("target", "assistant"):
        AutoModelForCausalLM.from_pretrained(saved / part).save_pretrained(tmp_path / part)
        raw = json.loads((tmp_path / part / "config.json").read_text())
        text = raw.get("text_config", raw)
        assert "per_layer_config" in text
        assert "global_head_dim" not in text
    target = check_same(tmp_path / "target", saved / "target")
    again, first = (load_assistant(path / "assistant", target) for path in (tmp_path, saved))
    parameters = dict(again._model.named_parameters())
    for name, parameter in first._model.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def test_of_a_multimodal_checkpoint_the_decoder_is_loaded(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, weights = as_multimodal(*read(saved / "target"))
    with caplog.at_level(logging.INFO):
        loaded = check_same(write_checkpoint(tmp_path, config, weights), saved / "target")
    assert loaded.eos_token_ids == load(saved / "target").eos_token_ids
    lines = [record.getMessage() for record in caplog.records if "modalities" in record.getMessage()]
    assert lines == [f"skipped {len(TOWERS)} tensors of other modalities: this is the text decoder"]


def test_keys_and_values_of_shared_layers_are_skipped(saved: Path, tmp_path: Path) -> None:
    config, weights = read(saved / "target")
    check_same(write_checkpoint(tmp_path, config, with_dead_kv(config, weights)), saved / "target")


def test_experts_may_be_stored_one_by_one(folder: Path, tmp_path: Path) -> None:
    target = folder / "moe_keqv" / "target"
    config, weights = read(target)
    check_same(write_checkpoint(tmp_path, config, with_experts_apart(weights)), target)


def test_all_layouts_at_once(folder: Path, tmp_path: Path) -> None:
    target = folder / "moe_keqv" / "target"
    config, weights = read(target)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    layout = as_multimodal(config, with_experts_apart(with_dead_kv(config, weights)))
    check_same(write_checkpoint(tmp_path, *layout), target)


def test_layer_indices_with_leading_zeros_are_read(copy: Path) -> None:
    edit_config(
        copy / "target", global_head_dim=None, per_layer_config={f"{i:02}": {"head_dim": 32} for i in (2, 4)}
    )
    assert {group.name: group.head_size for group in load(copy / "target").model.kv_groups()} == {
        "full": 32,
        "sliding": 16,
    }


def test_a_rotary_type_may_stand_under_its_older_key(saved: Path) -> None:
    raw = json.loads((saved / "target" / "config.json").read_text())
    older = {
        kind: {"type" if key == "rope_type" else key: value for key, value in values.items()}
        for kind, values in raw["rope_parameters"].items()
    }
    expected = Gemma4ForCausalLM.read_config(raw).rope
    assert Gemma4ForCausalLM.read_config(raw | {"rope_parameters": older}).rope == expected


def test_end_ids_are_those_of_both_configs(copy: Path) -> None:
    """A tool call ends with an id that only generation_config.json knows."""
    edit_config(copy / "target", eos_token_id=[1, 106])
    (copy / "target" / "generation_config.json").write_text('{"eos_token_id": [1, 106, 50]}')
    assert set(load(copy / "target").eos_token_ids) == {1, 50, 106}


def test_an_assistant_need_not_say_that_its_layers_share(copy: Path) -> None:
    edit_config(copy / "assistant", num_kv_shared_layers=0)
    load_assistant(copy / "assistant", load(copy / "target"))


# ---- what is refused: targets


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"layer_types": [SLIDING, "chunked_attention", FULL, SLIDING, FULL]},
            "layer_types: got chunked_attention, expected 'sliding_attention' or 'full_attention'",
        ),
        ({"layer_types": [SLIDING, FULL]}, "layer_types: got 2 entries, expected 5, one per layer"),
        (
            {"layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL]},
            "layer_types: layer 4 reads the KV of an earlier full_attention layer, but none of the layers below 3",
        ),
        (
            {
                "rope_parameters": {
                    SLIDING: {"rope_type": "spiral", "rope_theta": 1.0},
                    FULL: {"rope_theta": 1.0},
                }
            },
            r"rope_type: got 'spiral', expected one of .*proportional",
        ),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1.0}}}, "rope_parameters.full_attention: got None"),
        ({"rope_parameters": None}, "rope_parameters: got None, expected an object by layer type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: got 'gptq', expected"),
        ({"attention_bias": True}, "attention_bias: got True, expected False"),
        ({"hidden_activation": "silu"}, "hidden_activation: got 'silu', expected 'gelu_pytorch_tanh'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: got False, expected True"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: got 5, all layers, expected fewer"),
        ({"num_kv_shared_layers": 9}, r"num_kv_shared_layers: got 9, expected 0\.\.5"),
        ({"per_layer_config": [32]}, r"per_layer_config: got \[32\], expected an object by layer index"),
        ({"per_layer_config": {"2": {"head_dim": 7}}}, "layer 2: got head_dim 7, expected an even number"),
        ({"sliding_window": None}, "sliding_window: got None, expected a positive whole number"),
        ({"num_key_value_heads": 3}, "layer 0: got 3 KV heads, expected a divisor of 4"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping: got 0, expected a positive number"),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    copy: Path, entries: dict[str, object], message: str
) -> None:
    edit_config(copy / "target", **entries)
    with pytest.raises(CheckpointError, match=message):
        load(copy / "target")


def test_the_architecture_of_a_newer_generation_is_refused(copy: Path) -> None:
    edit_config(copy / "target", architectures=["Gemma5ForCausalLM"])
    with pytest.raises(
        CheckpointError, match=r"got 'Gemma5ForCausalLM', expected one of .*Gemma4ForCausalLM"
    ):
        load(copy / "target")


def test_the_wrong_head_size_is_named_by_the_tensors(copy: Path) -> None:
    """Both spellings gone: the class default of 512 must not be believed silently."""
    edit_config(copy / "target", global_head_dim=None)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.q_norm\.weight \(got shape \[32\]"):
        load(copy / "target")


def test_unknown_and_missing_tensors_are_named(copy: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["model.layers.1.layer_scalar"]
        tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)

    edit_tensors(copy / "target", spoil)
    with pytest.raises(CheckpointError, match=r"unknown: .*sinks; missing: model\.layers\.1\.layer_scalar"):
        load(copy / "target")


def test_a_missing_expert_is_named(folder: Path, tmp_path: Path) -> None:
    config, weights = read(folder / "moe_keqv" / "target")
    apart = with_experts_apart(weights)
    del apart["model.layers.1.experts.5.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.experts: incomplete; missing: 5\.up_proj"):
        load(write_checkpoint(tmp_path, config, apart))


# ---- what is refused: assistants


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"vocab_size": 256}, "drafter vocab_size: got 256, expected 320 for this target model"),
        ({"final_logit_softcapping": 30.0}, "drafter final_logit_softcapping: got 30.0, expected None"),
        ({"use_double_wide_mlp": True}, "drafter use_double_wide_mlp: got True, expected False"),
        ({"enable_moe_block": True}, r"num_experts: got None|drafter enable_moe_block: got True"),
        ({"global_head_dim": 64}, "drafter layer 2: got head_dim 64 .* expected 32 and any"),
        ({"sliding_window": 16}, "drafter layer 0: got head_dim 16 and sliding_window 16, expected 16 and 8"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: got 'awq', expected"),
        ({"layer_types": ["linear_attention", SLIDING, FULL]}, "layer_types: got linear_attention, expected"),
    ],
)
def test_an_assistant_that_does_not_fit_is_refused(
    copy: Path, entries: dict[str, object], message: str
) -> None:
    edit_config(copy / "assistant", **entries)
    with pytest.raises(CheckpointError, match=message):
        load_assistant(copy / "assistant", load(copy / "target"))


def test_an_assistant_of_another_target_size_is_refused(copy: Path) -> None:
    file = copy / "assistant" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"backbone_hidden_size": 64}))
    with pytest.raises(
        CheckpointError, match="drafter backbone_hidden_size: got 64, expected 48 for this target"
    ):
        load_assistant(copy / "assistant", load(copy / "target"))


def test_an_assistant_with_heads_that_do_not_divide_is_refused(copy: Path, folder: Path) -> None:
    edit_config(copy / "assistant", num_attention_heads=3, num_key_value_heads=1)
    with pytest.raises(CheckpointError, match="drafter num_attention_heads: got 3, expected a multiple of 2"):
        load_assistant(copy / "assistant", load(folder / "moe_keqv" / "target"))


def test_a_target_without_matching_layers_is_refused(copy: Path, tmp_path: Path) -> None:
    """A Llama has the width and the vocabulary, but lends no keys and values."""
    llama = make_tiny_checkpoint(tmp_path / "llama", "llama", hidden_size=48, dtype="float32")
    with pytest.raises(
        CheckpointError, match="drafter layer 0: reads the KV of a sliding_attention layer, but the"
    ):
        load_assistant(copy / "assistant", load(llama))


@pytest.mark.parametrize(
    "name", ["pre_projection.weight", "model.layers.1.layer_scalar", "masked_embedding.token_ordering"]
)
def test_missing_tensors_of_an_assistant_are_named(copy: Path, name: str) -> None:
    edit_tensors(copy / "assistant", lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"missing: {name}"):
        load_assistant(copy / "assistant", load(copy / "target"))


def test_an_ordering_that_is_none_is_refused(copy: Path) -> None:
    edit_tensors(copy / "assistant", lambda tensors: tensors["masked_embedding.token_ordering"].fill_(3))
    with pytest.raises(
        CheckpointError, match="token_ordering: got 320 ids, expected each of the 320 token ids once"
    ):
        load_assistant(copy / "assistant", load(copy / "target"))


def test_a_target_in_the_place_of_an_assistant_is_refused(copy: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"drafter architectures: got .*Gemma4ForCausalLM.*, expected 'Gemma4Ass"
    ):
        load_assistant(copy / "target", load(copy / "target"))


def test_an_unknown_position_policy_is_refused(copy: Path) -> None:
    with pytest.raises(ConfigError, match="got positions='first', expected one of last_key, last_token"):
        load_assistant(copy / "assistant", load(copy / "target"), positions="first")
