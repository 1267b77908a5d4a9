"""The row record of ``row_record`` as Triton reads it: offsets in words, flags, and loads."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from .. import row_record as layout


def _word(field: str) -> Any:
    return tl.constexpr(int(layout.RECORD.fields[field][1]) // 4)  # type: ignore[index]  # a structured type has fields


RECORD_WORDS: tl.constexpr = tl.constexpr(layout.RECORD_WORDS)
ENTRY_WORDS: tl.constexpr = tl.constexpr(layout.ENTRY_WORDS)

TEMPERATURE: tl.constexpr = _word("temperature")
TOP_P_VALUE: tl.constexpr = _word("top_p")
MIN_P: tl.constexpr = _word("min_p")
PRESENCE: tl.constexpr = _word("presence")
FREQUENCY: tl.constexpr = _word("frequency")
REPETITION: tl.constexpr = _word("repetition")
SEED: tl.constexpr = _word("seed")
NEEDS: tl.constexpr = _word("needs")
POSITION: tl.constexpr = _word("position")
MIN_TOKENS: tl.constexpr = _word("min_tokens")
TOP_K_VALUE: tl.constexpr = _word("top_k")
LIST_START: tl.constexpr = _word("list_start")
LIST_SIZE: tl.constexpr = _word("list_size")
LIST_ROOM: tl.constexpr = _word("list_room")

DRAWS: tl.constexpr = tl.constexpr(layout.DRAWS)
TOP_K: tl.constexpr = tl.constexpr(layout.TOP_K)
TOP_P: tl.constexpr = tl.constexpr(layout.TOP_P)
LISTED: tl.constexpr = tl.constexpr(layout.LISTED)
RESTRICTED: tl.constexpr = tl.constexpr(layout.RESTRICTED)
PENALISED: tl.constexpr = tl.constexpr(layout.PENALISED)

ALLOWED: tl.constexpr = tl.constexpr(layout.ALLOWED)
STOP: tl.constexpr = tl.constexpr(layout.STOP)
SEEN: tl.constexpr = tl.constexpr(layout.SEEN)


@triton.jit
def load_double(record: tl.tensor, field: tl.tensor) -> tl.tensor:
    """A float64 field of a record."""
    return tl.load((record + field).to(tl.pointer_type(tl.float64)))


@triton.jit
def load_seed(record: tl.tensor) -> tl.tensor:
    """The seed of a record, uint64."""
    return tl.load((record + SEED).to(tl.pointer_type(tl.uint64)))


@triton.jit
def list_of(record: tl.tensor, pool_address: tl.tensor) -> tl.tensor:
    """Pointer to a row's first list entry, int32 words."""
    start = tl.load(record + LIST_START).to(tl.int64) * ENTRY_WORDS
    return tl.load(pool_address).to(tl.pointer_type(tl.int32)) + start
