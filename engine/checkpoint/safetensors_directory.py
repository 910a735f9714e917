"""Checkpoints in the Hugging Face layout: a directory with config.json and safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.checkpoint.source import CheckpointSource
from engine.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsDirectory(CheckpointSource):
    """A local directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> dict[str, Any]:
        return read_json_object(self.path / "config.json")

    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return read_json_object(path) if path.exists() else {}

    def tensors(self) -> Iterator[tuple[str, Any]]:
        for file in self._weight_files():
            # "pt": safetensors itself makes torch tensors, memory-mapped; numpy has no bfloat16.
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a mapping
                        yield name, tensors.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from None

    def _weight_files(self) -> list[Path]:
        index_path = self.path / INDEX_FILE
        if index_path.exists():
            weight_map = read_json_object(index_path).get("weight_map")
            files = weight_map.values() if isinstance(weight_map, dict) else ()
            if not files or not all(isinstance(name, str) for name in files):
                raise CheckpointError(
                    f"{index_path}: weight_map: got {weight_map!r}, expected an object of file names"
                )
            return [self.path / name for name in sorted(set(files))]
        single = self.path / SINGLE_FILE
        if single.exists():
            return [single]
        raise CheckpointError(
            f"{self.path}: no weights: expected {SINGLE_FILE}, {INDEX_FILE} or one .gguf file"
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError when it cannot be read, or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable JSON file: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: got a JSON {type(value).__name__}, expected an object")
    return value
