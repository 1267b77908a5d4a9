"""The check of the CUDA backend measures right, on a device that is not there, and survives whatever its parts do."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncsched import StepPlan, StepResult
from asyncsched.gpu.cuda.load import load_on
from asyncsched.gpu.loading.dummy import DummyWeights
from asyncsched.gpu.models.decoder_config import DecoderConfig
from benchmarks import gpu_check
from benchmarks.bound import noted_products
from benchmarks.gpu import arithmetic, decode, parts, peer, prefill, serving
from benchmarks.gpu.comparison import Comparison, error
from benchmarks.gpu.engine import Steady, steady_steps
from benchmarks.gpu.equality import differing
from benchmarks.gpu.journal import Journal
from benchmarks.gpu.lab import LLAMA_8B, QWEN_06B, QWEN_14B, Lab, device_seconds, published_configs
from benchmarks.gpu.peer import PeerRun, continuous_batching, random_model
from benchmarks.gpu.records import Record, number
from benchmarks.gpu.sizes import FULL, QUICK
from benchmarks.gpu.streams import Readers

from .cuda_helpers import FakeDevice, FakeEvent, FakeLost
from .triton_helpers import needs_no_device

pytestmark = [
    pytest.mark.source_tree,
    # Padding rows compute on whatever is in memory, which numpy remarks on; nothing reads what comes of it.
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning"),
]

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    LLAMA_8B: {"model_type": "llama", **SMALL},
    QWEN_06B: {"model_type": "qwen3", "tie_word_embeddings": True, **SMALL},
    QWEN_14B: {"model_type": "qwen3", **SMALL},
    "small": {"model_type": "llama", **SMALL},
}
TINY = replace(
    FULL,
    copy_bytes=1 << 12,
    matrix=16,
    dtype="float32",
    max_rows=2,
    page_size=8,
    pages_per_row=8,
    max_model_len=64,
    token_budget=12,
    kernel_shapes=2,
    kernel_widths=((0, 64), (3, 1000)),
    kernel_contexts=(1, 19, 12),
    kernel_vocabulary=200,
    decode_rows=(1, 2),
    decode_context=16,
    decode_steps=5,
    attention_context=24,
    prefill_tokens=24,
    stream_prompt=5,
    stream_output=8,
    equality_lengths=(3, 9),
    equality_output=2,
    overlap_rounds=1,
    serving_sequences=2,
    serving_least=3,
    serving_most=9,
)


@dataclass
class Bench:
    """A lab on a device that is not there, and what it told."""

    lab: Lab
    device: FakeDevice
    records: list[Record]

    def run(self, part: str) -> dict[str, Record]:
        """One part; its own records by figure."""
        self.records.clear()
        parts.PARTS[part](self.lab)
        return {record.figure: record for record in self.records if record.part == part}


def bench_on(device: FakeDevice, folder: Path) -> Bench:
    records: list[Record] = []
    return Bench(Lab(device, TINY, partial(load_on, device), folder, records.append, configs=CONFIGS), device, records)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = bench_on(FakeDevice(), tmp_path_factory.mktemp("bench"))
    yield bench
    bench.lab.release()


# -- arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [(LLAMA_8B, 8_030_261_248), (QWEN_06B, 596_049_920), (QWEN_14B, 14_768_307_200)])
def test_configurations_have_the_published_sizes(name: str, count: int) -> None:
    config = DecoderConfig.from_hf(published_configs()[name])
    assert arithmetic.parameters(config) == count
    assert (config.kv_heads, config.head_dim) == (8, 128)


def test_parameters_are_those_of_transformers() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    models: Any = AutoModelForCausalLM
    for values in (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "qwen2"},
        CONFIGS[QWEN_06B],
    ):
        values = SMALL | values
        with torch.device("meta"):
            model = models.from_config(AutoConfig.for_model(**values))
        assert arithmetic.parameters(DecoderConfig.from_hf(values)) == sum(each.numel() for each in model.parameters())


def test_bytes_of_a_step() -> None:
    llama = DecoderConfig.from_hf(published_configs()[LLAMA_8B])
    assert arithmetic.kv_bytes_per_token(llama, 2) == 2 * 32 * 8 * 128 * 2 == 131_072
    read = (8_030_261_248 - 128_256 * 4096) * 2
    assert arithmetic.weight_bytes_per_step(llama, 2) == read
    assert arithmetic.decode_bytes(llama, 256, 1024.5, 2) == read + 256 * 1024.5 * 131_072
    tied = DecoderConfig.from_hf(published_configs()[QWEN_06B])
    assert arithmetic.weight_bytes_per_step(tied, 2) == 596_049_920 * 2  # its embedding table is read as a matrix


def test_operations_of_a_prompt() -> None:
    """By hand for a model of two layers: 10 tokens, hidden 32, two query heads and a key head of 16, 48 between."""
    config = DecoderConfig.from_hf(CONFIGS[LLAMA_8B] | {"num_hidden_layers": 2})
    qkv, output, feed_forward = 32 * 64, 32 * 32, 3 * 32 * 48
    attention = 4 * 2 * 16 * 55  # 55 pairs, a product with the keys and one with the values
    first = 2 * (qkv + output + feed_forward) * 10 + attention
    second = 2 * qkv * 10 + attention + 2 * (output + feed_forward)
    assert arithmetic.prefill_flops(config, 10) == first + second + 2 * 97 * 32


@needs_no_device
def test_operations_are_those_that_the_model_computes(bench: Bench) -> None:
    loaded = bench.lab.model(LLAMA_8B)
    with noted_products() as products:
        prefill.prompt_seconds(loaded, 24, seed=0)
    computed = sum(2 * linear.inputs * linear.outputs * rows for linear, rows in products)
    attention = 4 * 2 * 16 * 24 * 25 / 2
    assert arithmetic.prefill_flops(loaded.shape, 24) == computed + attention


# -- what times mean ----------------------------------------------------------------------------


class ScriptedDevice(FakeDevice):
    """Its events are at given moments."""

    def __init__(self, *moments: float) -> None:
        super().__init__()
        self.moments = list(moments)

    def mark(self) -> FakeEvent:
        """See ``Device``."""
        return FakeEvent(self.moments.pop(0))


def test_device_seconds_are_the_best_round() -> None:
    calls = []
    device = ScriptedDevice(0.0, 8.0, 10.0, 14.0)
    assert device_seconds(device, lambda: calls.append(1), calls=4, rounds=2) == 1.0
    assert len(calls) == 1 + 2 * 4
    assert not device.moments


def test_bandwidth_counts_what_is_read_and_what_is_written(tmp_path: Path) -> None:
    bench = bench_on(ScriptedDevice(0.0, 10.0, 0.0, 5.0, 0.0, 10.0), tmp_path)
    assert bench.lab.copy_bandwidth() == 2 * TINY.copy_bytes / 0.5
    assert bench.lab.copy_bandwidth() == 2 * TINY.copy_bytes / 0.5  # measured once
    assert [record.measured for record in bench.records] == [2 * TINY.copy_bytes / 0.5 / 1e9]


def test_matrix_rate(tmp_path: Path) -> None:
    bench = bench_on(ScriptedDevice(0.0, 20.0, 0.0, 10.0, 0.0, 20.0), tmp_path)
    assert bench.lab.matrix_rate() == 2 * 16**3 / 0.5


def step_result(step: int, began: float, ended: float, rows: int = 4, launching: float = 1e-4) -> StepResult:
    numbers = np.arange(rows, dtype=np.int32)
    return StepResult(step, numbers, numbers, launched_at=began, completed_at=ended, launching=(5.0, 5.0 + launching))


def test_idle_share_and_rate_of_steps() -> None:
    results = [step_result(1, 0.0, 2.0), step_result(2, 2.5, 4.5, launching=3e-4), step_result(3, 4.5, 6.0, launching=2e-4)]
    steady = Steady.of(results)
    assert steady.idle_share == 0.5 / 6.0
    assert steady.tokens_per_second == 8 / 4.0
    assert steady.launching["median"] == pytest.approx(2e-4)
    assert steady.launching["mean"] == pytest.approx(2e-4)


def test_steady_steps_are_those_in_which_all_rows_decode() -> None:
    plans = [StepPlan(1, leaves=(3,), decode=True), *(StepPlan(step, decode=True) for step in range(2, 7))]
    results = [step_result(plan.step, 0.0, 1.0, rows=3 if plan.step == 6 else 4) for plan in plans]
    assert steady_steps(plans, results, 4) == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="1 of 6 steps decoded all 3 rows"):
        steady_steps(plans, results, 3)


def test_rate_of_readers() -> None:
    readers = Readers(2, complete=(10.0, 5), over=(12.0, 45))
    assert readers.steady_rate == 20.0
    with pytest.raises(RuntimeError, match="longer outputs"):
        _ = replace(readers, over=(9.0, 45)).steady_rate


def test_load_is_the_same_every_time() -> None:
    load = serving.Load.draw(256, 100, 1024, 1000)
    assert load == serving.Load.draw(256, 100, 1024, 1000)
    for lengths in (list(map(len, load.prompts)), load.outputs):
        assert len(lengths) == 256
        assert 100 <= min(lengths) < 110 < 1014 < max(lengths) <= 1024
    assert max(map(max, load.prompts)) == 999


def test_first_difference() -> None:
    assert differing([[1, 2, 3], [4], [5, 6]], [[1, 2, 3], [9], [5, 6, 7]]) == {1: 0, 2: 2}


def test_sizes_fit_together() -> None:
    for sizes in (FULL, QUICK):
        assert len(sizes.decode_rows) == len(decode.TARGETS)
        assert sizes.decode_context % sizes.page_size == 0
        assert sizes.decode_context + 1 + sizes.decode_steps <= sizes.pages_per_row * sizes.page_size
        assert sizes.prefill_tokens < sizes.max_model_len
        assert sizes.serving_most * 2 <= sizes.max_model_len
        mean = sizes.serving_sequences * (sizes.serving_least + sizes.serving_most) / sizes.page_size
        assert mean < 0.92 * sizes.max_rows * sizes.pages_per_row  # all of them run at once


# -- comparison ---------------------------------------------------------------------------------


def test_errors_are_shares_of_the_tolerance() -> None:
    wanted = torch.tensor([1.0, -3.0, torch.nan])
    assert error(wanted.clone(), wanted) == (0.0, 0.0)
    share, absolute = error(wanted + torch.tensor([0.0, 4e-5, 0.0]), wanted)
    assert absolute == pytest.approx(4e-5, rel=0.01)
    assert share == pytest.approx(4e-5 / (2e-5 * 4), rel=0.01)
    for wrong in ([torch.nan, -3.0, torch.nan], [1.0, -3.0, 0.0], [1.0, -torch.inf, torch.nan]):
        assert error(torch.tensor(wrong), wanted)[0] > 1
    assert error(torch.tensor([1, 2]), torch.tensor([1, 3]))[0] > 1
    with pytest.raises(AssertionError):
        error(wanted, wanted.half())


def test_a_launch_that_fails_is_told_and_the_others_go_on() -> None:
    comparison = Comparison(FakeDevice().lost)
    one = torch.ones(2)
    for shape in ("a", "b", "c"):
        with comparison.of("norm", shape) as compare:
            if shape == "b":
                raise ValueError("no such type")
            compare(one + 1e-5 * (shape == "c"), one)
    (record,) = comparison.records()
    assert record.reached is False
    assert record.details["failures"] == {"b": "ValueError: no such type"}
    assert record.details["at"] == "c"
    assert record.details["share_of_the_others"] == pytest.approx(0.25, rel=0.01)
    with pytest.raises(FakeLost), comparison.of("norm", "d"):
        raise FakeLost("illegal address")


# -- every part on a device that is not there ---------------------------------------------------


@needs_no_device
def test_kernels(bench: Bench) -> None:
    records = bench.run("kernels")
    assert {figure.split(",")[0] for figure in records} == {
        "rms_norm", "add_rms_norm", "silu_mul", "head_rms_norm", "decode_attention", "prefill_attention",
        "rotary_store_decode", "rotary_store_prefill", "sample", "token_logprobs", "scatter_words",
    }  # fmt: skip
    for record in records.values():
        assert record.reached, record
        assert record.details["shapes"] >= 2


@needs_no_device
def test_equality(bench: Bench) -> None:
    records = bench.run("equality")
    assert [record.reached for record in records.values()] == [True, True]
    for record in records.values():
        assert record.details["sequences"] == 12
        assert len(record.details["differing"]) == 6


@needs_no_device
def test_attention(bench: Bench) -> None:
    (record,) = bench.run("attention").values()
    assert record.details["bytes"] == 2 * 2 * 24 * 16 * 4
    share = record.details["gb_per_s"] * 1e9 / bench.lab.copy_bandwidth()
    assert record.measured == pytest.approx(share)


@needs_no_device
def test_decode(bench: Bench) -> None:
    one, two = bench.run("decode").values()
    shape = bench.lab.model(LLAMA_8B).shape
    for rows, record in ((1, one), (2, two)):
        # Of steps 1 … 5 the last two count; step i attends to what was there, the token before it, and i more.
        assert record.details["mean_context"] == 16 + 1 + 4.5
        assert record.details["bytes"] == arithmetic.decode_bytes(shape, rows, 21.5, 4)
        assert record.details["floor_ms"] == pytest.approx(record.details["bytes"] / bench.lab.copy_bandwidth() * 1e3)
        assert record.measured == pytest.approx(record.details["step_ms"] / record.details["floor_ms"])


@needs_no_device
def test_decode_replays_graphs_over_contexts_of_that_length(bench: Bench) -> None:
    loaded = bench.lab.model(LLAMA_8B)
    replayed, lengths = bench.device.replayed, []
    executor = loaded.reusable._executor
    for plan in decode.decode_plans(loaded, 2, 16, 5):
        executor.launcher.launch(plan).finish()
        lengths.append(executor.launcher._state.length.tolist())
    assert lengths == [[17 + step] * 2 for step in range(6)]
    assert bench.device.replayed - replayed == 5
    used = executor.launcher._state.block_table[:, :3]
    assert len(set(used.flatten().tolist())) == 6  # nothing is shared
    loaded.reusable.launch([])
    assert not executor.launcher._active.any()


@needs_no_device
def test_prefill(bench: Bench) -> None:
    (record,) = bench.run("prefill").values()
    assert len(record.details["seconds"]) == 4
    best = min(record.details["seconds"][1:])
    shape = bench.lab.model(LLAMA_8B).shape
    assert record.measured == pytest.approx(arithmetic.prefill_flops(shape, 24) / best / bench.lab.matrix_rate())


@needs_no_device
def test_engine(bench: Bench) -> None:
    share, idle, launching = bench.run("engine").values()
    assert share.details["same_tokens"] is True
    assert share.details["steps"] >= 5
    assert share.measured == pytest.approx(share.details["streamed_tokens_per_s"] / share.details["bare_tokens_per_s"])
    assert idle.measured is not None
    assert 0 <= idle.measured < 1
    assert launching.measured == launching.details["microseconds"]["median"] > 0


@needs_no_device
def test_overlap(bench: Bench) -> None:
    llama, qwen = bench.run("overlap").values()
    assert (llama.target, qwen.target) == (1.10, 1.25)
    for record in (llama, qwen):
        ahead, serial = (max(record.details[f"tokens_per_s_depth_{depth}"]) for depth in (2, 0))
        assert record.measured == pytest.approx(ahead / serial)


@needs_no_device
def test_serving(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other engine runs one of the two models."""

    def other(folder: Path, prompts: list[list[int]], outputs: list[int], *rest: Any) -> PeerRun:
        if folder.name == QWEN_14B:
            raise MemoryError("no room for 14B")
        return PeerRun("5", "sdpa", len(prompts), len(prompts), sum(outputs), 100.0, False)

    monkeypatch.setattr(serving, "continuous_batching", other)
    small, large, against, failed = bench.run("serving").values()
    for record in (small, large):
        assert record.measured == pytest.approx(record.details["output_tokens"] / record.details["seconds"])
    assert small.measured is not None
    assert against.measured == pytest.approx(small.measured / (small.details["output_tokens"] / 100.0))
    assert failed.measured is None
    assert failed.reached is None
    assert "MemoryError: no room for 14B" in failed.details["transformers"]
    monkeypatch.setattr(bench.lab, "time_left", lambda: 35.0)
    load = serving.Load([[1]], [1])
    measured, details = serving.against_peer(bench.lab, QWEN_06B, load, 1.0)
    assert measured is None
    assert "no time left" in details["transformers"]


