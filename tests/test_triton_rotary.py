"""Rotary embedding and the store of keys and values in Triton against their definition in torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.cuda.kernels import reference_attention as reference
from asyncsched.gpu.cuda.kernels import rotary_store as kernels
from asyncsched.gpu.kernels import StepLayout
from asyncsched.gpu.kernels import rotary_store as cpu_rotary_store
from asyncsched.gpu.models.rope import RopeConfig

from .triton_helpers import DEVICE, compile_for, needs_device, needs_no_device

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [  # query heads, key heads, head size, rotated, page size, type
    (4, 2, 64, 64, 16, F32),
    (3, 3, 80, 32, 1, F32),
    (9, 3, 96, 96, 64, F32),
    (40, 2, 128, 128, 32, F32),  # more heads than a block holds
    (2, 1, 256, 64, 16, F32),
    (9, 3, 64, 64, 16, BF16),
    (8, 1, 80, 80, 32, F16),
    (4, 20, 128, 64, 16, BF16),
    (4, 2, 8, 4, 4, F32),
]
LENGTHS = [0, 5, 16, 31, 64, 90]
CHUNKS = [(1, 0), (9, 12), (0, 9), (3, 64), (5, 3)]  # (new tokens, tokens before them)
Shape = tuple[int, int, int, int, int, torch.dtype]


def integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def tables(rows: int, page_size: int) -> torch.Tensor:
    """Disjoint shuffled pages for rows of up to 100 tokens."""
    columns = -(-100 // page_size)
    pages = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(rows))
    return pages.view(rows, columns).to(torch.int32).to(DEVICE)


def run(module: Any, name: str, shape: Shape, places: Sequence[torch.Tensor], tokens: int, norms: bool) -> list[torch.Tensor]:
    """Queries, the whole projection and the pools after one call; nothing but NaN was in the pools."""
    heads, kv_heads, dim, rotated, page_size, dtype = shape
    table = tables(max(len(CHUNKS), len(LENGTHS)), page_size)
    fused = draw(tokens, (heads + 2 * kv_heads) * dim + 16, dtype=dtype, seed=tokens)[:, :-16]
    qkv = fused if module is kernels else fused.contiguous()
    pools = [torch.full((table.numel(), kv_heads, page_size, dim), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    weights = [1 + draw(dim, dtype=dtype, seed=seed) / 4 if norms else None for seed in (1, 2)]
    cos_sin = RopeConfig(theta=100.0).table(rotated, 128).to(DEVICE)
    options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-3}
    q = getattr(module, name)(qkv, cos_sin, *pools, table, *places, heads, **options)
    assert q.shape == (tokens, heads, dim)
    assert q.data_ptr() == qkv.data_ptr()
    return [q, qkv, *pools]


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to float32 arithmetic, or one unit in the last place."""
    tolerance = {F32: 2e-6, F16: 2**-10, BF16: 2**-7}[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=2e-6, equal_nan=True)


def both(name: str, shape: Shape, places: Sequence[torch.Tensor], tokens: int, norms: bool = False) -> list[torch.Tensor]:
    found = run(kernels, name, shape, places, tokens, norms)
    for one, other in zip(found, run(reference, name, shape, places, tokens, norms), strict=True):
        close(one, other)
    return found


@pytest.mark.parametrize(("shape", "norms"), [(shape, i % 2 == 0) for i, shape in enumerate(SHAPES)], ids=str)
def test_decode_matches_the_definition(shape: Shape, norms: bool) -> None:
    """Rows in any order, padding between them."""
    rows = [3, -1, 0, 5, 1, -1, 4]
    both("rotary_store_decode", shape, (integers(rows), integers(LENGTHS)), len(rows), norms)


@pytest.mark.parametrize(("shape", "norms"), [(shape, i % 2 == 1) for i, shape in enumerate(SHAPES)], ids=str)
def test_prefill_matches_the_definition(shape: Shape, norms: bool) -> None:
    """Chunks with and without a cached prefix, one without tokens, and padding behind the last."""
    sums = [0, *itertools.accumulate(new for new, _ in CHUNKS)]
    places = integers([4, 2, 0, 1, 3]), integers([before for _, before in CHUNKS]), integers(sums)
    both("rotary_store_prefill", shape, places, sums[-1] + 2, norms)


def test_what_is_padding_stays_as_it_is() -> None:
    shape = SHAPES[0]
    raw = draw(3, 8 * 64 + 16, dtype=F32, seed=3)[:, :-16]
    _, qkv, keys, values = both("rotary_store_decode", shape, (integers([-1, 2, -1]), integers([3, 3, 3])), 3)
    assert torch.equal(qkv[[0, 2]], raw[[0, 2]])
    assert torch.equal(qkv[1, 4 * 64 :], raw[1, 4 * 64 :])  # keys and values of the projection are only read
    for pool in (keys, values):
        assert int(pool.isfinite().sum()) == 2 * 64  # one token
    _, qkv, *_ = both("rotary_store_prefill", shape, (integers([2]), integers([3]), integers([0, 1])), 3)
    assert torch.equal(qkv[1:], raw[1:])


