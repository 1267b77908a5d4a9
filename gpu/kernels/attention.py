from __future__ import annotations
import numpy as np
from ._jit import kernel, launcher, prange
from .simd import LANES, load, pointer, store, prefetch_all
from .lanemath import add, between, exp2, larger, largest, mul, splat, sub, total
from .threads import parallel
from .tile import fma_tile, load_indirect, load_row, load_tile, store_tile, zeros

BLOCK = 64
VECTORS = BLOCK // LANES
import os
PK=int(os.environ.get('PK','1'));PV=int(os.environ.get('PV','1'))
TILE = int(os.environ.get('TILE','24'))
LOWEST = np.float32(-3e38)
F = np.float32

@kernel
def attend_tile(rows, k_cols, v_cols, q, keys, values, out, table, work, bases,
                token0, start, first, count, head, heads, group, dim, kv_heads, page_size, scale, window):
    R = len(rows)
    padded = (count + R - 1) // R * R
    qt = 0
    sc = qt + ((padded * dim + 15) & -16)
    ac = sc + padded * BLOCK
    ls = ac + padded * dim
    ms = ls + padded * LANES
    for j in range(padded):
        if j < count:
            token = token0 + (first + j) // group
            src = (token * heads + head * group + (first + j) % group) * dim
            for d in range(dim):
                work[qt + (j // R * dim + d) * R + j % R] = q[src + d] * scale
        else:
            for d in range(dim):
                work[qt + (j // R * dim + d) * R + j % R] = F(0)
        work[ms + j] = LOWEST
        store(work, ls + j * LANES, splat(F(0)))
        for d in range(0, dim, LANES):
            store(work, ac + j * dim + d, splat(F(0)))
    last = start + (first + count - 1) // group
    low = 0
    if window > 0:
        low = max(0, start + first // group - window + 1)
    for block in range(low // BLOCK, last // BLOCK + 1):
        begin = block * BLOCK
        used = min(last + 1 - begin, BLOCK)
        vectors = (used + LANES - 1) // LANES
        for c in range(VECTORS):
            t = begin + (c * LANES if c < vectors else 0)
            page = np.int64(table[t // page_size]) * kv_heads + head
            bases[c] = page * dim * page_size + t % page_size
            bases[VECTORS + c] = (page * page_size + t % page_size) * dim
        for c in range(VECTORS):
            t = min(begin + BLOCK + c * LANES, last)
            page = np.int64(table[t // page_size]) * kv_heads + head
            bases[2*VECTORS+c] = page * dim * page_size + t % page_size
            bases[3 * VECTORS + c] = (page * page_size + t % page_size) * dim
        for r in range(0, padded, R):
            for c in range(0, vectors, len(k_cols)):
                s = zeros(rows, k_cols)
                for d in range(dim):
                    if PK and r==0 and c==0:
                        prefetch_all(k_cols, keys, bases, 2*VECTORS, d*page_size)
                        if PV:
                            prefetch_all(k_cols, values, bases, 3*VECTORS, d*LANES)
                    s = fma_tile(s, work, qt + (r * dim + d * R), 1, load_indirect(k_cols, keys, bases, c, d * page_size))
                store_tile(rows, k_cols, s, work, sc + r * BLOCK + c * LANES, BLOCK)
        for j in range(count):
            pos = start + (first + j) // group - begin
            lo = pos - window + 1 if window > 0 else 0
            row = sc + j * BLOCK
            old = work[ms + j]
            top = splat(old)
            for c in range(vectors):
                x = between(load(work, row + c * LANES), lo - c * LANES, pos - c * LANES, F(-np.inf))
                store(work, row + c * LANES, x)
                top = larger(x, top)
            new = largest(top)
            if new > old:
                work[ms + j] = new
                corr = exp2(splat(old - new))
                store(work, ls + j * LANES, mul(load(work, ls + j * LANES), corr))
                for d in range(0, dim, LANES):
                    store(work, ac + j * dim + d, mul(load(work, ac + j * dim + d), corr))
            m = splat(new)
            l = load(work, ls + j * LANES)
            for c in range(vectors):
                p = exp2(sub(load(work, row + c * LANES), m))
                store(work, row + c * LANES, p)
                l = add(l, p)
            store(work, ls + j * LANES, l)
        for r in range(0, padded, R):
            for d in range(0, dim, LANES * len(v_cols)):
                o = load_tile(rows, v_cols, work, ac + r * dim + d, dim)
                for c in range(vectors):
                    base = bases[VECTORS + c] + d
                    for t in range(min(LANES, used - c * LANES)):
                        o = fma_tile(o, work, sc + r * BLOCK + c * LANES + t, BLOCK, load_row(v_cols, values, base + t * dim))
                store_tile(rows, v_cols, o, work, ac + r * dim + d, dim)
    for j in range(count):
        token = token0 + (first + j) // group
        dst = (token * heads + head * group + (first + j) % group) * dim
        inv = splat(F(1) / total(load(work, ls + j * LANES)))
        for d in range(0, dim, LANES):
            store(out, dst + d, mul(load(work, ac + j * dim + d), inv))

@kernel
def attend_range(chunk, chunks, worker, rows, kc, vc, elem, q, keys, values, out, table, max_pages, seg_row, seg_first, seg_len, seg_start,
            segments, work, work_each, heads, group, dim, kv_heads, page_size, scale, window, total):
    f = np.float32(0)
    i = np.int32(0)
    w = work + worker * work_each * 4
    bases = pointer(w, np.int64(0))
    w = pointer(w + 128, f)
    q = pointer(q, f)
    keys = pointer(keys, elem)
    values = pointer(values, elem)
    out = pointer(out, elem)
    seg_row = pointer(seg_row, i)
    seg_first = pointer(seg_first, i)
    seg_len = pointer(seg_len, i)
    seg_start = pointer(seg_start, i)
    low = total * chunk // chunks
    high = total * (chunk + 1) // chunks
    cost = 0
    for s in range(segments):
        n = np.int64(seg_len[s]) * group
        start = np.int64(seg_start[s])
        row_table = pointer(table + np.int64(seg_row[s]) * max_pages * 4, np.int32(0))
        for head in range(kv_heads):
            for first in range(0, n, TILE):
                count = min(TILE, n - first)
                if low <= cost < high:
                    attend_tile(rows, kc, vc, q, keys, values, out, row_table, w, bases, np.int64(seg_first[s]), start, first, count, head, heads, group, dim, kv_heads, page_size, scale, window)
                cost += (start + (first + count) // group) * (count + 3)

@kernel
def attend(rows, kc, vc, elem, q, keys, values, out, table, max_pages, seg_row, seg_first, seg_len, seg_start,
            segments, work, work_each, heads, group, dim, kv_heads, page_size, scale, window, total, fork, threads, chunks):
    parallel(attend_range, fork, threads, chunks, (rows, kc, vc, elem, q, keys, values, out, table, max_pages, seg_row, seg_first, seg_len, seg_start,
            segments, work, work_each, heads, group, dim, kv_heads, page_size, scale, window, total))
