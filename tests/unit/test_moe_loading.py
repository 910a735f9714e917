"""Checkpoints of models with experts and an MTP layer: fp8 blocks, what is left out, and what is refused and how."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.config import ModelConfig, SpeculatorConfig
from engine.errors import CheckpointError, ConfigError
from engine.models import fp8_blocks
from engine.models.deepseek import DeepseekForCausalLM
from engine.models.loader import LoadedModel, load_model
from engine.spec_decode.mtp import MTPSpeculator
from engine.spec_decode.registry import init_speculator
from tests.support.tiny_models import make_tiny_checkpoint
from tests.support.tiny_moe import TinyMoEKind, make_tiny_moe, write_tensors
from tests.support.tiny_mtp import MoETarget, add_mtp_layer

CPU = torch.device("cpu")
BLOCK = (8, 16)
Tensors = dict[str, torch.Tensor]


def load(path: Path, **config: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **config), device=CPU)


def load_mtp(loaded: LoadedModel, **config: Any) -> MTPSpeculator:
    speculator = init_speculator(SpeculatorConfig(method="mtp", **config), loaded, CPU)
    assert isinstance(speculator, MTPSpeculator)
    return speculator


def edit_config(path: Path, **values: object) -> None:
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | values))


def edit_tensors(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(path / "model.safetensors").items()}
    edit(tensors)
    write_tensors(path, tensors)


def rename(path: Path, old: str, new: str) -> None:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[new + name.removeprefix(old)] = tensors.pop(name)

    edit_tensors(path, edit)


@pytest.fixture(params=["deepseek_v3_yarn", "glm4_moe"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint with an MTP layer that knows nothing, to spoil."""
    kind: TinyMoEKind = request.param
    path = make_tiny_moe(tmp_path / "target", kind)
    add_mtp_layer(MoETarget(path), [], steps=0)
    return path


# ---- what loads


def test_without_speculation_the_mtp_layer_is_left_out_with_one_line(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        loaded = load(path)
    count = sum(name.startswith("model.layers.3.") for name in load_file(path / "model.safetensors"))
    lines = [record.getMessage() for record in caplog.records if "MTP" in record.getMessage()]
    assert lines == [f"left out {count} tensors of the MTP layer: draft method 'mtp' reads them"]
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.3." in name])
    without = dict(load(path).model.named_parameters())
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, without[name])


def test_copies_of_embedding_and_head_may_be_missing(path: Path) -> None:
    names = ("embed_tokens.weight", "shared_head.head.weight")
    edit_tensors(path, lambda tensors: [tensors.pop(f"model.layers.3.{name}") for name in names])
    load_mtp(load(path))


def test_random_weights_draft_too(path: Path) -> None:
    (path / "model.safetensors").unlink()
    speculator = load_mtp(load(path, load_format="dummy"))
    assert all(parameter.isfinite().all() for parameter in speculator._model.parameters())


# ---- fp8


def is_quantised(name: str) -> bool:
    """Released checkpoints store only the attention's and the experts' matrices like that."""
    return any(part in name for part in (".self_attn.", ".mlp.")) and ".gate." not in name


def as_fp8(path: Path) -> Tensors:
    """Store the matrices of the layers in blocks of fp8; returns what they stand for."""
    meaning: Tensors = {}

    def edit(tensors: Tensors) -> None:
        for name in list(tensors):
            weight = tensors[name]
            meaning[name] = weight
            if weight.ndim != 2 or not is_quantised(name):
                continue
            rows, columns = (-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True))
            scales = torch.zeros(rows, columns)
            stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
            meaning[name] = torch.empty(weight.shape)
            for row in range(rows):
                for column in range(columns):
                    part = (
                        slice(row * BLOCK[0], (row + 1) * BLOCK[0]),
                        slice(column * BLOCK[1], (column + 1) * BLOCK[1]),
                    )
                    scale = float(weight[part].abs().max()) / 448
                    scales[row, column] = scale
                    stored[part] = (weight[part] / scales[row, column]).to(torch.float8_e4m3fn)
                    meaning[name][part] = stored[part].to(torch.float32) * scales[row, column]
            tensors[name] = stored
            tensors[name + "_scale_inv"] = scales

    edit_tensors(path, edit)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    edit_config(path, quantization_config=quantization)
    return meaning


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    path = make_tiny_moe(tmp_path / "fp8", "deepseek_v3_yarn", dtype="float32")
    target = MoETarget(path)
    for name, tensor in target.weights.items():
        target.weights[name] = tensor.to(torch.float64)
    add_mtp_layer(target, [], steps=0)
    edit_config(path, dtype="float32")
    return path


