"""Attention, and rotary embedding with its store, against their definitions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asyncsched.gpu.cuda.kernels import decode_attention as decode
from asyncsched.gpu.cuda.kernels import prefill_attention as prefill
from asyncsched.gpu.cuda.kernels import reference_attention as reference
from asyncsched.gpu.cuda.kernels import rotary_store as rotary
from asyncsched.gpu.models.rope import RopeConfig

from .comparison import Comparison
from .lab import Lab

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SHAPES = (  # query heads, key heads, head size, page size, type
    (32, 8, 128, 32, BF16),
    (14, 2, 64, 64, F16),
    (6, 3, 80, 1, F32),
    (16, 2, 256, 16, BF16),
    (4, 4, 64, 16, F32),
    (6, 2, 96, 32, F16),
    (40, 8, 128, 16, BF16),
    (12, 2, 256, 64, F16),
    (16, 2, 128, 64, F32),
    (8, 1, 96, 16, BF16),
    (4, 2, 256, 1, F32),
    (5, 1, 80, 64, BF16),
)
"""Every head size, type and page size that matters, and 1 to 8 queries to a key."""
_SPLITS = (1, 3)
_SCALE = 0.1
_WINDOW = 50  # on every other shape
_CACHED = (0, 9, 0, 50)  # tokens in the pool before the chunks, in turn


@dataclass(frozen=True, slots=True)
class Scene:
    """Rows of ragged lengths in shuffled pages; slots without a token hold NaN."""

    keys: Tensor
    values: Tensor
    table: Tensor
    ends: tuple[int, ...]
    heads: int

    @classmethod
    def build(cls, lab: Lab, shape: tuple[int, int, int, int, torch.dtype], ends: tuple[int, ...]) -> Scene:
        """Noise where there are tokens."""
        heads, kv_heads, dim, size, dtype = shape
        counts = [-(-end // size) for end in ends]
        order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(dim + size))
        table = torch.full((len(ends), max(counts)), int(order[-1]))
        pools = torch.full((2, len(order), kv_heads, size, dim), torch.nan, dtype=dtype, device=lab.device.torch_device)
        first = 0
        for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
            table[row, :count] = own = order[first : first + count]
            first += count
            tokens = lab.noise(2, count * size, kv_heads, dim, dtype=dtype)
            tokens[:, end:] = torch.nan
            pools[:, own.to(pools.device)] = tokens.view(2, count, size, kv_heads, dim).transpose(2, 3)
        keys, values = pools
        return cls(keys, values, lab.integers(table), ends, heads)

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pools and table as the kernels take them."""
        return self.keys, self.values, self.table


def compare_attention(lab: Lab, comparison: Comparison) -> None:
    """All kernels that know of pages, over the chosen shapes."""
    ends = lab.sizes.kernel_contexts
    for index, shape in enumerate(SHAPES[: lab.sizes.kernel_shapes]):
        heads, kv_heads, dim, size, dtype = shape
        label = f"{heads}/{kv_heads} heads of {dim}, pages of {size}, {str(dtype).removeprefix('torch.')}"
        window = _WINDOW * (index % 2)
        scene = Scene.build(lab, shape, ends)
        for splits in _SPLITS:
            with comparison.of("decode_attention", f"{label}, {splits} splits, window {window}") as compare:
                compare(*_decoded(lab, scene, splits, window))
        with comparison.of("prefill_attention", f"{label}, window {window}") as compare:
            compare(*_prefilled(lab, scene, window))
        for name in ("rotary_store_decode", "rotary_store_prefill"):
            with comparison.of(name, label) as compare:
                for found, wanted in zip(*_rotated(lab, scene, name, norms=index % 2 == 0), strict=True):
                    compare(found, wanted)


