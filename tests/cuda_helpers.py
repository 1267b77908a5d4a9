"""A GPU that is not there: streams and events that only order what the CPU computes, as late as they may."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncsched.gpu.compute_thread import DeviceLostError


class FakeLost(Exception):
    """What the fake device raises when it is lost."""


@dataclass
class FakeEvent:
    """Passes at once."""

    at: float

    def synchronize(self) -> None:
        """See ``Event``."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """See ``Event``."""
        return float(end_event.at - self.at) * 1e3


@dataclass
class FakeArrival:
    """Copies when it is waited for, which is as late as a copy beside later steps may be."""

    device: FakeDevice
    sources: list[Tensor]
    fails: Exception | None = None

    def wait(self) -> list[Tensor]:
        """See ``Arrival``."""
        if self.fails is not None:
            raise self.fails
        with torch.inference_mode():
            return [source.clone() for source in self.sources]


@dataclass
class FakeDevice:
    """As much of ``Device`` as ordering takes, over CPU tensors and the interpreter.

    Args:
        fail: Called with the number of each launch of ``fetch``; what it returns is raised when that arrives.
        memory: Bytes it claims to have free.
    """

    fail: Callable[[int], Exception | None] = lambda number: None
    memory: int = 1 << 40
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    multiprocessors: int = 2
    fetched: int = 0
    captured: int = 0
    replayed: int = 0
    capturing: bool = False
    uploads: list[tuple[NDArray[np.int32], Tensor]] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    def computing(self) -> Any:
        """See ``Device``."""
        return nullcontext()

    def mark(self) -> FakeEvent:
        """See ``Device``."""
        return FakeEvent(time.monotonic())

    def upload(self, words: NDArray[np.int32]) -> Tensor:
        """See ``Device``."""
        assert not self.capturing, "a graph would copy the same words every time"
        assert words.dtype == np.int32
        return torch.from_numpy(words.copy())

    def fetch(self, tensors: Sequence[Tensor]) -> FakeArrival:
        """See ``Device``."""
        self.fetched += 1
        return FakeArrival(self, list(tensors), self.fail(self.fetched))

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Check that ``launch`` allocates no state of its own, and run it anew at every replay."""
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            with self._capturing():
                launch()

        return replay

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def lost(self, error: BaseException) -> DeviceLostError | None:
        """See ``Device``."""
        return DeviceLostError(f"lost: {error}") if isinstance(error, FakeLost) else None

    def free_memory(self) -> int:
        """See ``Device``."""
        return self.memory

    def peak_memory(self, work: Callable[[], None]) -> int:
        """See ``Device``."""
        work()
        return 1 << 20
