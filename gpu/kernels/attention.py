"""Attention of a packed step over the paged pool: one kernel for decode and prefill.

Queries that share a key/value head are cut into *tiles*: consecutive (token, head) pairs of one
segment, so a tile is the head group of one decoded token or of several prompt tokens. A tile
walks its context in blocks of 64 positions, read in place through the block table (Kwon et al.,
arXiv:2309.06180), and keeps a running maximum and sum per query (online softmax: Milakov and
Gimelshein, arXiv:1805.02867; in blocks as in Dao et al., arXiv:2205.14135), all in float32.

Blocks begin at absolute positions and every query has accumulators of its own, so the arithmetic
for one query is the same in whatever tile, chunk, batch or thread it is computed, bit for bit.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from ._jit import inlined, kernel, llvm, part
from .attention_tile import BLOCK, TILE, Data, Place, Shape, attend_tile, scratch_floats
from .layout import StepLayout
from .simd import LANES, pointer
from .store import check_pools
from .tensors import element, misfit
from .threads import FORK, parallel

_LOG2E = math.log2(math.e)
_LEAST = 1 << 18  # positions × queries × head size that are not worth a second thread


@inlined
def _cost(shape: Any, start: Any, first: Any, count: Any) -> Any:
    """Work of a tile in arbitrary units: positions read × (a share per query + one for reading)."""
    reach = start + (first + count - 1) // shape.group + 1
    if shape.window > 0 and reach > shape.window + count:
        reach = shape.window + count
    return reach * (count + 3)


@part
def _attend_chunk(
    chunk: Any,
    chunks: Any,
    worker: Any,
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    element: Any,
    shape: Any,
    segments: Any,
    max_pages: Any,
    arrays: Any,
    tensors: Any,
    work: Any,
    work_bytes: Any,
    stage_at: Any,
    scale: Any,
    cap: Any,
    everything: Any,
) -> None:
    """The tiles that begin in this chunk's share of the step's whole cost."""
    table, seg_row, seg_first, seg_len, seg_start = arrays
    q, keys, values, out = tensors
    index, number = np.int32(0), np.float32(0.0)
    memory = work + worker * work_bytes
    low, high = everything * chunk // chunks, everything * (chunk + 1) // chunks
    cost = 0
    for s in range(segments):
        start = np.int64(pointer(seg_start, index)[s])
        queries = np.int64(pointer(seg_len, index)[s]) * shape.group
        data = Data(
            pointer(q, number),
            pointer(keys, element),
            pointer(values, element),
            pointer(out, element),
            pointer(table + np.int64(pointer(seg_row, index)[s]) * max_pages * 4, index),
        )
        for head in range(shape.kv_heads):
            for first in range(0, queries, TILE):
                count = TILE if queries - first > TILE else queries - first
                if low <= cost < high:
                    place = Place(np.int64(pointer(seg_first, index)[s]), start, first, count, head)
                    attend_tile(rows, key_columns, value_columns, place, shape, data, element, memory, stage_at, scale, cap)
                cost += _cost(shape, start, first, count)


@kernel
def _attend(
    rows: Any,
    key_columns: Any,
    value_columns: Any,
    element: Any,
    heads: Any,
    kv_heads: Any,
    dim: Any,
    page_size: Any,
    window: Any,
    segments: Any,
    max_pages: Any,
    arrays: Any,
    tensors: Any,
    work: Any,
    work_bytes: Any,
    stage_at: Any,
    scale: Any,
    cap: Any,
    fork: Any,
    threads: Any,
) -> None:
    width = (dim + LANES - 1) // LANES * LANES
    shape = Shape(heads, kv_heads, heads // kv_heads, dim, width, page_size, window)
    lengths, starts = pointer(arrays[3], np.int32(0)), pointer(arrays[4], np.int32(0))
    everything = 0
    for s in range(segments):
        queries = np.int64(lengths[s]) * shape.group
        for first in range(0, queries, TILE):
            count = TILE if queries - first > TILE else queries - first
            everything += kv_heads * _cost(shape, np.int64(starts[s]), first, count)
    if everything * dim < _LEAST:
        threads = 1
    markers = (rows, key_columns, value_columns, element)
    memory = (work, work_bytes, stage_at, scale, cap, everything)
    parallel(_attend_chunk, fork, threads, 4 * threads, (*markers, shape, segments, max_pages, arrays, tensors, *memory))


@cache
def _registers() -> int:
    """Vectors of 16 float32 that fit the CPU's registers, one spared."""
    return 31 if llvm.get_host_cpu_features().get("avx512f") else 7