def _decoded(lab: Lab, scene: Scene, splits: int, window: int) -> tuple[Tensor, Tensor]:
    """Rows backwards, with padding at both ends, which must stay as it is."""
    rows = [-1, *reversed(range(len(scene.ends))), -1]
    q = _queries(lab, scene, len(rows))
    places = lab.integers(rows), lab.integers([end - 1 for end in scene.ends])
    found, wanted = _outputs(q)
    scratch = decode.DecodeScratch.allocate(len(rows) * splits, scene.heads, q.shape[2], q.device)
    scratch.partial.fill_(torch.nan)
    scratch.weight.fill_(torch.nan)
    options: dict[str, Any] = {"scale": _SCALE, "window": window}
    decode.decode_attention(q, *scene.paged, *places, found, scratch, splits=splits, **options)
    reference.decode_attention(q, *scene.paged, *places, wanted, **options)
    return found, wanted


def _prefilled(lab: Lab, scene: Scene, window: int) -> tuple[Tensor, Tensor]:
    """A chunk of every row, one without tokens, and padding behind the last."""
    places, tokens = _chunks(lab, scene)
    q = _queries(lab, scene, tokens + 2)
    found, wanted = _outputs(q)
    options: dict[str, Any] = {"scale": _SCALE, "window": window}
    prefill.prefill_attention(q, *scene.paged, *places, found, **options)
    reference.prefill_attention(q, *scene.paged, *places, wanted, **options)
    return found, wanted


def _rotated(lab: Lab, scene: Scene, name: str, *, norms: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Projection and pools behind the kernel, and behind the definition."""
    kv_heads, dim, dtype = scene.keys.shape[1], scene.keys.shape[3], scene.keys.dtype
    if name == "rotary_store_decode":
        rows = [*range(len(scene.ends)), -1]
        places: tuple[Tensor, ...] = lab.integers(rows), lab.integers([end - 1 for end in scene.ends])
        tokens = len(rows)
    else:
        places, tokens = _chunks(lab, scene, longest=60)  # its definition takes one token at a time
    qkv = lab.noise(tokens, (scene.heads + 2 * kv_heads) * dim, dtype=dtype)
    weights = [1 + lab.noise(dim, dtype=dtype) / 4 if norms else None for _ in range(2)]
    cos_sin = RopeConfig(theta=1e4).table(dim, max(scene.ends) + 1).to(qkv.device)
    results = []
    for module in (rotary, reference):
        own, keys, values = qkv.clone(), scene.keys.clone(), scene.values.clone()
        options = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-6}
        getattr(module, name)(own, cos_sin, keys, values, scene.table, *places, scene.heads, **options)
        results.append([own, keys, values])
    return results[0], results[1]


def _chunks(lab: Lab, scene: Scene, longest: int | None = None) -> tuple[tuple[Tensor, Tensor, Tensor], int]:
    """Rows, starts and sums of the lengths of one chunk per row, the second one empty; and the tokens of all."""
    starts = [min(cached, end - 1) for end, cached in zip(scene.ends, itertools.cycle(_CACHED), strict=False)]
    if longest is not None:
        starts = [max(start, end - longest) for start, end in zip(starts, scene.ends, strict=True)]
    lengths = [end - start for end, start in zip(scene.ends, starts, strict=True)]
    lengths[1] = 0
    sums = [0, *itertools.accumulate(lengths)]
    return (lab.integers(range(len(scene.ends))), lab.integers(starts), lab.integers(sums)), sums[-1]


def _queries(lab: Lab, scene: Scene, tokens: int) -> Tensor:
    """As they lie in a fused projection: keys and values between those of one token and the next."""
    kv_heads, dim = scene.keys.shape[1], scene.keys.shape[3]
    return lab.noise(tokens, scene.heads + 2 * kv_heads, dim, dtype=scene.keys.dtype)[:, : scene.heads]


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Two equal ones; what nobody writes is equal afterwards."""
    found, wanted = (torch.full((len(q), q.shape[1] * q.shape[2]), 7.0, dtype=q.dtype, device=q.device) for _ in range(2))
    return found, wanted
