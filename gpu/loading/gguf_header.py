"""The header of a GGUF file: metadata and the list of tensors.

The ``gguf`` library's own reader makes several NumPy views per vocabulary entry, which takes seconds
for 50,000 tokens and their merges; this one reads the same layout (GGUF specification, versions 2
and 3, little-endian) in one pass. Value and tensor types are the library's.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from ...errors import UnsupportedModelError, WeightsError

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One entry of the tensor list.

    Attributes:
        name: GGUF name, ``"blk.0.attn_q.weight"`` say.
        shape: Rows first, as in PyTorch (a GGUF file has it the other way round).
        kind: Stored type.
        offset: First byte, from the start of the file.
        size: In bytes.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says about itself.

    Attributes:
        path: The file.
        metadata: Key → number, bool, string, or list of them.
        tensors: GGUF name → entry.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read the header and check that the file is long enough for every tensor. Worker thread only.

    Raises:
        WeightsError: not a GGUF file, truncated or corrupt.
        UnsupportedModelError: another version or byte order, or one part of a split file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).header()
    except (struct.error, ValueError, KeyError, OSError, OverflowError) as error:
        raise WeightsError(f"{path} is not a GGUF file, or truncated or corrupt ({error}); download it again") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GGUFHeader:
        magic, version = self._take("II")
        if magic != GGUF_MAGIC:
            raise ValueError("wrong magic number")
        if version not in (2, 3):
            raise UnsupportedModelError(
                f"{self._path} is GGUF version {version} or big-endian; convert it to little-endian version 3"
            )
        tensor_count, key_count = self._take("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(GGUFValueType(self._one("I")))
        parts = metadata.get("split.count", 1)
        if parts > 1:
            raise UnsupportedModelError(f"{self._path} is one of {parts} parts; join them with llama-gguf-split --merge")
        listed = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in listed:
            per_block, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % per_block:
                raise ValueError(f"tensor {name!r} of shape {list(shape)} cannot have type {kind.name}")
            tensor = GGUFTensor(name, shape, kind, start + offset, prod(shape) // per_block * block_bytes)
            end = tensor.offset + tensor.size
            if end > len(self._data):
                raise ValueError(f"tensor {name!r} ends at byte {end:,}, the file at byte {len(self._data):,}")
            tensors[name] = tensor
        return GGUFHeader(self._path, metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        shape = self._take(f"{self._one('I')}Q")
        return name, tuple(reversed(shape)), GGMLQuantizationType(self._one("I")), self._one("Q")

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._one(_SCALARS[kind])
        item, count = GGUFValueType(self._one("I")), self._one("Q")
        if count > len(self._data):  # every item takes a byte at least
            raise ValueError(f"array of {count:,} items")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
            values = np.frombuffer(self._data, dtype, count, self._at).tolist()  # a list: views would pin the map
            self._at += count * dtype.itemsize
            return values
        return [self._value(item) for _ in range(count)] if item == GGUFValueType.ARRAY else self._strings(count)

    def _strings(self, count: int) -> list[str]:
        # The hot loop: a vocabulary and its merges are some hundred thousand strings.
        data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            stop = at + 8 + unpack(data, at)[0]
            if stop > len(data):
                raise ValueError(f"string ends at byte {stop:,}, the file at byte {len(data):,}")
            strings.append(data[at + 8 : stop].decode("utf-8", "replace"))
            at = stop
        self._at = at
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _one(self, layout: str) -> Any:
        return self._take(layout)[0]

    def _take(self, layout: str) -> tuple[Any, ...]:
        layout = "<" + layout
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values
