"""Tables of measured layer times, written by hand, and what is read from them; the comparison with a measured server."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asyncsched import ConfigError
from asyncsched.cost import StepWork
from asyncsched.lab.layer_times import read_layer_times

ROOT = Path(__file__).parent.parent
LAYERS = 3

DENSE: Sequence[tuple[str, int, float]] = [
    ("embedding", 1, 1.0), ("embedding", 5, 5.0),
    ("layernorm", 1, 10.0), ("layernorm", 5, 10.0),
    ("qkv_proj", 1, 100.0), ("qkv_proj", 3, 120.0), ("qkv_proj", 5, 200.0),
    ("final_layernorm", 1, 1000.0), ("final_layernorm", 5, 1000.0),
]  # fmt: skip
ENDS: Sequence[tuple[str, int, float]] = [("lm_head", 1, 7.0), ("lm_head", 4, 10.0), ("sampler", 1, 1.0), ("sampler", 4, 4.0)]

CHUNKS, BEFORE, ROWS, CONTEXTS = (0, 4, 8), (0, 10), (0, 2, 4), (0, 16, 32)


def attended(chunk: float, before: float, rows: float, context: float) -> float:
    """µs per layer by a law that is linear in each size, as every interpolation must find it."""
    return 2 * chunk + 0.5 * chunk * before + 3 * rows + 0.25 * rows * context


def attention(points: Sequence[tuple[int, int, int, int]] | None = None) -> list[tuple[float, ...]]:
    """A row per point that makes sense: what precedes no prompt, and the context of no rows, is not measured."""
    if points is None:
        points = [
            (chunk, before, rows, context)
            for chunk, before, rows, context in product(CHUNKS, BEFORE, ROWS, CONTEXTS)
            if (chunk or not before) and (rows or not context) and (chunk or rows)
        ]
    return [(*point, attended(*point)) for point in points]


SKEW = [
    (0, "n<=8", "sr<=50%", "kvB<=1k", "kp=0", 0.5),
    (0, "n<=8", "sr>50%", "kvB<=1k", "kp=0", 0.1),
    (0, "n<=8", "sr<=50%", "kvB<=16k", "kp=0", 0.9),
    (64, "n<=8", "sr<=50%", "kvB<=1k", "kp=0", 0.3),
]


def write(path: Path, header: str, rows: Sequence[Sequence[object]]) -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with every table."""
    folder = tmp_path / "layer-times"
    folder.mkdir()
    write(folder / "dense.csv", "layer,tokens,time_us", DENSE)
    write(folder / "per_sequence.csv", "layer,sequences,time_us", ENDS)
    write(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention())
    return folder


def add_skew(folder: Path, rows: Sequence[Sequence[object]] = SKEW) -> None:
    write(folder / "skew_fit.csv", "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha", rows)


# Dense parts


@pytest.mark.parametrize(
    ("tokens", "microseconds"),
    [
        (1, 1 + LAYERS * (2 * 10 + 100) + 1000),
        (2, 2 + LAYERS * (2 * 10 + 110) + 1000),  # between two sizes
        (3, 3 + LAYERS * (2 * 10 + 120) + 1000),  # a size that only one operation was measured at
        (5, 5 + LAYERS * (2 * 10 + 200) + 1000),
        (9, 9 + LAYERS * (2 * 10 + 360) + 1000),  # beyond the last, on the last slope
        (0, 1 + LAYERS * (2 * 10 + 100) + 1000),  # before the first, level
    ],
)
def test_each_operation_as_often_as_it_occurs(tables: Path, tokens: int, microseconds: float) -> None:
    """Twice per layer, once per layer, or once at all."""
    assert read_layer_times(tables, LAYERS).per_token(tokens) == pytest.approx(1e-6 * microseconds)


def test_what_comes_once_per_sequence(tables: Path) -> None:
    model = read_layer_times(tables, LAYERS)
    assert [model.per_sequence(count) for count in (1, 2, 4, 7)] == pytest.approx([8e-6, 10e-6, 14e-6, 20e-6])


# Attention


POINTS = [
    (4, 10, 2, 16),  # measured
    (6, 5, 3, 20),  # between
    (0, 0, 1, 8),
    (16, 10, 4, 32),  # beyond the last
    (8, 30, 9, 100),
    (8, 0, 0, 0),  # one kind only
    (0, 0, 4, 32),
    (0, 0, 0, 0),
]


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_attention_between_and_beyond(tables: Path, point: tuple[int, int, int, int]) -> None:
    assert read_layer_times(tables, LAYERS).attention(*point) == pytest.approx(1e-6 * LAYERS * attended(*point))


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_gaps_in_the_grid_are_filled(tables: Path, point: tuple[int, int, int, int]) -> None:
    """Some points are missing: one in the middle, the last ones that did not fit into memory."""
    missing = {(4, 0, 2, 16), (8, 10, 4, 32), (8, 10, 4, 16), (4, 10, 4, 32), (0, 0, 4, 32), (8, 10, 0, 0)}
    points = [tuple(map(int, row[:4])) for row in attention() if tuple(map(int, row[:4])) not in missing]
    write(tables / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention(points))  # type: ignore[arg-type]
    assert read_layer_times(tables, LAYERS).attention(*point) == pytest.approx(1e-6 * LAYERS * attended(*point))


