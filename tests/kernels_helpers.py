"""Paged pools with garbage in them, and memory that ends at a page nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncsched.gpu.kernels import StepLayout, store_kv

Segments = Sequence[tuple[int, int]]  # (new tokens, tokens cached before them)


@dataclass
class Scene:
    """Pools filled for some rows; every slot without a token holds NaN."""

    keys: Tensor
    values: Tensor
    table: NDArray[np.int32]
    page_size: int
    queries: Tensor
    ends: list[int]

    @classmethod
    def build(
        cls, heads: int, kv_heads: int, dim: int, page_size: int, ends: Sequence[int], dtype: torch.dtype, seed: int = 0
    ) -> Scene:
        """Rows of ``ends`` tokens; keys, values and queries of all positions are drawn once."""
        draw = torch.Generator().manual_seed(seed)
        counts = [-(-end // page_size) for end in ends]
        pages = sum(counts) + 2
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).numpy().astype(np.int32)
        table = np.full((len(ends) + 1, max(counts, default=0) + 1), shuffled[-1], np.int32)
        used = 0
        for row, count in enumerate(counts):
            table[row, :count] = shuffled[used : used + count]
            used += count
        keys = torch.full((pages, kv_heads, dim, page_size), torch.nan, dtype=dtype)
        values = torch.full((pages, kv_heads, page_size, dim), torch.nan, dtype=dtype)
        total = sum(ends)
        queries = torch.randn(total, heads, dim, generator=draw)
        scene = cls(keys, values, table, page_size, queries, list(ends))
        new = torch.randn(2, total, kv_heads, dim, generator=draw).to(dtype)
        store_kv(new[0], new[1], scene.layout([(end, 0) for end in ends]), keys, values)
        return scene

    def layout(self, segments: Segments, rows: Sequence[int] | None = None) -> StepLayout:
        """The layout of a step whose segment ``i`` belongs to ``rows[i]``, by default row ``i``."""
        lengths, starts = np.array(segments, np.int32).reshape(-1, 2).T
        order = np.arange(len(segments)) if rows is None else np.array(rows)
        return StepLayout.build(self.table, order.astype(np.int32), lengths, starts, self.page_size)

    def queries_of(self, segments: Segments, rows: Sequence[int] | None = None) -> Tensor:
        """The queries of these segments: a row's query at a position is always the same."""
        order = range(len(segments)) if rows is None else rows
        first = np.cumsum([0, *self.ends])
        parts = [self.queries[first[r] + s : first[r] + s + n] for r, (n, s) in zip(order, segments, strict=True)]
        return torch.cat(parts) if parts else self.queries[:0]


def guarded(tensor: Tensor) -> Tensor:
    """A copy that ends where the next page of memory cannot be read or written: an overrun kills the process."""
    if not tensor.numel():
        return tensor
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    whole = -(-size // page) * page
    memory = mmap.mmap(-1, whole + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(start + whole), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect failed")
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size).view(tensor.shape)
    return copy.copy_(tensor)


def close(found: Tensor, wanted: Tensor) -> None:
    """Equal up to float32 arithmetic, or for bfloat16 one unit in the last place."""
    rtol, atol = (2**-7, 1e-6) if wanted.dtype == torch.bfloat16 else (2e-5, 2e-6)
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
