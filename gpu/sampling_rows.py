"""Sampling state of every row: one table of plain numbers, and one pool for the rows' token lists.

The kernels read and advance both without touching Python. Memory follows what rows ask for: a row
without bias, masks, stops or penalties owns nothing in the pool, and penalties cost one entry per
distinct token that occurred, never a vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import IntArray, RowJoin

ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("repetition", np.float64),
        ("seed", np.uint64),
        ("position", np.int64),  # of the next output token
        ("min_tokens", np.int64),  # 0 if there is nothing to suppress
        ("start", np.int64),  # the row's lists in the pool, one after the other:
        ("room", np.int64),  # entries it owns there
        ("allowed", np.int64),  # ids that may be sampled, if restricted
        ("biased", np.int64),  # ids with a value to add; -inf bans
        ("stops", np.int64),  # ids suppressed below min_tokens
        ("seen", np.int64),  # ids that occurred, with their count in the output
        ("top_k", np.int64),  # 0 is off
        ("top_logprobs", np.int64),  # -1 reports nothing
        ("joined", np.bool_),
        ("plain", np.bool_),  # argmax of the unmodified logits, once min_tokens is reached
        ("restricted", np.bool_),
        ("penalised", np.bool_),
    ]
)
"""One row's entry; the lists' fields are their lengths, in the order in which they lie in the pool."""

_SPARE = 64
_MAX_BIAS = 3.0e38


class RowTable:
    """The table and the pool. Compute thread only.

    Attributes:
        rows: ``ROW`` entries ``[max_rows]``.
        ids: Token ids of the pool, int32 ``[n]``.
        values: What belongs to each id, float32 ``[n]``: a bias, or a count (exact to 2**24).
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.rows: NDArray[Any] = np.zeros(max_rows, ROW)
        self.ids: IntArray = np.empty(0, np.int32)
        self.values: NDArray[np.float32] = np.empty(0, np.float32)
        self._vocab_size = vocab_size
        self._used = 0

    def join(self, join: RowJoin) -> None:
        """Write the row's entry and lists. Ids outside the vocabulary are left out: nothing samples them."""
        params = join.params
        allowed = np.unique(self._valid(params.allowed_token_ids or ()))
        bias = [(token, min(max(value, -_MAX_BIAS), _MAX_BIAS)) for token, value in params.logit_bias.items()]
        bias += [(token, -np.inf) for token in params.bad_token_ids]
        bias = [(token, value) for token, value in bias if 0 <= token < self._vocab_size]
        stops = self._valid(join.stop_ids if join.generated < params.min_tokens else ())
        seen, counts = self._history(join)

        self.leave(join.row)
        row = self.rows[join.row]
        row["temperature"], row["top_p"], row["min_p"] = params.temperature, params.top_p, params.min_p
        row["presence"], row["frequency"] = params.presence_penalty, params.frequency_penalty
        row["repetition"] = params.repetition_penalty
        row["seed"] = join.seed % 2**64
        row["position"] = join.generated
        row["min_tokens"] = params.min_tokens if stops.size else 0
        row["allowed"], row["biased"], row["stops"], row["seen"] = allowed.size, len(bias), stops.size, seen.size
        row["top_k"] = params.top_k if params.top_k < self._vocab_size else 0
        row["top_logprobs"] = -1 if params.logprobs is None else params.logprobs
        row["restricted"] = params.allowed_token_ids is not None
        row["penalised"] = params.counts_tokens
        row["plain"] = params.greedy and not (row["restricted"] or bias or row["penalised"] or params.logprobs is not None)
        row["joined"] = True
        ids = np.concatenate([allowed, np.array([token for token, _ in bias], np.int32), stops, seen])
        values = np.concatenate([np.zeros(allowed.size), [value for _, value in bias], np.zeros(stops.size), counts])
        room = ids.size + (_SPARE if params.counts_tokens else 0)
        start = self._take(room)
        row["start"], row["room"] = start, room
        self.ids[start : start + ids.size] = ids
        self.values[start : start + ids.size] = values

    def leave(self, row: int) -> None:
        """Forget the row. Its place in the pool is reclaimed when the pool next fills up."""
        self.rows[row] = np.zeros((), ROW)

    def make_room(self, rows: IntArray) -> None:
        """Let every penalised one of ``rows`` count one more distinct token."""
        state = self.rows[rows]
        length = state["allowed"] + state["biased"] + state["stops"] + state["seen"]
        full = state["penalised"] & (length >= state["room"])
        for row in rows[full]:
            entry = self.rows[row]
            length = int(entry["room"])
            start = self._take(2 * length)
            old = int(entry["start"])  # read after _take, which may move everything
            self.ids[start : start + length] = self.ids[old : old + length]
            self.values[start : start + length] = self.values[old : old + length]
            entry["start"], entry["room"] = start, 2 * length

    def _take(self, room: int) -> int:
        """A free stretch of the pool; moves what lives there to a new pool if the old one is full."""
        if self._used + room > self.ids.size:
            owned = int(self.rows["room"].sum())
            ids = np.zeros(max(2 * (owned + room), 1024), np.int32)
            values = np.zeros(ids.size, np.float32)
            used = 0
            for row in np.flatnonzero(self.rows["room"]):
                entry = self.rows[row]
                start, size = int(entry["start"]), int(entry["room"])
                ids[used : used + size] = self.ids[start : start + size]
                values[used : used + size] = self.values[start : start + size]
                entry["start"] = used
                used += size
            self.ids, self.values, self._used = ids, values, used
        start = self._used
        self._used += room
        return start

    def _history(self, join: RowJoin) -> tuple[IntArray, NDArray[np.int64]]:
        """Distinct tokens that penalties concern, and how often each is in the output."""
        if not join.params.counts_tokens:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        split = max(0, join.history.size - join.generated)
        output = self._valid(join.history[split:])
        prompt = self._valid(join.history[:split] if join.params.repetition_penalty != 1.0 else ())
        seen = np.unique(np.concatenate([prompt, output]))
        counts = np.zeros(seen.size, np.int64)
        np.add.at(counts, np.searchsorted(seen, output), 1)
        return seen, counts

    def _valid(self, ids: Any) -> IntArray:
        array = np.asarray(ids, np.int64)
        return array[(array >= 0) & (array < self._vocab_size)].astype(np.int32)