def test_two_grids_over_each_other(tables: Path) -> None:
    """As published: a coarse grid of mixed steps, and a finer one of prompts alone."""
    fine = [(chunk, before, 0, 0) for chunk in (1, 2, 3, 5, 7) for before in BEFORE]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    write(tables / "attention.csv", header, [*attention(), *attention(fine)])
    model = read_layer_times(tables, LAYERS)
    for point in (*POINTS, (3, 10, 0, 0), (7, 4, 3, 24), (1, 0, 4, 32)):
        assert model.attention(*point) == pytest.approx(1e-6 * LAYERS * attended(*point))


# Steps


def test_a_step_is_the_sum_of_its_parts(tables: Path) -> None:
    """Two rows with 16 and 32 tokens, which count with their mean, and a chunk of 6 after 5."""
    model = read_layer_times(tables, LAYERS)
    work = StepWork(2, 48, [(5, 6)], (16, 32))
    parts = model.per_token(8), model.per_sequence(3), 1e-6 * LAYERS * attended(6, 5, 2, 24)
    assert model.seconds(work) == pytest.approx(sum(parts))
    assert model.seconds(StepWork(0, 0)) == 0.0
    only = model.per_token(4), model.per_sequence(1), 1e-6 * LAYERS * attended(4, 0, 0, 0)
    assert model.seconds(StepWork(0, 0, [(0, 4)])) == pytest.approx(sum(only))


def test_chunks_of_a_step_count_as_one(tables: Path) -> None:
    model = read_layer_times(tables, LAYERS)
    parts = model.per_token(8), model.per_sequence(2), 1e-6 * LAYERS * attended(8, 3, 0, 0)
    assert model.seconds(StepWork(0, 0, [(3, 2), (0, 6)])) == pytest.approx(sum(parts))


# Uneven contexts


def skewed(folder: Path, shortest: int, longest: int, mean: float, *, rows: int = 4, chunk: int = 0) -> float:
    """Which share of the way from even rows to rows all as long as the longest a step takes."""
    model = read_layer_times(folder, LAYERS)
    prefill = [(0, chunk)] if chunk else []

    def seconds(context: float, contexts: tuple[int, int] | None) -> float:
        return model.seconds(StepWork(rows, round(rows * context), prefill, contexts))

    even, long = seconds(mean, None), seconds(longest, None)
    return (seconds(mean, (shortest, longest)) - even) / (long - even)


@pytest.mark.parametrize(
    ("shortest", "longest", "mean", "chunk", "share"),
    [
        (16, 32, 20, 0, 0.5),  # (20 − 16) / (32 − 16) = 25 %
        (16, 32, 28, 0, 0.1),  # 75 %
        (16, 1024, 100, 0, 0.5),  # the bound of a bucket belongs to it
        (16, 2048, 100, 0, 0.9),
        (16, 32_768, 100, 0, 0.9),  # over the last bound: the last bucket
        (16, 32, 20, 4, 0.3),  # beside a prompt
        (16, 2048, 100, 4, 0.9),  # no samples there: those of the nearest prompts
    ],
)
def test_uneven_rows_take_longer(tables: Path, shortest: int, longest: int, mean: float, chunk: int, share: float) -> None:
    add_skew(tables)
    assert skewed(tables, shortest, longest, mean, chunk=chunk) == pytest.approx(share)


def test_even_rows_and_unknown_ones_take_what_the_grid_says(tables: Path) -> None:
    plain = read_layer_times(tables, LAYERS)
    add_skew(tables)
    model = read_layer_times(tables, LAYERS)
    assert plain.skew is None
    assert model.skew is not None
    for contexts in (None, (24, 24)):
        work = StepWork(2, 48, [], contexts)
        assert model.seconds(work) == plain.seconds(work)
    assert model.seconds(StepWork(2, 48, [], (16, 32))) > plain.seconds(StepWork(2, 48, [], (16, 32)))


# What is no table


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read.*dense\.csv"):
        read_layer_times(tmp_path / "nowhere", LAYERS)


@pytest.mark.parametrize("name", ["dense.csv", "per_sequence.csv", "attention.csv"])
def test_missing_tables(tables: Path, name: str) -> None:
    (tables / name).unlink()
    with pytest.raises(ConfigError, match=rf"cannot be read.*{name}"):
        read_layer_times(tables, LAYERS)


