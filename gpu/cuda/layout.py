"""Which token of a step is whose, as the GPU's kernels take it, and how a plan is packed into that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...contract import IntArray, PrefillChunk
from .kernels.decode_attention import DecodeScratch
from .row_state import RowState

_ALIGNMENT = 4  # words: Triton compiles anew for pointers that are not multiples of 16 bytes


def aligned(words: int) -> int:
    """So many 32-bit words or a few more, that what lies behind them is aligned as kernels have seen it before."""
    return -(-words // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Chunks:
    """The prompt chunks of a step, packed one behind the other.

    Attributes:
        rows: int32 ``[chunks]``.
        starts: int32 ``[chunks]``: tokens in the pool before each.
        cu_seqlens: int32 ``[chunks + 1]``: 0 and the sums of their lengths.
        token_rows, positions: int32 ``[tokens]``: row and position of every token.
        host_rows, ends: By chunk, on the host: row, and tokens in the pool behind it.
    """

    rows: Tensor
    starts: Tensor
    cu_seqlens: Tensor
    token_rows: Tensor
    positions: Tensor
    host_rows: list[int]
    ends: list[int]


@dataclass(frozen=True)
class DeviceLayout:
    """The tokens of a step: one per decoding row, then the chunks.

    Attributes:
        state: Block table and lengths.
        rows: int32 ``[n]``, the rows that decode; -1 is padding.
        splits: Into how many parts decode attention divides a context.
        scratch: For decode attention.
        chunks: ``None`` if the step has none.
    """

    state: RowState
    rows: Tensor
    splits: int
    scratch: DecodeScratch
    chunks: Chunks | None = None

    @cached_property
    def positions(self) -> Tensor:
        """Position of every token in its sequence, int32 ``[N]``; 0 for padding."""
        own = self.state.length.index_select(0, self.rows.clamp(min=0))
        return own if self.chunks is None else torch.cat([own, self.chunks.positions])

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Page and offset of every token, int64 ``[N]`` each. Only of steps without padding."""
        rows = self.rows if self.chunks is None else torch.cat([self.rows, self.chunks.token_rows])
        size = self.state.limits.page_size
        pages = self.state.block_table[rows, self.positions // size]
        return pages.long(), (self.positions % size).long()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What an eager step reads, in one array on the device.

    Attributes:
        rows: int32 ``[n]``: the rows that decode.
        chunks: The chunks; ``None`` if there are none.
        tokens: int32 ``[chunk tokens]``.
        wanted: int32: packed positions whose logits are needed, ascending.
        sampled: int32: rows that get a token, in the result's order.
    """

    rows: Tensor
    chunks: Chunks | None
    tokens: Tensor
    wanted: Tensor
    sampled: Tensor

    @classmethod
    def of(
        cls,
        decoding: IntArray,
        chunks: Sequence[PrefillChunk],
        wanted: NDArray[np.int64],
        sampled: IntArray,
        upload: Callable[[IntArray], Tensor],
    ) -> StepInputs:
        """Pack and send. ``upload`` copies int32 words to the device."""
        sizes = np.array([chunk.tokens.size for chunk in chunks], np.int32)
        starts = np.array([chunk.start for chunk in chunks], np.int32)
        rows = np.array([chunk.row for chunk in chunks], np.int32)
        sums = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        positions = np.arange(sums[-1], dtype=np.int32) + np.repeat(starts - sums[:-1], sizes)
        tokens = np.concatenate([np.empty(0, np.int32), *(chunk.tokens for chunk in chunks)])
        token_rows = np.repeat(rows, sizes)
        fields: tuple[NDArray[Any], ...] = (decoding, rows, starts, sums, token_rows, positions, tokens, wanted, sampled)
        lengths = [aligned(field.size) for field in fields]
        begins = np.cumsum([0, *lengths])
        words: IntArray = np.zeros(int(begins[-1]), np.int32)
        for begin, field in zip(begins[:-1], fields, strict=True):
            words[begin : begin + field.size] = field
        sent = upload(words)
        parts = [sent[begin : begin + field.size] for begin, field in zip(begins[:-1].tolist(), fields, strict=True)]
        decode_rows, *places, new_tokens, wanted_at, sampled_rows = parts
        packed = None
        if chunks:
            chunk_rows, chunk_starts, cu_seqlens, rows_of_tokens, at = places
            ends = (starts + sizes).tolist()
            packed = Chunks(chunk_rows, chunk_starts, cu_seqlens, rows_of_tokens, at, rows.tolist(), ends)
        return cls(decode_rows, packed, new_tokens, wanted_at, sampled_rows)
