"""A snapshot of the engine in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .state import ControlState


@dataclass(frozen=True, slots=True)
class Statistics:
    """The engine at one moment; totals count from its start.

    Attributes:
        running: Requests that hold a row.
        waiting: Requests that want one.
        steps: Steps completed.
        steps_in_flight: Steps submitted and not completed.
        submitted: Submissions accepted.
        rejected: Submissions refused by load or by the admission policy.
        finished: Requests ended, by finish reason.
        prompt_tokens: Prompt tokens of admitted requests.
        cached_tokens: Of those, found in the prefix cache.
        generated_tokens: Output tokens that arrived for a live request.
        dropped_tokens: Sampled for a request that had ended meanwhile (the price of running ahead).
        total_pages, free_pages, cached_pages, limbo_pages: The page pool; cached pages are held by
            prefixes nobody uses, limbo pages become free when the steps in flight complete.
        total_rows, free_rows: The row table.
        evicted_pages: Pages of cached prefixes given up.
        restarts: Requests that lost their row and began again, for whatever reason.
        preemptions: Of those, for want of pages.
        failed_steps, slow_steps: Steps that raised, or took longer than ``slow_step_seconds``.
        stuck_warnings: How often no step completed for ``slow_step_seconds`` although some were in flight.
        policy_faults: Mistakes of policies, by hook.
        device_busy: Seconds the device computed.
        device_idle: Seconds it waited between steps although the next one was submitted in time.
        overlapped_steps: Steps submitted while an earlier one was still in flight.
    """

    running: int
    waiting: int
    steps: int
    steps_in_flight: int
    submitted: int
    rejected: int
    finished: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    dropped_tokens: int
    total_pages: int
    free_pages: int
    cached_pages: int
    limbo_pages: int
    total_rows: int
    free_rows: int
    evicted_pages: int
    restarts: int
    preemptions: int
    failed_steps: int
    slow_steps: int
    stuck_warnings: int
    policy_faults: Mapping[str, int]
    device_busy: float
    device_idle: float
    overlapped_steps: int

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the cache (0 … 1)."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def overlap(self) -> float:
        """Share of steps that were submitted before the one ahead had completed (0 … 1)."""
        return self.overlapped_steps / self.steps if self.steps else 0.0


def snapshot(state: ControlState, lobby: int) -> Statistics:
    """Read the state. ``lobby`` requests wait outside the waiting set."""
    counters = state.counters
    return Statistics(
        running=state.rows.in_use,
        waiting=len(state.waiting) + lobby,
        steps=state.completed,
        steps_in_flight=state.outstanding,
        submitted=counters.submitted,
        rejected=counters.rejected,
        finished=dict(counters.finished),
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        generated_tokens=counters.generated_tokens,
        dropped_tokens=counters.dropped_tokens,
        total_pages=state.pool.total,
        free_pages=state.pool.free,
        cached_pages=state.tree.evictable,
        limbo_pages=state.pool.limbo,
        total_rows=state.rows.max_rows,
        free_rows=state.rows.free,
        evicted_pages=counters.evicted_pages,
        restarts=counters.restarts,
        preemptions=counters.preemptions,
        failed_steps=counters.failed_steps,
        slow_steps=counters.slow_steps,
        stuck_warnings=counters.stuck_warnings,
        policy_faults=dict(state.policies.faults),
        device_busy=counters.device_busy,
        device_idle=counters.device_idle,
        overlapped_steps=counters.overlapped_steps,
    )
