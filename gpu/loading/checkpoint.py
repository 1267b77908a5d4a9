"""One opened model: configuration, tokenizer, and weights by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from ...config import EngineConfig
from ...errors import ConfigError, UnsupportedModelError
from ...tokenizer import Tokenizer
from .json_files import read_json, read_json_if_present
from .resolve import Location, resolve


class WeightSource(Protocol):
    """Where tensors come from. Used by one thread at a time."""

    stored_dtype: str
    """The checkpoint's own data type, by its PyTorch name, for ``dtype="auto"``."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor, checked, converted, and on the device.

        Raises:
            WeightsError: missing, unreadable, or of another shape.
        """
        ...

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        ...


class Checkpoint:
    """An opened model. Worker thread only; a context manager that closes its files.

    Attributes:
        name: For logs and results.
        config: What config.json holds; for a GGUF file the same keys, from its metadata.
        dtype: Of every tensor handed out.
        device: Where tensors are put.
        tokenizer: ``None`` if the model has none: token ids in, token ids out.
        hf_folder: The folder with config.json; ``None`` for a GGUF file.
        generation_config: What generation_config.json holds, or ``{}``.
    """

    def __init__(
        self,
        *,
        name: str,
        config: dict[str, Any],
        dtype: torch.dtype,
        tokenizer: Tokenizer | None,
        hf_folder: Path | None,
        generation_config: dict[str, Any],
        source: WeightSource,
    ) -> None:
        self.name = name
        self.config = config
        self.dtype = dtype
        self.tokenizer = tokenizer
        self.hf_folder = hf_folder
        self.generation_config = generation_config
        self.device = torch.device("cpu")
        self._source = source

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a parameter of this name.

        Tied output embeddings and absent biases are not there. With random weights this is read off
        the configuration.
        """
        return self._source.has(name)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One parameter, contiguous, on ``device``, converted to ``dtype``.

        Its memory is its own: writing to it changes no file, and it stays valid after ``close()``.

        Args:
            name: Hugging Face parameter name, ``"model.layers.0.self_attn.q_proj.weight"`` say.
            shape: What the architecture expects.

        Raises:
            WeightsError: missing, unreadable, or of another shape.
        """
        return self._source.read(name, tuple(shape), self.dtype, self.device)

    def close(self) -> None:
        """Let go of the files. Idempotent."""
        self._source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_checkpoint(config: EngineConfig, *, float16: bool = False) -> Checkpoint:
    """Find and open ``config.model``. Worker thread only; takes seconds, longer for a download.

    Opening checks that every file is there and whole; tensors are read one by one later.

    Args:
        config: What to open.
        float16: The device computes in float16.

    Raises:
        ConfigError: ``load_format`` contradicts what was found, or the device cannot compute in ``dtype``.
        ModelNotFoundError: no such model; the text says what to do.
        UnsupportedModelError: its architecture, tokenizer or data type cannot be read here.
        WeightsError: weight files are missing, truncated or corrupt.
        ModelError: another file of the model is unreadable.
    """
    location = resolve(config)
    if config.dtype == "float16" and not float16:
        raise ConfigError("dtype='float16' has no kernels on this device; use bfloat16 or float32")
    return (_open_gguf if location.kind == "gguf" else _open_folder)(location, config, float16)


def _open_folder(location: Location, config: EngineConfig, float16: bool) -> Checkpoint:
    from .tokenizer_files import folder_tokenizer

    folder = location.path
    model = read_json(folder / "config.json")
    generation = read_json_if_present(folder / "generation_config.json")
    tokenizer = folder_tokenizer(folder, model, generation)
    source: WeightSource
    if config.load_format == "dummy":
        from .dummy import DummyWeights

        source = DummyWeights(model)
    else:
        if "quantization_config" in model:
            method = (model["quantization_config"] or {}).get("quant_method", "unknown")
            raise UnsupportedModelError(f"{folder} is quantised ({method}); use the unquantised model or a GGUF file of it")
        from .safetensors_files import SafetensorsWeights

        source = SafetensorsWeights(folder)
    return Checkpoint(
        name=location.name,
        config=model,
        dtype=_resolve_dtype(config.dtype, _declared_dtype(model) or source.stored_dtype, folder, float16),
        tokenizer=tokenizer,
        hf_folder=folder,
        generation_config=generation,
        source=source,
    )


def _open_gguf(location: Location, config: EngineConfig, float16: bool) -> Checkpoint:
    from .gguf_config import generation_config, hf_config
    from .gguf_header import read_header
    from .gguf_tokenizer import gguf_tokenizer

    header = read_header(location.path)
    model = hf_config(header)
    generation = generation_config(header)
    tokenizer = gguf_tokenizer(header)
    source: WeightSource
    if config.load_format == "dummy":
        from .dummy import DummyWeights

        source = DummyWeights(model)
    else:
        from .gguf_file import GGUFWeights

        source = GGUFWeights(header, model)
    return Checkpoint(
        name=location.name,
        config=model,
        dtype=_resolve_dtype(config.dtype, "bfloat16", location.path, float16),
        tokenizer=tokenizer,
        hf_folder=None,
        generation_config=generation,
        source=source,
    )


def _declared_dtype(model: Mapping[str, Any]) -> str | None:
    declared = model.get("dtype") or model.get("torch_dtype")
    return str(declared).removeprefix("torch.") if declared else None


def _resolve_dtype(asked: str, stored: str, path: Path, float16: bool) -> torch.dtype:
    if asked != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[asked]
    if stored == "float32":
        return torch.float32
    if stored == "bfloat16" or (stored == "float16" and not float16):  # bfloat16 cannot overflow in its place
        return torch.bfloat16
    if stored == "float16":
        return torch.float16
    raise UnsupportedModelError(f"{path} has data type {stored!r}; pass dtype='bfloat16' or dtype='float32'")
