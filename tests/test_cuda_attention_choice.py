"""Choosing the attention of prompts: flashinfer's, which is not here, in the shape its documentation gives it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.gpu.cuda.attention_choice import FlashInferPrefill, PrefillAttention, choose_prefill, triton_prefill

from .cuda_helpers import FakeDevice
from .triton_helpers import needs_no_device

pytestmark = needs_no_device

SHAPE = (4, 2, 16)
PLANS: list[dict[str, Any]] = []


class Wrapper:
    """Paged prefill as flashinfer documents it, in plain torch: CSR page tables, HND pools, causal at the end."""

    off_by = 0.0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "HND"
        assert workspace.dtype is torch.uint8

    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor, heads: int, kv_heads: int,
        head_dim: int, page_size: int, **options: Any,
    ) -> None:  # fmt: skip
        assert {each.dtype for each in (qo_indptr, indptr, indices, last_page_len)} == {torch.int32}
        assert bool((last_page_len >= 1).all())
        assert bool((last_page_len <= page_size).all())
        assert int(indptr[-1]) == len(indices)
        assert options["causal"]
        self.given = qo_indptr, indptr, indices, last_page_len, heads // kv_heads, page_size, options
        PLANS.append(options)

    def run(self, q: Tensor, pools: tuple[Tensor, Tensor]) -> Tensor:
        qo_indptr, indptr, indices, last_page_len, group, page_size, options = self.given
        assert q.is_contiguous()
        out = torch.empty_like(q)
        for i in range(len(indptr) - 1):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * page_size + int(last_page_len[i])
            keys, values = (
                pool[pages].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, 1).float() for pool in pools
            )
            begin, end = int(qo_indptr[i]), int(qo_indptr[i + 1])
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * options["sm_scale"]
            position = torch.arange(length - (end - begin), length)[:, None]
            hidden = torch.arange(length)[None] > position
            if options["window_left"] >= 0:
                hidden |= torch.arange(length)[None] < position - options["window_left"]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return out + self.off_by


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    PLANS.clear()
    wrapper = type("Wrapper", (Wrapper,), {})
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=wrapper))
    monkeypatch.setattr("asyncsched.gpu.cuda.attention_choice._WORKSPACE", 16)
    return wrapper


def choose(times: list[float], dtype: torch.dtype = torch.bfloat16) -> tuple[PrefillAttention, list[Any]]:
    """What is chosen if ours takes ``times[0]`` and flashinfer's ``times[1]``, and what the log says."""
    left = list(times)

    def seconds(device: Any, work: Callable[[], object]) -> float:
        work()
        return left.pop(0)

    with structlog.testing.capture_logs() as logs:
        chosen = choose_prefill(FakeDevice(), *SHAPE, dtype, tokens=(9, 21), seconds=seconds)
    return chosen, logs


def test_the_quicker_one_is_chosen(flashinfer: type[Wrapper]) -> None:
    chosen, (said,) = choose([2.0, 1.0])
    assert isinstance(chosen, FlashInferPrefill)
    assert (said["chosen"], said["ratio"]) == ("flashinfer", 0.5)
    chosen, (said,) = choose([1.0, 2.0])
    assert chosen is triton_prefill
    assert said["chosen"] == "triton"


def test_one_that_disagrees_is_not_chosen(flashinfer: type[Wrapper]) -> None:
    flashinfer.off_by = 0.5
    chosen, (said,) = choose([2.0, 1.0])
    assert chosen is triton_prefill
    assert "disagrees" in said["event"]
    flashinfer.off_by = float("nan")
    assert choose([2.0, 1.0])[0] is triton_prefill


def test_one_that_fails_is_not_chosen(flashinfer: type[Wrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, *args: Any, **options: Any) -> None:
        raise RuntimeError("head size not compiled")

    monkeypatch.setattr(flashinfer, "plan", broken)
    chosen, (said,) = choose([2.0, 1.0])
    assert chosen is triton_prefill
    assert "head size not compiled" in said["reason"]


def test_without_it_and_in_float32_there_is_nothing_to_choose(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # how Python marks a module that is not there
    assert choose([]) == (triton_prefill, [])
    request.getfixturevalue("flashinfer")
    assert choose([], torch.float32) == (triton_prefill, [])


def test_one_plan_serves_the_layers_of_a_step(flashinfer: type[Wrapper]) -> None:
    from asyncsched.gpu.cuda.attention_choice import _Trial

    device = FakeDevice()
    attention = FlashInferPrefill(sys.modules["flashinfer"], device.torch_device)
    trial = _Trial(device, *SHAPE, torch.bfloat16, 9, 21)
    layout = trial._layout
    outs = [torch.empty(21, 64, dtype=torch.bfloat16) for _ in range(6)]
    for out, window in zip(outs, (0, 0, 8, 8, 0, 8), strict=True):
        attention(trial._q, layout, *trial._pools, out, scale=0.25, window=window)
    assert [plan["window_left"] for plan in PLANS] == [-1, 7]
    for out, window in zip(outs[1:3], (0, 8), strict=True):
        own = torch.empty_like(out)
        triton_prefill(trial._q, layout, *trial._pools, own, scale=0.25, window=window)
        assert torch.allclose(out.float(), own.float(), atol=2e-2)
    trial.run(attention)  # another step
    assert len(PLANS) == 3


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="attention='flash': use triton or auto"):
        EngineConfig(attention="flash")  # type: ignore[arg-type]
