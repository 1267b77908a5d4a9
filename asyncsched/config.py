"""Everything tunable about an engine, in one frozen dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from .errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Immutable; see each group.

    Model:
        model: ``"smollm2-135m"`` (the packaged default), a folder, a ``.gguf`` file, or a hub name
            ``"org/name"`` (found through the hub cache; honours ``HF_HOME`` and ``HF_HUB_OFFLINE``).
        revision: Branch, tag or commit for a hub name.
        load_format: ``"auto"``, ``"safetensors"``, ``"gguf"``, or ``"dummy"`` (random weights, needs
            only the configuration file).
        dtype: ``"auto"`` (the checkpoint's, bf16 for GGUF), ``"bfloat16"``, ``"float32"``, or on a GPU ``"float16"``.
        device: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"`` or ``"cuda:1"``, or the name of another backend.
        max_model_len: Longest prompt + output in tokens; ``None`` is the model's own.

    Memory (at most one of ``pages``, ``pool_bytes``, ``pool_fraction``):
        max_rows: Most requests running at once.
        page_size: Tokens per page, a power of two.
        pages: Pool size in pages.
        pool_bytes: Pool size in bytes.
        pool_fraction: Pool size as a share of the memory free after loading (0 … 1).

    Steps:
        depth: Steps that may be in flight; 0 is serial (for comparisons).
        token_budget: Most tokens one step computes (decode and prefill together).
        chunk_cap: Most prompt tokens of one request per step; ``None`` is the budget.
        chunked_prefill: ``False`` computes each prompt in one piece.
        prefix_cache: Reuse the pages of earlier prompts and answers.
        reserve: ``"full"`` reserves pages for the whole output at admission: nothing is ever preempted.
            ``"expected"`` reserves what is likely to be needed, runs more at once, and preempts when
            pages run out. ``"prompt"`` reserves the prompt alone, as vLLM does: the most at once, and the
            most preemptions.
        max_preemptions: A request preempted this often is spared while another victim can be found.

    GPU:
        cuda_graphs: Run decode steps as CUDA graphs; ``False`` launches them kernel by kernel, with the same tokens.
        attention: ``"triton"``, the engine's own kernels, or ``"auto"``: for prompts flashinfer's, if it is
            installed, agrees with them on a trial when the model is loaded, and is quicker there.

    Queue:
        max_queued_requests, max_queued_tokens: Bounds on what waits; ``None`` is unbounded.
        when_full: ``"refuse"`` raises ``QueueFullError``; ``"wait"`` holds the request outside.

    Event loop:
        own_loop: Run the control tasks in an event loop in a thread of their own, so that an application
            that blocks its loop does not hold up the device. The API stays the same; each token costs a
            little more, and ``QueueFullError`` is raised from the stream.

    Policies (names, dotted paths, ``{"name": …, option: …}``, or instances):
        policy: Who runs next.
        budget_policy: How much prefill goes into a step; ``None`` asks ``policy``, if it has an opinion.
        preemption_policy: Who gives up its row; ``None`` asks ``policy``, if it has an opinion.
        eviction_policy: Which cached prefix goes first.
        admission_policy: Who may enter; ``None`` lets everybody in.
        strict_policies: Raise on a policy's mistake instead of doing without it.
        policy_allowance: Seconds that one call of a policy may take.
        cost_model: Predicts step times for policies: a ``CostModel``, or the path of a file written by
            ``asyncsched fit-cost-model``; ``None`` fits one to the running engine if a policy asks.

    Eviction:
        low_watermark, high_watermark: When less than ``low`` of the pool is free, evict until
            ``high`` is (shares of the pool).

    Timing (seconds):
        queue_timeout, request_timeout: Limits on waiting for a row and on the whole request, unless the
            request says otherwise; ``None`` is no limit.
        slow_step_seconds: A step longer than this is logged as a warning.
        close_timeout: How long to wait for the compute thread on closing.
    """

    model: str = DEFAULT_MODEL
    revision: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    max_model_len: int | None = None

    max_rows: int = 128
    page_size: int = 32
    pages: int | None = None
    pool_bytes: int | None = None
    pool_fraction: float | None = None

    depth: int = 2
    token_budget: int = 1024
    chunk_cap: int | None = None
    chunked_prefill: bool = True
    prefix_cache: bool = True
    reserve: Literal["full", "expected", "prompt"] = "full"
    max_preemptions: int = 3

    own_loop: bool = False

    cuda_graphs: bool = True
    attention: Literal["triton", "auto"] = "triton"

    max_queued_requests: int | None = None
    max_queued_tokens: int | None = None
    when_full: Literal["refuse", "wait"] = "refuse"

    policy: Any = "fcfs"
    budget_policy: Any = None
    preemption_policy: Any = None
    eviction_policy: Any = "lru"
    admission_policy: Any = None
    strict_policies: bool = False
    policy_allowance: float = 0.05
    cost_model: Any = None

    low_watermark: float = 0.02
    high_watermark: float = 0.05

    queue_timeout: float | None = None
    request_timeout: float | None = None
    slow_step_seconds: float = 30.0
    close_timeout: float = 30.0

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model is empty; pass a folder, a .gguf file or a hub name")
        if self.load_format not in ("auto", "safetensors", "gguf", "dummy"):
            raise ConfigError(f"load_format={self.load_format!r}: use auto, safetensors, gguf or dummy")
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ConfigError(f"dtype={self.dtype!r}: use auto, bfloat16, float16 or float32")
        if self.attention not in ("triton", "auto"):
            raise ConfigError(f"attention={self.attention!r}: use triton or auto")
        if self.reserve not in ("full", "expected", "prompt"):
            raise ConfigError(f"reserve={self.reserve!r}: use full, expected or prompt")
        if self.when_full not in ("refuse", "wait"):
            raise ConfigError(f"when_full={self.when_full!r}: use refuse or wait")
        _at_least(self, 1, "max_rows", "page_size", "token_budget")
        _at_least(self, 0, "depth", "max_preemptions")
        for name in ("max_model_len", "pages", "pool_bytes", "chunk_cap", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) is not None:
                _at_least(self, 1, name)
        if self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size={self.page_size} is not a power of two; use 1, 16, 32 …")
        if sum(size is not None for size in (self.pages, self.pool_bytes, self.pool_fraction)) > 1:
            raise ConfigError("give the pool's size once: pages, pool_bytes or pool_fraction")
        for name in ("pool_fraction", "low_watermark", "high_watermark"):
            share = getattr(self, name)
            if share is not None and (isinstance(share, bool) or not isinstance(share, int | float)):
                raise ConfigError(f"{name}={share!r} must be a number")
        if self.pool_fraction is not None and not 0.0 < self.pool_fraction <= 1.0:
            raise ConfigError(f"pool_fraction={self.pool_fraction} is not in (0, 1]")
        if not 0.0 <= self.low_watermark <= self.high_watermark < 1.0:
            raise ConfigError("watermarks must satisfy 0 <= low <= high < 1")
        for name in ("queue_timeout", "request_timeout", "slow_step_seconds", "close_timeout", "policy_allowance"):
            seconds = getattr(self, name)
            if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
                raise ConfigError(f"{name}={seconds!r} must be a positive number of seconds")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from keywords, naming the closest option when one is unknown."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                from difflib import get_close_matches

                hint = get_close_matches(name, known, 1)
                raise ConfigError(f"unknown engine option {name!r}" + (f"; did you mean {hint[0]!r}?" if hint else ""))
        return cls(**options)


def _at_least(config: EngineConfig, low: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {low}")
