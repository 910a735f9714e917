"""Typed access to the metadata of a GGUF file's architecture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import CheckpointError


class ArchitectureMetadata:
    """The metadata under "<architecture>."."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._architecture = architecture
        self._metadata = metadata

    def count(self, key: str, default: int | None = None) -> int:
        value = self.required(key) if default is None else self.optional(key, default)
        if not isinstance(value, int) or value < 1:
            raise CheckpointError(
                f"{self._architecture}.{key}: got {value!r}, expected a positive whole number"
            )
        return value

    def required(self, key: str) -> Any:
        full_key = f"{self._architecture}.{key}"
        if full_key not in self._metadata:
            raise CheckpointError(f"{full_key}: missing in the metadata")
        return self._metadata[full_key]

    def optional(self, key: str, default: Any) -> Any:
        return self._metadata.get(f"{self._architecture}.{key}", default)

    def refuse(self, keys: Iterable[str]) -> None:
        """Raises CheckpointError for the first of them that is there."""
        for key in keys:
            if (full_key := f"{self._architecture}.{key}") in self._metadata:
                raise CheckpointError(f"{full_key}: got {self._metadata[full_key]!r}, expected no such entry")
