"""From logits to tokens: what the parameters of every row ask for, applied in one pass.

The order of operations on one row:

1. ``allowed_token_ids``, ``logit_bias``, ``bad_token_ids``; stop ids while the output is shorter
   than ``min_tokens``;
2. ``repetition_penalty`` (tokens of prompt and output), then ``frequency_penalty`` and
   ``presence_penalty`` (tokens of the output);
3. ``temperature`` 0 takes the largest logit now, the lowest token id of equal ones; otherwise
   logits are divided by it;
4. ``top_k``, then ``top_p`` over the probabilities that top-k left, then ``min_p`` relative to the
   likeliest token;
5. one draw from the softmax of what is left.

Steps 1 to 3 are in vLLM's order; 4 is in that of Hugging Face transformers (vLLM applies min-p
first, over whose rest top-p then renormalises). "The k most likely" and "the smallest set" use a
total order, larger logit first and of equal logits the lower id first, so exactly k tokens and
never a token too many survive; both others keep every logit that equals the k-th.

Reported log-probabilities are those of the model: the log-softmax of the unmodified logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..contract import EMPTY_INTS, IntArray, RowJoin, TokenLogprobs
from ..sampling_params import MAX_LOGPROBS, SamplingParams
from .kernels.logits import BLOCK, OK, Bits
from .kernels.sampling import Report, Scratch, argmax_rows, report_rows, sample_rows
from .kernels.threads import team
from .sampling_failures import FAILURES
from .sampling_rows import RowTable

_LEAST_WORK = 65536  # logits worth waking the other threads for


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What one call sampled.

    Attributes:
        tokens: int32 ``[n]``, one per entry of ``rows``; 0 where the row failed.
        logprobs: Row → log-probabilities of its token, for rows that asked; ``None`` if none did.
        failed: Row → why it has no token; ``None`` if every row has one.
    """

    tokens: IntArray
    logprobs: dict[int, TokenLogprobs] | None = None
    failed: dict[int, str] | None = None


