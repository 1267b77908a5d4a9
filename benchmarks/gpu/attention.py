"""Paged decode attention alone, in Llama-3.1-8B's shape, against the time it takes to read its keys and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncsched.gpu.cuda.kernels.decode_attention import DecodeScratch, decode_attention, decode_splits
from asyncsched.gpu.models.decoder_config import DecoderConfig

from .lab import LLAMA_8B, Lab, device_seconds
from .records import Record

TARGET = 0.8
"""Share of the copy bandwidth."""


def run(lab: Lab) -> None:
    """Measure one layer's attention over shuffled pages."""
    sizes, shape = lab.sizes, DecoderConfig.from_hf(lab.configs[LLAMA_8B])
    bandwidth = lab.copy_bandwidth()
    rows, context = sizes.max_rows, sizes.attention_context
    splits = decode_splits(rows, shape.kv_heads, context, lab.device.multiprocessors)
    with torch.inference_mode(), lab.device.computing():
        launch = attention_of(lab, shape, rows, context, splits)
    seconds = device_seconds(lab.device, launch, calls=20)
    itemsize = getattr(torch, sizes.dtype).itemsize
    read = 2 * rows * context * shape.kv_heads * shape.head_dim * itemsize
    details = {"milliseconds": seconds * 1e3, "bytes": read, "gb_per_s": read / seconds / 1e9, "splits": splits}
    figure = f"decode attention, {rows} rows × {context:,}, share of the copy bandwidth"
    lab.emit(Record("attention", figure, read / seconds / bandwidth, TARGET, details=details))


def attention_of(lab: Lab, shape: DecoderConfig, rows: int, context: int, splits: int) -> Callable[[], None]:
    """Everything allocated and filled; calling the answer launches the kernels."""
    size, dtype = lab.sizes.page_size, getattr(torch, lab.sizes.dtype)
    each = -(-context // size)
    keys, values = (lab.noise(rows * each, shape.kv_heads, size, shape.head_dim, dtype=dtype) for _ in range(2))
    table = lab.integers(torch.randperm(rows * each, generator=torch.Generator().manual_seed(0)).view(rows, each))
    lengths = lab.integers([context - 1] * rows)
    entries = lab.integers(range(rows))
    queries = lab.noise(rows, shape.heads, shape.head_dim, dtype=dtype)
    out = torch.empty(rows, shape.heads * shape.head_dim, dtype=dtype, device=queries.device)
    scratch = DecodeScratch.allocate(rows * splits, shape.heads, shape.head_dim, queries.device)
    scale = shape.head_dim**-0.5

    def launch() -> None:
        decode_attention(queries, keys, values, table, entries, lengths, out, scratch, scale=scale, splits=splits)

    return launch
