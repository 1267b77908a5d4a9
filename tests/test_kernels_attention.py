"""Paged attention: against its definition, and against itself in other batches."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from asyncsched.errors import UnsupportedModelError
from asyncsched.gpu.kernels import StepLayout, paged_attention, reference

from .kernels_helpers import Scene, Segments, close, guarded

BF16, F32 = torch.bfloat16, torch.float32
# Decoding at block and page borders, prompts with and without a cached prefix, a segment without tokens.
MIXED: Segments = [(1, 0), (1, 40), (1, 63), (1, 64), (0, 5), (7, 0), (100, 33), (33, 150), (1, 191)]
SHAPES = [  # heads, key heads, head size, page size, type
    (9, 3, 64, 32, BF16),
    (9, 3, 64, 16, BF16),
    (9, 3, 64, 128, BF16),
    (9, 3, 64, 32, F32),
    (9, 3, 64, 1, BF16),
    (3, 3, 64, 64, BF16),
    (8, 4, 128, 32, BF16),
    (8, 2, 80, 16, BF16),
    (8, 1, 96, 32, BF16),
    (6, 1, 256, 64, BF16),
    (7, 1, 64, 32, BF16),
    (71, 1, 64, 16, BF16),
    (6, 2, 8, 4, F32),
    (6, 2, 20, 8, BF16),
]


def attend(scene: Scene, segments: Segments, rows: list[int] | None = None, **options: Any) -> torch.Tensor:
    q, layout = scene.queries_of(segments, rows), scene.layout(segments, rows)
    scale = scene.keys.shape[2] ** -0.5
    return paged_attention(q, layout, scene.keys, scene.values, scale, **options)


def define(scene: Scene, segments: Segments, **options: Any) -> torch.Tensor:
    """The same by the reference, which cannot bear the garbage."""
    q, layout = scene.queries_of(segments), scene.layout(segments)
    keys, values = scene.keys.nan_to_num(0.0), scene.values.nan_to_num(0.0)
    return reference.paged_attention(q, layout, keys, values, keys.shape[2] ** -0.5, **options)


def parts(found: torch.Tensor, segments: Segments) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(n for n, _ in segments))
    return [found[end - n : end] for end, (n, _) in zip(ends, segments, strict=True)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size", "dtype"), SHAPES)
def test_matches_the_definition(heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype) -> None:
    scene = Scene.build(heads, kv_heads, dim, page_size, [n + s for n, s in MIXED], dtype)
    found = attend(scene, MIXED)
    assert found.dtype == dtype
    assert found.shape == (sum(n for n, _ in MIXED), heads * dim)
    close(found, define(scene, MIXED))


@pytest.mark.parametrize(
    "options", [{"window": 1}, {"window": 50}, {"window": 1000}, {"softcap": 2.0}, {"window": 64, "softcap": 30.0}]
)
@pytest.mark.parametrize("page_size", [32, 1])
def test_window_and_softcap(options: dict[str, Any], page_size: int) -> None:
    scene = Scene.build(9, 3, 64, page_size, [n + s for n, s in MIXED], BF16)
    close(attend(scene, MIXED, **options), define(scene, MIXED, **options))


def test_large_scores_and_a_long_context() -> None:
    """Weights that underflow, and a running maximum that keeps moving; float32 scores of 100 are good to 1e-5."""
    scene = Scene.build(3, 1, 64, 32, [1500], F32)
    scene.queries *= 30 * torch.linspace(0.1, 1.0, 1500).view(-1, 1, 1)
    torch.testing.assert_close(attend(scene, [(300, 1200)]), define(scene, [(300, 1200)]), rtol=0, atol=2e-4)


def test_no_segments() -> None:
    scene = Scene.build(9, 3, 64, 32, [], BF16)
    assert attend(scene, []).shape == (0, 576)


@pytest.mark.parametrize("page_size", [32, 1])
@pytest.mark.parametrize("options", [{}, {"window": 70}])
def test_decoding_a_token_equals_prefilling_it_bit_for_bit(page_size: int, options: dict[str, Any]) -> None:
    scene = Scene.build(9, 3, 64, page_size, [200], BF16)
    whole = attend(scene, [(200, 0)], **options)
    for position in range(200):
        assert torch.equal(attend(scene, [(1, position)], **options)[0], whole[position])


def test_chunks_equal_the_whole_bit_for_bit() -> None:
    scene = Scene.build(8, 4, 128, 32, [300], BF16)
    whole = attend(scene, [(300, 0)])
    for cuts in ([0, 1, 300], [0, 7, 64, 65, 200, 300], [0, 150, 151, 152, 299, 300]):
        chunks = [attend(scene, [(b - a, a)]) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 128])
def test_page_size_does_not_change_a_bit(page_size: int) -> None:
    segments = [(100, 50), (1, 77)]
    results = [attend(Scene.build(9, 3, 64, size, [150, 78], BF16), segments) for size in (64, page_size)]
    assert torch.equal(*results)


def test_a_row_does_not_notice_its_batch() -> None:
    scene = Scene.build(9, 3, 64, 32, [n + s for n, s in MIXED], BF16)
    whole = parts(attend(scene, MIXED), MIXED)
    order = list(range(len(MIXED)))
    for seed in range(5):
        random.Random(seed).shuffle(order)
        chosen = order[: 2 + seed]
        segments = [MIXED[i] for i in chosen]
        for i, part in zip(chosen, parts(attend(scene, segments, chosen), segments), strict=True):
            assert torch.equal(part, whole[i])


def test_threads_do_not_change_a_bit() -> None:
    scene = Scene.build(9, 3, 64, 32, [900, 500, 1], BF16)
    segments = [(400, 500), (1, 499), (1, 0)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results += [attend(scene, segments) for _ in range(3)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_share_pages_in_one_step() -> None:
    scene = Scene.build(9, 3, 64, 16, [64, 90], BF16)
    alone = attend(scene, [(64, 0), (90, 0)])
    scene.table[1, :2] = scene.table[0, :2]
    shared = attend(scene, [(64, 0), (58, 32)])
    assert torch.equal(shared[:64], alone[:64])
    close(shared, define(scene, [(64, 0), (58, 32)]))


def test_nan_in_a_context_stays_in_its_row() -> None:
    scene = Scene.build(9, 3, 64, 32, [100, 100], BF16)
    clean = attend(scene, [(1, 99), (1, 99)])
    scene.keys[scene.table[1, 1], 0, 5, 3] = torch.nan  # position 35 of the second row
    found = attend(scene, [(1, 99), (1, 99)])
    assert torch.equal(found[0], clean[0])
    assert found[1, : 3 * 64].isnan().all()
    assert torch.equal(found[1, 3 * 64 :], clean[1, 3 * 64 :])
    assert attend(scene, [(1, 99), (1, 34)]).isfinite().all()


@pytest.mark.parametrize(("dim", "page_size", "dtype"), [(64, 16, BF16), (64, 16, F32), (20, 8, BF16), (8, 4, F32)])
def test_reads_nothing_behind_its_arrays(dim: int, page_size: int, dtype: torch.dtype) -> None:
    scene = Scene.build(6, 2, dim, page_size, [page_size * 5], dtype)
    scene.table[0, :5] = [2, 0, 3, 1, len(scene.keys) - 1]  # ends with the pool's last page
    keys, values = (guarded(pool.nan_to_num(0.5)) for pool in (scene.keys, scene.values))
    table = guarded(torch.from_numpy(scene.table[:1, :5].copy())).numpy()
    layout = StepLayout.build(
        table, np.zeros(1, np.int32), np.full(1, page_size * 5, np.int32), np.zeros(1, np.int32), page_size
    )
    q = guarded(scene.queries)
    found = paged_attention(q, layout, keys, values, 0.1)
    close(found, reference.paged_attention(q, layout, keys, values, 0.1))


def test_refuses_what_it_cannot_compute() -> None:
    scene = Scene.build(9, 3, 64, 32, [10], BF16)
    q, layout = scene.queries, scene.layout([(10, 0)])
    with pytest.raises(UnsupportedModelError, match="bfloat16 and float32"):
        paged_attention(q, layout, scene.keys.half(), scene.values.half(), 1.0)
    with pytest.raises(ValueError, match="key heads"):
        paged_attention(q[:9], layout, scene.keys, scene.values, 1.0)
    with pytest.raises(ValueError, match="of the pool"):
        paged_attention(q, layout, scene.values, scene.keys, 1.0)
    with pytest.raises(ValueError, match="contiguous float32"):
        paged_attention(q.double(), layout, scene.keys, scene.values, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention(q, layout, scene.keys.transpose(2, 3), scene.values, 1.0)
