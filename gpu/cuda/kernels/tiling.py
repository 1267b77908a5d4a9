"""How attention is cut into blocks: a small rule by head size and type instead of autotuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_TILE_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one attention kernel is launched.

    Attributes:
        queries: Rows of a block of queries, (token, head of a group) pairs; a power of two ≥ 16.
        keys: Positions read at a time; a power of two ≥ 16.
        warps: Warps of a program.
        ahead: Blocks of keys and values whose loads are under way while one is computed.
    """

    queries: int
    keys: int
    warps: int
    ahead: int

    @property
    def stages(self) -> int:
        """Pipeline stages as Triton counts them: a load of keys waits for one of the block table."""
        return 2 * self.ahead + 1


def padded(head_dim: int) -> int:
    """Columns of a block that holds one head: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """Blocks for decode attention, which lives on bytes in flight.

    Tiles of 16 KB, two of keys and two of values under way: about 72 KB of shared memory, so that
    two programs (A100) or three (H100 and later) share a multiprocessor and each keeps 64 KB of
    loads queued. A group of query heads is one block up to 32.

    Args:
        head_dim: Width of one head.
        dtype: Of the pool.
        group: Query heads per key/value head.
    """
    keys = _TILE_BYTES // (padded(head_dim) * dtype.itemsize)
    return Tiling(min(32, padded(group)), max(16, min(keys, 128)), 4, 2)


def prefill_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Blocks for prefill attention, which lives on tensor cores.

    As many queries as leave the accumulators in registers, keys two blocks ahead where that fits
    the 99 KB of shared memory that sm86 and sm89 have.

    Args:
        head_dim: Width of one head.
        dtype: Of the pool.
    """
    if dtype == torch.float32:
        if head_dim <= 128:
            return Tiling(64 if head_dim <= 64 else 32, 32, 8, 1)
        return Tiling(16, 16, 4, 1)
    return Tiling(128, 64, 8, 2) if head_dim <= 128 else Tiling(64, 32, 8, 1)
