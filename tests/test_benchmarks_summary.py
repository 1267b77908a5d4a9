"""The comparison with other engines and the summary of all benchmarks, on small records made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, summary
from benchmarks.peers.report import family, peak_rss_mb, timed_pass
from benchmarks.workloads import Workload, workloads

Record = dict[str, Any]
PNG = b"\x89PNG\r\n\x1a\n"


def throughput(engine: str, workload: str, output: float, total: float = 0.0) -> Record:
    return {"engine": engine, "workload": workload, "output_throughput": output, "total_token_throughput": total}


def cost(batch: int, streamed: int, microseconds: float) -> Record:
    return {"engine": "asyncsched", "batch": batch, "depth": 2, "streamed": streamed, "us_per_request_step": microseconds}


def cell(depth: int, step_ms: float, idle: float, **other: Any) -> Record:
    place = {"case": "simulated", "rows": 256, "depth": depth, "step_ms": step_ms, "blocked_ms": 0, "own_loop": False}
    return place | {"idle_share": idle, "bound_share": 1 - idle} | other


BENCHMARKS: dict[str, list[Record]] = {
    "compare": [
        throughput("asyncsched", "short64", 300.0, 400.0),
        throughput("vllm", "short64", 150.0, 500.0),
        throughput("asyncsched", "single", 40.0),
        throughput("vllm", "single", 50.0),
        throughput("asyncsched", "prefill16", 1.0, 1300.0),
        throughput("vllm", "prefill16", 5.0, 650.0),
        {"engine": "llama.cpp", "failed": "no compiler", "install": "bash scripts/install_peers.sh llama.cpp"},
    ],
    "throughput": [throughput("asyncsched", "short64", 1.0, 1.0)],  # another run: never compared with vLLM's
    "control_plane": [cost(256, 0, 0.29), cost(1024, 0, 0.16), cost(256, 100, 4.0)],
    "overlap": [
        cell(2, 10.0, 0.005),
        cell(0, 10.0, 0.2),
        cell(2, 10.0, 0.01, blocked_ms=5, block="sleep"),
        cell(2, 10.0, 0.03, blocked_ms=5, block="busy"),
        cell(2, 5.0, 0.01),
        cell(0, 5.0, 0.28),
        cell(2, 5.0, 0.9, rows=64),
        {"case": "gain", "step_ms": 5.0, "rows": 256, "gain": 9.9},
    ],
    "startup": [{"case": "cold", "ready_s": 6.5}, {"case": "warm", "ready_s": 2.5}],
}


def write(folder: Path, benchmarks: dict[str, list[Record]]) -> Path:
    for name, records in benchmarks.items():
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(["a line that is no record", *lines, ""]), "utf-8")
    return folder


def rows(records: Sequence[Record]) -> dict[str, list[str]]:
    """Measured, target and verdict by figure."""
    return {row[0]: row[1:] for row in (target.row(records) for target in summary.TARGETS)}


def test_figures_ratios_and_verdicts(tmp_path: Path) -> None:
    found = rows(summary.load(write(tmp_path, BENCHMARKS)))
    assert found["short64, tokens per second ÷ vLLM"] == ["2 ×", "≥ 1.5 ×", "yes"]
    assert found["single, tokens per second ÷ vLLM"] == ["0.8 ×", "≥ 1 ×", "no"]
    assert found["prefill16, tokens per second ÷ vLLM"] == ["2 ×", "≥ 1.3 ×", "yes"]  # of all tokens, not of the output
    assert found["control plane per request-step, 256 rows, 0 % read as text"] == ["0.29 µs", "≤ 0.3 µs", "yes"]
    assert found["control plane per request-step, 1,024 rows, 0 % read as text"] == ["0.16 µs", "≤ 0.15 µs", "no"]
    assert found["device idle, 256 rows, 10-ms steps, depth 2"] == ["0.5 %", "≤ 1 %", "yes"]
    assert found["throughput of depth 2 ÷ depth 0, 256 rows, 5-ms steps"] == ["1.38 ×", "≥ 1.1 ×", "yes"]
    assert found["ready for the first request, cold"] == ["6.5 s", "≤ 6 s", "no"]
    assert found["ready for the first request, warm"] == ["2.5 s", "≤ 4 s", "yes"]


def test_the_worst_of_several_fitting_records_counts(tmp_path: Path) -> None:
    found = rows(summary.load(write(tmp_path, BENCHMARKS)))
    assert found["… loop blocked 5 ms, 10 times a second"] == ["3 %", "≤ 2 %", "no"]
    records: list[Record] = [{"workload": "short64", "engine_over_bound": share} for share in (0.99, 0.96, 0.98)]
    assert rows(records)["short64, engine ÷ bare model loop"] == ["0.96 ×", "≥ 0.97 ×", "no"]


def test_what_was_not_measured_is_said_to_be(tmp_path: Path) -> None:
    found = rows(summary.load(write(tmp_path, BENCHMARKS)))
    missing = [name for name, (measured, *_) in found.items() if measured == "not measured"]
    assert missing == [
        "long32, tokens per second ÷ vLLM",
        "shared512, tokens per second ÷ vLLM",
        "short64, engine ÷ bare model loop",
        "shared512, engine ÷ bare model loop",
        "control plane per request-step, 1,024 rows, 100 % read as text",
        "prefix tree, match of 1,024 tokens",
        "prefix tree, insert of 1,024 tokens",
        "… loop blocked 50 ms, twice a second, own loop",
        "memory beyond weights and KV pool, warm caches",
        "… after compiling every kernel",
    ]
    assert all(found[name][2] == "not measured" for name in missing)


def test_every_target_can_be_reached() -> None:
    records: list[Record] = []
    for name in workloads():
        records += [throughput("asyncsched", name, 2.0, 2.0), throughput("vllm", name, 1.0, 1.0)]
        records.append({"workload": name, "engine_over_bound": 1.0})
    records = [record | {"benchmark": "compare"} for record in records]
    records += [cost(batch, streamed, 0.1) for batch in (256, 1024) for streamed in (0, 100)]
    records.append({"prefix_tree": "any", "match_us": 1.0, "insert_us": 1.0})
    records += [cell(2, 10, 0.0), cell(2, 10, 0.0, blocked_ms=5), cell(2, 10, 0.0, blocked_ms=50, own_loop=True)]
    records += [cell(2, 5, 0.0), cell(0, 5, 0.5)]
    records += [
        {"case": "cold", "ready_s": 1.0},
        {"case": "warm", "ready_s": 1.0},
        *({"case": "memory", "caches": caches, "beyond_mb": 1.0} for caches in ("warm", "cold")),
    ]
    assert {verdict for *_, verdict in rows(records).values()} == {"yes"}


@pytest.mark.parametrize("benchmarks", [BENCHMARKS, {}], ids=["some", "none"])
def test_the_command_prints_a_table_and_writes_a_picture(
    benchmarks: dict[str, list[Record]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["summary", str(write(tmp_path, benchmarks))])
    summary.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["figure", "measured", "target", "reached"]
    assert len(lines) == len(summary.TARGETS) + (5 if benchmarks else 4)
    assert ("llama.cpp is missing or failed: no compiler" in lines) == bool(benchmarks)
    assert (tmp_path / "summary.png").read_bytes().startswith(PNG)


def test_the_picture_shows_each_peer_that_was_measured(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert summary.draw_peers(axes, summary.load(write(tmp_path, BENCHMARKS)))
    legend = [text.get_text() for text in axes.legend().get_texts()]
    assert sorted(legend) == ["target over vllm", "vllm"]
    assert {text.get_text() for text in axes.texts} == {"2.00", "0.80"}
    assert [label.get_text().split("\n")[0] for label in axes.get_xticklabels()] == ["short64", "single", "prefill16"]


def test_a_missing_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path / "nowhere")])
    with pytest.raises(SystemExit):
        summary.main()
    assert "make bench" in capsys.readouterr().err


def test_rounds_are_reduced_to_medians() -> None:
    records = [throughput("vllm", "single", output) for output in (5.0, 1.0, 3.0)]
    records.append({"engine": "vllm", "workload": "startup", "seconds": 7.0, "process": 8.0})
    assert compare.medians(records) == [
        {"engine": "vllm", "workload": "single", "rounds": 3, "output_throughput": 3.0, "total_token_throughput": 0.0},
        {"engine": "vllm", "workload": "startup", "rounds": 1, "seconds": 7.0, "process": 8.0},
    ]


def test_the_table_of_the_comparison() -> None:
    records = [
        throughput("asyncsched", "single", 44.0),
        throughput("asyncsched", "prefill16", 1.0, 1200.0),
        {"engine": "asyncsched", "workload": "startup", "seconds": 2.0, "process": 2.5},
        throughput("vllm", "prefill16", 2.0, 600.0),
        {"engine": "vllm", "workload": "memory", "max_rss_mb": 7000.0},
    ]
    lines = compare.table(records).splitlines()
    assert lines[0].split() == ["asyncsched", "vllm"]
    assert [line.split() for line in lines[2:]] == [
        ["single,", "tok/s", "44.0", "–"],
        ["prefill16,", "tok/s", "1,200.0", "600.0", "(", "2.00)"],
        ["ready,", "s", "2.5", "–"],
        ["memory,", "MB", "–", "7,000.0"],
    ]


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    peer = compare.Engine("other", "benchmarks.peers.other", python=tmp_path / "python", model=tmp_path, part="other")
    assert compare.run(peer, ["single"], 1) == [
        {
            "engine": "other",
            "failed": f"{tmp_path / 'python'} does not exist",
            "install": "bash scripts/install_peers.sh other",
        }
    ]


def test_a_peer_that_fails_is_named_with_its_last_words() -> None:
    (record,) = compare.run(compare.Engine("other", "benchmarks.no_such_engine"), ["single"], 1)
    assert record["engine"] == "other"
    assert "No module named benchmarks.no_such_engine" in record["failed"]


class Half:
    """Generates half of what it should."""

    def __init__(self) -> None:
        self.forgotten = False

    def generate(self, prompts: list[list[int]], output: int) -> list[int]:
        return [output // 2 if self.forgotten else output for _ in prompts]

    def forget(self) -> None:
        self.forgotten = True


def test_a_peer_that_stops_early_is_not_timed() -> None:
    with pytest.raises(RuntimeError, match=r"each request should have 8 tokens, got \[4\]"):
        timed_pass(Half(), Workload("some", [[1], [2]], 8))


def test_peak_memory_counts_living_children() -> None:
    before = peak_rss_mb()
    code = "held = b'x' * (64 << 20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        assert child.pid in family(os.getpid())
        assert peak_rss_mb() >= before + 64
        child.communicate("\n")
    assert child.pid not in family(os.getpid())