def test_fp8_blocks_become_the_weights_that_they_stand_for(
    fp8: Path, caplog: pytest.LogCaptureFixture
) -> None:
    meaning = as_fp8(fp8)
    with caplog.at_level(logging.INFO):
        loaded = load(fp8)
    speculator = load_mtp(loaded)
    assert any("fp8 weights become float32 while loading" in record.getMessage() for record in caplog.records)
    write_tensors(fp8, meaning)
    raw = json.loads((fp8 / "config.json").read_text())
    del raw["quantization_config"]
    (fp8 / "config.json").write_text(json.dumps(raw))
    plain = load(fp8)
    for got, wanted in (
        (loaded.model, plain.model),
        (speculator._model, load_mtp(plain)._model),
    ):
        expected = dict(wanted.named_parameters())
        for name, parameter in got.named_parameters():
            assert torch.equal(parameter, expected[name]), name


def test_weights_and_scales_may_come_in_any_order() -> None:
    weight, scales = torch.ones(3, 2).to(torch.float8_e4m3fn), torch.tensor([[2.0], [0.5]])
    items = [("a.weight_scale_inv", scales), ("a.weight", weight), ("b.weight", weight)]
    items.append(("b.weight_scale_inv", scales))
    got = dict(fp8_blocks.dequantised(items, (2, 4)))
    assert list(got) == ["a.weight", "b.weight"]
    for value in got.values():
        assert value.tolist() == [[2.0, 2.0], [2.0, 2.0], [0.5, 0.5]]


