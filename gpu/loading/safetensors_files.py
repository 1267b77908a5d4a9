"""Weights from safetensors: one file, or shards listed by an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ModelError, ModelNotFoundError, WeightsError
from .json_files import read_json
from .shapes import check_shape, missing

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SafetensorsWeights:
    """The safetensors of a folder, mapped into memory. Worker thread only.

    Opening reads every header, so that a missing or truncated shard is reported at once.

    Raises:
        ModelNotFoundError: the folder has no safetensors.
        WeightsError: a shard is missing, truncated or corrupt, or the index names a tensor its shard lacks.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, Any] = {}
        self._place: dict[str, Path] = {}
        index = folder / _INDEX
        if index.is_file():
            self._open_shards(index)
        else:
            file = _single_file(folder)
            self._place = dict.fromkeys(self._open(file), file)
        if not self._place:
            raise WeightsError(f"{folder} holds no tensors at all; download the model again")
        self.stored_dtype = self._dtype_of(next(iter(self._place)))

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self._place

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See ``WeightSource.read``."""
        file = self._place.get(name)
        if file is None:
            raise missing(name, self._folder)
        opened = self._files.get(file)
        if opened is None:
            raise WeightsError(f"{file} has been closed; read every tensor before closing the checkpoint")
        part = opened.get_slice(name)
        check_shape(name, file, shape, tuple(part.get_shape()))
        if part.get_dtype() not in (*_DTYPES, "F64"):
            raise WeightsError(
                f"tensor {name!r} in {file} has type {part.get_dtype()}, expected one of {', '.join(_DTYPES)}; "
                "quantised weights are read from GGUF files only"
            )
        mapped: torch.Tensor = opened.get_tensor(name)
        # Copied: one tensor that is kept as a view would keep the pages of the whole file in memory.
        return mapped.to(device, dtype, copy=True).contiguous()

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._files.clear()

    def _open_shards(self, index: Path) -> None:
        try:
            listed = read_json(index)["weight_map"]
            place = {str(name): self._folder / str(file) for name, file in listed.items()}
        except (ModelError, KeyError, AttributeError) as error:
            raise WeightsError(f"{index} has no readable weight_map ({error}); download it again") from error
        for file in sorted(set(place.values())):
            if not file.is_file():
                raise WeightsError(f"shard {file.name} is listed in {index} but is not there; download it again")
            names = self._open(file)
            for name in sorted(name for name, home in place.items() if home == file and name not in names):
                raise WeightsError(f"tensor {name!r} is listed in {index} but is not in {file.name}; download both again")
        self._place = place

    def _open(self, file: Path) -> frozenset[str]:
        try:
            opened: Any = safe_open(file, framework="pt", device="cpu")
            names = frozenset(opened.keys())
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(f"{file} is truncated or corrupt ({error}); download it again") from error
        self._files[file] = opened
        return names

    def _dtype_of(self, name: str) -> str:
        kind: str = self._files[self._place[name]].get_slice(name).get_dtype()
        return _DTYPES.get(kind, kind)


def _single_file(folder: Path) -> Path:
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    if files:
        raise WeightsError(f"{folder} holds {len(files)} safetensors files but no {_INDEX}; download the index")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelNotFoundError(f"{folder} holds pickled weights only, which are not read; convert them to safetensors")
    raise ModelNotFoundError(f"{folder} holds no safetensors; download the weights, or use load_format='dummy'")
