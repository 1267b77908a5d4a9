"""How one row's sampling state lies in device memory, and how a join is written in that form.

A row has a fixed record and, if it asks for anything per token (bias, allowed, banned or stop ids,
penalties), a list of entries, one per token id that anything is said about. Penalties cost one
entry per distinct token that occurred, never a vocabulary. Parameters are float64 as on the CPU,
so that both draw the same tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...contract import RowJoin

RECORD = np.dtype(
    [
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("repetition", np.float64),
        ("seed", np.uint64),
        ("needs", np.int32),  # what sampling has to do for this row: the flags below
        ("position", np.int32),  # of the next output token
        ("min_tokens", np.int32),
        ("top_k", np.int32),
        ("list_start", np.int32),  # first entry in the pool
        ("list_size", np.int32),
        ("list_room", np.int32),  # entries the row owns
        ("padding", np.int32, (3,)),  # to 96 bytes: float64 fields stay aligned in an array of records
    ]
)
"""One row's record. The device advances ``position`` and ``list_size``."""

RECORD_WORDS = RECORD.itemsize // 4

DRAWS, TOP_K, TOP_P, LISTED, RESTRICTED, PENALISED = (1 << bit for bit in range(6))
"""Flags of ``needs``; 0 is the argmax of the unmodified logits. The first of them is set if the others of the draw are."""

ENTRY = np.dtype([("token", np.int32), ("bias", np.float32), ("marks", np.int32), ("count", np.int32)])
"""What is said about one token id: a value to add (-inf bans), the marks below, occurrences in the output."""

ENTRY_WORDS = ENTRY.itemsize // 4

ALLOWED, STOP, SEEN = (1 << bit for bit in range(3))
"""Marks: may be sampled if the row is restricted; suppressed below ``min_tokens``; occurred in prompt or output."""

_MAX_BIAS = 3.0e38
_SPARE = 8  # entries beyond what a row can need, so that a wasted step at its end finds room too


def encode_join(join: RowJoin, vocab_size: int, max_model_len: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """A join's record and entries. Pure.

    Ids outside the vocabulary are left out: nothing samples them.

    Args:
        join: The row, its parameters and history.
        vocab_size: Valid ids are ``0 … vocab_size - 1``.
        max_model_len: Longest prompt + output in tokens; bounds the entries a penalised row can need.

    Returns:
        A ``RECORD`` ``[1]`` without ``list_start``, and its ``ENTRY`` array ``[list_size]``, ascending token ids.
    """
    params = join.params
    entries = _entries(join, vocab_size)
    draws = params.temperature > 0.0 and params.top_k != 1  # top-k 1 keeps what greedy takes
    top_k = params.top_k if params.top_k < vocab_size else 0
    flags = {
        DRAWS: draws,
        TOP_K: draws and top_k > 0,
        TOP_P: draws and params.top_p < 1.0,
        LISTED: entries.size > 0 or params.counts_tokens,
        RESTRICTED: params.allowed_token_ids is not None,
        PENALISED: params.counts_tokens,
    }
    record = np.zeros(1, RECORD)
    record["temperature"], record["top_p"], record["min_p"] = params.temperature, params.top_p, params.min_p
    record["presence"], record["frequency"] = params.presence_penalty, params.frequency_penalty
    record["repetition"] = params.repetition_penalty
    record["seed"] = join.seed % 2**64
    record["needs"] = sum(flag for flag, needed in flags.items() if needed)
    record["position"], record["min_tokens"], record["top_k"] = join.generated, params.min_tokens, top_k
    record["list_size"] = entries.size
    record["list_room"] = entries.size + (min(_tokens_to_come(join, max_model_len), vocab_size) if params.counts_tokens else 0)
    return record, entries


def _tokens_to_come(join: RowJoin, max_model_len: int) -> int:
    limit = max_model_len - join.history.size
    if join.params.max_tokens is not None:
        limit = min(limit, join.params.max_tokens - join.generated)
    return max(limit, 0) + _SPARE


def _entries(join: RowJoin, vocab_size: int) -> NDArray[Any]:
    params = join.params
    inside = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    biased, bias = _ids(tuple(inside)), np.clip(np.array(tuple(inside.values())), -_MAX_BIAS, _MAX_BIAS)
    allowed = _ids(params.allowed_token_ids or ())
    banned = _ids(params.bad_token_ids)
    stops = _ids(join.stop_ids if join.generated < params.min_tokens else ())
    split = max(0, join.history.size - join.generated)
    output = _ids(join.history[split:] if params.counts_tokens else ())
    prompt = _ids(join.history[:split] if params.counts_tokens and params.repetition_penalty != 1.0 else ())
    tokens = np.unique(np.concatenate([biased, allowed, banned, stops, output, prompt]))
    tokens = tokens[(tokens >= 0) & (tokens < vocab_size)]

    entries = np.zeros(tokens.size, ENTRY)
    entries["token"] = tokens
    entries["bias"][np.searchsorted(tokens, biased)] = bias
    entries["bias"][np.isin(tokens, banned)] = -np.inf
    for mark, ids in ((ALLOWED, allowed), (STOP, stops), (SEEN, np.concatenate([output, prompt]))):
        entries["marks"] |= np.where(np.isin(tokens, ids), mark, 0).astype(np.int32)
    output = output[(output >= 0) & (output < vocab_size)]
    np.add.at(entries["count"], np.searchsorted(tokens, output), 1)
    return entries


def _ids(values: Any) -> NDArray[np.int64]:
    return np.asarray(values, np.int64)
