"""Attention, and rotary embedding with its store, in plain torch: the definition of the kernels.

The signatures of the kernels without what only concerns their launch, float32 arithmetic, results
rounded once. Slow; for tests.
"""

from __future__ import annotations

import itertools

import torch


def decode_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> None:
    """See :func:`asyncsched.gpu.cuda.kernels.decode_attention.decode_attention`."""
    for entry, row in enumerate(rows.tolist()):
        if row >= 0:
            position = int(lengths[row])
            keys, values = (_context(pool, block_table[row], position + 1) for pool in (k_pool, v_pool))
            out[entry] = _attend(q[entry : entry + 1], keys, values, scale, window)


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
) -> None:
    """See :func:`asyncsched.gpu.cuda.kernels.prefill_attention.prefill_attention`."""
    sums = cu_seqlens.tolist()
    for row, start, (begin, end) in zip(rows.tolist(), starts.tolist(), itertools.pairwise(sums), strict=True):
        keys, values = (_context(pool, block_table[row], start + end - begin) for pool in (k_pool, v_pool))
        out[begin:end] = _attend(q[begin:end], keys, values, scale, window)


def rotary_store_decode(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """See :func:`asyncsched.gpu.cuda.kernels.rotary_store.rotary_store_decode`."""
    places = [(row, int(lengths[row])) for row in rows.tolist()]
    return _rotary_store(qkv, cos_sin, k_pool, v_pool, block_table, places, heads, q_norm, k_norm, eps)


def rotary_store_prefill(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    cu_seqlens: torch.Tensor,
    heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """See :func:`asyncsched.gpu.cuda.kernels.rotary_store.rotary_store_prefill`."""
    places = _places(rows, starts, cu_seqlens)
    return _rotary_store(qkv, cos_sin, k_pool, v_pool, block_table, places, heads, q_norm, k_norm, eps)


def _rotary_store(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_table: torch.Tensor,
    places: list[tuple[int, int]],
    heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _, kv_heads, page_size, head_dim = k_pool.shape
    split = qkv.view(len(qkv), heads + 2 * kv_heads, head_dim)
    for token, (row, position) in enumerate(places):
        if row < 0:
            continue
        q, k, v = split[token, :heads], split[token, heads : heads + kv_heads], split[token, heads + kv_heads :]
        page, offset = int(block_table[row, position // page_size]), position % page_size
        k_pool[page, :, offset] = _turn(k.float(), k_norm, cos_sin[position], eps).to(k_pool.dtype)
        v_pool[page, :, offset] = v
        split[token, :heads] = _turn(q.float(), q_norm, cos_sin[position], eps).to(qkv.dtype)
    return split[:, :heads]


def _turn(x: torch.Tensor, norm: torch.Tensor | None, cos_sin: torch.Tensor, eps: float) -> torch.Tensor:
    """Heads ``[n, head_dim]`` of one position normed (if asked) and rotated."""
    if norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
    cos, sin = cos_sin.chunk(2)
    half = len(cos)
    low, high, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], -1)


def _places(rows: torch.Tensor, starts: torch.Tensor, cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    """Row and position of every token of packed chunks."""
    chunks = zip(rows.tolist(), starts.tolist(), cu_seqlens.diff().tolist(), strict=True)
    return [(row, start + j) for row, start, count in chunks for j in range(count)]


def _context(pool: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` keys or values of a row, float32 ``[kv_heads, count, head_dim]``."""
    page_size = pool.shape[2]
    pages = pool[table[: -(-count // page_size)].long()]
    return pages.transpose(0, 1).flatten(1, 2)[:, :count].float()


def _attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """The last ``n`` tokens of a context, ``[n, heads, head_dim]``, over its keys and values."""
    count, context = len(q), keys.shape[1]
    group = q.shape[1] // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = torch.einsum("nhd,htd->hnt", q.float(), keys) * scale
    position = torch.arange(context - count, context, device=q.device)
    age = position[:, None] - torch.arange(context, device=q.device)
    unseen = (age < 0) | (age >= window) if window else age < 0
    weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
    return torch.einsum("hnt,htd->nhd", weights, values).flatten(1)
