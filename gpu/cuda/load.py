"""The CUDA backend: entry point ``cuda`` of the group ``asyncsched.backends``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backend import Backend
from ...config import EngineConfig
from ...contract import ExecutorLimits
from ...errors import ConfigError, NotEnoughMemoryError

if TYPE_CHECKING:
    from ..loading.checkpoint import Checkpoint
    from ..models.base import CausalModel, KVPool
    from .device import Device
    from .launcher import Launcher

_SHARE = 0.9
"""Of the memory that is free behind a warm-up: the rest is for fragmentation and for graphs captured later."""


def load(config: EngineConfig) -> Backend:
    """Load a model onto the GPU, size its pool, capture its graphs. Worker thread only; takes seconds to minutes.

    Raises:
        ConfigError: no GPU that torch can use, or options that contradict the model.
        ModelError: the model cannot be found, read or run, or does not fit the memory.
    """
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"device='cuda' needs triton, which cannot be imported ({error}); install asyncsched-llm[gpu]"
        ) from error
    assert triton is not None
    from .device import CudaDevice

    return load_on(CudaDevice(_index(config.device)), config)


def _cuda_available() -> bool:
    return torch.version.cuda is not None and torch.cuda.is_available()


load.available = _cuda_available  # type: ignore[attr-defined]  # what ``device="auto"`` asks


def load_on(device: Device, config: EngineConfig) -> Backend:
    """Load a model onto a given device. See ``load``."""
    try:
        with device.computing():  # what is written to memory here is read on that stream
            return _load_on(device, config)
    except torch.OutOfMemoryError as error:
        raise NotEnoughMemoryError(
            f"the GPU's memory ran out while {config.model} was loaded: {error}; lower pool_fraction, max_rows or "
            "token_budget, or free memory"
        ) from error


def _load_on(device: Device, config: EngineConfig) -> Backend:
    from ..loading import open_checkpoint
    from ..pool import page_bytes, pool_pages
    from .executor import CudaExecutor
    from .launcher import Launcher
    from .support import check_model

    with open_checkpoint(config, float16=True) as checkpoint:
        checkpoint.device = device.torch_device
        check_model(checkpoint, device.free_memory())
        model = _build(device, checkpoint, config)
        size = page_bytes(model.cache_shapes, config.page_size, model.dtype)

        def limits(pages: int) -> ExecutorLimits:
            return ExecutorLimits(config.max_rows, pages, config.page_size, model.max_model_len, model.vocab_size)

        def try_out() -> None:
            Launcher(model, limits(1), device, _pools(model, 1, config.page_size, device), graphs=False).warm_up(
                config.token_budget
            )

        needed = device.peak_memory(try_out)
        pages = pool_pages(config, model.max_model_len, size, max(device.free_memory() - needed, 0), _SHARE)
        pools = _pools(model, pages, config.page_size, device)
        launcher = Launcher(model, limits(pages), device, pools, graphs=config.cuda_graphs)
        _capture(launcher)
        return Backend(CudaExecutor(launcher), checkpoint.tokenizer, checkpoint.name)


def _build(device: Device, checkpoint: Checkpoint, config: EngineConfig) -> CausalModel:
    from ..models.registry import build_model
    from .attention_choice import choose_prefill, triton_prefill
    from .model_kernels import CudaKernels
    from .support import attention_shape, weight_bytes

    shape = attention_shape(checkpoint.config) if config.attention == "auto" else None
    prefill = triton_prefill if shape is None else choose_prefill(device, *shape, checkpoint.dtype)
    with _bar("weights", weight_bytes(checkpoint), unit="B", unit_scale=True, unit_divisor=1024) as bar:
        weights = _ShownWeights(checkpoint, bar.update)
        return build_model(weights, config.max_model_len, dummy=config.load_format == "dummy", kernels=CudaKernels(prefill))


def _pools(model: CausalModel, pages: int, page_size: int, device: Device) -> list[KVPool]:
    def zeros(kv_heads: int, head_dim: int) -> Tensor:
        return torch.zeros(pages, kv_heads, page_size, head_dim, dtype=model.dtype, device=device.torch_device)

    shapes = [(shape.kv_heads, shape.head_dim) for shape in model.cache_shapes]
    return [(zeros(*shape), zeros(*shape)) for shape in shapes]


def _capture(launcher: Launcher) -> None:
    sizes = launcher.graph_sizes
    if sizes:
        with _bar("CUDA graphs", len(sizes)) as bar:
            launcher.capture(lambda rows: bar.update())


def _bar(title: str, total: int | None, **options: Any) -> Any:
    # Shown on a terminal only.
    return import_module("tqdm").tqdm(desc=title, total=total, file=sys.stderr, disable=None, leave=False, **options)


class _ShownWeights:
    """A checkpoint that tells of every tensor it hands out."""

    def __init__(self, checkpoint: Checkpoint, read: Callable[[int], Any]) -> None:
        self._checkpoint = checkpoint
        self._read = read

    @property
    def name(self) -> str:
        """See ``models.base.Weights``."""
        return self._checkpoint.name

    @property
    def config(self) -> Mapping[str, Any]:
        """See ``models.base.Weights``."""
        return self._checkpoint.config

    @property
    def dtype(self) -> torch.dtype:
        """See ``models.base.Weights``."""
        return self._checkpoint.dtype

    @property
    def device(self) -> torch.device:
        """See ``models.base.Weights``."""
        return self._checkpoint.device

    @property
    def hf_folder(self) -> Path | None:
        """See ``models.base.Weights``."""
        return self._checkpoint.hf_folder

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """See ``models.base.Weights``."""
        tensor = self._checkpoint.tensor(name, shape)
        self._read(tensor.nbytes)
        return tensor


def _index(device: str) -> int:
    """The number in ``"cuda:1"``; 0 without one."""
    _, colon, number = device.partition(":")
    if not colon:
        return 0
    if not number.isdecimal():
        raise ConfigError(f"device={device!r}: write cuda, or cuda:0, cuda:1 …")
    return int(number)
