"""The state a real device would keep, with every access checked."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..contract import ExecutorLimits, IntArray, PrefillChunk, RowJoin, StepPlan
from .oracle import POISON, U64, extend, extend_one, sample

Positions = NDArray[np.int32] | NDArray[np.int64]


class SimulationError(Exception):
    """The control plane broke the contract; the text says which clause."""


class SimulatedDevice:
    """Rows and pages of hashes instead of keys and values (see ``oracle``).

    Checked: step numbers, joins of used rows, leaves of unknown ones, chunks that do not continue
    their row, reads of slots nothing wrote, writes into pages another row can see, page ids and
    tokens out of range, and the token budget.

    Args:
        limits: Capacities.
        token_budget: Most tokens a plan may hold; unchecked if ``None``.
    """

    def __init__(self, limits: ExecutorLimits, token_budget: int | None = None) -> None:
        self.limits = limits
        self.token_budget = token_budget
        pages_per_row = -(-limits.max_model_len // limits.page_size)
        self.slots = np.zeros(limits.pages * limits.page_size, np.uint64)
        self.table = np.full((limits.max_rows, pages_per_row), -1, np.int32)
        self.length = np.zeros(limits.max_rows, np.int64)
        self.joined = np.zeros(limits.max_rows, np.bool_)
        self.active = np.zeros(limits.max_rows, np.bool_)
        self.last_token = np.zeros(limits.max_rows, np.int64)
        self.seed = np.zeros(limits.max_rows, np.uint64)
        self.position = np.zeros(limits.max_rows, np.int64)
        self.step = 0

    def apply_deltas(self, plan: StepPlan) -> None:
        """Leaves, joins and page appends."""
        if plan.step != self.step + 1:
            raise SimulationError(f"step {plan.step} follows step {self.step}")
        self.step = plan.step
        named = [*plan.leaves, *(j.row for j in plan.joins), *(c.row for c in plan.prefill), *plan.pages.rows.tolist()]
        bad = [row for row in named if not 0 <= row < self.limits.max_rows]
        self._require(not bad, plan, f"rows {bad} do not exist")
        for row in plan.leaves:
            self._require(bool(self.joined[row]), plan, f"row {row} leaves but never joined")
            self.joined[row] = self.active[row] = False
            self.table[row] = -1
        for join in plan.joins:
            self._join(plan, join)
        appends = plan.pages
        if len(appends.rows):
            self._require(bool(self.joined[appends.rows].all()), plan, "pages appended to a row that is not joined")
            self._fresh(plan, appends.pages)
            inside = (appends.indices >= 0) & (appends.indices < self.table.shape[1])
            self._require(bool(inside.all()), plan, "pages appended beyond the longest block table")
            self.table[appends.rows, appends.indices] = appends.pages
            self.slots.reshape(-1, self.limits.page_size)[appends.pages] = 0

    def compute(self, plan: StepPlan, *, failing: bool = False) -> tuple[IntArray, IntArray]:
        """The step itself: rows and their sampled tokens, in the contract's order.

        A ``failing`` step leaves poison where its results should be: steps already in flight may go
        on with it, but no token that came of it may reach anybody.
        """
        decode = np.flatnonzero(self.active).astype(np.int32) if plan.decode else np.empty(0, np.int32)
        work = len(decode) + sum(len(chunk.tokens) for chunk in plan.prefill)
        self._require(work > 0, plan, "there is nothing to compute")
        alone = len(plan.prefill) == 1 and not len(decode)  # a prompt that may not be chunked
        over = self.token_budget is not None and work > self.token_budget and not alone
        self._require(not over, plan, f"{work} tokens are over the budget of {self.token_budget}")
        for chunk in plan.prefill:
            self._prefill(plan, chunk, failing)
        if len(decode):
            before = self._read(plan, decode, self.length[decode] - 1)
            after = np.full_like(before, POISON) if failing else extend(before, self.last_token[decode])
            self._write(plan, decode, self.length[decode], after)
            self.length[decode] += 1
        sampled = [chunk.row for chunk in plan.prefill if chunk.sample]
        rows = np.concatenate([decode, np.array(sampled, np.int32)])
        tokens = np.empty(0, np.int32)
        if len(rows):
            state = self._read(plan, rows, self.length[rows] - 1)
            tokens = sample(state, self.seed[rows], self.position[rows], self.limits.vocab_size)
            self.position[rows] += 1
            self.last_token[rows] = tokens
            self.active[rows] = True
        return rows, tokens

    def _join(self, plan: StepPlan, join: RowJoin) -> None:
        row = join.row
        self._require(not self.joined[row], plan, f"request {join.number} joins row {row}, which is taken")
        self._require(join.cached % self.limits.page_size == 0, plan, "the cached length is not a whole number of pages")
        valid = (join.pages >= 0) & (join.pages < self.limits.pages)
        self._require(bool(valid.all()), plan, f"page ids {join.pages[~valid]} do not exist")
        self._require(len(np.unique(join.pages)) == len(join.pages), plan, "a page appears twice in one block table")
        self._require(len(join.pages) <= self.table.shape[1], plan, "the block table is longer than the model")
        self._fresh(plan, join.pages[join.cached // self.limits.page_size :])
        self.joined[row] = True
        self.table[row] = -1
        self.table[row, : len(join.pages)] = join.pages
        fresh = join.pages[join.cached // self.limits.page_size :]
        self.slots.reshape(-1, self.limits.page_size)[fresh] = 0
        self.length[row] = join.cached
        self.seed[row] = join.seed
        self.position[row] = join.generated

    def _fresh(self, plan: StepPlan, pages: IntArray) -> None:
        valid = (pages >= 0) & (pages < self.limits.pages)
        self._require(bool(valid.all()), plan, f"page ids {pages[~valid]} do not exist")
        self._require(len(np.unique(pages)) == len(pages), plan, "a page is given out twice")
        used = np.isin(pages, self.table[self.joined])
        self._require(not used.any(), plan, f"pages {pages[used]} are given out while a row has them")

    def _prefill(self, plan: StepPlan, chunk: PrefillChunk, failing: bool) -> None:
        row = chunk.row
        self._require(bool(self.joined[row]) and not self.active[row], plan, f"chunk for row {row}, which is not prefilling")
        self._require(
            chunk.start == self.length[row], plan, f"chunk of row {row} starts at {chunk.start}, not {self.length[row]}"
        )
        inside = (chunk.tokens >= 0) & (chunk.tokens < self.limits.vocab_size)
        self._require(len(chunk.tokens) > 0 and bool(inside.all()), plan, f"chunk of row {row} has impossible tokens")
        one = np.array([row])
        state = int(self._read(plan, one, np.array([chunk.start - 1]))[0]) if chunk.start else 0
        states = np.empty(len(chunk.tokens), np.uint64)
        for index, token in enumerate(chunk.tokens.tolist()):
            states[index] = state = POISON if failing else extend_one(state, token)
        positions = np.arange(chunk.start, chunk.start + len(states))
        self._write(plan, np.full(len(states), row), positions, states)
        self.length[row] += len(states)

    def _slots(self, plan: StepPlan, rows: Positions, positions: Positions) -> Positions:
        size = self.limits.page_size
        self._require(bool((positions < self.limits.max_model_len).all()), plan, "a row grows beyond the model's length")
        pages = self.table[rows, positions // size]
        self._require(
            bool((pages >= 0).all()), plan, f"rows {rows[pages < 0]} have no page at positions {positions[pages < 0]}"
        )
        slots: Positions = pages.astype(np.int64) * size + positions % size
        return slots

    def _read(self, plan: StepPlan, rows: Positions, positions: Positions) -> U64:
        states = self.slots[self._slots(plan, rows, positions)]
        self._require(bool((states != 0).all()), plan, f"rows {rows[states == 0]} read slots that nothing wrote")
        return states

    def _write(self, plan: StepPlan, rows: Positions, positions: Positions, states: U64) -> None:
        slots = self._slots(plan, rows, positions)
        pages = np.unique(slots // self.limits.page_size)
        visible = np.isin(self.table[self.joined], pages).sum()
        if visible != len(pages):  # another row sees one of them: it may be filled for both, but not changed
            before = self.slots[slots]
            self._require(
                bool(((before == 0) | (before == states)).all()), plan, f"rows {np.unique(rows)} overwrite shared pages"
            )
        self.slots[slots] = states

    def _require(self, condition: bool, plan: StepPlan, what: str) -> None:
        if not condition:
            raise SimulationError(f"step {plan.step}: {what}")
