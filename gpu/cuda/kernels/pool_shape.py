"""What the launchers of attention and rotary kernels check: kernels check nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....errors import UnsupportedModelError

_TYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 256


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Sizes of one layer's pool, ``[pages, kv_heads, page_size, head_dim]``."""

    kv_heads: int
    page_size: int
    head_dim: int

    @classmethod
    def of(cls, k_pool: torch.Tensor, v_pool: torch.Tensor) -> PoolShape:
        """Read and check the pools of keys and values.

        Raises:
            UnsupportedModelError: a data type or head size the kernels lack.
            ValueError: the pools differ, or are not contiguous.
        """
        if k_pool.dtype not in _TYPES:
            raise UnsupportedModelError(
                f"the CUDA kernels compute bfloat16, float16 and float32, not {k_pool.dtype}; choose another dtype"
            )
        _, kv_heads, page_size, head_dim = k_pool.shape
        check_head_dim(head_dim)
        if v_pool.shape != k_pool.shape or v_pool.dtype != k_pool.dtype:
            raise misfit(f"keys {tuple(k_pool.shape)} and values {tuple(v_pool.shape)} of the pool, or their types")
        if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
            raise ValueError(
                "the pools of keys and values must be contiguous; allocate each layer's pool as a tensor of its own"
            )
        return cls(kv_heads, page_size, head_dim)

    def group(self, q: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> int:
        """Check the queries and the output of attention; how many query heads share a key/value head.

        Raises:
            ValueError: shapes, types or strides that attention cannot read.
        """
        tokens, heads, head_dim = q.shape
        if head_dim != self.head_dim or heads % self.kv_heads or not heads:
            raise misfit(f"queries {tuple(q.shape)} for {self.kv_heads} key heads of {self.head_dim}")
        if q.stride()[1:] != (head_dim, 1) or q.dtype != dtype or out.dtype != dtype:
            raise ValueError(
                f"queries are {q.dtype} of strides {q.stride()}, the output is {out.dtype}, the pools are {dtype}; "
                "the types must be equal and the heads contiguous"
            )
        if out.shape != (tokens, heads * head_dim) or not out.is_contiguous():
            raise misfit(f"output {tuple(out.shape)} for queries {tuple(q.shape)}; it must be contiguous")
        return heads // self.kv_heads


def check_head_dim(head_dim: int) -> None:
    """The width of a head must be one that the kernels compute.

    Raises:
        UnsupportedModelError: it is another.
    """
    if head_dim % 8 or not 8 <= head_dim <= _WIDEST:
        raise UnsupportedModelError(
            f"the CUDA kernels compute heads of up to {_WIDEST} dimensions, in multiples of 8, not {head_dim}; use device='cpu'"
        )


def check_integers(**tensors: torch.Tensor) -> None:
    """Row numbers, lengths, tables: int32 and contiguous.

    Raises:
        ValueError: one of them is not; the text has its name.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype} of strides {tensor.stride()}; it must be contiguous int32")


def check_chunks(rows: torch.Tensor, starts: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """One row and one start per chunk, and one sum more.

    Raises:
        ValueError: the counts do not fit.
    """
    chunks = len(rows)
    if rows.shape != (chunks,) or starts.shape != (chunks,) or cu_seqlens.shape != (chunks + 1,):
        raise misfit(f"rows {tuple(rows.shape)}, starts {tuple(starts.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}")


def misfit(what: str) -> ValueError:
    """The error for shapes that do not belong together."""
    return ValueError(f"tensor shapes do not fit: {what}")
