"""The CPU backend: entry point ``cpu`` of the group ``asyncsched.backends``."""

from __future__ import annotations

from functools import partial

import torch

from ..backend import Backend
from ..config import EngineConfig
from ..contract import ExecutorLimits
from .compiling import compile_meanwhile
from .cpu_executor import CpuExecutor
from .loading import open_checkpoint
from .loading.release import release_freed_memory
from .models.registry import build_model
from .pool import available_memory, page_bytes, pool_pages
from .sampler import Sampler, warm_up_sampling


def load(config: EngineConfig) -> Backend:
    """Load a model, allocate its pools, and compile its kernels. Worker thread only; takes seconds.

    Raises:
        ConfigError: options contradict the model.
        ModelError: the model cannot be found, read or run, or does not fit the memory.
    """
    backend = _load(config)
    release_freed_memory()
    return backend


def _load(config: EngineConfig) -> Backend:
    with open_checkpoint(config) as checkpoint:
        compiling = compile_meanwhile(checkpoint, config.page_size)
        try:
            model = build_model(checkpoint, config.max_model_len, dummy=config.load_format == "dummy")
        finally:
            if compiling is not None:
                compiling.join()
        size = page_bytes(model.cache_shapes, config.page_size, model.dtype)
        limits = ExecutorLimits(
            max_rows=config.max_rows,
            pages=pool_pages(config, model.max_model_len, size, available_memory()),
            page_size=config.page_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )
        warm_up = partial(_warm_up_later, limits.vocab_size, model.dtype)
        executor = CpuExecutor(model, Sampler(limits.max_rows, limits.vocab_size), limits, meanwhile=warm_up)
        executor.warm_up()
        return Backend(executor, checkpoint.tokenizer, checkpoint.name)


def _warm_up_later(vocab_size: int, dtype: torch.dtype) -> None:
    """What greedy requests need not wait for. Compiling takes memory that running does not."""
    warm_up_sampling(vocab_size, dtype)
    release_freed_memory()
