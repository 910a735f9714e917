"""What a gateway has to know of the served model: it tokenizes, renders chats and makes the text itself.

The files of the tokenizer travel as one zip, which is the same, byte by byte, on every replica of a model. Knows no
protocol.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.open import open_checkpoint
from engine.checkpoint.tokenizer_files import tokenizer_json
from engine.config import ModelConfig
from server.convert import sampling_defaults

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_OLDEST = (1980, 1, 1, 0, 0, 0)  # the time of every entry


@dataclass(frozen=True)
class GatewayModel:
    """Of one checkpoint."""

    path: str  # as the server was told
    tokenizer_path: str  # the same; empty: with the model
    model_type: str
    architectures: tuple[str, ...]
    bos_token_id: int  # 0 where there is none, as in the protocol
    pad_token_id: int
    sampling_defaults: Mapping[str, float]
    tokenizer_archive: bytes  # zip
    tokenizer_sha256: str  # of the archive, hexadecimal


def read_gateway_model(config: ModelConfig) -> GatewayModel:
    """Takes up to a second for a large tokenizer. Raises CheckpointError."""
    checkpoint = open_checkpoint(config)
    model_config, generation_config = checkpoint.config(), checkpoint.generation_config()
    archive = _archive(
        tokenizer_json(config).parent,
        {"config.json": model_config, "generation_config.json": generation_config},
    )
    return GatewayModel(
        path=config.model,
        tokenizer_path=config.tokenizer or "",
        model_type=str(model_config.get("model_type", "")),
        architectures=tuple(model_config.get("architectures") or ()),
        bos_token_id=_token_id(model_config, "bos_token_id"),
        pad_token_id=_token_id(model_config, "pad_token_id"),
        sampling_defaults=sampling_defaults(generation_config),
        tokenizer_archive=archive,
        tokenizer_sha256=hashlib.sha256(archive).hexdigest(),
    )


def _archive(directory: Path, documents: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The tokenizer's files, and these as JSON. Never weights."""
    contents = {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
    for name in _TOKENIZER_FILES:
        if (directory / name).is_file():
            contents[name] = (directory / name).read_bytes()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(zipfile.ZipInfo(name, _OLDEST), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _token_id(config: Mapping[str, Any], name: str) -> int:
    """Models with several parts keep those of the text in a config of its own."""
    text_config = config.get("text_config") or {}
    value = config.get(name, text_config.get(name))
    return value if isinstance(value, int) else 0
