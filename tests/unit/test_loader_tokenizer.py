"""Where a checkpoint's tokenizer is found, and that frontend and engine see the same one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.checkpoint import tokenizer_files
from engine.checkpoint.tokenizer_files import load_hf_tokenizer, tokenizer_json
from engine.config import ModelConfig
from engine.errors import CheckpointError
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TINY_EOS_TOKEN_ID, make_tiny_checkpoint, make_tiny_tokenizer

TEXT = "the lazy dog , naïve 🙂 東京 !"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype="float32")
    return make_tiny_tokenizer(path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(path: Path, **options: Any) -> ModelConfig:
    return ModelConfig(model=str(path), **options)


def test_a_directory_s_tokenizer_is_read_in_place(directory: Path, cache: Path) -> None:
    assert tokenizer_json(config(directory)) == directory / "tokenizer.json"
    tokenizer = load_hf_tokenizer(config(directory))
    assert tokenizer.eos_token_id == TINY_EOS_TOKEN_ID
    assert not cache.exists()


def test_text_comes_back_with_its_spaces(directory: Path) -> None:
    tokenizer = load_hf_tokenizer(config(directory))
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_a_gguf_file_has_the_tokenizer_it_was_made_from(tmp_path: Path, directory: Path) -> None:
    gguf = config(write_tiny_gguf(tmp_path / "model.gguf", directory))
    converted, expected = load_hf_tokenizer(gguf), load_hf_tokenizer(config(directory))
    messages = [{"role": "user", "content": TEXT}]
    assert converted.apply_chat_template(messages, tokenize=False) == expected.apply_chat_template(
        messages, tokenize=False
    )
    for text in (TEXT, "<|im_start|>user\nhi<|im_end|>"):
        token_ids = expected(text)["input_ids"]
        assert converted(text)["input_ids"] == token_ids
        assert Tokenizer.from_file(str(tokenizer_json(gguf))).encode(text).ids == token_ids
    assert converted.eos_token_id == TINY_EOS_TOKEN_ID


def test_the_kept_conversion_is_what_the_frontend_uses(tmp_path: Path) -> None:
    """transformers converts Qwen's tokenizer without the normalisation that it adds when it reads one."""
    directory = make_tiny_tokenizer(make_tiny_checkpoint(tmp_path / "qwen2", "qwen2", dtype="float32"))
    gguf = config(write_tiny_gguf(tmp_path / "model.gguf", directory))
    kept = Tokenizer.from_file(str(tokenizer_json(gguf)))
    used = load_hf_tokenizer(gguf).backend_tokenizer
    assert kept.to_str() == used.to_str()
    decomposed = "nai\u0308ve"
    assert kept.encode(decomposed).ids == used.encode(decomposed).ids == used.encode("na\u00efve").ids


def test_a_conversion_is_kept_until_the_file_changes(tmp_path: Path, directory: Path, cache: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "model.gguf", directory)
    first = tokenizer_json(config(gguf))
    stamp = first.stat().st_mtime_ns
    assert first.is_relative_to(cache)
    assert tokenizer_json(config(gguf)).stat().st_mtime_ns == stamp
    write_tiny_gguf(gguf, directory, metadata={"general.description": "another"})
    assert tokenizer_json(config(gguf)) != first


def test_of_two_conversions_at_once_the_first_stays(
    tmp_path: Path, directory: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ours is under way, another process puts its own in place."""
    gguf = write_tiny_gguf(tmp_path / "model.gguf", directory)
    target = tokenizer_json(config(gguf)).parent
    other = target.rename(tmp_path / "other")

    def convert(*args: Any, **options: Any) -> Any:
        tokenizer = from_pretrained(*args, **options)
        shutil.copytree(other, target, dirs_exist_ok=True)
        (target / "of-the-other").touch()
        return tokenizer

    from_pretrained = tokenizer_files._from_pretrained
    monkeypatch.setattr(tokenizer_files, "_from_pretrained", convert)
    assert tokenizer_json(config(gguf)).parent == target
    assert (target / "of-the-other").exists()
    assert list((cache / "tokenizers").iterdir()) == [target]


def test_another_tokenizer_may_be_named(tmp_path: Path, directory: Path) -> None:
    bare = make_tiny_checkpoint(tmp_path / "bare", "llama", dtype="float32")
    assert tokenizer_json(config(bare, tokenizer=str(directory))) == directory / "tokenizer.json"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    bare = make_tiny_checkpoint(tmp_path / "bare", "llama", dtype="float32")
    for read in (tokenizer_json, load_hf_tokenizer):
        with pytest.raises(CheckpointError, match=r"bare: no tokenizer: expected tokenizer\.json"):
            read(config(bare))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 3}', '{"model": {"type": "BPE"}}'])
@pytest.mark.parametrize("with_config", [False, True])
def test_a_corrupt_tokenizer_is_named(
    tmp_path: Path, directory: Path, content: str, with_config: bool
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    if with_config:
        shutil.copy(directory / "tokenizer_config.json", tmp_path)
    with pytest.raises(CheckpointError, match="not a loadable tokenizer"):
        load_hf_tokenizer(config(tmp_path))


def test_a_gguf_file_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    bare = make_tiny_checkpoint(tmp_path / "bare", "llama", dtype="float32")
    with pytest.raises(CheckpointError, match="not a loadable tokenizer"):
        tokenizer_json(config(write_tiny_gguf(tmp_path / "model.gguf", bare)))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, directory: Path, cache: Path) -> None:
    gguf = config(write_tiny_gguf(tmp_path / "model.gguf", directory))
    cache.write_text("no directory")
    with pytest.raises(
        CheckpointError, match=r"the tokenizer of model\.gguf cannot be kept there: .*SLIPSTREAM_CACHE"
    ):
        load_hf_tokenizer(gguf)
