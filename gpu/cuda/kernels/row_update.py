"""Bringing a plan's changes into the device's row state."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _scatter_kernel(state: tl.tensor, words: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(words + i, mask=inside, other=0)
    value = tl.load(words + count + i, mask=inside, other=0)
    tl.store(state + index, value, mask=inside)


def scatter_words(state: torch.Tensor, words: torch.Tensor, count: int) -> None:
    """``state[words[i]] = words[count + i]`` for ``i < count``. Compute thread only.

    Args:
        state: int32 ``[n]``, changed in place.
        words: int32, at least ``2 * count``: indices below ``n`` of which none occurs twice, then values.
        count: Words to write.

    Raises:
        ValueError: the type or size of an array is not as above.
    """
    if state.dtype != torch.int32 or words.dtype != torch.int32 or words.numel() < 2 * count:
        raise ValueError(f"{count} writes need int32 arrays, the second of {2 * count} words; got {words.numel()}")
    if count:
        _scatter_kernel[(triton.cdiv(count, _BLOCK),)](state, words, count, BLOCK=_BLOCK, num_warps=4)
