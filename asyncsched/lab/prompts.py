"""Prompts for traces that tell lengths and shared blocks, but no texts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..contract import IntArray
from ..errors import TraceError
from .trace import TraceRequest

Words = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
"""2⁶⁴ over the golden ratio: the increment of SplitMix64."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)


class PromptMaker:
    """Makes token ids that are shared exactly where a trace says so.

    A block's tokens are a function of its id (and the seed) alone, the rest of a prompt is one of its
    index. Every token is a hash of a 64-bit key and its offset, in the manner of SplitMix64 (Steele,
    Lea and Flood, OOPSLA 2014); keys of different blocks are never the same, and no table is kept.

    Args:
        vocab_size: Token ids are ``0 … vocab_size - 1``, all about equally frequent.
        seed: Another seed makes other tokens.

    Raises:
        TraceError: ``vocab_size`` is below 2 or over 2³¹.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        if not 2 <= vocab_size <= 2**31:
            raise TraceError(f"vocab_size={vocab_size} is not in 2 … 2**31")
        self._vocab = np.uint64(vocab_size)
        blocks, tails = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        self._blocks: np.uint64 = blocks
        self._tails: np.uint64 = tails
        self._steps = _steps(1024)

    def prompt(self, request: TraceRequest, index: int) -> IntArray:
        """The prompt of a request: int32 ``[request.prompt_tokens]``.

        Args:
            request: Its length and blocks.
            index: Its place in the trace; prompts of different places share whole blocks only.
        """
        size = request.block_size
        shared = len(request.blocks) * size
        words = np.empty(request.prompt_tokens, np.uint64)
        if shared:
            keys = _mixed(np.array(request.blocks, np.uint64) ^ self._blocks)
            np.add(keys[:, None], self._offsets(size), out=words[:shared].reshape(-1, size))
        tail = request.prompt_tokens - shared
        if tail:
            key = _mixed(np.array([index], np.uint64) ^ self._tails)
            np.add(key, self._offsets(tail), out=words[shared:])
        return self._tokens(words)

    def _offsets(self, count: int) -> Words:
        """``_STEP`` × 1 … ``count``, from a table as long as the longest run so far."""
        if len(self._steps) < count:
            self._steps = _steps(max(count, 2 * len(self._steps)))
        return self._steps[:count]

    def _tokens(self, words: Words) -> IntArray:
        """Hash in place, then scale the upper half to the vocabulary: a multiplication is quicker than a remainder."""
        words ^= words >> _HALF
        words *= _FIRST
        words >>= _HALF
        words *= self._vocab
        words >>= _HALF
        return words.astype(np.int32)


def _steps(count: int) -> Words:
    return np.arange(1, count + 1, dtype=np.uint64) * _STEP


def _mixed(keys: Words) -> Words:
    """The finaliser of SplitMix64, a bijection of 64 bits."""
    keys = (keys ^ (keys >> np.uint64(30))) * _FIRST
    keys = (keys ^ (keys >> np.uint64(27))) * _SECOND
    return keys ^ (keys >> np.uint64(31))
