"""Reads the layout of a GGUF file: metadata and where each tensor lies. Knows nothing of models.

The reader of the `gguf` package builds a numpy array for every vocabulary entry, which takes seconds; here
arrays are stepped over, since neither weights nor config need them. Format: ggml's docs/gguf.md, versions 2
and 3, little endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from engine.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALAR_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class GGUFTensorInfo:
    """`shape` has the slowest dimension first (the file has it last)."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """metadata: key -> scalar or string; arrays are left out (`find_strings` looks into one). tensors: name -> where
    it is.
    """

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError for a file that is missing, truncated or not GGUF."""
        self.path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
            self._cursor = _Cursor(self._bytes.data)
            self._read_header()
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from None

    def _read_header(self) -> None:
        cursor = self._cursor
        if (magic := bytes(cursor.take(4))) != MAGIC:
            raise ValueError(f"it starts with {magic!r}, expected {MAGIC!r}")
        version, num_tensors, num_entries = cursor.unpack("<IQQ")
        if version not in SUPPORTED_VERSIONS:
            raise ValueError(f"version: got {version}, expected one of {SUPPORTED_VERSIONS}")
        self.metadata: dict[str, Any] = {}
        self._array_positions: dict[str, int] = {}
        for _ in range(num_entries):
            key = cursor.string()
            (value_type,) = cursor.unpack("<I")
            if value_type == _ARRAY:
                self._array_positions[key] = cursor.position
                cursor.skip_array()
            else:
                self.metadata[key] = cursor.value(value_type)
        infos = [self._read_tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment: got {alignment!r}, expected a positive whole number")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {info.name: self._placed(info, data_start) for info in infos}

    def _read_tensor_info(self) -> GGUFTensorInfo:
        name = self._cursor.string()
        (num_dimensions,) = self._cursor.unpack("<I")
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name}: got {num_dimensions} dimensions, expected at most {MAX_DIMENSIONS}")
        shape = tuple(reversed(self._cursor.unpack(f"<{num_dimensions}Q")))
        type_id, offset = self._cursor.unpack("<IQ")
        quantization = GGMLQuantizationType(type_id)
        block_values, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block_values:
            raise ValueError(
                f"{name}: got shape {list(shape)}, expected rows of whole {block_values}-value blocks"
            )
        num_bytes = math.prod(shape) // block_values * block_bytes
        return GGUFTensorInfo(name, shape, quantization, offset, num_bytes)

    def _placed(self, info: GGUFTensorInfo, data_start: int) -> GGUFTensorInfo:
        offset = data_start + info.offset
        if offset + info.num_bytes > len(self._bytes):
            end = offset + info.num_bytes
            raise ValueError(
                f"{info.name} ends at byte {end}, but the file has {len(self._bytes)} (truncated?)"
            )
        return GGUFTensorInfo(info.name, info.shape, info.quantization, offset, info.num_bytes)

    def find_strings(self, key: str, wanted: Collection[str]) -> dict[str, int]:
        """Which of the wanted strings the array `key` of the metadata holds, and at which index. Raises
        CheckpointError for an array of something else.
        """
        if key not in self._array_positions:
            return {}
        entries = _Cursor(self._bytes.data, self._array_positions[key]).string_array()
        by_bytes = {text.encode(): text for text in wanted}
        try:
            return {by_bytes[entry]: i for i, entry in enumerate(entries) if entry in by_bytes}
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {key}: {error}") from None

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor, dequantised to float32. Raises CheckpointError for a quantisation that is not known."""
        info = self.tensors[name]
        raw = self._bytes[info.offset : info.offset + info.num_bytes]
        try:
            values = dequantize(raw.reshape(*info.shape[:-1], -1), info.quantization)
        except NotImplementedError:
            got = info.quantization.name
            raise CheckpointError(
                f"{self.path}: {name}: got quantisation {got}, which cannot be read"
            ) from None
        return np.require(values, np.float32, ["W"]).reshape(
            info.shape
        )  # float32 is a read-only view until here


class _Cursor:
    """Reads forward through the header. Raises ValueError at the end of the file."""

    def __init__(self, data: memoryview, position: int = 0) -> None:
        self._data = data
        self.position = position

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def take(self, count: int) -> memoryview:
        start = self.position
        self.skip(count)
        return self._data[start : self.position]

    def skip(self, count: int) -> None:
        self.position += count
        if self.position > len(self._data):
            raise ValueError(f"it ends at byte {len(self._data)}, inside the header")

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        return str(self.take(length), "utf-8")

    def value(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type not in _SCALAR_FORMATS:
            raise ValueError(f"unknown value type {value_type}")
        return self.unpack(_SCALAR_FORMATS[value_type])[0]

    def string_array(self) -> Iterator[bytes]:
        """Its entries as UTF-8."""
        value_type, length = self.unpack("<IQ")
        if value_type != _STRING:
            raise ValueError(f"got an array of type {value_type}, expected strings")
        for _ in range(length):
            (num_bytes,) = self.unpack("<Q")
            yield bytes(self.take(num_bytes))

    def skip_array(self) -> None:
        value_type, length = self.unpack("<IQ")
        if value_type in _SCALAR_FORMATS:
            self.skip(length * struct.calcsize(_SCALAR_FORMATS[value_type]))
        elif value_type == _STRING:
            for _ in range(length):
                (num_bytes,) = self.unpack("<Q")
                self.skip(num_bytes)
        else:
            raise ValueError(f"unknown array element type {value_type}")
