"""Paged attention in Triton against its definition in torch, and against itself cut another way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.cuda.kernels import reference_attention as reference
from asyncsched.gpu.cuda.kernels.decode_attention import DecodeScratch, decode_attention, decode_splits
from asyncsched.gpu.cuda.kernels.prefill_attention import prefill_attention
from asyncsched.gpu.cuda.kernels.tiling import Tiling, decode_tiling, prefill_tiling

from .triton_helpers import DEVICE, compile_for, needs_device, needs_no_device

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = [  # query heads, key heads, head size, page size, type
    (8, 2, 64, 16, F32),
    (3, 3, 80, 1, F32),
    (8, 1, 96, 64, F32),
    (10, 2, 128, 32, F32),
    (2, 1, 256, 16, F32),
    (9, 3, 64, 16, BF16),
    (7, 1, 128, 64, BF16),
    (8, 4, 80, 32, F16),
    (40, 1, 16, 4, F32),  # more heads to a key head than a block holds
]
ENDS = [1, 33, 64, 17, 100]  # tokens per row: at and beside the borders of pages and blocks
CHUNKS = [(1, 0), (33, 0), (0, 9), (14, 50), (40, 30)]  # (new tokens, tokens before them)
SMALL = Tiling(16, 16, 4, 1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    tolerance = {F32: 4e-6, F16: 2e-3, BF16: 1e-2}[wanted.dtype]  # weights are rounded to the pool's type
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@dataclass
class Scene:
    """Rows of ``ends`` tokens in shuffled pages; slots without a token hold NaN, and free table entries name a page of them."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    heads: int

    @classmethod
    def build(cls, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype, ends: Sequence[int]) -> Scene:
        generator = torch.Generator().manual_seed(heads * dim + page_size)
        counts = [-(-end // page_size) for end in ends]
        pages = torch.randperm(sum(counts) + 1, generator=generator)
        table = torch.full((len(ends), max(counts) + 2), int(pages[-1]), dtype=torch.int32)
        pools = torch.full((2, len(pages), kv_heads, page_size, dim), torch.nan)
        first = 0
        for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
            table[row, :count] = own = pages[first : first + count]
            first += count
            tokens = torch.full((2, count * page_size, kv_heads, dim), torch.nan)
            tokens[:, :end] = torch.randn(2, end, kv_heads, dim, generator=generator)
            pools[:, own] = tokens.view(2, count, page_size, kv_heads, dim).transpose(2, 3)
        keys, values = pools.to(dtype).to(DEVICE)
        return cls(keys, values, table.to(DEVICE), heads)

    def queries(self, tokens: int) -> torch.Tensor:
        """Queries as they lie in a fused projection: keys and values between those of one token and the next."""
        kv_heads, dim = self.keys.shape[1], self.keys.shape[3]
        generator = torch.Generator().manual_seed(tokens)
        fused = torch.randn(tokens, self.heads + 2 * kv_heads, dim, generator=generator)
        return fused.to(self.keys.dtype).to(DEVICE)[:, : self.heads]

    def decode(self, rows: Sequence[int], ends: Sequence[int], splits: int = 1, **options: Any) -> torch.Tensor:
        q, out, arguments = self._arguments(len(rows), integers(rows), integers([end - 1 for end in ends]))
        scratch = DecodeScratch.allocate(len(rows) * splits, self.heads, q.shape[2], DEVICE)
        scratch.partial.fill_(torch.nan)
        scratch.weight.fill_(torch.nan)
        options |= {"scratch": scratch, "scale": 0.1, "splits": splits}
        decode_attention(*arguments, **options)
        return out

    def define_decode(self, rows: Sequence[int], ends: Sequence[int], **options: Any) -> torch.Tensor:
        _, out, arguments = self._arguments(len(rows), integers(rows), integers([end - 1 for end in ends]))
        reference.decode_attention(*arguments, scale=0.1, **options)
        return out

    def prefill(self, kernel: Any, chunks: Sequence[tuple[int, int]], padding: int = 0, **options: Any) -> torch.Tensor:
        """Chunk ``i`` belongs to row ``i``."""
        sums = [0, *itertools.accumulate(new for new, _ in chunks)]
        places = integers(range(len(chunks))), integers([before for _, before in chunks]), integers(sums)
        _, out, arguments = self._arguments(sums[-1] + padding, *places)
        kernel(*arguments, scale=0.1, **options)
        return out

    def _arguments(self, tokens: int, *places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
        q = self.queries(tokens)
        out = torch.full((tokens, self.heads * q.shape[2]), 7.0, dtype=q.dtype, device=DEVICE)
        return q, out, (q, self.keys, self.values, self.table, *places, out)


def integers(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_matches_the_definition(shape: tuple[int, int, int, int, torch.dtype], splits: int) -> None:
    """Rows in any order, padding between them; short rows leave splits empty."""
    scene = Scene.build(*shape, ENDS)
    rows = [4, -1, 0, 2, 1, -1, 3]
    found = scene.decode(rows, ENDS, splits, tiling=SMALL if splits > 1 else None)
    close(found, scene.define_decode(rows, ENDS))
    assert (found[[1, 5]] == 7).all()


@pytest.mark.parametrize("window", [1, 16, 21, 90, 1000])
@pytest.mark.parametrize("splits", [1, 2])
def test_decode_in_a_window(window: int, splits: int) -> None:
    scene = Scene.build(4, 2, 16, 16, F32, ENDS)
    rows = range(len(ENDS))
    found = scene.decode(rows, ENDS, splits, window=window, tiling=SMALL)
    close(found, scene.define_decode(rows, ENDS, window=window))


def test_the_number_of_splits_changes_only_the_rounding() -> None:
    scene = Scene.build(4, 1, 64, 16, F32, [200])
    whole = scene.decode([0], [200])
    for splits in (2, 5, 13, 64):
        close(scene.decode([0], [200], splits, tiling=SMALL), whole)


def test_scores_far_apart() -> None:
    """One token takes all the weight, wherever it is: weights of other splits underflow to zero."""
    scene = Scene.build(1, 1, 64, 16, F32, [100])
    for position in (0, 47, 99):
        scene.keys.nan_to_num_(0.0)[...] = -scene.queries(1)[0, 0] * 1000
        page = scene.table[0, position // 16]
        scene.keys[page, 0, position % 16] *= -1
        close(scene.decode([0], [100], 3, tiling=SMALL)[0], scene.values[page, 0, position % 16])


@pytest.mark.parametrize(("shape", "window"), [(shape, 19 * (i % 2)) for i, shape in enumerate(SHAPES)], ids=str)
def test_prefill_matches_the_definition(shape: tuple[int, int, int, int, torch.dtype], window: int) -> None:
    """Chunks with and without a cached prefix, one without tokens, and padding behind the last."""
    scene = Scene.build(*shape, [new + before for new, before in CHUNKS])
    found = scene.prefill(prefill_attention, CHUNKS, padding=3, window=window)
    close(found, scene.prefill(reference.prefill_attention, CHUNKS, padding=3, window=window))
    assert (found[-3:] == 7).all()


@pytest.mark.parametrize(("queries", "keys", "window"), [(16, 64, 0), (64, 16, 0), (32, 32, 5), (32, 16, 40)])
def test_prefill_in_other_blocks(queries: int, keys: int, window: int) -> None:
    tiling = Tiling(queries, keys, 4, 1)
    scene = Scene.build(6, 2, 16, 16, F32, [new + before for new, before in CHUNKS])
    found = scene.prefill(prefill_attention, CHUNKS, window=window, tiling=tiling)
    close(found, scene.prefill(reference.prefill_attention, CHUNKS, window=window))


def test_a_decoded_token_equals_a_prefilled_one() -> None:
    scene = Scene.build(6, 2, 64, 16, F32, [90])
    close(scene.decode([0], [90], 2, tiling=SMALL), scene.prefill(prefill_attention, [(1, 89)]))


def test_many_chunks_of_one_token() -> None:
    ends = [3 * i + 1 for i in range(21)]
    scene = Scene.build(2, 1, 16, 16, F32, ends)
    close(scene.prefill(prefill_attention, [(1, end - 1) for end in ends]), scene.define_decode(range(21), ends))


def test_nothing_to_do() -> None:
    scene = Scene.build(4, 2, 64, 16, F32, [5])
    assert scene.decode([], [5]).shape == (0, 256)
    assert scene.prefill(prefill_attention, []).shape == (0, 256)
    assert (scene.decode([-1, -1], [5], 2) == 7).all()


def test_nan_in_a_context_stays_in_its_row() -> None:
    scene = Scene.build(4, 2, 64, 16, F32, [40, 40])
    clean = scene.decode([0, 1], [40, 40])
    scene.keys[scene.table[1, 1], 0, 3, 5] = torch.nan
    found = scene.decode([0, 1], [40, 40])
    assert torch.equal(found[0], clean[0])
    assert found[1, :128].isnan().all()
    assert torch.equal(found[1, 128:], clean[1, 128:])


def test_splits_fill_the_device_but_stay_worth_it() -> None:
    assert decode_splits(256, 8, 4096, 132) == 2  # 2,048 programs alone are under 8 waves of 264
    assert decode_splits(512, 8, 4096, 132) == 1
    assert decode_splits(1, 8, 4096, 132) == 32  # of 128 positions
    assert decode_splits(1, 8, 1, 132) == 1
    assert decode_splits(1, 1, 1 << 20, 132) == 128
    assert decode_splits(512, 8, 131072, 132) == 8  # one long row among many short ones
    for rows in range(1, 300, 7):
        splits = decode_splits(rows, 8, 1 << 17, 132)
        assert rows * 8 * splits >= min(8 * 2 * 132, rows * 8 * 128)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_blocks_are_powers_of_two_that_matrix_units_take(dim: int, dtype: torch.dtype) -> None:
    for tiling in (prefill_tiling(dim, dtype), *(decode_tiling(dim, dtype, group) for group in (1, 3, 8, 71))):
        for size in (tiling.queries, tiling.keys):
            assert size >= 16
            assert size & (size - 1) == 0


def test_refuses_what_it_cannot_compute() -> None:
    scene = Scene.build(4, 2, 64, 16, F32, [5])

    def decode(**changes: Any) -> None:
        given: dict[str, Any] = {
            "q": scene.queries(1),
            "k_pool": scene.keys,
            "v_pool": scene.values,
            "block_table": scene.table,
            "rows": integers([0]),
            "lengths": integers([4]),
            "out": torch.empty(1, 256, device=DEVICE),
            "scratch": DecodeScratch.allocate(1, 4, 64, DEVICE),
            "scale": 0.1,
            "splits": 1,
        }
        decode_attention(**given | changes)

    decode()
    with pytest.raises(UnsupportedModelError, match="float64"):
        decode(k_pool=scene.keys.double(), v_pool=scene.values.double())
    for dim in (4, 20, 264):
        with pytest.raises(UnsupportedModelError, match="multiples of 8"):
            decode(k_pool=torch.empty(1, 2, 16, dim), v_pool=torch.empty(1, 2, 16, dim))
    with pytest.raises(ValueError, match="of the pool"):
        decode(v_pool=scene.values[1:])
    with pytest.raises(ValueError, match="contiguous"):
        decode(k_pool=scene.keys.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match="key heads"):
        decode(q=torch.empty(1, 3, 64, device=DEVICE))
    with pytest.raises(ValueError, match="types must be equal"):
        decode(q=scene.queries(1).half())
    with pytest.raises(ValueError, match="output"):
        decode(out=torch.empty(2, 256, device=DEVICE))
    with pytest.raises(ValueError, match=r"lengths is torch\.int64"):
        decode(lengths=integers([4]).long())
    with pytest.raises(ValueError, match="-1 for padding"):
        decode(rows=integers([0, 0]))
    with pytest.raises(ValueError, match="allocate more"):
        decode(splits=2)
    paged = scene.queries(1), scene.keys, scene.values, scene.table
    for rows, sums in ((1, 3), (2, 2)):
        places = integers([0] * rows), integers([4]), integers([1] * sums)
        with pytest.raises(ValueError, match="cu_seqlens"):
            prefill_attention(*paged, *places, torch.empty(1, 256, device=DEVICE), scale=0.1)


def device_launches() -> None:
    """One launch of every variant that differs in more than sizes."""
    for shape, options, splits in (
        ((8, 2, 128, 16, BF16), {}, 4),
        ((3, 3, 80, 1, F16), {"window": 32}, 1),
        ((4, 2, 64, 64, F32), {}, 1),
    ):
        scene = Scene.build(*shape, [40])
        scene.decode([0], [40], splits, **options)
        scene.prefill(prefill_attention, [(20, 20)], **options)


@needs_no_device
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_for_devices(capability: int) -> None:
    assert len(compile_for(__file__, capability)) == 7


@needs_device
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_decode_of_many_long_rows(dim: int, dtype: torch.dtype) -> None:
    ends = [1 + 97 * i % 4096 for i in range(256)]
    scene = Scene.build(32, 8, dim, 16, dtype, ends)
    wanted = scene.define_decode(range(256), ends)
    for splits in (1, decode_splits(256, 8, 4096, 132), 9):
        close(scene.decode(range(256), ends, splits), wanted)


@needs_device
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prefill_of_long_chunks(dim: int, dtype: torch.dtype) -> None:
    chunks = [(700, 0), (1, 2000), (300, 1000), (5, 64)]
    scene = Scene.build(8, 2, dim, 16, dtype, [new + before for new, before in chunks])
    close(scene.prefill(prefill_attention, chunks), scene.prefill(reference.prefill_attention, chunks))


@needs_device
def test_a_captured_graph_serves_other_rows_and_lengths() -> None:
    scene = Scene.build(8, 2, 128, 16, BF16, [900, 30, 500])
    rows, lengths = integers([0, -1]), integers([10, 10, 10])
    q, out = scene.queries(2), torch.empty(2, 1024, dtype=BF16, device=DEVICE)
    scratch = DecodeScratch.allocate(2 * 5, 8, 128, DEVICE)

    def decode() -> None:
        decode_attention(q, scene.keys, scene.values, scene.table, rows, lengths, out, scratch, scale=0.1, splits=5)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    rows.copy_(integers([2, 0]))
    lengths.copy_(integers([899, 29, 499]))
    graph.replay()
    close(out, scene.define_decode([2, 0], [900, 30, 500]))