@pytest.mark.parametrize("name", ["dense.csv", "per_sequence.csv", "attention.csv", "skew_fit.csv"])
@pytest.mark.parametrize("spoilt", ["empty", "header", "columns", "cut", "words"])
def test_spoilt_tables(tables: Path, name: str, spoilt: str) -> None:
    """The text names the file."""
    add_skew(tables)
    path = tables / name
    header, *rows = path.read_text().splitlines()
    path.write_text({
        "empty": "",
        "header": header + "\n",
        "columns": "a,b,c\n1,2,3\n",
        "cut": "\n".join([header, *rows[:-1], rows[-1].rpartition(",")[0]]),
        "words": "\n".join([header, *rows[:-1], rows[-1].rpartition(",")[0] + ",much"]),
    }[spoilt])  # fmt: skip
    with pytest.raises(ConfigError, match=name):
        read_layer_times(tables, LAYERS)


def test_a_bucket_nobody_knows(tables: Path) -> None:
    add_skew(tables, [(0, "many", "sr<=50%", "kvB<=1k", "kp=0", 0.5)])
    with pytest.raises(ConfigError, match=r"skew_fit\.csv has a bucket that cannot be read.*many"):
        read_layer_times(tables, LAYERS)


def test_one_size_is_no_curve(tables: Path) -> None:
    write(tables / "dense.csv", "layer,tokens,time_us", [*DENSE, ("o_proj", 1, 3.0)])
    with pytest.raises(ConfigError, match="one size only for o_proj"):
        read_layer_times(tables, LAYERS)


@pytest.mark.parametrize(
    "points",
    [
        [(0, 0, 1, 16), (0, 0, 2, 16)],
        [(chunk, before, rows, context) for chunk, before, rows, context in product((4, 8), (0, 4), (0, 2), (0, 8))],
    ],
    ids=["decoding only", "no point without a prompt"],
)
def test_attention_must_cover_every_kind_of_step(tables: Path, points: list[tuple[int, int, int, int]]) -> None:
    write(tables / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", attention(points))
    with pytest.raises(ConfigError, match=r"attention\.csv does not cover"):
        read_layer_times(tables, LAYERS)


# Against a measured server


@pytest.fixture
def server(tables: Path) -> Path:
    """A measured run of three requests, which was slower than its layer times say."""
    run = tables.parent
    blocks: Mapping[str, Any] = {"hash_ids": []}
    arrivals = [{"arrival_time_ns": 0, "input_toks": 6, "output_toks": 3, **blocks},
                {"arrival_time_ns": 10_000_000, "input_toks": 8, "output_toks": 1, **blocks},
                {"arrival_time_ns": 20_000_000, "input_toks": 4, "output_toks": 5, **blocks}]  # fmt: skip
    (run / "workload.jsonl").write_text("\n".join(map(json.dumps, arrivals)))
    stamps = [{"queued_ts": 5.0, "first_token_ts": 5.01, "last_token_ts": 5.03, "output_toks": 3},
              {"queued_ts": 5.01, "first_token_ts": 5.02, "last_token_ts": 5.02, "output_toks": 1},
              {"queued_ts": 5.02, "first_token_ts": 5.03, "last_token_ts": 5.07, "output_toks": 5}]  # fmt: skip
    (run / "requests.jsonl").write_text("\n".join(map(json.dumps, stamps)))
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
    (run / "meta.json").write_text(json.dumps({"engine_kwargs": engine, "kv_cache": {"block_size": 16, "num_gpu_blocks": 9}}))
    return run


@pytest.mark.source_tree
def test_fidelity(server: Path) -> None:
    """The benchmark: nothing is fitted, so what it says can be worked out from the tables."""
    from benchmarks.fidelity import compare, setup_of

    setup = setup_of(server, LAYERS, None)
    assert (setup.max_rows, setup.max_model_len, setup.page_size, setup.pages) == (4, 128, 16, 8), "vLLM keeps one block"
    assert setup.options["token_budget"] == 64
    assert setup_of(server, LAYERS, 77).pages == 77
    found = {record["figure"]: record for record in compare(server, server / "workload.jsonl", LAYERS, None)}
    assert len(found) == 9
    model = read_layer_times(server / "layer-times", LAYERS)
    alone = [model.seconds(StepWork(0, 0, [(0, size)])) for size in (6, 8, 4)]  # each is done before the next one comes
    assert found["mean ttft"]["simulated_ms"] == pytest.approx(1e3 * sum(alone) / 3, abs=0.05)
    assert found["mean ttft"]["measured_ms"] == pytest.approx(10.0)
    assert found["mean ttft"]["difference"] == pytest.approx(100 * sum(alone) / 3 - 1, abs=1e-4)
    decode = [model.seconds(StepWork(1, context, [], (context, context))) for context in (7, 8, 5, 6, 7, 8)]
    per_token = sum(decode[:2]) / 2, sum(decode[2:]) / 4
    assert found["mean tpot"]["simulated_ms"] == pytest.approx(1e3 * sum(per_token) / 2, abs=0.05)
    assert found["mean tpot"]["measured_ms"] == pytest.approx(10.0)


@pytest.mark.source_tree
def test_fidelity_prints_lines_or_json(server: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fidelity", str(server), "--layers", str(LAYERS)]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 9
    assert all(" simulated " in line and line.endswith("%") for line in lines)
    records = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [json.loads(record)["figure"] for record in records][:3] == ["mean ttft", "p50 ttft", "p90 ttft"]
