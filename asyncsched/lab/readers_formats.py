"""The published trace formats: what tells them, and what a record of each means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from .trace import TraceRequest

Record = Mapping[str, Any]

MOONCAKE_BLOCK = 512
LLMSERVINGSIM_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Format:
    """A format of one request per row (csv) or per line (JSON).

    Attributes:
        name: What the caller calls it.
        table: It is a csv file with a header.
        fields: Names that every record has; they tell the format.
        coarse: Its stamps may be coarser than the time between arrivals.
        request: The request of a record; ``None`` if it has no tokens. Raises ``KeyError``, ``TypeError``
            or ``ValueError`` for a broken record.
    """

    name: Literal["azure", "burstgpt", "mooncake", "llmservingsim"]
    table: bool
    fields: frozenset[str]
    coarse: bool
    request: Callable[[Record], TraceRequest | None]

    @property
    def looks(self) -> str:
        """For error messages."""
        return f"{'columns' if self.table else 'JSON lines with'} {', '.join(sorted(self.fields))}"


def _azure(record: Record) -> TraceRequest | None:
    """Stamps are times of day with up to seven digits behind the point; the seventh is dropped."""
    stamp = datetime.fromisoformat(record["TIMESTAMP"])
    at = (stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp()
    return _request(at, _count(record, "ContextTokens"), _count(record, "GeneratedTokens"))


def _burstgpt(record: Record) -> TraceRequest | None:
    """Rows without tokens are failures. Which model served it and by which way it came in goes into the hints."""
    return _request(
        _number(record, "Timestamp"),
        _count(record, "Request tokens"),
        _count(record, "Response tokens"),
        hints={"model": record["Model"], "log_type": record["Log Type"]},
    )


def _mooncake(record: Record) -> TraceRequest | None:
    """Milliseconds, and one id per block of 512 tokens, the last one begun or full.

    Only full blocks are kept as shared. The id of a begun block occurs again where the whole prompt does;
    leaving it out makes 0.02 % of the published conversation trace's prompt tokens unique that were not
    (0.08 % of the synthetic one's).
    """
    tokens = _count(record, "input_length")
    return _request(
        _number(record, "timestamp") / 1000,
        tokens,
        _count(record, "output_length"),
        blocks=_blocks(record, tokens, MOONCAKE_BLOCK, begun=True),
        block_size=MOONCAKE_BLOCK,
    )


def _llmservingsim(record: Record) -> TraceRequest | None:
    """Nanoseconds, and one id per full block of 16 tokens."""
    tokens = _count(record, "input_toks")
    return _request(
        _number(record, "arrival_time_ns") / 1e9,
        tokens,
        _count(record, "output_toks"),
        blocks=_blocks(record, tokens, LLMSERVINGSIM_BLOCK, begun=False),
        block_size=LLMSERVINGSIM_BLOCK,
    )


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("azure", True, frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), False, _azure),
        Format(
            "burstgpt",
            True,
            frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"}),
            True,
            _burstgpt,
        ),
        Format("mooncake", False, frozenset({"timestamp", "input_length", "output_length", "hash_ids"}), True, _mooncake),
        Format(
            "llmservingsim",
            False,
            frozenset({"arrival_time_ns", "input_toks", "output_toks", "hash_ids"}),
            False,
            _llmservingsim,
        ),
    )
}


def _request(at: float, prompt_tokens: int, output_tokens: int, **about: Any) -> TraceRequest | None:
    if not prompt_tokens or not output_tokens:
        return None
    return TraceRequest(at, prompt_tokens, output_tokens, **about)


def _count(record: Record, name: str) -> int:
    """A field that holds a whole number, at least 0."""
    value = record[name]
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}={value!r} is not a whole number of tokens")
    return value


def _number(record: Record, name: str) -> float:
    """A field that holds a number of some unit of time, at least 0."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name}={value!r} is not a number")
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name}={value!r} is not a time from the start of the trace")
    return number


def _blocks(record: Record, tokens: int, size: int, *, begun: bool) -> tuple[int, ...]:
    """The ids of the full blocks; ``begun``: a begun one has an id too."""
    ids = record["hash_ids"]
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise ValueError("hash_ids is not a list of whole numbers")
    expected = -(-tokens // size) if begun else tokens // size
    if len(ids) != expected:
        raise ValueError(f"{len(ids)} hash_ids where a prompt of {tokens} tokens has {expected}, one per {size} tokens")
    return tuple(ids[: tokens // size])
