"""The vector type under the kernels: rounding, functions, partial vectors, threads, the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncsched.gpu.kernels import _jit, threads
from asyncsched.gpu.kernels._jit import inlined, kernel, part
from asyncsched.gpu.kernels.lanemath import exp, exp2, largest, tanh, total
from asyncsched.gpu.kernels.simd import LANES, load, load_part, pointer, store, store_part, store_strided
from asyncsched.gpu.kernels.threads import FORK, parallel


@kernel
def _functions(x: Any, out: Any, size: Any) -> None:
    source, target = pointer(x, np.float32(0.0)), pointer(out, np.float32(0.0))
    for i in range(0, size, LANES):
        value = load(source, i)
        store(target, i, exp(value))
        store(target, size + i, exp2(value))
        store(target, 2 * size + i, tanh(value))


def _apply(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(3, len(x))
    _functions(x.data_ptr(), out.data_ptr(), len(x))
    return out


def test_exponentials_and_tanh_are_accurate() -> None:
    x = torch.cat([torch.linspace(-87, 88, 1 << 16), torch.linspace(-1, 1, 1 << 16)])
    found, wide = _apply(x).double(), x.double()
    assert (found[0] / wide.exp() - 1).abs().max() < 1.5e-7
    assert (found[1] / wide.exp2() - 1).abs().max() < 1.5e-7
    assert (found[2] - wide.tanh()).abs().max() < 2e-7


def test_exponentials_of_extremes() -> None:
    edges = [0.0, -0.0, -127.0, -1e38, -torch.inf, 130.0, 3e38, torch.inf, torch.nan]
    found = _apply(torch.tensor(edges + [0.0] * (LANES - len(edges))))[:, : len(edges)]
    ends = [1.0, 1.0, 0.0, 0.0, 0.0, torch.inf, torch.inf, torch.inf, torch.nan]
    torch.testing.assert_close(found[:2], torch.tensor([ends, ends]), rtol=0, atol=0, equal_nan=True)


@kernel
def _round(x: Any, out: Any, size: Any) -> None:
    source, target = pointer(x, np.float32(0.0)), pointer(out, np.uint16(0))
    for i in range(0, size, LANES):
        store(target, i, load(source, i))


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    bits[: 1 << 17] &= 0xFFFF8000  # ties
    x = torch.from_numpy(bits.view(np.float32))
    out = torch.empty(len(x), dtype=torch.bfloat16)
    _round(x.data_ptr(), out.data_ptr(), len(x))
    wanted = x.bfloat16()
    assert torch.equal(out.isnan(), x.isnan())
    assert torch.equal(out[~x.isnan()], wanted[~x.isnan()])


@kernel
def _parts(element: Any, x: Any, out: Any, count: Any, stride: Any) -> None:
    source, target = pointer(x, element), pointer(out, element)
    value = load_part(source, 0, count)
    if stride == 0:
        store_part(target, 0, value, count)
    else:
        store_strided(target, 0, stride, value, count)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_vectors_touch_their_lanes_only(count: int, dtype: torch.dtype) -> None:
    element = np.float32(0.0) if dtype == torch.float32 else np.uint16(0)
    x = torch.arange(1, 17).to(dtype)
    lanes = min(count, LANES)
    for stride in (0, 1, 3):
        out, wanted = torch.zeros(64, dtype=dtype), torch.zeros(64, dtype=dtype)
        _parts(element, x.data_ptr(), out.data_ptr(), count, stride)
        wanted[: lanes * (stride or 1) : stride or 1] = x[:lanes]
        assert torch.equal(out, wanted)


@kernel
def _reductions(x: Any, out: Any) -> None:
    value, target = load(pointer(x, np.float32(0.0)), 0), pointer(out, np.float32(0.0))
    target[0] = total(value)
    target[1] = largest(value)


def test_reductions() -> None:
    x, out = torch.randn(LANES, generator=torch.Generator().manual_seed(0)), torch.empty(2)
    _reductions(x.data_ptr(), out.data_ptr())
    folded = x
    while len(folded) > 1:
        half = len(folded) // 2
        folded = folded[:half] + folded[half:]
    assert out.tolist() == [folded.item(), x.max().item()]


@part
def _mark(chunk: Any, chunks: Any, worker: Any, out: Any, bonus: Any) -> None:
    target = pointer(out, np.int64(0))
    target[chunk] += worker + bonus[0] * chunks


@kernel
def _mark_all(out: Any, chunks: Any, fork: Any, workers: Any) -> None:
    parallel(_mark, fork, workers, chunks, (out, (1000, 0.5)))


@pytest.mark.parametrize("fork", [FORK, 0])
@pytest.mark.parametrize(("workers", "chunks"), [(1, 5), (2, 1000), (3, 2), (2, 0)])
def test_every_chunk_runs_once(fork: int, workers: int, chunks: int) -> None:
    for _ in range(20):
        marks = torch.zeros(chunks, dtype=torch.int64)
        _mark_all(marks.data_ptr(), chunks, fork, workers)
        assert (marks // 1000 == chunks).all()
        assert (marks % 1000 < workers).all()


@pytest.mark.skipif(
    not torch.backends.openmp.is_available(),  # type: ignore[no-untyped-call]  # torch is typed in part
    reason="torch was built without OpenMP",
)
def test_the_pool_is_found() -> None:
    assert FORK != 0


def test_a_team_is_as_large_as_torch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.team(99, 100) == (0, 1)
    monkeypatch.setattr(threads, "FORK", 12345)
    assert threads.team(100, 100) == (12345, torch.get_num_threads())
    monkeypatch.setattr(threads, "FORK", 0)
    assert threads.team(100, 100) == (0, 1)


def test_kernels_leave_torch_its_threads() -> None:
    before, marks = torch.get_num_threads(), torch.zeros(4, dtype=torch.int64)
    try:
        torch.set_num_threads(1)
        _mark_all(marks.data_ptr(), 4, FORK, 2)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def _triple(x: int) -> int:
    return 3 * x


def test_cached_code_is_used_only_with_the_sources_it_was_made_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    hits = []
    for sources in ("first", "first", "second", "first"):
        monkeypatch.setattr(_jit, "_SOURCES", sources)
        compiled: Any = kernel(_triple)
        assert compiled(5) == 15
        hits.append(sum(compiled.stats.cache_hits.values()))
    assert hits == [0, 1, 0, 1]


def test_a_kernel_without_a_place_for_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []

    class Logger:
        def warning(self, event: str, **details: str) -> None:
            messages.append(event + details["hint"])

    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    monkeypatch.setattr(_jit, "get_logger", lambda part: Logger())

    def double(x: int) -> int:
        return 2 * x

    assert kernel(double)(21) == 42
    assert "NUMBA_CACHE_DIR" in messages[0]
    assert inlined(double)(4) == 8
