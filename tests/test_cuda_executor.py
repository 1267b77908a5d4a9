"""The CUDA executor over a device that is not there: what it computes, in which order, and how it fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import anyio
import numpy as np
import pytest
import torch

import asyncsched
from asyncsched.contract import (
    EMPTY_INTS,
    ExecutorLimits,
    PageAppends,
    PrefillChunk,
    RowJoin,
    StepPlan,
    StepResult,
)
from asyncsched.errors import ConfigError, EngineClosedError, EngineDeadError, NotEnoughMemoryError, UnsupportedModelError
from asyncsched.gpu.compute_thread import DeviceLostError
from asyncsched.gpu.cuda.executor import CudaExecutor
from asyncsched.gpu.cuda.launcher import Launcher
from asyncsched.gpu.cuda.load import load, load_on
from asyncsched.gpu.cuda.model_kernels import CudaKernels
from asyncsched.gpu.models.decoder import Decoder
from asyncsched.gpu.models.decoder_config import DecoderConfig
from asyncsched.sampling_params import SamplingParams

from .cuda_helpers import FakeDevice, FakeLost
from .models_helpers import GREEDY, TINY, VOCAB, ModuleWeights, tiny_transformer
from .triton_helpers import needs_no_device

pytestmark = [
    needs_no_device,
    # Padding rows compute on whatever is in memory, which numpy remarks on; nothing reads what comes of it.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

SMALL = {**TINY, "num_hidden_layers": 2}
LIMITS = ExecutorLimits(max_rows=4, pages=24, page_size=8, max_model_len=64, vocab_size=VOCAB)
PROMPTS = [list(range(3, 14)), [40, 41, 42], list(range(3, 12))]


@pytest.fixture(scope="module")
def model() -> Decoder:
    weights = ModuleWeights(tiny_transformer("llama", **SMALL))
    return Decoder(DecoderConfig.from_hf(weights.config), weights, LIMITS.max_model_len, CudaKernels())


def launcher_of(model: Any, device: FakeDevice | None = None, *, graphs: bool = True) -> Launcher:
    return Launcher(model, LIMITS, device or FakeDevice(), pools_of(model), graphs=graphs)


def executor_of(model: Any, device: FakeDevice | None = None) -> CudaExecutor:
    return CudaExecutor(launcher_of(model, device))


def pools_of(model: Any) -> list[Any]:
    def zeros(shape: Any) -> torch.Tensor:
        return torch.zeros(LIMITS.pages, shape.kv_heads, LIMITS.page_size, shape.head_dim)

    return [(zeros(shape), zeros(shape)) for shape in model.cache_shapes]


def join(row: int, pages: list[int], params: SamplingParams = GREEDY) -> RowJoin:
    return RowJoin(row, row + 1, np.array(pages, np.int32), 0, params, seed=7)


def chunk(row: int, tokens: list[int], start: int = 0, *, sample: bool = True) -> PrefillChunk:
    return PrefillChunk(row, start, np.array(tokens, np.int32), sample)


def folder_of(path: Path, kind: str = "llama", **options: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": kind, **SMALL, **options}))
    return path


def answers(backend: asyncsched.Backend, depth: int, prompts: Any = PROMPTS, **params: Any) -> list[Any]:
    options = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, **params}

    async def main() -> list[Any]:
        engine = asyncsched.Engine(backend=backend, depth=depth, token_budget=9, max_rows=4, page_size=8)
        async with engine:
            results: list[Any] = await engine.generate(prompts, **options)
            return results

    return anyio.run(main)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("model"))


def options(folder: Path, **more: Any) -> asyncsched.EngineConfig:
    sizes: dict[str, Any] = {"max_rows": 4, "page_size": 8, "pages": 24, "token_budget": 9, "max_model_len": 64}
    return asyncsched.EngineConfig(model=str(folder), load_format="dummy", **{"dtype": "float32", **sizes, **more})


@pytest.fixture(scope="module")
def on_cpu(folder: Path) -> Callable[..., list[Any]]:
    def answer(**params: Any) -> list[Any]:
        from asyncsched.gpu.cpu import load as load_on_cpu

        return answers(load_on_cpu(options(folder)), 2, **params)

    return answer


# -- the same tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_greedy_tokens_are_those_of_the_cpu(folder: Path, on_cpu: Callable[..., list[Any]], depth: int, graphs: bool) -> None:
    device = FakeDevice()
    backend = load_on(device, options(folder, cuda_graphs=graphs))
    found = answers(backend, depth)
    assert [result.token_ids for result in found] == [result.token_ids for result in on_cpu()]
    assert (device.replayed > 0) == graphs
    assert device.captured == (3 if graphs else 0)  # 1, 2 and 4 rows


def test_drawn_tokens_are_those_of_the_cpu(folder: Path, on_cpu: Callable[..., list[Any]]) -> None:
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 30, "seed": 11, "frequency_penalty": 0.3}
    found = answers(load_on(FakeDevice(), options(folder)), 2, **params)
    assert [result.token_ids for result in found] == [result.token_ids for result in on_cpu(**params)]


def test_logprobs_are_those_of_the_cpu(folder: Path, on_cpu: Callable[..., list[Any]]) -> None:
    params: dict[str, Any] = {"logprobs": 3, "prompt_logprobs": 2}
    found, expected = answers(load_on(FakeDevice(), options(folder)), 2, **params), on_cpu(**params)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        for ours, other in (
            (mine.completions[0].logprobs, theirs.completions[0].logprobs),
            (mine.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert len(ours) == len(other) > 2
            for one, two in zip(ours, other, strict=True):
                assert (one is None) == (two is None)
                if one is not None:
                    assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
                    assert (one.rank, one.top_ids) == (two.rank, two.top_ids)


@pytest.mark.parametrize("kind", ["gpt_neox", "qwen3"])
def test_other_models(tmp_path: Path, kind: str) -> None:
    from asyncsched.gpu.cpu import load as load_on_cpu

    config = options(folder_of(tmp_path, kind, **({} if kind == "qwen3" else {"num_key_value_heads": 6, "head_dim": None})))
    backend = load_on(FakeDevice(), config)
    expected = answers(load_on_cpu(config), 2)
    assert [result.token_ids for result in answers(backend, 2)] == [result.token_ids for result in expected]


def test_what_a_cut_off_model_cannot_do_is_said(model: Decoder) -> None:
    layout: Any = None
    with pytest.raises(UnsupportedModelError, match="soft caps"):
        CudaKernels().paged_attention(torch.zeros(1, 1, 8), layout, torch.zeros(1), torch.zeros(1), 1.0, softcap=30.0)


# -- plans --------------------------------------------------------------------------------------


def test_a_row_keeps_its_token_on_the_device(model: Decoder) -> None:
    launcher = launcher_of(model)
    first = launcher.launch(StepPlan(1, joins=(join(2, [0, 1]),), prefill=(chunk(2, [5, 6, 7]),)))
    second = launcher.launch(StepPlan(2, decode=True))  # launched before the first was read
    third = launcher.launch(StepPlan(3, decode=True))
    results = [step.finish() for step in (first, second, third)]
    assert [result.rows.tolist() for result in results] == [[2]] * 3
    tokens = [int(result.tokens[0]) for result in results]
    whole = launcher_of(model, graphs=False)
    again = whole.launch(StepPlan(1, joins=(join(0, [0, 1]),), prefill=(chunk(0, [5, 6, 7, *tokens[:2]]),))).finish()
    assert int(again.tokens[0]) == tokens[2]


def test_pages_leaves_and_rows_that_join_beside_others(model: Decoder) -> None:
    launcher = launcher_of(model)
    plans = [
        StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5, 6, 7, 8, 9, 10]),)),
        StepPlan(2, joins=(join(3, [2]),), prefill=(chunk(3, [9, 8]),), decode=True),
        StepPlan(3, decode=True),
        StepPlan(4, pages=PageAppends(*(np.array([value], np.int32) for value in (0, 1, 5))), decode=True),
        StepPlan(5, leaves=(3,), decode=True),
        StepPlan(6, leaves=(0,)),
    ]
    results = [step.finish() for step in [launcher.launch(plan) for plan in plans]]
    assert [result.rows.tolist() for result in results] == [[0], [0, 3], [0, 3], [0, 3], [0], []]
    tokens = [int(result.tokens[0]) for result in results[:5]]
    whole = launcher_of(model, graphs=False)
    prompt = [5, 6, 7, 8, 9, 10, *tokens[:4]]
    again = whole.launch(StepPlan(1, joins=(join(1, [3, 4]),), prefill=(chunk(1, prompt),))).finish()
    assert int(again.tokens[0]) == tokens[4]
    assert all(result.completed_at >= result.launched_at > 0 for result in results)


def test_a_chunk_that_samples_nothing(model: Decoder) -> None:
    launcher = launcher_of(model)
    plan = StepPlan(1, joins=(join(0, [0, 1]),), prefill=(chunk(0, [5, 6, 7], sample=False),))
    result = launcher.launch(plan).finish()
    assert result.rows.size == result.tokens.size == 0
    result = launcher.launch(StepPlan(2, prefill=(chunk(0, [8, 9], 3),))).finish()
    whole = launcher_of(model).launch(StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5, 6, 7, 8, 9]),)))
    assert result.tokens.tolist() == whole.finish().tokens.tolist()


def test_a_graph_is_captured_when_it_is_first_needed(model: Decoder) -> None:
    device = FakeDevice()
    launcher = launcher_of(model, device)
    launcher.launch(StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5]),))).finish()
    assert (device.captured, device.replayed) == (0, 0)
    for step in (2, 3):
        launcher.launch(StepPlan(step, decode=True)).finish()
    assert (device.captured, device.replayed) == (1, 2)


def test_a_row_whose_logits_are_broken_fails_alone(model: Decoder) -> None:
    launcher = launcher_of(model)
    forward = model.forward

    def broken(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        logits[0] = torch.nan
        return logits

    launcher._model = type("Broken", (), {"forward": staticmethod(broken), "graphable": False})()
    joins = (join(0, [0]), join(1, [1]))
    result = launcher.launch(StepPlan(1, joins=joins, prefill=(chunk(0, [5]), chunk(1, [6])))).finish()
    assert result.failed is not None
    assert list(result.failed) == [0]
    assert "NaN" in result.failed[0]


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_failed_step_moves_its_rows_on(model: Decoder, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    launcher = launcher_of(model, graphs=graphs)
    launcher.launch(StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5, 6]),))).finish()

    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", full)
        with pytest.raises(torch.OutOfMemoryError):
            launcher.launch(StepPlan(2, decode=True))
    assert launcher._state.length.tolist()[0] == 3
    assert launcher.launch(StepPlan(3, decode=True)).finish().rows.tolist() == [0]
    assert launcher._state.length.tolist()[0] == 4


def collect(executor: CudaExecutor) -> SimpleQueue[StepResult]:
    results: SimpleQueue[StepResult] = SimpleQueue()
    executor.start(results.put)
    return results


def test_a_lost_device_ends_everything(model: Decoder) -> None:
    executor = executor_of(model, FakeDevice(fail=lambda number: FakeLost("illegal address") if number == 2 else None))
    results = collect(executor)
    executor.submit(StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5, 6]),)))
    assert results.get(timeout=60).error is None
    executor.submit(StepPlan(2, decode=True))
    lost = results.get(timeout=60)
    assert lost.fatal
    assert isinstance(lost.error, DeviceLostError)
    assert "illegal address" in str(lost.error)
    executor.submit(StepPlan(3, decode=True))
    after = results.get(timeout=60)
    assert after.fatal
    assert after.error is lost.error
    executor.close()


def test_results_come_in_order_whatever_happens(model: Decoder) -> None:
    executor = executor_of(model, FakeDevice(fail=lambda number: MemoryError("no room") if number == 2 else None))
    results = collect(executor)
    executor.submit(StepPlan(1, joins=(join(0, [0]),), prefill=(chunk(0, [5, 6]),)))
    for step in (2, 3, 4):
        executor.submit(StepPlan(step, decode=True))
    found = [results.get(timeout=60) for _ in range(4)]
    assert [result.step for result in found] == [1, 2, 3, 4]
    assert [type(result.error) for result in found] == [type(None), MemoryError, type(None), type(None)]
    assert not any(result.fatal for result in found)
    executor.close()


def test_a_lost_device_in_an_engine(folder: Path) -> None:
    backend = load_on(FakeDevice(fail=lambda number: FakeLost("fell off the bus") if number > 12 else None), options(folder))

    async def main() -> None:
        async with asyncsched.Engine(backend=backend, max_rows=4, page_size=8) as engine:
            with pytest.raises(EngineDeadError, match="fell off the bus"):
                await engine.generate(PROMPTS, max_tokens=30, temperature=0, ignore_eos=True)

    anyio.run(main)


def test_closing(model: Decoder) -> None:
    executor = executor_of(model)
    with pytest.raises(EngineClosedError, match="not running"):
        executor.submit(StepPlan(1))
    results = collect(executor)
    with pytest.raises(EngineClosedError, match="started before"):
        executor.start(results.put)
    for step in range(1, 4):
        executor.submit(StepPlan(step))
    executor.close()
    executor.close()
    assert [results.get_nowait().step for _ in range(3)] == [1, 2, 3]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncsched-cuda")]
    with pytest.raises(EngineClosedError, match="closed"):
        executor.submit(StepPlan(4))


# -- loading ------------------------------------------------------------------------------------


def test_without_cuda(folder: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"device='cuda': .*(CUDA|GPU)"):
        load(options(folder, device="cuda"))

    async def main() -> None:
        async with asyncsched.Engine(config=options(folder, device="cuda")):
            raise AssertionError("it started")

    with pytest.raises(ConfigError, match="device='cuda'"):
        anyio.run(main)
    assert threading.active_count() <= threads + 1  # anyio's own worker thread


def test_a_device_that_is_no_number(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"device='cuda:one': write cuda, or cuda:0"):
        load(options(folder, device="cuda:one"))


def test_weights_that_do_not_fit(folder: Path) -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"the weights of .* need .* bytes are missing"):
        load_on(FakeDevice(memory=10_000), options(folder))


def test_a_pool_that_does_not_fit(folder: Path) -> None:
    with pytest.raises(NotEnoughMemoryError, match="page pool"):
        load_on(FakeDevice(memory=1_200_000), options(folder, pages=1000))


def test_memory_that_runs_out_while_loading(folder: Path) -> None:
    class Full(FakeDevice):
        def peak_memory(self, work: Callable[[], None]) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    with pytest.raises(NotEnoughMemoryError, match=r"ran out while .* Tried to allocate 2 GiB; lower pool_fraction"):
        load_on(Full(), options(folder))


def test_a_head_size_without_kernels(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="multiples of 8, not 12"):
        load_on(FakeDevice(), options(folder_of(tmp_path, head_dim=12)))


def test_float16_is_for_gpus(folder: Path) -> None:
    from asyncsched.gpu.cpu import load as load_on_cpu

    with pytest.raises(ConfigError, match="float16"):
        load_on_cpu(options(folder, dtype="float16"))
    assert answers(load_on(FakeDevice(), options(folder, dtype="float16")), 1, PROMPTS[:1])[0].finish_reason == "length"


def test_without_flashinfer_there_is_one_attention(folder: Path, on_cpu: Callable[..., list[Any]]) -> None:
    found = answers(load_on(FakeDevice(), options(folder, attention="auto")), 2)
    assert [result.token_ids for result in found] == [result.token_ids for result in on_cpu()]


def test_the_pool_takes_what_is_left(folder: Path) -> None:
    limits = load_on(FakeDevice(memory=1 << 22), options(folder, pages=None, pool_fraction=0.5)).executor.limits
    per_page = 2 * 2 * 16 * 8 * 4 * 2  # keys and values, kv heads, head size, page size, float32, layers
    assert limits.pages == int(0.5 * ((1 << 22) - (1 << 20))) // per_page


def test_a_plan_without_work_is_answered(model: Decoder) -> None:
    result = launcher_of(model).launch(StepPlan(1, decode=True)).finish()
    assert (result.rows.size, result.tokens.size, result.failed) == (0, 0, None)
    assert EMPTY_INTS.size == 0