class Sampler:
    """Samples for every row of an executor. Compute thread only.

    Token ``i`` of a request depends on its seed, on ``i`` and on its own logits: not on the row,
    the batch, or the number of threads.

    Args:
        max_rows: Rows are ``0 … max_rows - 1``.
        vocab_size: Logits per row.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._table = RowTable(max_rows, vocab_size)
        self._prompt_logprobs: dict[int, int] = {}
        self._scratch: Scratch | None = None

    def join(self, join: RowJoin) -> None:
        """A request takes a row: its parameters, seed, output position and token counts."""
        self.leave(join.row)
        self._table.join(join)
        if join.params.prompt_logprobs is not None:
            self._prompt_logprobs[join.row] = join.params.prompt_logprobs

    def leave(self, row: int) -> None:
        """Forget a row; a row that nobody has may leave too."""
        self._table.leave(row)
        self._prompt_logprobs.pop(row, None)

    def wants_prompt_logprobs(self, row: int) -> int | None:
        """How many of the likeliest tokens to report per prompt token; ``None`` for no report."""
        return self._prompt_logprobs.get(row)

    def sample(self, logits: torch.Tensor, rows: IntArray) -> SampleOutput:
        """One token per row; advances the output position and token counts of every row that gets one.

        Args:
            logits: bfloat16 or float32 ``[n, vocab_size]`` in host memory; left as it is.
            rows: int32 ``[n]``, distinct rows that have joined.

        Raises:
            ValueError: shape, type or rows are not as above.
        """
        bits = self._bits(logits)
        self._check_rows(rows, bits.shape[0])
        tokens = np.zeros(rows.size, np.int32)
        status = np.zeros(rows.size, np.int32)
        if rows.size == 0:
            return SampleOutput(tokens)
        table = self._table.rows
        state = table[rows]
        if np.all(state["plain"] & (state["position"] >= state["min_tokens"])):
            argmax_rows(*self._team(rows.size), bits, tokens, status)
            table["position"][rows[status == OK]] += 1
            return SampleOutput(tokens, None, self._failures(rows, tokens, status))
        self._table.make_room(rows)
        wanted = state["top_logprobs"]
        report = _new_report(rows.size if wanted.max() >= 0 else 0, MAX_LOGPROBS)
        fork, threads = self._team(rows.size)
        ids, values = self._table.ids, self._table.values
        sample_rows(fork, threads, bits, rows, table, ids, values, self._workspace(threads), tokens, status, report)
        reporting = np.flatnonzero((wanted >= 0) & (status == OK)).tolist()
        logprobs = {int(rows[i]): _token_logprobs(report, i, int(wanted[i])) for i in reporting}
        return SampleOutput(tokens, logprobs or None, self._failures(rows, tokens, status))

    def prompt_logprobs(self, logits: torch.Tensor, tokens: IntArray, k: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of given tokens, and of the ``k`` likeliest, at each position.

        Args:
            logits: bfloat16 or float32 ``[m, vocab_size]``; row ``j`` predicts ``tokens[j]``.
            tokens: int32 ``[m]``.
            k: 0 … 20.

        Returns:
            One entry per position. Logits without a distribution (NaN, +inf, nothing finite) give
            log-probability NaN and rank 0.

        Raises:
            ValueError: shape, type or tokens are not as above.
        """
        bits = self._bits(logits)
        if tokens.shape != (bits.shape[0],):
            raise ValueError(f"{tokens.shape} tokens for {bits.shape[0]} rows of logits; pass one token per row")
        if tokens.size == 0:
            return ()
        if tokens.min() < 0 or tokens.max() >= self._vocab_size:
            raise ValueError(f"tokens must lie in 0 … {self._vocab_size - 1}")
        report = _new_report(tokens.size, k)
        fork, threads = self._team(tokens.size)
        report_rows(fork, threads, bits, tokens.astype(np.int32, copy=False), self._workspace(threads), report)
        return tuple(_token_logprobs(report, i, k) for i in range(tokens.size))

    def _bits(self, logits: torch.Tensor) -> Bits:
        if logits.ndim != 2 or logits.shape[1] != self._vocab_size:
            raise ValueError(f"logits have shape {tuple(logits.shape)}, not [n, {self._vocab_size}]")
        word = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(logits.dtype)
        if word is None:
            raise ValueError(f"logits are {logits.dtype}; pass bfloat16 or float32")
        bits: Bits = logits.detach().contiguous().view(word).numpy()
        return bits

    def _check_rows(self, rows: IntArray, n: int) -> None:
        if rows.shape != (n,):
            raise ValueError(f"{rows.shape} rows for {n} rows of logits; pass one row index per row of logits")
        if n and (rows.min() < 0 or rows.max() >= self._max_rows or not self._table.rows["joined"][rows].all()):
            raise ValueError(f"rows {rows.tolist()} are not all in use; a row must join before it samples")

    def _failures(self, rows: IntArray, tokens: IntArray, status: IntArray) -> dict[int, str] | None:
        bad = np.flatnonzero(status != OK)
        if bad.size == 0:
            return None
        tokens[bad] = 0
        return {int(rows[i]): FAILURES[int(status[i])] for i in bad}

    def _team(self, n: int) -> tuple[int, int]:
        return team(n * self._vocab_size, _LEAST_WORK) if n > 1 else (0, 1)

    def _workspace(self, threads: int) -> Scratch:
        if self._scratch is None or self._scratch[0].shape[0] < threads:
            blocks = -(-self._vocab_size // BLOCK)
            padded = (threads, blocks * BLOCK)
            self._scratch = (
                np.empty(padded, np.float32),
                np.empty((threads, blocks), np.float32),
                np.empty(padded, np.int64),
                np.empty(padded, np.float32),
            )
        return self._scratch


def warm_up_sampling(vocab_size: int, dtype: torch.dtype) -> None:
    """Compile, or load from the cache, what drawing a token needs beyond taking the likeliest one. Any thread.

    On a machine that has never run it this takes several seconds, which greedy requests need not wait for.
    """
    sampler = Sampler(1, vocab_size)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
    sampler.join(RowJoin(row=0, number=0, pages=EMPTY_INTS, cached=0, params=params, seed=0))
    logits = torch.zeros(1, vocab_size, dtype=dtype)
    sampler.sample(logits, np.zeros(1, np.int32))
    sampler.prompt_logprobs(logits, np.zeros(1, np.int32), 1)


def _new_report(n: int, k: int) -> Report:
    return np.empty(n, np.float32), np.empty(n, np.int32), np.empty((n, k), np.int32), np.empty((n, k), np.float32)


def _token_logprobs(report: Report, i: int, k: int) -> TokenLogprobs:
    logprobs, ranks, top_ids, top_logprobs = report
    found = int((top_ids[i, :k] >= 0).sum())
    return TokenLogprobs(
        float(logprobs[i]), int(ranks[i]), tuple(top_ids[i, :found].tolist()), tuple(top_logprobs[i, :found].tolist())
    )
