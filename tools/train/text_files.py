"""Reads training text: plain or xz-compressed UTF-8 files, documents separated by a marker line."""

from __future__ import annotations

import lzma
from collections.abc import Iterable
from pathlib import Path

SEPARATOR = "<|endoftext|>"


def read_documents(paths: Iterable[Path]) -> list[str]:
    """All documents of all files, in order, without the empty ones. Raises OSError."""
    documents = []
    for path in paths:
        opener = lzma.open if path.suffix == ".xz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            documents += [text for part in file.read().split(SEPARATOR) if (text := part.strip())]
    return documents