@cache
def _markers(group: int, width: int) -> tuple[tuple[None, ...], tuple[None, ...], tuple[None, ...]]:
    """Rows and columns of the accumulator tiles: as many as the registers hold beside one row of operands."""
    most = 4 if _registers() > 16 else 3
    rows = -(-group // -(-group // most))
    columns = (_registers() - 1) // (rows + 1)
    keys = max(c for c in (1, 2, 4) if c <= columns)
    values = max(c for c in range(1, columns + 1) if width // LANES % c == 0)
    return (None,) * rows, (None,) * keys, (None,) * values


def paged_attention(
    q: torch.Tensor,
    layout: StepLayout,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of every new token over its own context in the pool. Compute thread only.

    Keys and values of the whole step must have been written. Slots of a page that hold no token
    yet may contain anything, NaN included.

    Args:
        q: Queries, float32 ``[N, heads, head_dim]``; ``heads`` is a multiple of the pool's.
        layout: The step's segments.
        k_pool: ``[pages, kv_heads, head_dim, page_size]``, bfloat16 or float32.
        v_pool: ``[pages, kv_heads, page_size, head_dim]``, same type.
        scale: Multiplies the scores.
        window: Attend to the last ``window`` positions only, the token's own included; 0 is all.
        softcap: ``cap * tanh(score / cap)`` before the softmax (Gemma 2); 0 is off.

    Returns:
        ``[N, heads * head_dim]`` in the pool's type.
    """
    kind = element(k_pool, v_pool)
    tokens, heads, dim = q.shape
    kv_heads, page_size = k_pool.shape[1], layout.page_size
    if q.dtype != torch.float32 or not q.is_contiguous():
        raise misfit(f"q is {q.dtype} of strides {q.stride()}; it must be contiguous float32")
    if tokens != layout.tokens or heads % kv_heads:
        raise misfit(f"q {tuple(q.shape)}, {layout.tokens} tokens, {kv_heads} key heads")
    check_pools(k_pool, v_pool, layout, kv_heads, dim)
    markers = _markers(heads // kv_heads, -(-dim // LANES) * LANES)
    threads = torch.get_num_threads() if FORK else 1
    floats, staged = _memory(dim, len(markers[0]), page_size, k_pool.element_size())
    out = k_pool.new_empty((tokens, heads * dim))
    work = torch.empty(threads * (floats + staged), dtype=torch.float32)
    sizes = (heads, kv_heads, dim, page_size, window, len(layout.seg_row), layout.table.shape[1])
    tensors = (q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr())
    memory = (work.data_ptr(), 4 * (floats + staged), 4 * floats if staged else None)
    factor, cap = (scale / softcap, np.float32(softcap * _LOG2E)) if softcap > 0 else (scale * _LOG2E, None)
    _attend(*markers, kind, *sizes, layout.addresses[:5], tensors, *memory, np.float32(factor), cap, FORK, threads)
    return out


@cache
def _memory(dim: int, rows: int, page_size: int, element_size: int) -> tuple[int, int]:
    """Float32 words of memory per thread: for a tile, and behind it for a staged block if there is one."""
    width = -(-dim // LANES) * LANES
    tile = -(-scratch_floats(rows, dim, width) // LANES) * LANES
    return tile, BLOCK * (dim + width) * element_size // 4 if page_size % LANES or dim % LANES else 0
