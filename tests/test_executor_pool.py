"""How large the pool becomes, and what is said when it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncsched.config import EngineConfig
from asyncsched.errors import NotEnoughMemoryError
from asyncsched.gpu.models.base import CacheShape
from asyncsched.gpu.pool import allocate_pools, available_memory, page_bytes, pool_pages

GIB = 1 << 30
SHAPES = (CacheShape(3, 64), CacheShape(2, 16))


def test_bytes_of_a_page() -> None:
    assert page_bytes(SHAPES, 32, torch.bfloat16) == (2 * 3 * 64 + 2 * 2 * 16) * 32 * 2
    assert page_bytes(SHAPES, 1, torch.float32) == (2 * 3 * 64 + 2 * 2 * 16) * 4


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"pages": 7}, 7),
        ({"pool_bytes": 10_999}, 10),
        ({"pool_fraction": 0.5}, GIB // 2000),
        ({"max_rows": 3}, 3 * 4),  # every row at full length: 100 tokens are four pages of 32
        ({"max_rows": 1 << 20}, GIB // 4000),  # but a quarter of the memory at most
    ],
)
def test_pages_by_option(options: dict[str, Any], expected: int) -> None:
    assert pool_pages(EngineConfig(page_size=32, **options), 100, 1000, GIB) == expected


@pytest.mark.parametrize("options", [{"pool_bytes": 999}, {"pool_fraction": 1e-9}, {"pages": 2 * GIB}, {"pool_bytes": 2 * GIB}])
def test_what_does_not_fit_is_said_with_the_numbers(options: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"1,000 bytes .*1,073,741,824 bytes are available"):
        pool_pages(EngineConfig(**options), 100, 1000, GIB)
    with pytest.raises(NotEnoughMemoryError):
        pool_pages(EngineConfig(), 100, 1000, 3999)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pools_are_zeroed_pairs_per_layer(dtype: torch.dtype) -> None:
    pools = allocate_pools(SHAPES, 5, 8, dtype)
    assert [(tuple(keys.shape), tuple(values.shape)) for keys, values in pools] == [
        ((5, 3, 64, 8), (5, 3, 8, 64)),
        ((5, 2, 16, 8), (5, 2, 8, 16)),
    ]
    for pair in pools:
        for pool in pair:
            assert pool.dtype is dtype
            assert pool.is_contiguous()
            assert not pool.any()


def test_a_refused_mapping_is_said_with_the_numbers() -> None:
    with pytest.raises(NotEnoughMemoryError, match="pool of"):
        allocate_pools(SHAPES, 1 << 45, 8, torch.float32)


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "ascii")
    return root


MEMINFO = {"meminfo": "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable: 8000 kB\n"}
STATISTICS = "anon 5\ninactive_file 1000\ntotal_inactive_file 2000\n"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, 8000 * 1024),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": STATISTICS}, 8000 * 1024),
        ({"memory.max": "100000\n", "memory.current": "60000\n", "memory.stat": STATISTICS}, 41_000),
        (
            {
                "memory/memory.limit_in_bytes": "100000\n",
                "memory/memory.usage_in_bytes": "60000\n",
                "memory/memory.stat": STATISTICS,
            },
            42_000,
        ),
        ({"memory.max": "100000\n", "memory.current": "900000\n", "memory.stat": STATISTICS}, 0),
    ],
)
def test_available_memory_heeds_the_control_group(groups: dict[str, str], expected: int, tmp_path: Path) -> None:
    root = files(tmp_path, MEMINFO | groups)
    assert available_memory(root / "meminfo", root) == expected


def test_available_memory_of_this_machine() -> None:
    assert available_memory() > 0
    assert available_memory(Path("/no/such/file"), Path("/no/such/folder")) > 0
