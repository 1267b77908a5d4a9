"""What a caller can ask of sampling, validated on construction."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import InvalidParamsError

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Immutable.

    Attributes:
        max_tokens: Most tokens to generate; 0 computes the prompt only; ``None`` means as many as
            the model's length allows.
        min_tokens: End-of-sequence and stop ids are suppressed before this many tokens.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set whose probability reaches this (0 < top_p ≤ 1).
        min_p: Drop tokens less likely than ``min_p`` × the most likely one.
        seed: Token ``i`` depends on ``(seed, i)`` only, never on the batch. ``None`` draws one.
        n: Independent completions of one prompt, sharing its pages.
        stop: Strings that end the text, wherever token boundaries fall.
        stop_token_ids: Token ids that end the request.
        include_stop: Keep the stop string or stop token in the output.
        ignore_eos: Do not stop at the model's end-of-sequence tokens.
        presence_penalty: Subtracted once from every token that was generated already.
        frequency_penalty: Subtracted per earlier occurrence in the output.
        repetition_penalty: Divides (if positive) or multiplies (if negative) the logits of tokens
            in prompt or output; 1 is off (Keskar et al., CTRL, 2019).
        logit_bias: Token id → value added to its logit.
        allowed_token_ids: Only these may be sampled.
        bad_token_ids: These may never be sampled.
        logprobs: Report the chosen token's log-probability and this many of the most likely
            (0 … 20); ``None`` reports nothing.
        prompt_logprobs: The same for every prompt token; the prefix cache is not read then.
        detokenize: ``False`` yields token ids only.
        skip_special_tokens: Leave special tokens out of the text.

    Raises:
        InvalidParamsError: a value is out of range, not finite, or contradicts another.
    """

    max_tokens: int | None = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # normalise sequences once, so that later code sees tuples only
        stop: object = self.stop
        set_(self, "stop", (stop,) if isinstance(stop, str) else _tuple("stop", stop, str))
        set_(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids, int))
        set_(self, "bad_token_ids", _tuple("bad_token_ids", self.bad_token_ids, int))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _tuple("allowed_token_ids", self.allowed_token_ids, int))
            if not self.allowed_token_ids:
                raise InvalidParamsError("allowed_token_ids is empty: nothing could be sampled; pass None to allow all")
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParamsError("logit_bias must map token ids to numbers")
        set_(self, "logit_bias", {_int("logit_bias key", k): _number("logit_bias", v) for k, v in self.logit_bias.items()})
        if self.max_tokens is not None:
            _at_least("max_tokens", _int("max_tokens", self.max_tokens), 0)
        _at_least("min_tokens", _int("min_tokens", self.min_tokens), 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParamsError(
                f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}; lower one or raise the other"
            )
        _at_least("temperature", _number("temperature", self.temperature), 0.0)
        _at_least("top_k", _int("top_k", self.top_k), 0)
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise InvalidParamsError(f"top_p={self.top_p} is not in (0, 1]; use 1 to switch it off")
        if not 0.0 <= _number("min_p", self.min_p) <= 1.0:
            raise InvalidParamsError(f"min_p={self.min_p} is not in [0, 1]; use 0 to switch it off")
        if self.seed is not None and not 0 <= _int("seed", self.seed) < 2**63:
            raise InvalidParamsError(f"seed={self.seed} is not in [0, 2**63)")
        if not 1 <= _int("n", self.n) <= 128:
            raise InvalidParamsError(f"n={self.n} is not in 1 … 128")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= _number(name, getattr(self, name)) <= 2.0:
                raise InvalidParamsError(f"{name}={getattr(self, name)} is not in [-2, 2]; use 0 to switch it off")
        if not 0.0 < _number("repetition_penalty", self.repetition_penalty) <= 10.0:
            raise InvalidParamsError(f"repetition_penalty={self.repetition_penalty} is not in (0, 10]; use 1 to switch it off")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= _int(name, value) <= MAX_LOGPROBS:
                raise InvalidParamsError(f"{name}={value} is not in 0 … {MAX_LOGPROBS}")
        if any(not s for s in self.stop):
            raise InvalidParamsError("stop holds an empty string, which would match at once; remove it")
        if self.stop and not self.detokenize:
            raise InvalidParamsError("stop strings need text: use stop_token_ids, or leave detokenize on")

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """True when sampling needs to know which tokens occurred before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def token_ids(self) -> dict[str, tuple[int, ...]]:
        """Every token id named by these parameters, by field, for a check against the vocabulary."""
        return {
            "stop_token_ids": self.stop_token_ids,
            "bad_token_ids": self.bad_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": tuple(self.logit_bias),
        }


FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))


def _tuple(name: str, values: object, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InvalidParamsError(f"{name} must be a sequence of {kind.__name__}")
    if kind is int:
        return tuple(_int(name, v) for v in values)
    if any(not isinstance(v, kind) for v in values):
        raise InvalidParamsError(f"{name} must hold {kind.__name__} only")
    return tuple(values)


def _int(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidParamsError(f"{name}={value!r} must be a whole number")
    return int(value.__index__())


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidParamsError(f"{name}={value!r} must be a finite number")
    return float(value)


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise InvalidParamsError(f"{name}={value} must be at least {low}")
