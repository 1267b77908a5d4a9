"""From logits to tokens on the GPU: the CPU sampler's rules and draws, without a sort and without waiting.

Six kernels on fixed grids, so that a CUDA graph can hold them. A row takes part in those it needs:

1. scan: argmax and status of the unmodified logits, and a float32 copy if the row needs more;
2. adjust: masks, bias and penalties, for rows with a list;
3. rescan: their argmax anew;
4. cut: what top-k and top-p keep;
5. race: min-p and the draw;
6. finish: the token, and the row's state moved on.

Greedy rows without further wishes need the first and the last only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ....errors import UnsupportedModelError
from ..row_state import RowState
from .draw import finish_kernel, race_kernel
from .penalties import adjust_kernel
from .scan import rescan_kernel, scan_kernel
from .selection import cut_kernel

_CHUNK = 8192  # logits per program of the kernels that divide a row
_SCAN_TILE, _RACE_TILE, _CUT_TILE = 2048, 1024, 4096
_BAND = 4096
_ENTRIES = 512
_LIST_PROGRAMS = 4
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST_TOKENS = 1 << 18 | 1 << 14  # of the vocabulary: sums of integer weights stay under 2**63


class SamplingWorkspace:
    """Scratch of one sampling call, at addresses that stay. Compute thread only.

    Calls that share it must be on one stream.

    Args:
        most_rows: Rows of logits of the largest call.
        vocab_size: Logits per row.
        device: Where the tensors live.
        greedy_only: Leave out the float32 copy of the logits, ``4 * most_rows * vocab_size`` bytes;
            every call must be ``greedy``.

    Raises:
        UnsupportedModelError: the vocabulary is too large for sums of weights.
    """

    def __init__(self, most_rows: int, vocab_size: int, device: torch.device, *, greedy_only: bool = False) -> None:
        if not 0 < vocab_size <= _MOST_TOKENS:
            raise UnsupportedModelError(f"sampling takes vocabularies of 1 … {_MOST_TOKENS:,} tokens, not {vocab_size:,}")
        self.vocab_size = vocab_size
        self.chunk = min(_CHUNK, triton.next_power_of_2(vocab_size))
        self.parts = -(-vocab_size // self.chunk)

        def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(most_rows, *shape, dtype=dtype, device=device)

        self.keys = scratch(torch.int64, self.parts)
        self.extremes = scratch(torch.int32, self.parts, 2)
        self.scores = scratch(torch.float64, self.parts)
        self.winners = scratch(torch.int32, self.parts)
        self.cuts = scratch(torch.int64)
        self.bands = scratch(torch.int64, min(_BAND, self.chunk))
        self.logits = scratch(torch.float32, 0 if greedy_only else self.parts * self.chunk)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Where a sampling call leaves its results.

    Attributes:
        tokens: int32 ``[n]``; 0 where the row failed, untouched where there is no row.
        status: int32 ``[n]``: 0, or why there is no token, see ``sampling_failures``.
    """

    tokens: torch.Tensor
    status: torch.Tensor


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: RowState,
    workspace: SamplingWorkspace,
    out: Sampled,
    *,
    decoding: int,
    greedy: bool = False,
) -> None:
    """Queue one token per row and move the rows on. Nothing waits for the device. Compute thread only.

    Args:
        logits: float32, bfloat16 or float16 ``[n, vocab_size]``, last dimension contiguous; left as it is.
        rows: int32 ``[n]``: distinct rows that have joined, or -1: nothing is computed or written then.
        state: Read, and changed for these rows: last token, and for those that get a token output
            position and token counts.
        workspace: For ``n`` rows at least.
        out: Written.
        decoding: The first so many rows decode: their length grows by one.
        greedy: Take the argmax for every row, whatever it needs: for callers who know that ``needs`` is
            0 for all of them.

    Raises:
        UnsupportedModelError: the logits' type is another.
        ValueError: a shape is not as above.
    """
    n = _check(logits, rows, workspace, out, greedy)
    if n == 0:
        return
    parts, records, pool = workspace.parts, state.records, state.pool_address
    most_parts = triton.next_power_of_2(parts)
    row_of_logits = (logits, logits.stride(0), rows, records)
    copy = (workspace.logits, workspace.logits.shape[1])
    first = (workspace.keys, workspace.extremes)
    best = (workspace.scores, workspace.winners)
    # Without fused products float32 and float64 round as on the CPU.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    vocab, chunk = workspace.vocab_size, workspace.chunk
    scan_tiles = {"CHUNK": chunk, "TILE": min(chunk, _SCAN_TILE)}
    scan_kernel[(n, parts)](*row_of_logits, *copy, *first, vocab, COPY=not greedy, **scan_tiles, **options)
    if not greedy:
        adjust_kernel[(n, _LIST_PROGRAMS)](*row_of_logits, pool, *copy, BLOCK=_ENTRIES, **options)
        rescan_kernel[(n, parts)](rows, records, *copy, workspace.keys, **scan_tiles, **options)
        tiles = {"TILE": min(chunk, _CUT_TILE), "BAND": workspace.bands.shape[1], "PARTS": most_parts}
        scratch = (workspace.bands, workspace.cuts)
        cut_kernel[(n,)](rows, records, *copy, *first, *scratch, vocab, parts, **tiles, **(options | {"num_warps": 16}))
        tiles = {"CHUNK": chunk, "TILE": min(chunk, _RACE_TILE), "PARTS": most_parts}
        race_kernel[(n, parts)](rows, records, *copy, *first, workspace.cuts, *best, **tiles, **options)
    moved = (state.length, state.last_token)
    results = (out.tokens, out.status, decoding, parts)
    tiles = {"GREEDY": greedy, "PARTS": most_parts, "BLOCK": _ENTRIES}
    finish_kernel[(n,)](rows, records, pool, *moved, *first, *best, *results, **tiles, **options)


def _check(logits: torch.Tensor, rows: torch.Tensor, workspace: SamplingWorkspace, out: Sampled, greedy: bool) -> int:
    if logits.dtype not in _DTYPES:
        raise UnsupportedModelError(f"sampling takes float32, bfloat16 and float16 logits, not {logits.dtype}")
    n = rows.numel()
    if logits.shape != (n, workspace.vocab_size) or logits.stride(1) != 1:
        raise ValueError(f"logits {tuple(logits.shape)} do not fit {n} rows of {workspace.vocab_size} contiguous logits")
    if n > workspace.keys.shape[0]:
        raise ValueError(f"{n} rows do not fit a workspace of {workspace.keys.shape[0]}")
    if not greedy and workspace.logits.shape[1] == 0:
        raise ValueError("this workspace was made greedy_only; make one without it to draw tokens")
    for name, each in (("rows", rows), ("tokens", out.tokens), ("status", out.status)):
        if each.dtype != torch.int32 or each.shape != (n,) or not each.is_contiguous():
            raise ValueError(f"{name} must be a contiguous int32 vector of {n}, not {each.dtype} {tuple(each.shape)}")
    return n
