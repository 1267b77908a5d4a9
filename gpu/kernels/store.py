"""Keys and values of new tokens into the paged pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._jit import inlined, kernel, part
from .layout import StepLayout
from .simd import LANES, load_part, pointer, store_part, store_strided
from .tensors import element, misfit
from .threads import parallel, team

_LEAST = 1 << 14


@inlined
def put_key(pool: Any, slot: Any, head: Any, kv_heads: Any, dim: Any, page_size: Any, source: Any, begin: Any) -> None:
    """One key into its page, where a position is a column: consecutive dimensions are a page size apart."""
    target = (slot // page_size * kv_heads + head) * dim * page_size + slot % page_size
    for d in range(0, dim, LANES):
        value = load_part(source, begin + d, dim - d)
        store_strided(pool, target + d * page_size, page_size, value, dim - d)


@inlined
def put_value(pool: Any, slot: Any, head: Any, kv_heads: Any, dim: Any, page_size: Any, source: Any, begin: Any) -> None:
    """One value into its page, where a position is a row."""
    target = ((slot // page_size * kv_heads + head) * page_size + slot % page_size) * dim
    for d in range(0, dim, LANES):
        store_part(pool, target + d, load_part(source, begin + d, dim - d), dim - d)


@part
def _store_tokens(
    chunk: Any,
    chunks: Any,
    worker: Any,
    element: Any,
    k: Any,
    v: Any,
    slots: Any,
    k_pool: Any,
    v_pool: Any,
    tokens: Any,
    kv_heads: Any,
    dim: Any,
    page_size: Any,
) -> None:
    keys, values = pointer(k, element), pointer(v, element)
    for i in range(tokens * chunk // chunks, tokens * (chunk + 1) // chunks):
        slot = pointer(slots, np.int64(0))[i]
        for head in range(kv_heads):
            begin = (i * kv_heads + head) * dim
            put_key(pointer(k_pool, element), slot, head, kv_heads, dim, page_size, keys, begin)
            put_value(pointer(v_pool, element), slot, head, kv_heads, dim, page_size, values, begin)


@kernel
def _store(
    element: Any,
    k: Any,
    v: Any,
    slots: Any,
    k_pool: Any,
    v_pool: Any,
    tokens: Any,
    kv_heads: Any,
    dim: Any,
    page_size: Any,
    fork: Any,
    threads: Any,
) -> None:
    arguments = (element, k, v, slots, k_pool, v_pool, tokens, kv_heads, dim, page_size)
    parallel(_store_tokens, fork, threads, 4 * threads, arguments)


def check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor, layout: StepLayout, kv_heads: int, dim: int) -> None:
    """Refuse pools whose shape is not ``[pages, kv_heads, dim, page_size]`` and its counterpart."""
    size = layout.page_size
    if k_pool.shape[1:] != (kv_heads, dim, size) or v_pool.shape != (len(k_pool), kv_heads, size, dim):
        shapes = f"keys {tuple(k_pool.shape)} and values {tuple(v_pool.shape)} of the pool"
        raise misfit(f"{shapes}, {kv_heads} heads of {dim}, pages of {size}")


def store_kv(k: torch.Tensor, v: torch.Tensor, layout: StepLayout, k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """Write keys and values of a step's tokens to their slots, as they are. Compute thread only.

    Args:
        k, v: ``[N, kv_heads, head_dim]``, in the pool's type.
        layout: Says which slot each of the N tokens has.
        k_pool: ``[pages, kv_heads, head_dim, page_size]``, written.
        v_pool: ``[pages, kv_heads, page_size, head_dim]``, written.
    """
    kind = element(k, v, k_pool, v_pool)
    tokens, kv_heads, dim = k.shape
    if k.shape != v.shape or tokens != layout.tokens:
        raise misfit(f"k {tuple(k.shape)}, v {tuple(v.shape)}, {layout.tokens} tokens")
    check_pools(k_pool, v_pool, layout, kv_heads, dim)
    addresses = (k.data_ptr(), v.data_ptr(), layout.addresses.slots, k_pool.data_ptr(), v_pool.data_ptr())
    _store(kind, *addresses, tokens, kv_heads, dim, layout.page_size, *team(k.numel(), _LEAST))
