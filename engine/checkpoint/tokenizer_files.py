"""Finds the tokenizer of a checkpoint, for the frontend (transformers) and for the engine (tokenizers).

Both must see the same tokenizer, so both read the same directory. A GGUF file holds its vocabulary in a
form of its own: it is converted once, which takes seconds, and kept in the cache folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine.checkpoint.open import open_checkpoint
from engine.config import ModelConfig
from engine.errors import CheckpointError

TOKENIZER_FILE = "tokenizer.json"


def tokenizer_json(config: ModelConfig) -> Path:
    """A file that `tokenizers.Tokenizer.from_file` loads. Raises CheckpointError when there is none."""
    path = tokenizer_directory(config) / TOKENIZER_FILE
    if not path.exists():
        raise CheckpointError(
            f"{path.parent}: no tokenizer: expected {TOKENIZER_FILE}; name another with --tokenizer"
        )
    return path


def load_hf_tokenizer(config: ModelConfig) -> Any:
    """The transformers tokenizer (PreTrainedTokenizerBase) with its chat template. Raises CheckpointError."""
    return _from_pretrained(tokenizer_json(config).parent)


def tokenizer_directory(config: ModelConfig) -> Path:
    """The directory with the tokenizer's files; that of a GGUF file is made when it is not there."""
    source = open_checkpoint(config if config.tokenizer is None else ModelConfig(model=config.tokenizer))
    return _converted(source.path) if source.path.is_file() else source.path


def cache_directory() -> Path:
    """Where slipstream keeps what it can make again: $SLIPSTREAM_CACHE, or ~/.cache/slipstream."""
    return Path(os.environ.get("SLIPSTREAM_CACHE") or "~/.cache/slipstream").expanduser()


def _converted(gguf_path: Path) -> Path:
    """The cached conversion of a GGUF file's tokenizer, keyed by what changes when the file does."""
    stat = gguf_path.stat()
    target = cache_directory() / "tokenizers" / f"{gguf_path.stem}-{stat.st_size}-{stat.st_mtime_ns}"
    if target.exists():
        return target
    tokenizer = _from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=target.parent))
        tokenizer.save_pretrained(work)
        # What transformers reads back may normalise where the first did not: keep what the frontend will use.
        _from_pretrained(work).save_pretrained(work)
    except OSError as error:
        raise CheckpointError(
            f"{target.parent}: the tokenizer of {gguf_path.name} cannot be kept there: {error}; name another folder "
            "with SLIPSTREAM_CACHE"
        ) from None
    # Frontend and engine may convert at the same time: each makes its own folder, and the first rename stays.
    try:
        work.rename(target)
    except OSError:
        shutil.rmtree(work)
    return target


def _from_pretrained(directory: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer  # takes seconds to import, and only a start needs it

    try:
        # Clean-up of spaces would change text that was already streamed.
        return AutoTokenizer.from_pretrained(directory, clean_up_tokenization_spaces=False, **options)
    except Exception as error:  # tokenizers raises nothing narrower for a file that it cannot parse
        raise CheckpointError(f"{directory}: not a loadable tokenizer: {error}") from None
