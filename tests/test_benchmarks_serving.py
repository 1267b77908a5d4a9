"""The serving benchmark measures right: known latencies in virtual time, hand-made timelines, arrivals, traces."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from asyncsched import Backend, Engine, ExecutorLimits
from asyncsched.testing import SimulatedExecutor
from benchmarks.arrivals import Arrival, gamma_times, mean_rate, read_trace, scaled, synthetic
from benchmarks.latency import Targets, Timeline, most_at_once, report, summary
from benchmarks.serving import as_json, draw_prompts, measure, parse, runs, serve, table_line

LIMITS = ExecutorLimits(max_rows=8, pages=256, page_size=4, max_model_len=128, vocab_size=1000)
STEP = 0.25
"""Seconds per step; a power of two, so that sums of it are exact."""


def virtually(main: Callable[[], Awaitable[None]]) -> None:
    """Run in virtual time: the clock jumps as soon as everybody waits."""
    trio.run(main, clock=MockClock(autojump_threshold=0))


def simulated(rows: int = LIMITS.max_rows, **options: Any) -> Engine:
    """An engine whose steps take ``STEP`` each."""
    executor = SimulatedExecutor(replace(LIMITS, max_rows=rows), latency=STEP)
    return Engine(backend=Backend(executor, None, "simulated"), **{"depth": 0, "page_size": 4, **options})


def prompts_for(arrivals: list[Arrival], shared_prefix: int = 0) -> list[list[int]]:
    return draw_prompts(arrivals, range(1000), shared_prefix, 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_request_has_exactly_the_latencies_of_its_steps(depth: int) -> None:
    async def main() -> None:
        arrivals = [Arrival(3.0, 16, 5)]
        async with simulated(depth=depth) as engine:
            (timeline,), duration = await serve(engine, arrivals, prompts_for(arrivals))
        assert timeline.ttft == STEP
        assert timeline.itls == [STEP] * 4
        assert timeline.tpot == STEP
        assert timeline.e2el == 5 * STEP
        assert (timeline.input_tokens, timeline.output_tokens) == (16, 5)
        assert duration == 3.0 + 5 * STEP

    virtually(main)


def test_a_chunked_prompt_takes_a_step_per_chunk() -> None:
    async def main() -> None:
        arrivals = [Arrival(0.0, 40, 2)]
        async with simulated(token_budget=16) as engine:
            (timeline,), _ = await serve(engine, arrivals, prompts_for(arrivals))
        assert timeline.ttft == 3 * STEP
        assert timeline.tpot == STEP

    virtually(main)


def test_a_request_that_comes_during_a_step_waits_for_the_next() -> None:
    async def main() -> None:
        arrivals = [Arrival(0.0, 8, 10), Arrival(2.5 * STEP, 8, 3)]
        async with simulated() as engine:
            (_, late), duration = await serve(engine, arrivals, prompts_for(arrivals))
        assert late.ttft == 1.5 * STEP
        assert late.e2el == 3.5 * STEP
        assert duration == 10 * STEP

    virtually(main)


def test_goodput_counts_the_requests_that_did_not_wait_too_long() -> None:
    async def main() -> None:
        arrivals = [Arrival(0.0, 8, 4)] * 4  # one row: their first tokens come after 1, 5, 9 and 13 steps
        async with simulated(rows=1) as engine:
            record = await measure(engine, arrivals, prompts_for(arrivals), Targets(ttft=9 * STEP, tpot=STEP))
            strict = await measure(engine, arrivals, prompts_for(arrivals), Targets(ttft=9 * STEP, tpot=0.9 * STEP))
        seconds = 16 * STEP
        assert record["duration"] == seconds
        assert record["request_throughput"] == 4 / seconds
        assert record["request_goodput"] == 3 / seconds
        assert strict["request_goodput"] == 0
        assert record["output_throughput"] == 16 / seconds
        assert record["total_token_throughput"] == (16 + 32) / seconds
        assert (record["total_input_tokens"], record["total_output_tokens"]) == (32, 16)
        assert record["mean_ttft_ms"] == pytest.approx(7 * STEP * 1e3)
        assert record["median_tpot_ms"] == pytest.approx(STEP * 1e3)
        assert record["std_tpot_ms"] == 0
        assert record["max_concurrent_requests"] == 4

    virtually(main)


def test_hit_rate_starts_from_an_empty_cache_each_time() -> None:
    async def main() -> None:
        arrivals = [Arrival(10.0 * index, 8, 2) for index in range(4)]
        async with simulated() as engine:
            for _ in range(2):
                record = await measure(engine, arrivals, prompts_for(arrivals, shared_prefix=24), Targets())
                assert record["hit_rate"] == 3 * 24 / (4 * 32)
                assert record["total_input_tokens"] == 4 * 32

    virtually(main)


def test_a_request_that_cannot_be_served_counts_as_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        arrivals = [Arrival(0.0, 8, 2), Arrival(0.0, 500, 2)]
        async with simulated() as engine:
            record = await measure(engine, arrivals, prompts_for(arrivals), Targets())
        assert (record["completed"], record["failed"]) == (1, 1)
        assert record["total_input_tokens"] == 8
        assert "1 of 2 requests failed, the first one with PromptTooLongError" in capsys.readouterr().err

    virtually(main)


def test_merged_tokens_are_one_gap_but_count_for_tpot() -> None:
    timeline = Timeline(10.0, 5, 7, [11.0, 12.0, 14.0])
    assert (timeline.ttft, timeline.e2el) == (1.0, 4.0)
    assert timeline.itls == [1.0, 2.0]
    assert timeline.tpot == 3.0 / 6


def test_a_single_token_has_no_tpot_and_meets_any_target_of_it() -> None:
    timeline = Timeline(0.0, 5, 1, [0.5])
    assert timeline.tpot is None
    assert Targets(ttft=0.5, tpot=0.001).met(timeline)
    assert not Targets(ttft=0.4).met(timeline)
    record = report([timeline], 1.0, Targets())
    assert record["mean_tpot_ms"] is None
    assert record["p99_itl_ms"] is None
    assert record["p99_e2el_ms"] == 500.0


def test_summary_is_in_milliseconds() -> None:
    values = [0.001 * number for number in range(1, 102)]  # 1 … 101 ms
    numbers = summary("itl", values)
    expected = {"mean": 51, "median": 51, "std": np.std(range(1, 102)), "p50": 51, "p90": 91, "p99": 100}
    assert numbers == {f"{kind}_itl_ms": pytest.approx(value) for kind, value in expected.items()}


def test_field_names_are_those_of_vllm() -> None:
    metrics = {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    totals = {
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "max_concurrent_requests",
    }  # fmt: skip
    assert metrics | totals <= report([Timeline(0.0, 1, 1, [1.0])], 1.0, Targets()).keys()


def test_one_ends_as_another_starts_is_not_at_once() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([Timeline(0.0, 1, 1, [1.0]), Timeline(1.0, 1, 1, [2.0])]) == 1
    assert most_at_once([Timeline(0.0, 1, 1, [1.5]), Timeline(1.0, 1, 1, [2.0]), Timeline(1.2, 1, 1, [1.3])]) == 3


def test_poisson_gaps_vary_as_much_as_their_mean_and_burstier_ones_more() -> None:
    def variation(burstiness: float) -> float:
        gaps = np.diff(gamma_times(4000, 5.0, burstiness, seed=3))
        return float(np.std(gaps) / np.mean(gaps))

    assert variation(1.0) == pytest.approx(1, rel=0.1)
    assert variation(0.25) == pytest.approx(2, rel=0.1)
    assert variation(4.0) == pytest.approx(0.5, rel=0.1)
    assert variation(math.inf) == pytest.approx(0, abs=1e-9)


def test_offered_load_is_the_rate_exactly() -> None:
    times = gamma_times(30, 4.0, 1.0, seed=0)
    assert times[-1] == pytest.approx(30 / 4.0)
    assert times == sorted(times)
    assert times[0] > 0
    assert gamma_times(30, math.inf, 1.0, seed=0) == [0.0] * 30
    assert gamma_times(30, 8.0, 1.0, seed=0) == pytest.approx([time / 2 for time in times])


def test_lengths_stay_in_their_range_around_the_mean() -> None:
    arrivals = synthetic(2000, 1.0, 1.0, 100, 20, 0.5, seed=0)
    inputs = [arrival.input_len for arrival in arrivals]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert np.mean(inputs) == pytest.approx(100, rel=0.05)
    outputs = [arrival.output_len for arrival in arrivals]
    assert (min(outputs), max(outputs)) == (10, 30)
    assert {arrival.input_len for arrival in synthetic(50, 1.0, 1.0, 100, 20, 0.0, seed=0)} == {100}


def load(*arguments: str) -> list[tuple[float, list[Arrival], list[list[int]]]]:
    options = parse(arguments)
    return [(rate, arrivals, draw_prompts(arrivals, range(1000), 16, options.seed)) for rate, arrivals in runs(options)]


@pytest.mark.parametrize("arrivals", [(), ("--arrivals", "gamma", "--burstiness", "0.5")])
def test_the_same_options_send_the_same_and_another_seed_does_not(arrivals: tuple[str, ...]) -> None:
    assert load(*arrivals) == load(*arrivals)
    assert load(*arrivals)[0] != load(*arrivals, "--seed", "1")[0]


def test_all_rates_send_the_same_prompts() -> None:
    loads = load("--rate", "1", "2.5", "inf", "--requests", "10")
    assert [rate for rate, *_ in loads] == [1.0, 2.5, math.inf]
    assert loads[0][2] == loads[1][2] == loads[2][2]
    assert loads[0][1] != loads[1][1]


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    arrivals = [Arrival(0.0, 20, 1), Arrival(0.0, 30, 1)]
    first, second = draw_prompts(arrivals, range(100, 1000), 16, 0)
    assert (len(first), len(second)) == (36, 46)
    assert first[:16] == second[:16]
    assert first[16:36] != second[16:36]
    assert min(first + second) >= 100


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 23:59:59.9799600,374,44\r
2023-11-17 00:00:00.2299600,396,109\r
2023-11-17 00:00:01.4799600,0,55\r
2023-11-17 00:00:01.9799600,91,16\r
"""


