"""Log-probabilities of tokens and the likeliest of each position, in torch: for few rows, outside CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ....contract import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of one token per row of logits, and of the ``k`` likeliest.

    A row without a distribution (NaN, +inf, nothing finite) has NaN and rank 0.

    Attributes:
        logprobs: float32 ``[n]``.
        ranks: int32 ``[n]``, 1 is the likeliest.
        top_ids: int32 ``[n, k]``, likeliest first, of equal ones the lower id first; -1 where there is none.
        top_logprobs: float32 ``[n, k]``.
    """

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def cpu(self) -> Logprobs:
        """The same in host memory; waits for the device."""
        return Logprobs(self.logprobs.cpu(), self.ranks.cpu(), self.top_ids.cpu(), self.top_logprobs.cpu())

    def entry(self, i: int, k: int) -> TokenLogprobs:
        """Row ``i`` with its ``k`` likeliest tokens; of tensors in host memory."""
        found = int((self.top_ids[i, :k] >= 0).sum())
        ids, values = self.top_ids[i, :found], self.top_logprobs[i, :found]
        return TokenLogprobs(float(self.logprobs[i]), int(self.ranks[i]), tuple(ids.tolist()), tuple(values.tolist()))


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> Logprobs:
    """The log-softmax of unmodified logits at given tokens, their ranks, and the likeliest tokens. Compute thread only.

    Nothing waits for the device. Scratch is some 30 bytes per logit: pass rows by the hundred at most.

    Args:
        logits: float32, bfloat16 or float16 ``[n, V]``.
        tokens: int32 or int64 ``[n]``, each below ``V``.
        k: 0 … 20.
    """
    x = logits.float()
    keys = _keys(x)
    chosen = tokens.long().unsqueeze(1)
    top = x.max(1, keepdim=True).values
    good = torch.isfinite(top) & ~x.isnan().any(1, keepdim=True)
    top = torch.where(good, top, 0.0).double()
    normaliser = top + (x - top).exp().sum(1, keepdim=True).log()
    ids = keys.topk(min(k, keys.shape[1]), dim=1).indices
    likeliest = x.gather(1, ids)
    some = good & (likeliest > -torch.inf)
    logprobs = torch.where(good, x.gather(1, chosen) - normaliser, torch.nan).float()
    ranks = torch.where(good, (keys > keys.gather(1, chosen)).sum(1, keepdim=True) + 1, 0).int()
    top_ids = torch.where(some, ids, -1).int()
    top_logprobs = torch.where(some, likeliest - normaliser, -torch.inf).float()
    return Logprobs(logprobs.squeeze(1), ranks.squeeze(1), top_ids, top_logprobs)


def _keys(x: torch.Tensor) -> torch.Tensor:
    """int64 that sort by logit, then by lower token id: ``topk`` promises no order among equal values."""
    bits = x.contiguous().view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).long()
    order = torch.where(bits < 0, -magnitude, magnitude)
    return (order << 32) - torch.arange(x.shape[1], device=x.device)
