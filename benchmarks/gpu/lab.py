"""What the parts share: the device, what it can do at most, and the model that is loaded."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncsched import Backend, EngineConfig
from asyncsched.gpu.cuda.device import Device
from asyncsched.gpu.cuda.executor import CudaExecutor
from asyncsched.gpu.models.decoder_config import DecoderConfig

from .loaded import Loaded, Reusable
from .records import Record
from .sizes import Sizes

CONFIGS = Path(__file__).parent / "configs"
LLAMA_8B, QWEN_06B, QWEN_14B = "llama-3.1-8b", "qwen3-0.6b", "qwen3-14b"


def published_configs() -> dict[str, dict[str, Any]]:
    """The configurations beside this module, by the names of their files."""
    return {file.stem: json.loads(file.read_text("utf-8")) for file in sorted(CONFIGS.glob("*.json"))}


def device_seconds(device: Device, work: Callable[[], object], *, calls: int, rounds: int = 3) -> float:
    """Device seconds per call of ``work``, by events around ``calls`` of them; the best of some rounds."""
    best = math.inf
    with torch.inference_mode(), device.computing():
        work()
        for _ in range(rounds):
            began = device.mark()
            for _ in range(calls):
                work()
            ended = device.mark()
            ended.synchronize()
            best = min(best, began.elapsed_time(ended) / 1e3 / calls)
    return best


class Lab:
    """One device and what is needed to measure on it.

    Args:
        device: What kernels and copies are timed on.
        sizes: How much of everything.
        load: Loads a backend onto the device.
        folder: Where model folders are made.
        emit: Takes every record.
        configs: ``config.json`` by model.
        device_name: What ``EngineConfig.device`` says.
        time_left: Seconds until everything must be over.
    """

    def __init__(
        self,
        device: Device,
        sizes: Sizes,
        load: Callable[[EngineConfig], Backend],
        folder: Path,
        emit: Callable[[Record], None],
        *,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        device_name: str = "cuda",
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.load = load
        self.emit = emit
        self.configs = published_configs() if configs is None else configs
        self._folder = folder
        self.device_name = device_name
        self.time_left = time_left
        self._loaded: Loaded | None = None
        self._bandwidth: float | None = None
        self._matrix_rate: float | None = None

    def folder_of(self, model: str, config: Mapping[str, Any] | None = None) -> Path:
        """A folder with the model's ``config.json``, which is all that random weights need."""
        folder = self._folder / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(config or self.configs[model])), "utf-8")
        return folder

    def engine_config(self, model: str) -> EngineConfig:
        """Options of the engines that run a model, the same in all parts."""
        sizes = self.sizes
        return EngineConfig(
            model=str(self.folder_of(model)),
            load_format="dummy",
            device=self.device_name,
            dtype=sizes.dtype,
            max_model_len=sizes.max_model_len,
            max_rows=sizes.max_rows,
            page_size=sizes.page_size,
            pages=sizes.max_rows * sizes.pages_per_row,
            token_budget=sizes.token_budget,
        )

    def model(self, name: str) -> Loaded:
        """A model with random weights; it stays loaded until another one is asked for."""
        if self._loaded is None or self._loaded.name != name:
            self.release()
            config = self.engine_config(name)
            executor = self.load(config).executor
            assert isinstance(executor, CudaExecutor)
            self._loaded = Loaded(name, DecoderConfig.from_hf(self.configs[name]), config, Reusable(executor))
        return self._loaded

    def release(self) -> None:
        """Free the loaded model's memory."""
        if self._loaded is not None:
            self._loaded.reusable.shut_down()
            self._loaded = None
        gc.collect()  # an engine is a circle of references
        self.device.free_memory()  # gives back what torch keeps

    def copy_bandwidth(self) -> float:
        """Bytes per second that a large copy on the device reads and writes, together."""
        if self._bandwidth is None:
            with torch.inference_mode(), self.device.computing():
                source = self.noise(self.sizes.copy_bytes // 2, dtype=torch.bfloat16)
                target = torch.empty_like(source)
            seconds = device_seconds(self.device, lambda: target.copy_(source), calls=10)
            self._bandwidth = 2 * self.sizes.copy_bytes / seconds
            self.emit(Record("device", "copy bandwidth, GB/s read and written", self._bandwidth / 1e9))
        return self._bandwidth

    def matrix_rate(self) -> float:
        """Floating-point operations per second of a large product of bfloat16 matrices."""
        if self._matrix_rate is None:
            size = self.sizes.matrix
            with torch.inference_mode(), self.device.computing():
                a, b = (self.noise(size, size, dtype=torch.bfloat16) for _ in range(2))
                out = torch.empty_like(a)
            seconds = device_seconds(self.device, lambda: torch.matmul(a, b, out=out), calls=20)
            self._matrix_rate = 2 * size**3 / seconds
            self.emit(Record("device", "bfloat16 matrix rate, TFLOP/s", self._matrix_rate / 1e12))
        return self._matrix_rate

    def noise(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Normal numbers: zeros would cost a real device less power, and flatter it."""
        return torch.randn(*shape, dtype=dtype, device=self.device.torch_device)

    def integers(self, values: Any) -> Tensor:
        """int32 on the device."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.device.torch_device)