def test_azure_trace(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE, "utf-8", newline="")
    expected = [Arrival(0.0, 374, 44), Arrival(0.25, 396, 109), Arrival(2.0, 91, 16)]
    assert read_trace(path, 100) == expected
    assert read_trace(path, 2) == expected[:2]


def test_json_trace_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(12.0, 30, 3), (10.0, 10, 1), (10.5, 20, 2)]
    names = ("timestamp", "input_length", "output_length")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), "utf-8")
    assert read_trace(path, 100) == [Arrival(0.0, 10, 1), Arrival(0.5, 20, 2), Arrival(2.0, 30, 3)]
    assert read_trace(path, 1) == [Arrival(0.0, 10, 1)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.txt", "", "a .csv or a .jsonl file"),
        ("trace.csv", "TIMESTAMP,Model\n2023-11-16 00:00:00,7\n", "no column 'ContextTokens'"),
        ("trace.jsonl", '{"input_length": 1, "output_length": 1}\n', "no column 'timestamp'"),
        ("trace.jsonl", "", "no request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_trace(path, 10)


def test_trace_runs_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_text(AZURE, "utf-8", newline="")
    options = parse(["--arrivals", "trace", "--trace", str(path), "--scale-rate", "1", "4"])
    (rate, once), (fast_rate, fast) = runs(options)
    assert (rate, fast_rate) == (1.0, 4.0)
    assert [arrival.at for arrival in once] == [0.0, 0.25, 2.0]
    assert fast == scaled(once, 4.0)
    assert [arrival.at for arrival in fast] == [0.0, 0.0625, 0.5]
    assert mean_rate([Arrival(0.0, 1, 1)] * 3) == math.inf


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arrivals", "gamma"],
        ["--burstiness", "2"],
        ["--arrivals", "trace"],
        ["--trace", "file.csv"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--requests", "0"],
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "error:" in capsys.readouterr().err


def test_lines_hold_infinity_and_metrics_nobody_has() -> None:
    record = {
        "request_rate": math.inf,
        "hit_rate": 1 / 3,
        **report([Timeline(0.0, 5, 1, [0.5])], 2.0, Targets()),
    }
    line = json.loads(as_json(record))
    assert line["request_rate"] == "inf"
    assert line["hit_rate"] == 0.3333
    assert line["mean_tpot_ms"] is None
    cells = table_line(record).split()
    assert cells[:5] == ["inf", "0.50", "0.50", "0", "500"]
    assert "–" in cells
