"""A stand-in for the model whose every token betrays a mix-up.

The "keys and values" of a position are a hash of all tokens up to it; the sampled token is a hash
of that, the request's seed and the output position. A wrong page, row, position, prefix or seed
therefore changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def mix(value: U64) -> U64:
    """splitmix64's finaliser (Steele et al., 2014), element-wise."""
    with np.errstate(over="ignore"):
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * _MIX1
        value = (value ^ (value >> np.uint64(27))) * _MIX2
        return value ^ (value >> np.uint64(31))


POISON = 2
"""State of what a failed step should have computed; everything that follows from it is poison too."""


def extend(state: U64, token: NDArray[np.int64]) -> U64:
    """State after one more token, element-wise; odd, so that 0 can mean "nothing was written here"."""
    return np.where(state == POISON, state, mix(state ^ mix(token.astype(np.uint64))) | np.uint64(1))


def sample(state: U64, seed: U64, position: NDArray[np.int64], vocab_size: int) -> NDArray[np.int32]:
    """The token sampled after ``state`` at output ``position``, element-wise."""
    return (mix(state ^ mix(seed ^ mix(position.astype(np.uint64)))) % np.uint64(vocab_size)).astype(np.int32)


def mix_one(value: int) -> int:
    """``mix`` for one Python number."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def extend_one(state: int, token: int) -> int:
    """``extend`` for one Python number."""
    if state == POISON:
        return POISON
    return mix_one(state ^ mix_one(token)) | 1


def sample_one(state: int, seed: int, position: int, vocab_size: int) -> int:
    """``sample`` for one Python number."""
    return mix_one(state ^ mix_one(seed ^ mix_one(position))) % vocab_size


def expected_tokens(prompt: Sequence[int], seed: int, count: int, vocab_size: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """What the engine must output for ``prompt``: up to ``count`` tokens, ending with the first stop id."""
    state = 0
    for token in prompt:
        state = extend_one(state, token)
    output: list[int] = []
    for position in range(count):
        token = sample_one(state, seed, position, vocab_size)
        output.append(token)
        if token in stop_ids:
            break
        state = extend_one(state, token)
    return output