def test_many_chunks() -> None:
    """The chunk of a token is found among any number of them, empty ones too."""
    for chunks in range(1, 6):
        lengths = [(3 * i) % 4 for i in range(chunks)]
        sums = [0, *itertools.accumulate(lengths)]
        places = integers(range(chunks)), integers([10 * i for i in range(chunks)]), integers(sums)
        both("rotary_store_prefill", SHAPES[-1], places, sums[-1])


def test_nothing_to_do() -> None:
    both("rotary_store_decode", SHAPES[0], (integers([]), integers(LENGTHS)), 0)
    both("rotary_store_prefill", SHAPES[0], (integers([]), integers([]), integers([0])), 0)


@pytest.mark.parametrize("norms", [False, True])
def test_rotates_as_the_cpu_does(norms: bool) -> None:
    """Float32 queries, keys and values of the two planes, by position; their pools are laid out differently."""
    heads, kv_heads, dim, page_size = 3, 1, 64, 16
    rows, lengths = integers([1, 0, 2]), integers([7, 40, 64])
    shape = (heads, kv_heads, dim, dim, page_size, F32)
    q, _, keys, values = run(kernels, "rotary_store_decode", shape, (rows, lengths), 3, norms)
    raw = draw(3, (heads + 2 * kv_heads) * dim + 16, dtype=F32, seed=3)[:, :-16].cpu().contiguous()
    table = tables(6, page_size).cpu()
    seg_start = lengths[rows.long()].cpu().numpy()
    layout = StepLayout.build(table.numpy(), rows.cpu().numpy(), np.ones(3, np.int32), seg_start, page_size)
    k_pool = torch.full((table.numel(), kv_heads, dim, page_size), torch.nan)
    v_pool = torch.full((table.numel(), kv_heads, page_size, dim), torch.nan)
    weights = [1 + draw(dim, dtype=F32, seed=seed).cpu() / 4 if norms else None for seed in (1, 2)]
    cos_sin = RopeConfig(theta=100.0).table(dim, 128)
    options: dict[str, Any] = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-3}
    wanted = cpu_rotary_store(raw, cos_sin, layout, k_pool, v_pool, heads, kv_heads, **options)
    close(q.cpu(), wanted)
    close(keys.cpu(), k_pool.transpose(2, 3))
    close(values.cpu(), v_pool)


def test_refuses_what_it_cannot_compute() -> None:
    def decode(**changes: Any) -> None:
        given: dict[str, Any] = {
            "qkv": draw(1, 8 * 64, dtype=F32, seed=1),
            "cos_sin": RopeConfig(theta=100.0).table(64, 128).to(DEVICE),
            "k_pool": torch.zeros(8, 2, 16, 64, device=DEVICE),
            "v_pool": torch.zeros(8, 2, 16, 64, device=DEVICE),
            "block_table": tables(1, 16),
            "rows": integers([0]),
            "lengths": integers([4]),
            "heads": 4,
        }
        kernels.rotary_store_decode(**given | changes)

    decode()
    table = RopeConfig(theta=100.0).table(64, 128).to(DEVICE)
    with pytest.raises(UnsupportedModelError, match="float64"):
        decode(k_pool=torch.zeros(8, 2, 16, 64).double(), v_pool=torch.zeros(8, 2, 16, 64).double())
    with pytest.raises(ValueError, match="heads of 64"):
        decode(heads=5)
    with pytest.raises(ValueError, match="must be the pool's"):
        decode(qkv=draw(1, 8 * 64, dtype=BF16, seed=1))
    with pytest.raises(ValueError, match="must be the pool's"):
        decode(qkv=draw(1, 16 * 64, dtype=F32, seed=1)[:, ::2])
    for wrong in (table.half(), table[:, ::2], table[:, :0], torch.cat([table, table], 1), table[:, :63].contiguous()):
        with pytest.raises(ValueError, match="cos_sin"):
            decode(cos_sin=wrong)
    with pytest.raises(ValueError, match="norm weight"):
        decode(q_norm=torch.ones(32, device=DEVICE))
    with pytest.raises(ValueError, match="-1 for padding"):
        decode(rows=integers([0, 0]))
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        decode(lengths=integers([4]).long())


def device_launches() -> None:
    """One launch of every variant that differs in more than sizes."""
    decode = integers([0]), integers([4])
    prefill = integers([0]), integers([4]), integers([0, 1])
    for shape, norms in (((8, 2, 128, 128, 16, BF16), False), ((4, 2, 80, 32, 1, F32), True)):
        run(kernels, "rotary_store_decode", shape, decode, 1, norms)
        run(kernels, "rotary_store_prefill", shape, prefill, 1, norms)


@needs_no_device
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_devices(capability: int) -> None:
    assert len(compile_for(__file__, capability)) == 4


@needs_device
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_many_tokens(dtype: torch.dtype) -> None:
    rows = [i % 6 for i in range(6)] + [-1] * 50
    both("rotary_store_decode", (32, 8, 128, 128, 16, dtype), (integers(rows), integers(LENGTHS)), len(rows), True)
    chunks = integers([0, 1, 2, 3, 4]), integers([0, 1, 2, 3, 0]), integers([0, 99, 150, 150, 222, 300])
    both("rotary_store_prefill", (32, 8, 128, 64, 16, dtype), chunks, 310)
