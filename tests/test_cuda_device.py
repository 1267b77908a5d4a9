"""What surrounds a GPU and needs none: finding it, its clock, its graphs, its messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncsched.backend import load_backend
from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError, NotEnoughMemoryError
from asyncsched.gpu.compute_thread import DeviceLostError
from asyncsched.gpu.cuda.device import CudaDevice, DeviceClock, check_cuda, check_memory
from asyncsched.gpu.cuda.graphs import SIZES, DecodeGraphs

from .cuda_helpers import FakeDevice, FakeEvent


@dataclass
class FakeCuda:
    """As much of ``torch.cuda`` as finding a device takes."""

    devices: int = 1
    capability: tuple[int, int] = (9, 0)
    broken: str = ""

    def device_count(self) -> int:
        return self.devices

    def init(self) -> None:
        if self.broken or not self.devices:
            raise RuntimeError(self.broken or "No CUDA GPUs are available")

    def get_device_capability(self, index: int) -> tuple[int, int]:
        return self.capability

    def get_device_name(self, index: int) -> str:
        return "Some GPU"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeCuda], None]:
    def pretend(cuda: FakeCuda) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr("asyncsched.gpu.cuda.device.cuda", cuda)

    return pretend


@pytest.mark.parametrize(
    ("cuda", "index", "text"),
    [
        (FakeCuda(devices=0), 0, r"No CUDA GPUs are available; torch .* needs a driver for CUDA 13.0 or later"),
        (FakeCuda(devices=2), 2, r"device='cuda:2': this machine has 2 GPUs, 0 … 1"),
        (FakeCuda(broken="driver too old (found version 11040)"), 0, r"driver too old .*; update the driver"),
        (FakeCuda(capability=(7, 5)), 0, r"Some GPU has compute capability 7.5; the kernels need 8.0"),
    ],
)
def test_a_gpu_that_cannot_be_used(machine: Callable[[FakeCuda], None], cuda: FakeCuda, index: int, text: str) -> None:
    machine(cuda)
    with pytest.raises(ConfigError, match=text):
        check_cuda(index)


def test_a_gpu_that_can_be_used(machine: Callable[[FakeCuda], None]) -> None:
    machine(FakeCuda(devices=2))
    check_cuda(1)


def test_a_build_of_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="a build without CUDA; install one with"):
        CudaDevice()


def test_which_errors_end_a_device() -> None:
    device: Any = CudaDevice.__new__(CudaDevice)
    lost = device.lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    assert isinstance(lost, DeviceLostError)
    assert "illegal memory access" in str(lost)
    assert device.lost(torch.OutOfMemoryError("CUDA out of memory")) is None
    assert device.lost(ValueError("a shape")) is None


def test_missing_memory_is_counted() -> None:
    check_memory("the weights", 100, 100)
    with pytest.raises(NotEnoughMemoryError, match=r"the weights need 2,000 bytes .* 1,500 bytes free: 500 bytes are missing"):
        check_memory("the weights", 2000, 1500)


def test_the_clock_follows_the_events() -> None:
    clock = DeviceClock(FakeEvent(100.0))
    first = clock.at(FakeEvent(100.5))
    assert clock.at(FakeEvent(100.75)) == pytest.approx(first + 0.25)
    assert clock.at(FakeEvent(103.0)) == pytest.approx(first + 2.5)


def test_sizes_of_graphs() -> None:
    graphs = DecodeGraphs(FakeDevice(), lambda rows: None, 40)
    assert graphs.sizes == [1, 2, 4, 8, 16, 24, 32, 40]
    assert graphs.first == [40, 32, 16, 8, 4, 2, 1]
    assert [graphs.padded(rows) for rows in (1, 3, 9, 33, 40, 41)] == [1, 4, 16, 40, 40, None]
    assert DecodeGraphs(FakeDevice(), lambda rows: None, 1000).padded(513) is None
    assert DecodeGraphs(FakeDevice(), lambda rows: None, SIZES[-1]).sizes == list(SIZES)


def test_a_graph_is_captured_once_and_replayed() -> None:
    device, launched = FakeDevice(), list[int]()
    graphs = DecodeGraphs(device, launched.append, 4)
    assert not graphs.ready(2)
    graphs.capture(2)
    graphs.capture(2)
    assert graphs.ready(2)
    assert (device.captured, launched) == (1, [2])  # run once before, to compile
    graphs.replay(2)
    assert launched == [2, 2]


@pytest.mark.parametrize(("available", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch, available: bool, chosen: str) -> None:
    def point(name: str) -> Any:
        def load(config: EngineConfig) -> Any:
            raise KeyError(name)

        if name == "cuda":
            load.available = lambda: available  # type: ignore[attr-defined]  # what a backend may carry
        return SimpleNamespace(name=name, load=lambda: load)

    monkeypatch.setattr("asyncsched.backend.entry_points", lambda group: [point("cpu"), point("cuda")])
    for device, expected in (("auto", chosen), ("cuda:1", "cuda"), ("cpu", "cpu")):
        with pytest.raises(KeyError, match=expected):
            load_backend(EngineConfig(device=device))
    with pytest.raises(ConfigError, match="no backend for device='tpu'; installed: cpu, cuda"):
        load_backend(EngineConfig(device="tpu"))
