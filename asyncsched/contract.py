"""The contract between the planes: what crosses to the compute thread and what comes back.

The control plane owns every decision; the device owns the state of the running rows. A plan
therefore says only *what changed*, and a result only *what was sampled*. Everything here is
immutable, numbered, and safe to hand from one thread to the other.

How a device applies one plan, in this order:

1. ``leaves``: the rows stop being active. Their pages may belong to others from now on.
2. ``joins``: the row gets a block table, sampling state and ``cached`` tokens that are already
   in the pool. It is not active yet.
3. ``pages``: block-table entries are written.
4. one forward pass over ``prefill`` chunks and, if ``decode``, one token for every active row
   (the token sampled last for that row, kept on the device). Within a layer the keys and values
   of the whole step are written before any of its queries read, so that two requests that
   arrive together can share pages in the same step.
5. sampling: one token for every active row, then one for every chunk with ``sample``, whose row
   is active from the next step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .sampling_params import SamplingParams

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]

EMPTY_INTS: IntArray = np.empty(0, np.int32)
EMPTY_INTS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class RowJoin:
    """A request takes a row.

    Attributes:
        row: Row index, ``0 <= row < limits.max_rows``.
        number: The engine's own request number; never reused.
        pages: Block table so far, int32 ``[n]`` page ids. ``pages[i]`` holds tokens
            ``i * page_size … (i + 1) * page_size - 1``.
        cached: Tokens whose keys and values are in those pages already (a multiple of the page
            size; less than the prompt's length).
        params: Sampling parameters, validated.
        seed: The request's seed. Token ``i`` of the output depends on ``(seed, i)`` only.
        stop_ids: Token ids that end the request (end-of-sequence included unless ignored), for
            suppression below ``min_tokens``.
        generated: How many of ``history``'s last tokens were generated before this join (0 unless
            the request is resumed after a preemption). Sampling continues at this position.
        history: Prompt plus generated tokens, int32 ``[n]``, present only when the parameters
            need token counts (penalties); empty otherwise.
    """

    row: int
    number: int
    pages: IntArray
    cached: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    generated: int = 0
    history: IntArray = field(default_factory=lambda: EMPTY_INTS)


@dataclass(frozen=True, slots=True)
class PageAppends:
    """Block-table entries to write: ``table[rows[i], indices[i]] = pages[i]``; three int32 ``[n]``."""

    rows: IntArray
    indices: IntArray
    pages: IntArray


NO_PAGES = PageAppends(EMPTY_INTS, EMPTY_INTS, EMPTY_INTS)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens to compute for one row: positions ``start … start + len(tokens) - 1``.

    ``sample`` is true on the last chunk of a request that wants output: the row's first token is
    sampled from the chunk's last position, and the row is active from the next step on.
    """

    row: int
    start: int
    tokens: IntArray
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, as a delta. Event loop → compute thread. Numbered 1, 2, 3 … without gaps."""

    step: int
    joins: tuple[RowJoin, ...] = ()
    leaves: tuple[int, ...] = ()
    pages: PageAppends = NO_PAGES
    prefill: tuple[PrefillChunk, ...] = ()
    decode: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position (natural logarithm, of the unmodified distribution).

    Attributes:
        logprob: Of the chosen (or, in a prompt, the actual) token.
        rank: Its rank, 1 is the most likely.
        top_ids: The most likely token ids, most likely first, ``[k]``.
        top_logprobs: Their log-probabilities, ``[k]``.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step sampled. Compute thread → event loop. Completed strictly in step order.

    Attributes:
        step: The plan's number.
        rows: int32 ``[n]``: first the rows that were active, ascending, then the rows of chunks
            with ``sample``, in the plan's order.
        tokens: int32 ``[n]``, the sampled token per entry of ``rows``.
        logprobs: Row → log-probabilities of its sampled token, for rows that asked.
        prompt_logprobs: Row → for each token of its chunk in this step, that token's
            log-probability given what precedes it (``None`` for position 0 of a prompt), for rows
            that asked.
        failed: Row → why this row alone has no usable token (NaN logits, say). Such a row is in
            ``rows``; its token is meaningless.
        error: The step raised: nothing of it is usable; ``rows`` and ``tokens`` are empty. The
            deltas (leaves, joins, pages) have been applied all the same. Later steps that are already
            in flight may name the same rows and pages; the device computes them as if nothing had
            happened, and what comes of it is dropped.
        fatal: With ``error``: the device is lost, no later plan can run.
        launched_at: When the device began, monotonic seconds (``time.monotonic``).
        completed_at: When it ended.
        launching: When the compute thread began and ended to launch it, the same clock; ``None`` where the
            thread is the device.
    """

    step: int
    rows: IntArray
    tokens: IntArray
    logprobs: dict[int, TokenLogprobs] | None = None
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] | None = None
    failed: dict[int, str] | None = None
    error: BaseException | None = None
    fatal: bool = False
    launched_at: float = 0.0
    completed_at: float = 0.0
    launching: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor can hold; fixed once it is built.

    Attributes:
        max_rows: Rows it keeps.
        pages: Pages in its pool.
        page_size: Tokens per page.
        max_model_len: Longest prompt + output of one request, in tokens.
        vocab_size: Valid token ids are ``0 … vocab_size - 1``.
    """

    max_rows: int
    pages: int
    page_size: int
    max_model_len: int
    vocab_size: int


@runtime_checkable
class Executor(Protocol):
    """The seam between the planes."""

    @property
    def limits(self) -> ExecutorLimits:
        """Capacities, constant."""
        ...

    def start(self, deliver: Callable[[StepResult], None]) -> None:
        """Begin to accept plans. ``deliver`` may be called from any thread, once per plan, in order."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Queue one plan and return at once. Loop thread only."""
        ...

    def close(self) -> None:
        """Finish or drop what is queued, join every thread, free the memory. Idempotent; may block."""
        ...
