"""Compiling a model's kernels while its weights are still being read."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from ..contract import ExecutorLimits
from ..errors import AsyncschedError
from .cpu_executor import CpuExecutor
from .models.decoder import Decoder
from .models.decoder_config import DecoderConfig
from .sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .loading.checkpoint import Checkpoint

_VOCAB, _LENGTH = 64, 64


class StandInWeights:
    """Zeros for a tiny model of the same kind, whose kernels are those of the real one.

    Args:
        checkpoint: The real one.
    """

    name = "stand-in"
    hf_folder: Path | None = None
    device = torch.device("cpu")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config: Mapping[str, Any] = checkpoint.config
        self.dtype = checkpoint.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``models.base.Weights``."""
        return torch.zeros(shape, dtype=self.dtype)


def compile_meanwhile(checkpoint: Checkpoint, page_size: int) -> Thread | None:
    """Start to compile what a model of the built-in decoder needs; join the answer before the model runs.

    Compiling takes seconds where it was never done, and reading weights hardly needs the interpreter.
    Kernels depend on data types and on which norms and rotations a model has, not on its sizes.
    """
    try:
        config = DecoderConfig.from_hf(checkpoint.config)
    except AsyncschedError:  # another kind of model, or one that will be refused in a moment
        return None
    thread = Thread(target=_compile, args=(config, StandInWeights(checkpoint), page_size), name="asyncsched-compile")
    thread.start()
    return thread


def _compile(config: DecoderConfig, weights: StandInWeights, page_size: int) -> None:
    with suppress(Exception):  # whatever it is, the model's own first step meets it again
        stand_in(config, weights, page_size).warm_up()


def stand_in(config: DecoderConfig, weights: StandInWeights, page_size: int) -> CpuExecutor:
    """An executor of one layer, one key head and few tokens, otherwise as ``config`` says."""
    group = config.heads // config.kv_heads
    sizes = {"vocab_size": _VOCAB, "hidden": 64, "intermediate": 64, "heads": group, "kv_heads": 1}
    tiny = replace(config, **sizes, windows=config.windows[:1], max_length=_LENGTH)  # type: ignore[arg-type]
    limits = ExecutorLimits(1, 1, page_size, _LENGTH, _VOCAB)
    return CpuExecutor(Decoder(tiny, weights, _LENGTH), Sampler(1, _VOCAB), limits)
