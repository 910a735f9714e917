"""Sampled answers on disk: gzip-compressed JSON lines in numbered files, each written at once and whole.

A run that is cut off loses the answers of its last, unfinished file and nothing else.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of a model. Token ids are the model's own: tokenising the text again may give others."""

    kind: str  # of the prompt
    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]  # with the end token, if there is one
    temperature: float
    finish: str  # "stop", "length", or "cut": the run ended before the answer


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Sample)


class SampleWriter:
    """Writes `NAME-000.jsonl.gz`, `NAME-001.jsonl.gz`, ...; goes on behind the files that are there."""

    def __init__(self, folder: Path, name: str, samples_per_file: int = 1000) -> None:
        self._folder = folder
        self._name = name
        self._limit = samples_per_file
        self._open: list[Sample] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._next = len(list(folder.glob(f"{name}-*.jsonl.gz")))

    @property
    def num_files(self) -> int:
        """Files of this name that there are."""
        return self._next

    def add(self, sample: Sample) -> None:
        self._open.append(sample)
        if len(self._open) >= self._limit:
            self.flush()

    def flush(self) -> None:
        """Write what is open, if anything."""
        if not self._open:
            return
        path = self._folder / f"{self._name}-{self._next:03d}.jsonl.gz"
        partial = path.with_suffix(".partial")
        data = b"\n".join(_ENCODER.encode(sample) for sample in self._open) + b"\n"
        partial.write_bytes(gzip.compress(data, compresslevel=5, mtime=0))
        partial.rename(path)
        self._next += 1
        self._open.clear()


def read_samples(folders: Iterable[Path]) -> Iterator[Sample]:
    """All samples of all folders, in the order of file names. Raises FileNotFoundError for a folder without any."""
    for folder in folders:
        paths = sorted(folder.glob("*.jsonl.gz"))
        if not paths:
            raise FileNotFoundError(
                f"{folder}: got no *.jsonl.gz, expected sampled text (python -m tools.train sample)"
            )
        for path in paths:
            with gzip.open(path, "rb") as file:
                for line in file:
                    yield _DECODER.decode(line)
