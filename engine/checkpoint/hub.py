"""Checkpoints on the Hugging Face hub: fetched into the hub's own cache, then read like a local directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine.checkpoint.safetensors_directory import SafetensorsDirectory
from engine.errors import CheckpointError

# Config, tokenizer and chat template. Weights come when tensors are asked for: the frontend fetches none.
METADATA_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt"]
WEIGHT_PATTERNS = ["*.safetensors"]


class HubCheckpoint(SafetensorsDirectory):
    """A repository id such as "Qwen/Qwen3-0.6B". Works offline once it is in the hub's cache."""

    def __init__(self, repo_id: str, revision: str | None) -> None:
        self._repo_id = repo_id
        self._revision = revision
        super().__init__(self._download(METADATA_PATTERNS))

    def tensors(self) -> Iterator[tuple[str, Any]]:
        self._download(METADATA_PATTERNS + WEIGHT_PATTERNS)
        return super().tensors()

    def _download(self, patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(self._repo_id, revision=self._revision, allow_patterns=patterns))
        except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"{self._repo_id}: neither a local path nor to be had from the model hub: {reason}"
            ) from None