def test_a_gpu_that_cannot_hold_the_weights_is_told_before_anything_is_read(
    fp8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_fp8(fp8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    raw = json.loads((fp8 / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match=r"fp8 weights become bfloat16 .*got 0.0 GiB free on cuda, expected"
    ):
        fp8_blocks.announce_dequantisation(DeepseekForCausalLM, raw, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quantization_config.quant_method: got 'awq', expected 'fp8'"),
        ({"quant_method": "fp8"}, "quantization_config.weight_block_size: got None, expected two"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size: got \[128\]"),
    ],
)
def test_other_quantisation_is_refused(fp8: Path, quantization: dict[str, Any], message: str) -> None:
    edit_config(fp8, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        load(fp8)


def test_quantised_glm_is_refused(tmp_path: Path) -> None:
    path = make_tiny_moe(tmp_path, "glm4_moe")
    edit_config(path, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(CheckpointError, match="quantization_config: got 'compressed-tensors'"):
        load(path)


def test_fp8_without_its_other_half_or_its_config_is_named(fp8: Path) -> None:
    as_fp8(fp8)
    name = "model.layers.1.self_attn.o_proj.weight"
    edit_tensors(fp8, lambda tensors: tensors.update({name + "_scale_inv": torch.ones(1, 1)}))
    with pytest.raises(CheckpointError, match=rf"{name}.*: got scales of shape \[1, 1\], expected \[4, 3\]"):
        load(fp8)
    edit_tensors(fp8, lambda tensors: tensors.pop(name + "_scale_inv"))
    with pytest.raises(CheckpointError, match=f"without their other half: {name}$"):
        load(fp8)
    edit_config(fp8, quantization_config=None)
    with pytest.raises(CheckpointError, match="expected no fp8 without a quantization_config"):
        load(fp8)


# ---- MTP layers that are not there, or elsewhere


def test_a_target_of_another_family_has_no_mtp_layer(tmp_path: Path) -> None:
    loaded = load(make_tiny_checkpoint(tmp_path, "llama"))
    with pytest.raises(CheckpointError, match="mtp: got LlamaForCausalLM, expected a target whose family"):
        load_mtp(loaded)


@pytest.mark.parametrize("count", [0, 2])
def test_none_or_several_mtp_layers_are_refused(path: Path, count: int) -> None:
    if count == 0:
        edit_tensors(
            path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.3." in name]
        )
    edit_config(path, num_nextn_predict_layers=count)
    loaded = load(path)
    with pytest.raises(CheckpointError, match=f"num_nextn_predict_layers: got {count}, expected 1 MTP layer"):
        load_mtp(loaded)


def test_a_checkpoint_without_the_announced_layer_is_refused(path: Path) -> None:
    edit_tensors(path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".layers.3." in name])
    loaded = load(path)
    with pytest.raises(
        CheckpointError, match=r"has no tensors model.layers.3.\*, expected those of the MTP layer"
    ):
        load_mtp(loaded)


def test_a_layer_at_another_index_is_named(path: Path) -> None:
    rename(path, "model.layers.3.", "model.layers.4.")
    with pytest.raises(
        CheckpointError, match=r"model.layers.4.\S+: got layer 4, expected 0..3: num_hidden_layers 3"
    ):
        load(path)


def test_an_mtp_layer_that_the_config_does_not_announce_is_named(path: Path) -> None:
    edit_config(path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"got layer 3, expected 0..2: .* num_nextn_predict_layers 0"):
        load(path)


def test_missing_and_unknown_tensors_of_the_layer_are_named(path: Path) -> None:
    rename(path, "model.layers.3.enorm.", "model.layers.3.norm_e.")
    loaded = load(path)
    with pytest.raises(
        CheckpointError, match=r"unknown: model.layers.3.norm_e.weight; missing: model.layers.3.enorm.w"
    ):
        load_mtp(loaded)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_that_differs_from_the_targets_is_refused(path: Path, name: str) -> None:
    edit_tensors(path, lambda tensors: tensors[f"model.layers.3.{name}"].add_(1.0))
    loaded = load(path)
    with pytest.raises(CheckpointError, match=f"model.layers.3.{name}: got other values than the target's"):
        load_mtp(loaded)


def test_the_method_takes_no_checkpoint_and_no_options(path: Path) -> None:
    loaded = load(path)
    with pytest.raises(ConfigError, match="speculator mtp: got model=elsewhere, expected none"):
        load_mtp(loaded, model="elsewhere")
    with pytest.raises(ConfigError, match="speculator mtp: got option 'layer'"):
        load_mtp(loaded, options={"layer": "61"})


# ---- configs that would be computed wrongly


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax', expected 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: got 'greedy', expected 'noaux_tc'"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: got 'noaux_tc', expected 'greedy' or"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: got true, expected false"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: got 'sigmoid', expected 'softmax'"),
        ("deepseek_v3", {"n_group": 3}, "n_group: got 3, expected a divisor of n_routed_experts 8"),
        ("deepseek_v3", {"n_group": 8}, "that leaves at least 2 a group"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group: got 5, expected at most n_group 4"),
        (
            "deepseek_v3",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok: got 5, expected at most the 4 experts",
        ),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias: got true, expected false"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim: got 7, expected an even number"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank: got None, expected a positive whole number"),
        ("deepseek_v3", {"tie_word_embeddings": True}, "tie_word_embeddings: got true, expected false"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: got 2, expected 1"),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: got 1.5"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace: got -1"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    kind: TinyMoEKind, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_tiny_moe(tmp_path, kind)
    edit_config(path, **values)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_a_misshapen_rotary_projection_is_named(tmp_path: Path) -> None:
    path = make_tiny_moe(tmp_path, "deepseek_v3_yarn")
    name = "model.layers.0.self_attn.q_b_proj.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(79, 24)}))
    with pytest.raises(CheckpointError, match=rf"{name} \(got shape \[79, 24\], expected \[80, 24\]\)"):
        load(path)
