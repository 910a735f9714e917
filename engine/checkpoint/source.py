"""One seam for where a checkpoint comes from. No torch here: the frontend reads configs through it.

A source knows files and formats; it does not know models, and gives tensors under the names of the Hugging
Face format whatever the file calls them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError


class CheckpointSource(ABC):
    """Raises CheckpointError from every method when files are missing or corrupt."""

    path: Path  # the directory, or the .gguf file: where the tokenizer is too

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json, or what takes its place."""

    @abstractmethod
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json; empty when there is none."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Every tensor once, as (name, torch tensor or numpy array)."""


def eos_token_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a sequence, of both files and the decoder's part of a multimodal config together, sorted. Each
    may hold an int, a list or null; raises CheckpointError for anything else."""
    ids: set[int] = set()
    for values in (config, config.get("text_config"), generation_config):
        found = values.get("eos_token_id") if isinstance(values, Mapping) else None
        listed = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in listed):
            raise CheckpointError(f"eos_token_id: got {found!r}, expected a token id or a list of them")
        ids.update(listed)
    return tuple(sorted(ids))