# -- the other engine ---------------------------------------------------------------------------


def test_the_other_engines_model_has_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[QWEN_06B]))
    model = random_model(tmp_path, torch.device("cpu"), torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    wanted = DummyWeights(CONFIGS[QWEN_06B]).read(name, (32, 48), torch.float32, torch.device("cpu"))
    assert torch.equal(model.get_parameter(name), wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@dataclass
class Answer:
    """As much of transformers' ``GenerationOutput`` as is read."""

    request_id: str
    generated_tokens: list[int]
    error: str | None = None

    def is_finished(self) -> bool:
        """See ``GenerationOutput``."""
        return self.error is None


@dataclass
class Manager:
    """As much of transformers' manager as is used: every request but ``stuck`` is answered at once."""

    stuck: str | None = None
    fails: bool = False
    answers: list[Answer] = field(default_factory=list)
    stopped: bool = False
    background_thread_status: Any = field(default_factory=lambda: type("Status", (), {"fatal_error": "out of memory"}))

    def add_request(self, prompt: list[int], request_id: str, max_new_tokens: int, eos_token_id: int) -> None:
        """See transformers."""
        assert eos_token_id == -1
        if request_id != self.stuck:
            self.answers.append(Answer(request_id, [7] * max_new_tokens, "no" if self.fails else None))

    def get_result(self, timeout: float) -> Answer | None:
        """See transformers."""
        return self.answers.pop(0) if self.answers else None

    def is_running(self) -> bool:
        """See transformers."""
        return not self.stopped

    def stop(self, block: bool, timeout: float, hard_stop: bool) -> None:
        """See transformers."""
        assert hard_stop
        self.stopped = True
        self.answers.append(Answer(str(self.stuck), [7, 7], "stopped"))


def peer_run(monkeypatch: pytest.MonkeyPatch, manager: Manager, longest: float) -> PeerRun:
    model: Any = type("Model", (), {})()
    model.config = type("Config", (), {"_attn_implementation": "paged|sdpa"})
    model.continuous_batching_context_manager = lambda **options: nullcontext(manager)
    monkeypatch.setattr(peer, "random_model", lambda *arguments: model)
    return continuous_batching(Path(), [[1, 2]] * 3, [4, 5, 6], torch.device("cpu"), "float32", longest)


def test_the_other_engine_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = peer_run(monkeypatch, Manager(), 60.0)
    assert (run.sequences, run.finished, run.tokens, run.capped, run.attention) == (3, 3, 15, False, "paged|sdpa")
    assert run.rate == 15 / run.seconds


def test_the_other_engine_is_stopped_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = Manager(stuck="request 1")
    run = peer_run(monkeypatch, manager, 0.05)
    assert manager.stopped
    assert (run.sequences, run.finished, run.tokens, run.capped) == (3, 2, 4 + 6 + 2, True)


def test_the_other_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="warm-up 0 failed: no"):
        peer_run(monkeypatch, Manager(fails=True), 60.0)
    with pytest.raises(RuntimeError, match="thread has ended: out of memory"):
        peer_run(monkeypatch, Manager(stuck="request 0", stopped=True), 60.0)


# -- table and files ----------------------------------------------------------------------------


def test_targets() -> None:
    assert Record("p", "f", 1.25, 1.25, at_most=True).reached is True
    assert Record("p", "f", 1.26, 1.25, at_most=True).reached is False
    assert Record("p", "f", 0.97, 0.97).reached is True
    assert Record("p", "f", 0.96, 0.97).reached is False
    assert Record("p", "f", None, 0.97).reached is None
    assert Record("p", "f", 0.96).reached is None
    assert [number(value) for value in (0.0, 3.0, 1.23456, 12345.6, 4.2e-5)] == ["0", "3", "1.235", "12,346", "4.2e-05"]


def test_journal_json_and_table(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    record = Record("engine", "tokens/s", 0.98, 0.97, details={"steps": 3})
    assert not journal.read().good
    journal.write("environment", {"gpu": "none"})
    for name in ("engine", "decode"):
        journal.write("begin", name)
    journal.write("record", record.as_json())
    journal.write("record", Record("decode", "over the floor", 1.5, 1.25, at_most=True).as_json())
    journal.write("end", {"part": "engine", "seconds": 2.0, "why": None})
    assert journal.read().running == "decode"
    journal.write("end", {"part": "decode", "seconds": 1.0, "why": "Traceback\nValueError: bad\n"})
    journal.write("skip", {"part": "serving", "why": "the time was over"})
    story = journal.read()
    assert story.records[0] == record
    assert not story.good
    gpu_check.save(tmp_path, story)
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert saved["environment"] == {"gpu": "none"}
    assert saved["parts"]["decode"] == {"state": "failed", "seconds": 1.0, "why": "Traceback\nValueError: bad\n"}
    assert [each["reached"] for each in saved["records"]] == [True, False]
    assert saved["records"][0]["details"] == {"steps": 3}
    assert story.summary().splitlines() == [
        "figure                               measured  to reach  reached",
        "-----------------------------------  --------  --------  -------",
        "engine: tokens/s                         0.98    ≥ 0.97      yes",
        "decode: over the floor                    1.5    ≤ 1.25       NO",
        "decode: failed: ValueError: bad             –         –       NO",
        "serving: skipped: the time was over         –         –       NO",
    ]


def test_a_line_that_was_never_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write("begin", "decode")
    with (tmp_path / "journal").open("a") as file:
        file.write('{"record": {"part": "dec')
    assert journal.read().running == "decode"
    journal.write("end", {"part": "decode", "seconds": 1.0, "why": "killed"})
    assert journal.read().parts["decode"].state == "failed"


# -- processes ----------------------------------------------------------------------------------


@dataclass
class Child:
    """A process that has ended, or hangs until it is killed."""

    status: int | None

    def poll(self) -> int | None:
        """See ``Process``."""
        return self.status

    def kill(self) -> None:
        """See ``Process``."""
        self.status = -9

    def wait(self) -> int:
        """See ``Process``."""
        assert self.status is not None
        return self.status


@dataclass
class Machine:
    """Processes that measure here and now, on a clock that is set by hand."""

    out: Path
    lab: Any
    parts: dict[str, Callable[[Any], None]]
    now: float = 1000.0
    started: list[list[str]] = field(default_factory=list)

    def start(self, rest: Sequence[str]) -> Child:
        """Run the parts; ``MemoryError`` stands for a crash, ``TimeoutError`` for a hang."""
        self.started.append(list(rest))
        journal = Journal(self.out / "gpu_check.jsonl")
        try:
            done = parts.measure(
                rest, self.lab, journal, 1480.0, lambda seconds: nullcontext(), parts=self.parts, clock=lambda: self.now
            )
        except SystemExit as end:
            return Child(end.code if isinstance(end.code, int) else None)
        return Child(gpu_check.DONE if done else gpu_check.GO_ON)

    def sleep(self, seconds: float) -> None:
        """Time passes."""
        self.now += 100 * seconds

    def supervise(self) -> tuple[int, dict[str, str]]:
        """The exit status, and the states of the parts."""
        status = gpu_check.supervise(list(self.parts), self.out, 1480.0, self.start, clock=lambda: self.now, sleep=self.sleep)
        saved = json.loads((self.out / "gpu_check.json").read_text())
        return status, {name: part["state"] for name, part in saved["parts"].items()}


def works(lab: Any) -> None:
    """A part that reaches its target."""
    lab(Record("part", "figure", 1.0, 1.0))


def machine(out: Path, **those: Callable[[Any], None]) -> Machine:
    return Machine(out, parts.tell(Journal(out / "gpu_check.jsonl")), those)


def test_all_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = machine(tmp_path, one=works, two=works)
    assert rig.supervise() == (gpu_check.DONE, {"one": "done", "two": "done"})
    assert rig.started == [["one", "two"]]
    assert capsys.readouterr().out.splitlines()[-1].split() == ["part:", "figure", "1", "≥", "1", "yes"]


def test_a_part_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    def raises(lab: Any) -> None:
        works(lab)
        raise ZeroDivisionError("no rows")

    rig = machine(tmp_path, one=works, two=raises, three=works)
    assert rig.supervise() == (gpu_check.FAILED, {"one": "done", "two": "failed", "three": "done"})
    assert rig.started == [["one", "two", "three"], ["three"]]
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert "ZeroDivisionError: no rows" in saved["parts"]["two"]["why"]
    assert "in raises" in saved["parts"]["two"]["why"]
    assert len(saved["records"]) == 3


def test_a_part_that_crashes_does_not_stop_the_others(tmp_path: Path) -> None:
    def crashes(lab: Any) -> None:
        (tmp_path / "stacks.txt").write_text("in crashes, line 1\n")
        raise SystemExit(-11)

    rig = machine(tmp_path, one=crashes, two=works)
    assert rig.supervise() == (gpu_check.FAILED, {"one": "failed", "two": "done"})
    why = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["one"]["why"]
    assert "in crashes, line 1" in why
    assert "status -11" in why


def test_a_process_that_does_not_even_begin(tmp_path: Path) -> None:
    rig = machine(tmp_path, one=works, two=works)
    start, rig.start = rig.start, lambda rest: start(rest) if rest == ["two"] else Child(1)  # type: ignore[method-assign]
    assert rig.supervise() == (gpu_check.FAILED, {"one": "failed", "two": "done"})


def test_a_part_that_hangs_is_ended_with_the_time(tmp_path: Path) -> None:
    def hangs(lab: Any) -> None:
        raise SystemExit(None)

    rig = machine(tmp_path, one=hangs, two=works)
    assert rig.supervise() == (gpu_check.FAILED, {"one": "failed", "two": "skipped"})
    assert rig.started == [["one", "two"]]


def test_no_part_is_begun_behind_the_deadline(tmp_path: Path) -> None:
    def takes_long(lab: Any) -> None:
        works(lab)
        rig.now = 1476.0

    rig = machine(tmp_path, one=takes_long, two=works)
    assert rig.supervise() == (gpu_check.FAILED, {"one": "done", "two": "skipped"})


def test_no_gpu_is_told_by_the_first_process(tmp_path: Path) -> None:
    status = gpu_check.supervise(["kernels"], tmp_path, 1480.0, lambda rest: Child(gpu_check.NO_GPU), clock=lambda: 0.0)
    assert status == gpu_check.NO_GPU
    assert not (tmp_path / "gpu_check.json").exists()


def test_time_limits() -> None:
    """A part gets what is left, and no more than it may take."""
    seen: list[float] = []

    def watch(seconds: float) -> Any:
        seen.append(seconds)
        return nullcontext()

    lab: Any = None
    journal: Any = type("Silent", (), {"write": lambda self, kind, value: None})()
    these: Any = {"decode": lambda lab: None, "serving": lambda lab: None}
    for left in (500.0, 60.0):
        assert parts.measure(list(these), lab, journal, left, watch, parts=these, clock=lambda: 0.0)
    assert seen == [110.0, 300.0, 60.0, 60.0]
    assert set(parts.PARTS) == set(gpu_check.NAMES)


HANGING = """
from pathlib import Path
from threading import Event
from benchmarks.gpu.parts import ended_after

def hang():
    Event().wait()

with ended_after(Path({path!r}), 0.2):
    hang()
"""


def test_a_part_that_hangs_says_where(tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt"
    command = [sys.executable, "-c", HANGING.format(path=str(path))]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], check=False, timeout=120)
    assert done.returncode == 1
    assert "in hang" in path.read_text()


@needs_no_device
def test_the_process_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "CudaDevice", FakeDevice)
    monkeypatch.setattr(parts, "ended_after", lambda stacks, seconds: nullcontext())
    journal = Journal(tmp_path / "journal")
    assert parts.main(["attention"], tmp_path, journal, TINY, 1e12)
    story = journal.read()
    assert story.environment["torch"]
    assert story.parts["attention"].state == "done"
    assert [record.part for record in story.records] == ["device", "attention"]
    assert parts.main(["attention"], tmp_path, journal, TINY, 0.0)
    assert journal.read().parts["attention"].state == "skipped"


@needs_no_device
def test_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path / "results"), "--quick"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "gpu_check needs a GPU: device='cuda'" in done.stderr
    assert list((tmp_path / "results").iterdir()) == []


def test_environment_names_the_versions() -> None:
    found = parts.environment(torch.device("cpu"))
    assert found["torch"].startswith(torch.__version__.partition("+")[0])
    assert found["transformers"]
    assert "gpu" not in found
