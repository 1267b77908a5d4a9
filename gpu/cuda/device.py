"""One GPU as the executor uses it: a stream for computing, one for copying, events, and graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ConfigError, NotEnoughMemoryError
from ..compute_thread import DeviceLostError

# By name because torch annotates its CUDA module in part.
cuda: Any = import_module("torch.cuda")

_OLDEST = (8, 0)


class Event(Protocol):
    """A moment on the compute stream."""

    def synchronize(self) -> None:
        """Block until it has passed."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from here to a later event; both must have passed."""
        ...


class Arrival(Protocol):
    """Results on their way to host memory."""

    def wait(self) -> list[Tensor]:
        """Block until they are there. Completion thread only."""
        ...


class Device(Protocol):
    """What the executor needs of a device. All methods are for the compute thread unless they say otherwise.

    Attributes:
        torch_device: Where tensors live.
        multiprocessors: How many it has.
    """

    torch_device: torch.device
    multiprocessors: int

    def computing(self) -> AbstractContextManager[Any]:
        """Within: what this thread launches goes to the compute stream."""
        ...

    def mark(self) -> Event:
        """A fresh event behind everything launched on the compute stream so far."""
        ...

    def upload(self, words: NDArray[np.int32]) -> Tensor:
        """Queue a copy to the device. The array may be changed afterwards."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Arrival:
        """Queue a copy to host memory, behind everything launched so far.

        It runs beside later steps: the tensors must be this step's own.
        """
        ...

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Record what ``launch`` launches instead of running it; calling the answer runs it."""
        ...

    def lost(self, error: BaseException) -> DeviceLostError | None:
        """The error if it means that the device can run nothing more. Any thread."""
        ...

    def free_memory(self) -> int:
        """Bytes that can be allocated. Any thread."""
        ...

    def peak_memory(self, work: Callable[[], None]) -> int:
        """Bytes that ``work`` takes at most beyond what is allocated now. Any thread, while no step runs."""
        ...


class CudaDevice:
    """An NVIDIA GPU through torch.

    Args:
        index: Which one.

    Raises:
        ConfigError: torch cannot use it; the text says why and what to do.
    """

    def __init__(self, index: int = 0) -> None:
        check_cuda(index)
        self.torch_device = torch.device("cuda", index)
        self.multiprocessors = cuda.get_device_properties(index).multi_processor_count
        self._compute = cuda.Stream(self.torch_device)
        self._copy = cuda.Stream(self.torch_device)
        self._graphs = cuda.graph_pool_handle()

    def computing(self) -> AbstractContextManager[Any]:
        """See ``Device``."""
        streaming: AbstractContextManager[Any] = cuda.stream(self._compute)
        return streaming

    def mark(self) -> Event:
        """See ``Device``."""
        event: Any = cuda.Event(enable_timing=True)
        event.record(self._compute)
        marked: Event = event
        return marked

    def upload(self, words: NDArray[np.int32]) -> Tensor:
        """See ``Device``. torch's allocator of pinned memory gives a buffer out again only when no copy reads it."""
        return torch.from_numpy(words).pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, tensors: Sequence[Tensor]) -> Arrival:
        """See ``Device``."""
        self._copy.wait_stream(self._compute)
        with cuda.stream(self._copy):
            hosts = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
            for host, each in zip(hosts, tensors, strict=True):
                host.copy_(each, non_blocking=True)
            arrived = cuda.Event(blocking=True)  # the thread that waits for it sleeps
            arrived.record(self._copy)
        return _Arrival(hosts, list(tensors), arrived)

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """See ``Device``. All graphs share one pool of memory: they run one after the other."""
        graph = cuda.CUDAGraph()
        with self.computing():
            # Other threads may use CUDA meanwhile: only this one's calls are held to what a capture allows.
            graph.capture_begin(self._graphs, capture_error_mode="thread_local")
            try:
                launch()
            except BaseException:
                with suppress(RuntimeError):  # a capture that failed cannot be ended properly
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def lost(self, error: BaseException) -> DeviceLostError | None:
        """See ``Device``. Running out of memory is not the end of the device; any other error of CUDA is."""
        if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
            return DeviceLostError(f"the GPU is lost, restart the process: {error}")
        return None

    def free_memory(self) -> int:
        """See ``Device``. What torch has cached counts as free."""
        cuda.empty_cache()
        return int(cuda.mem_get_info(self.torch_device)[0])

    def peak_memory(self, work: Callable[[], None]) -> int:
        """See ``Device``."""
        cuda.synchronize(self.torch_device)
        cuda.reset_peak_memory_stats(self.torch_device)
        before: int = cuda.memory_allocated(self.torch_device)
        work()
        cuda.synchronize(self.torch_device)
        most: int = cuda.max_memory_allocated(self.torch_device)
        return most - before


class _Arrival:
    def __init__(self, hosts: list[Tensor], sources: list[Tensor], arrived: Event) -> None:
        self._hosts = hosts
        self._sources = sources  # kept until they are read: the compute stream might be given their memory
        self._arrived = arrived

    def wait(self) -> list[Tensor]:
        """See ``Arrival``."""
        self._arrived.synchronize()
        self._sources.clear()
        return self._hosts


class DeviceClock:
    """When device events were, in ``time.monotonic`` seconds. Completion thread only, events in order.

    An event knows its distance from another one, in float32 milliseconds: the reference moves along.

    Args:
        reference: A first event, whose time is taken when it has passed.
    """

    def __init__(self, reference: Event) -> None:
        reference.synchronize()
        self._reference, self._seconds = reference, time.monotonic()

    def at(self, event: Event) -> float:
        """When an event was that has passed, no earlier than the one asked for before."""
        self._seconds += self._reference.elapsed_time(event) / 1e3
        self._reference = event
        return self._seconds


def check_cuda(index: int) -> None:
    """See that torch can compute on a GPU.

    Raises:
        ConfigError: it cannot; the text says why and what to do.
    """
    if torch.version.cuda is None:
        raise ConfigError(
            f"device='cuda': torch {torch.__version__} is a build without CUDA; install one with, or use device='cpu'"
        )
    try:
        cuda.init()  # raises if there is no driver, an old one, or no GPU
        count = cuda.device_count()
        if index >= count:
            raise ConfigError(f"device='cuda:{index}': this machine has {count} GPUs, 0 … {count - 1}")
        capability = cuda.get_device_capability(index)
    except RuntimeError as error:
        raise ConfigError(
            f"device='cuda': {error}; torch {torch.__version__} needs a driver for CUDA {torch.version.cuda} or later "
            "(see nvidia-smi); update the driver, or use device='cpu'"
        ) from error
    if capability < _OLDEST:
        name, found = cuda.get_device_name(index), ".".join(map(str, capability))
        raise ConfigError(f"device='cuda': {name} has compute capability {found}; the kernels need 8.0 (Ampere) or later")


def check_memory(what: str, needed: int, free: int) -> None:
    """See that something fits.

    Raises:
        NotEnoughMemoryError: it does not; the text says how much is missing.
    """
    if needed > free:
        raise NotEnoughMemoryError(
            f"{what} need {needed:,} bytes and the GPU has {free:,} bytes free: {needed - free:,} bytes are missing; "
            "free memory, or use a smaller model or a shorter data type"
        )
