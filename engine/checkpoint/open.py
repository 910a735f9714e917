"""Decides what a model name stands for: a directory, a GGUF file, or a repository on the hub."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.gguf_checkpoint import GGUFCheckpoint
from engine.checkpoint.safetensors_directory import SafetensorsDirectory
from engine.checkpoint.source import CheckpointSource
from engine.config import ModelConfig
from engine.errors import CheckpointError


def open_checkpoint(config: ModelConfig) -> CheckpointSource:
    """The source that `config` names; no weights are read. Raises CheckpointError."""
    path = Path(config.model).expanduser()
    if path.is_dir():
        return _open_directory(path, config.load_format)
    if path.is_file():
        return _open_file(path, config.load_format)
    if path.suffix == ".gguf" or not _looks_like_hub_id(config.model):
        raise CheckpointError(f"{config.model}: no such file or directory")
    if config.load_format == "gguf":
        raise CheckpointError(f"{config.model}: load format gguf reads local files only, and there is none")
    from engine.checkpoint.hub import HubCheckpoint  # the hub's client takes a moment to import

    return HubCheckpoint(config.model, config.revision)


def _open_directory(path: Path, load_format: str) -> CheckpointSource:
    gguf_files = sorted(path.glob("*.gguf"))
    has_config = (path / "config.json").exists()
    if load_format == "gguf" or (load_format != "safetensors" and not has_config and gguf_files):
        if len(gguf_files) != 1:
            names = ", ".join(file.name for file in gguf_files) or "none"
            raise CheckpointError(
                f"{path}: got these .gguf files: {names}; expected exactly one, or name the file"
            )
        return GGUFCheckpoint(gguf_files[0])
    return SafetensorsDirectory(path)


def _open_file(path: Path, load_format: str) -> CheckpointSource:
    if path.suffix != ".gguf" or load_format == "safetensors":
        raise CheckpointError(
            f"{path}: got a file, expected a directory with config.json and weights, or a .gguf file"
        )
    return GGUFCheckpoint(path)


def _looks_like_hub_id(name: str) -> bool:
    """A name, or owner/name. What starts like a path never goes to the network."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1
