"""A table from names to objects: models, attention backends, draft methods. Knows nothing of what it holds.

Tables are written out where they are defined; nothing registers itself when it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from engine.errors import ConfigError, EngineError

T = TypeVar("T")


class Registry(Generic[T]):
    """`kind` names the entries in messages; `error` is raised for a name that is not there."""

    def __init__(
        self, kind: str, entries: Mapping[str, T] | None = None, *, error: type[EngineError] = ConfigError
    ) -> None:
        self._kind = kind
        self._entries: dict[str, T] = dict(entries or {})
        self._error = error

    def register(self, name: str, entry: T) -> None:
        assert name not in self._entries, f"{self._kind} {name!r} is registered already"
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """The entry. Raises `error` listing the known names."""
        if name not in self._entries:
            raise self._error(f"{self._kind}: got {name!r}, expected one of {', '.join(self.names())}")
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))
