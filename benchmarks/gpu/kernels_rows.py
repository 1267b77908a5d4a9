"""Norms and activations, sampling and the update of the rows' state, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from asyncsched import ExecutorLimits, RowJoin, SamplingParams, StepPlan
from asyncsched.gpu.cuda.kernels import reference_elementwise as elementwise
from asyncsched.gpu.cuda.kernels import reference_sampling as sampling
from asyncsched.gpu.cuda.kernels.activation import silu_mul
from asyncsched.gpu.cuda.kernels.logprobs import token_logprobs
from asyncsched.gpu.cuda.kernels.norm import add_rms_norm, head_rms_norm, rms_norm
from asyncsched.gpu.cuda.kernels.row_update import scatter_words
from asyncsched.gpu.cuda.kernels.sampling import Sampled, SamplingWorkspace, sample
from asyncsched.gpu.cuda.row_state import RowState

from .comparison import Comparison
from .lab import Lab

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = ((4, 2, 64), (3, 1, 80), (16, 8, 128), (2, 2, 256))
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "bad_token_ids": (5,), "presence_penalty": 1.0},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 3000},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.5, "top_p": 0.3},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.9, "top_k": 100, "logit_bias": {3: 2.5, 9: -50.0}, "min_tokens": 8, "max_tokens": 20},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, 60, 3))},
)
PROMPT, OUTPUT, STOPS = (1, 2, 3, 3, 20), (5, 5, 20, 11), (6, 7)


def compare_elementwise(lab: Lab, comparison: Comparison) -> None:
    """Norms and activations in every type."""
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        for rows, width in lab.sizes.kernel_widths:
            shape = f"[{rows}, {width}] {kind}"
            x, residual, weight = (lab.noise(*each, dtype=dtype) for each in ((rows, width), (rows, width), (width,)))
            with comparison.of("rms_norm", shape) as compare:
                compare(rms_norm(x, weight, 1e-6), elementwise.rms_norm(x, weight, 1e-6))
            with comparison.of("add_rms_norm", shape) as compare:
                mine, theirs = residual.clone(), residual.clone()
                compare(add_rms_norm(x, mine, weight, 1e-6), elementwise.add_rms_norm(x, theirs, weight, 1e-6))
                compare(mine, theirs)
            with comparison.of("silu_mul", shape) as compare:
                gate_up = 4 * lab.noise(rows, 2 * width, dtype=dtype)
                compare(silu_mul(gate_up), elementwise.silu_mul(gate_up))
        for heads, kv_heads, dim in HEADS:
            with comparison.of("head_rms_norm", f"{heads}/{kv_heads} heads of {dim} {kind}") as compare:
                mine = lab.noise(7, (heads + 2 * kv_heads) * dim, dtype=dtype)
                theirs, q_weight, k_weight = mine.clone(), lab.noise(dim, dtype=dtype), lab.noise(dim, dtype=dtype)
                head_rms_norm(mine, q_weight, k_weight, heads, kv_heads, 1e-6)
                elementwise.head_rms_norm(theirs, q_weight, k_weight, heads, kv_heads, 1e-6)
                compare(mine, theirs)


def compare_rows(lab: Lab, comparison: Comparison) -> None:
    """Sampling with every parameter, log-probabilities, and writes into the rows' state."""
    vocabulary = lab.sizes.kernel_vocabulary
    for dtype in DTYPES:
        shape = f"{len(PARAMS)} rows of {vocabulary:,}, {str(dtype).removeprefix('torch.')}"
        logits = (2.5 * lab.noise(len(PARAMS), vocabulary, dtype=torch.float32)).to(dtype)
        with comparison.of("sample", shape) as compare:
            found = _sampled(lab, logits)
            compare(found.tokens.cpu(), torch.tensor(_chosen(logits.cpu()), dtype=torch.int32))
            compare(found.status.cpu(), torch.zeros(len(PARAMS), dtype=torch.int32))
        with comparison.of("token_logprobs", shape) as compare:
            tokens = torch.arange(len(PARAMS), device=logits.device)
            mine, theirs = token_logprobs(logits, tokens, 20).cpu(), token_logprobs(logits.cpu(), tokens.cpu(), 20)
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
                compare(getattr(mine, name), getattr(theirs, name))
    for count in (1, 1023, 4096):
        with comparison.of("scatter_words", f"{count} words") as compare:
            at = torch.randperm(8192, generator=torch.Generator().manual_seed(count))[:count]
            state, wanted = (torch.arange(8192, dtype=torch.int32) for _ in range(2))
            wanted[at] = -1 - at.int()
            state = state.to(lab.device.torch_device)
            scatter_words(state, lab.integers(torch.cat([at, -1 - at])), count)
            compare(state.cpu(), wanted)


def _sampled(lab: Lab, logits: torch.Tensor) -> Sampled:
    """One step of the sampler, a row for each set of parameters and one of padding between the first two."""
    count, vocabulary = logits.shape
    limits = ExecutorLimits(max_rows=count, pages=4, page_size=16, max_model_len=64, vocab_size=vocabulary)
    device = lab.device.torch_device
    state, workspace = RowState(limits, device), SamplingWorkspace(count + 1, vocabulary, device)
    state.apply(state.pack(StepPlan(1, joins=tuple(_join(row, SamplingParams(**PARAMS[row])) for row in range(count)))))
    rows = lab.integers([0, -1, *range(1, count)])
    out = Sampled(torch.full_like(rows, -7), torch.full_like(rows, -7))
    padded = torch.cat([logits[:1], torch.full_like(logits[:1], torch.nan), logits[1:]])
    sample(padded, rows, state, workspace, out, decoding=count + 1)
    assert int(out.tokens[1]) == int(out.status[1]) == -7, "padding was written"
    kept = rows >= 0
    return Sampled(out.tokens[kept], out.status[kept])


def _chosen(logits: torch.Tensor) -> list[int]:
    """The tokens by the definition: sorting, one row at a time."""
    chosen = []
    for row, options in enumerate(PARAMS):
        params = SamplingParams(**options)
        x = sampling.adjusted(logits[row], params, prompt=PROMPT, output=OUTPUT, stop_ids=STOPS)
        chosen.append(sampling.choose(x, params, 1000 + row, len(OUTPUT)))
    return chosen


def _join(row: int, params: SamplingParams) -> RowJoin:
    none = np.empty(0, np.int32)
    history = np.array([*PROMPT, *OUTPUT], np.int32) if params.counts_tokens else none
    return RowJoin(row, row, none, 0, params, 1000 + row, STOPS, len(OUTPUT), history)
