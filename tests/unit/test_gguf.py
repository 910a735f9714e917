"""GGUF files: the same model as the safetensors they were made from, and clear words for broken ones."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from engine.checkpoint.gguf_checkpoint import GGUFCheckpoint
from engine.checkpoint.gguf_file import GGUFFile
from engine.config import ModelConfig
from engine.errors import CheckpointError
from engine.models.gemma3 import Gemma3ForCausalLM
from engine.models.gemma_config import FULL, SLIDING
from engine.models.loader import LoadedModel, load_model
from tests.support.gguf_reference import load_gguf_reference
from tests.support.paged_forward import PagedForward
from tests.support.smollm2 import smollm2_gguf, smollm2_reference
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import (
    TINY_EOS_TOKEN_ID,
    TINY_MODEL_TYPES,
    TinyModelType,
    make_tiny_checkpoint,
    make_tiny_tokenizer,
)

CPU = torch.device("cpu")


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(path), **options), device=CPU)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype="float32")


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("model_type", TINY_MODEL_TYPES)
def test_weights_equal_those_of_the_directory(tmp_path: Path, model_type: TinyModelType, tie: bool) -> None:
    directory = make_tiny_checkpoint(tmp_path / "directory", model_type, dtype="float32", tie=tie)
    expected = load(directory)
    loaded = load(write_tiny_gguf(tmp_path / "model.gguf", directory))
    assert loaded.architecture == expected.architecture
    assert loaded.eos_token_ids == (TINY_EOS_TOKEN_ID,)
    assert loaded.dtype == torch.float32
    assert loaded.model.max_position_embeddings == expected.model.max_position_embeddings
    expected_parameters = dict(expected.model.named_parameters())
    # Gemma 3 files hold norm weights plus one, rounded.
    tolerance = torch.finfo(torch.float32).eps if model_type == "gemma3_text" else 0.0
    for name, parameter in loaded.model.named_parameters():
        assert (parameter - expected_parameters.pop(name)).abs().max() <= tolerance, name
    assert not expected_parameters


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_weights_equal_those_that_transformers_reads(
    tmp_path: Path, llama: Path, name: str
) -> None:
    path = write_tiny_gguf(
        tmp_path / "model.gguf",
        llama,
        quantization=GGMLQuantizationType[name],
        metadata={"llama.vocab_size": 320, "general.name": "tiny", "llama.rope.dimension_count": 8},
    )
    prompt = list(range(3, 60))
    model = load(path).model
    forward = PagedForward(model, num_requests=1, max_tokens=64, block_size=16, dtype=torch.float32)
    with torch.inference_mode():
        expected = load_gguf_reference(path)(torch.tensor([prompt])).logits[0]
    assert (forward.step([(0, prompt)])[0] - expected).abs().max() < 1e-4


def test_a_directory_of_one_gguf_file_is_that_file(tmp_path: Path, llama: Path) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", llama)
    assert load(tmp_path).architecture == "LlamaForCausalLM"
    write_tiny_gguf(tmp_path / "other.gguf", llama)
    with pytest.raises(CheckpointError, match=r"model\.gguf, other\.gguf; expected exactly one"):
        load(tmp_path)


def test_rope_scaling_is_read(tmp_path: Path, llama: Path) -> None:
    path = write_tiny_gguf(
        tmp_path / "model.gguf",
        llama,
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 128,
        },
    )
    assert GGUFCheckpoint(path).config()["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }


def test_gemma_3_rotation_pattern_and_softcap_are_read(tmp_path: Path) -> None:
    directory = make_tiny_checkpoint(tmp_path / "directory", "gemma3_text", dtype="float32")
    metadata = {
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.freq_base_swa": 5000.0,
        "gemma3.final_logit_softcapping": 30.0,
        "gemma3.attention.sliding_window_pattern": 2,
    }
    model = load(write_tiny_gguf(tmp_path / "model.gguf", directory, metadata=metadata)).model
    assert isinstance(model, Gemma3ForCausalLM)
    full, sliding = (model.config.rope[kind] for kind in (FULL, SLIDING))
    assert (full.rope_type, full.theta, full.scaling["factor"]) == ("linear", 1e6, 8.0)
    assert (sliding.rope_type, sliding.theta) == ("default", 5000.0)
    assert model.config.layer_types == (SLIDING, FULL, SLIDING)
    assert model.config.final_softcap == 30.0


def test_the_end_of_a_turn_ends_an_answer_too(tmp_path: Path, llama: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    loaded = load(write_tiny_gguf(tmp_path / "model.gguf", llama, metadata=metadata))
    assert loaded.eos_token_ids == (TINY_EOS_TOKEN_ID, 5, 7)


@pytest.mark.parametrize("name", ["<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_end_tokens_without_an_entry_are_found_by_name(tmp_path: Path, name: str) -> None:
    """Files of Qwen, Gemma and Llama 3 name one end token, though their models end answers with two."""
    directory = make_tiny_tokenizer(make_tiny_checkpoint(tmp_path / "llama", "llama", dtype="float32"))
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        name if token_id == 40 else token: token_id for token, token_id in vocabulary.items()
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    end_of_text = vocabulary["<|endoftext|>"]
    loaded = load(write_tiny_gguf(tmp_path / "model.gguf", directory))
    assert loaded.eos_token_ids == (end_of_text, TINY_EOS_TOKEN_ID, 40)


def test_a_vocabulary_that_is_no_list_of_strings_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", [1, 2])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"model\.gguf: tokenizer\.ggml\.tokens: got an array of type \d+"
    ):
        GGUFCheckpoint(path).generation_config()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"general\.architecture: got 'mamba', expected one of llama"),
        ({"llama.block_count": None}, r"llama\.block_count: missing in the metadata"),
        ({"llama.rope.dimension_count": 4}, r"rope\.dimension_count: got 4, expected 8"),
        ({"split.count": 3}, r"split\.count: got 3 files"),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale: got 0\.5, expected no such entry"),
        ({"llama.rope.scaling.attn_factor": 1.5}, r"scaling\.attn_factor: got 1\.5, expected no such entry"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(
    tmp_path: Path, llama: Path, metadata: dict[str, Any], message: str
) -> None:
    architecture = metadata.pop("general.architecture", None)
    path = write_tiny_gguf(tmp_path / "model.gguf", llama, metadata=metadata)
    if architecture is not None:
        path.write_bytes(path.read_bytes().replace(b"llama", architecture.encode(), 1))
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_llama_3_frequency_factors_are_refused(tmp_path: Path, llama: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(4, dtype=np.float32)}
    path = write_tiny_gguf(tmp_path / "model.gguf", llama, extra_tensors=factors)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight: Llama 3 rope scaling"):
        load(path)


def test_an_unknown_tensor_is_named_as_the_file_names_it(tmp_path: Path, llama: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), dtype=np.float32)}
    path = write_tiny_gguf(tmp_path / "model.gguf", llama, extra_tensors=extra)
    with pytest.raises(CheckpointError, match=r"unknown: blk\.0\.ffn_gate_inp\.weight"):
        load(path)


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, llama: Path) -> None:
    content = write_tiny_gguf(tmp_path / "model.gguf", llama).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [1, 3, 4, 10, 24, 30, *range(100, 4000, 97), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: not a readable GGUF file"):
            GGUFFile(path)


def test_a_damaged_header_is_refused_or_harmless(tmp_path: Path, llama: Path) -> None:
    content = write_tiny_gguf(tmp_path / "model.gguf", llama).read_bytes()
    path = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[rng.randrange(3000)] = rng.choice([0, 1, 0x7F, 0xFF])
        path.write_bytes(damaged)
        try:
            load(path)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a readable GGUF file"),
        (b"PK\x03\x04" + bytes(64), "it starts with"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(64), "version: got 9, expected one of"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_smollm2_logits_equal_transformers() -> None:
    """The real model: 30 layers, 9 heads on 3 KV heads, Q4_1 and Q8_0 weights, tied embeddings."""
    path = smollm2_gguf()
    model = load(path, dtype="float32").model
    reference = smollm2_reference()
    prompt = torch.randint(0, model.vocab_size, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    forward = PagedForward(model, num_requests=1, max_tokens=64, block_size=16, dtype=torch.float32)
    logits = torch.cat([forward.step([(0, prompt[:47])])[0], forward.step([(0, prompt[47:])])[0]])
    assert (logits - expected).abs().max() < 1e-3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
