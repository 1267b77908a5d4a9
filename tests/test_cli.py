"""The ``asyncsched`` command: what it prints and writes, how it fails, and that its reference page is complete."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any

import pytest

from asyncsched import LogStarted, StepCompleted, registry
from asyncsched.cli.main import main, make_parser
from asyncsched.cli.specs import policy_spec, shares
from asyncsched.cost import LinearCost, StepWork
from asyncsched.cost_files import read_cost_model
from asyncsched.policy_set import HOOKS

ROOT = Path(__file__).parent.parent
TRACE = Path(__file__).parent / "data" / "traces" / "azure_code.csv"
PREFIXES = TRACE.with_name("mooncake_conversation.jsonl")
BUNDLED = [point for point in entry_points(group=registry.GROUP) if point.dist and point.dist.name == "asyncsched-llm"]

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut off, and there are no colours."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")


def run(capsys: Captured, *arguments: object) -> str:
    """The output of a command that succeeds."""
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def fails(capsys: Captured, *arguments: object) -> str:
    """The message of a command that does not."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("asyncsched: ")
    return captured.err


def refused(capsys: Captured, *arguments: object) -> str:
    """The message about arguments that cannot be parsed."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == 2
    return capsys.readouterr().err


def table(text: str) -> dict[str, list[str]]:
    """The cells of the comparison by the name of the line; ``""`` for the heads of the columns."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if re.search("[│┃]", line)]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


# policies


def test_all_bundled_policies_are_listed(capsys: Captured) -> None:
    text = run(capsys, "policies")
    assert len(BUNDLED) >= 3
    for point in BUNDLED:
        assert re.search(rf"^  {re.escape(point.name)} +\S", text, re.MULTILINE), point.name
        assert re.search(rf"\(asyncsched-llm [\w.]+, {re.escape(point.value)}\)", text), point.value
    heads = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert heads == [kind for kind in HOOKS if kind in heads]
    assert {"policy", "eviction_policy"} <= set(heads)
    assert re.search(r"^ +options: age_steps=256, .*:LPM\)$", text, re.MULTILINE)
    assert re.search(r"^ +options: none  .*:FCFS\)$", text, re.MULTILINE)


def test_named_policies_are_shown_with_their_documentation(capsys: Captured) -> None:
    text = run(capsys, "policies", "lpm", "lru")
    assert re.findall(r"^  (\S+) ", text, re.MULTILINE) == ["lpm", "lru"]
    assert "Args:" in text
    assert "Not for traffic in which many prompts are seen once" in text


def test_an_unknown_policy(capsys: Captured) -> None:
    assert main(["policies", "lpm", "nonesuch"]) == 1
    text = capsys.readouterr().out
    assert "nonesuch: not installed" in text
    assert re.search(r"^  lpm ", text, re.MULTILINE)


def test_policies_that_cannot_be_used_are_listed_with_the_reason(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        (
            EntryPoint("gone", "no_such_module:Thing", registry.GROUP),
            EntryPoint("useless", "argparse:Namespace", registry.GROUP),
            EntryPoint("lru", "asyncsched.policies.lru:LRU", registry.GROUP),
        )
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert main(["policies"]) == 1
    text = capsys.readouterr().out
    assert re.search("gone: cannot be used: .*No module named 'no_such_module'", text)
    assert "useless: cannot be used: has none of the hooks order, budget, victims, key, admit" in text
    assert re.search(r"^  lru ", text, re.MULTILINE)


# Descriptions of policies


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("lpm", "lpm"),
        ("module:Class", "module:Class"),
        ("sjf,age_tokens=2,prompt_weight=0.5", {"name": "sjf", "age_tokens": 2, "prompt_weight": 0.5}),
        ("ttl, within=lfu,flag=true,none=null", {"name": "ttl", "within": "lfu", "flag": True, "none": None}),
        ("a,text=x=y", {"name": "a", "text": "x=y"}),
        ('{"name": "vtc", "shares": {"a": 1, "b": 2}}', {"name": "vtc", "shares": {"a": 1, "b": 2}}),
    ],
)
def test_what_describes_a_policy(text: str, spec: Any) -> None:
    assert policy_spec(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lpm,age_steps", "'age_steps' in 'lpm,age_steps' is not option=value"),
        ("lpm,=3", "'=3' in 'lpm,=3' is not option=value"),
        ("vtc,shares=[1,2]", "for values with a comma, give a JSON object"),
        ('{"name": "lpm"', "is no JSON object"),
    ],
)
def test_what_does_not(text: str, message: str, capsys: Captured) -> None:
    assert message in refused(capsys, "simulate", TRACE, "--policy", text)


def test_shares() -> None:
    assert shares("a=9, b=0.5") == {"a": 9.0, "b": 0.5}
    for text in ("a", "a=1,b", "a=x", "a=1=2"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not name=weight,name=weight"):
            shares(text)


# simulate


def test_two_policies_are_compared(capsys: Captured, tmp_path: Path) -> None:
    out = tmp_path / "measures.json"
    text = run(capsys, "simulate", TRACE, "--policy", "fcfs", "--policy", "lpm,age_steps=8", "--json", out, "--requests", 8)
    assert "azure_code: 8 requests" in text
    assert "first 8 of 12 requests" in text
    shown = table(text)
    assert shown[""] == ["fcfs", "lpm,age_steps=8"]
    assert shown["completed"] == ["8", "8"]
    measures = json.loads(out.read_text())
    assert list(measures) == shown[""]
    for name, cell in zip(shown[""], shown["TTFT mean, s"], strict=True):
        assert measures[name]["completed"] == 8
        assert measures[name]["ttft"]["mean"] == pytest.approx(float(cell), abs=0.006)


def test_the_engine_decides_by_the_policies_given(capsys: Captured, tmp_path: Path) -> None:
    """The order shows in the latencies, the budget in the time per token."""
    out = tmp_path / "measures.json"
    policies = ["--policy", "fcfs", "--policy", "sjf", "--budget-policy", "decode-first,tokens=256"]
    run(capsys, "simulate", TRACE, "--rows", 1, "--json", out, *policies)
    fcfs, sjf = json.loads(out.read_text()).values()
    assert sjf["ttft"]["mean"] < 0.8 * fcfs["ttft"]["mean"]
    run(capsys, "simulate", TRACE, "--json", out)
    (whole,) = json.loads(out.read_text()).values()
    run(capsys, "simulate", TRACE, "--json", out, *policies[4:])
    (small,) = json.loads(out.read_text()).values()
    assert small["itl"]["maximum"] < 0.5 * whole["itl"]["maximum"]


def test_every_combination_is_run_and_named_by_what_differs(capsys: Captured) -> None:
    options = ["--policy=fcfs", "--policy=lpm", "--eviction-policy=lru", "--eviction-policy=fifo", "--budget-policy=slo"]
    shown = table(run(capsys, "simulate", PREFIXES, *options, "--requests", 6, "--seconds", 4))
    assert shown[""] == ["fcfs + lru", "fcfs + fifo", "lpm + lru", "lpm + fifo"]


def test_a_run_can_be_repeated(capsys: Captured, tmp_path: Path) -> None:
    """Also with everything that is drawn at random; another seed draws something else."""
    out = tmp_path / "measures.json"
    options = ["--tenants", "a=3,b=1", "--hint-error", 1, "--policy", "sjf", "--rows", 2, "--json", out]

    def measures(*more: object) -> Any:
        run(capsys, "simulate", TRACE, *options, *more)
        (found,) = json.loads(out.read_text()).values()
        del found["wall_seconds"]
        return found

    first = measures()
    assert measures() == first
    assert measures("--seed", 1) != first


def test_load_and_targets(capsys: Captured) -> None:
    text = run(
        capsys, "simulate", TRACE, "--scale-rate", 2, "--tenants", "a=1,b=1", "--ttft-target", 1, "--tpot-target", 1,
        "--deadline", 60, "--max-tokens", "exact", "--depth", 0, "--reserve", "full", "--token-budget", 512, "--pages", 2048,
        "--page-size", 32,
    )  # fmt: skip
    shown = table(text)
    assert "arrivals 2 times as fast" in text
    assert {"kept their targets, %", "fairness between tenants"} <= set(shown)
    assert 0 < float(shown["kept their targets, %"][0]) < 100


def test_measures_without_a_number_are_null(capsys: Captured, tmp_path: Path) -> None:
    """One page holds none of these prompts: nothing completes, so that there are no latencies."""
    out = tmp_path / "measures.json"
    shown = table(run(capsys, "simulate", TRACE, "--pages", 1, "--json", out))
    assert shown["refused or failed"] == ["12"]
    assert shown["TTFT mean, s"] == ["–"]
    measures = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert measures["fcfs"]["ttft"]["mean"] is None


def test_a_policy_of_the_current_folder(tmp_path: Path) -> None:
    """Found by the command as it is installed: a script in another folder."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "my_order.py").write_text(
        "class Backwards:\n    def order(self, waiting, view):\n        return list(waiting)[::-1]\n"
    )
    script = tmp_path / "asyncsched-script.py"
    script.write_text("import sys\nfrom asyncsched.cli.main import main\nsys.exit(main())\n")
    command: list[str | Path] = [sys.executable, script, "simulate", TRACE, "--policy", "my_order:Backwards", "--requests", "2"]
    done = subprocess.run(command, cwd=tmp_path / "work", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert table(done.stdout)[""] == ["my_order:Backwards"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch.csv"], "nonesuch.csv cannot be read"),
        ([__file__], "the first line fits no known trace"),
        ([TRACE, "--policy", "lpm", "--policy", "nonesuch"], "no policy named 'nonesuch'"),
        ([TRACE, "--policy", "lpm,nonesuch=1"], "could not be made with options {'nonesuch': 1}"),
        ([TRACE, "--policy", "lru"], "has no method order()"),
        ([TRACE, "--policy", '{"age_steps": 3}'], 'needs a "name"'),
        ([TRACE, "--page-size", 3], "page_size=3 is not a power of two"),
        ([TRACE, "--scale-rate", 0], "rate=0.0 must be a positive number"),
        ([TRACE, "--tenants", "a=0"], "must name tenants with positive numbers"),
        ([TRACE, "--seconds", 0], "leave no request"),
        ([TRACE, "--deadline", -1], "deadline=-1.0 must be"),
        ([TRACE, "--cost-model", TRACE], "is not a cost model"),
        ([TRACE, "--json", "no/such/folder/out.json"], "there is no folder no/such/folder"),
        ([TRACE, "--html", "no/such/folder/out.html"], "there is no folder no/such/folder"),
    ],
)
def test_what_cannot_be_simulated(arguments: list[object], message: str, capsys: Captured) -> None:
    assert message in fails(capsys, "simulate", *arguments)
    assert "TTFT" not in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--pages", "--page-size", "--rows", "--token-budget", "--requests", "--max-tokens"])
def test_numbers_that_must_be_positive(option: str, capsys: Captured) -> None:
    assert f"argument {option}: '0' is not a whole number from 1 on" in refused(capsys, "simulate", TRACE, option, 0)
    assert f"argument {option}: 'many' is not a whole number" in refused(capsys, "simulate", TRACE, option, "many")


def test_without_the_laboratorys_packages(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncsched.lab.tables", None)
    assert "pip install 'asyncsched-llm[lab]'" in fails(capsys, "simulate", TRACE)


# fit-cost-model

COST = LinearCost(fixed=4e-3, per_decode_row=3e-5, per_context_token=2e-7, per_prefill_token=5e-5, per_attention_pair=1e-9)


def write_log(path: Path, steps: int) -> Path:
    """An event log of an engine whose steps take what ``COST`` says."""
    records: list[Any] = [LogStarted(0.0, 0.0, "made-up", 8, 64, 16, 1024, 1000)]
    at = 0.0
    for step in range(1, steps + 1):
        rows = step % 9
        prefill = ((32 * (step % 2), 16 * (step % 5)),) if step % 5 else ()
        work = StepWork(rows, rows * (100 + step), prefill)
        end = at + COST.seconds(work)
        records.append(StepCompleted(end, step, rows, work.context_tokens, prefill, at, end, False))
        at = end + 1e-3
    lines = (json.dumps({"event": type(record).__name__, **asdict(record)}) for record in records)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_csv(path: Path, columns: str, rows: Iterable[Iterable[object]]) -> None:
    path.write_text("\n".join([columns, *(",".join(map(str, row)) for row in rows)]) + "\n")


def write_tables(folder: Path) -> Path:
    """Layer times in µs that are easy to add up."""
    folder.mkdir()
    dense = [(name, tokens, base + tokens) for name, base in (("mlp", 10), ("layernorm", 1)) for tokens in (1, 100)]
    write_csv(folder / "dense.csv", "layer,tokens,time_us", [*dense, ("embedding", 1, 3), ("embedding", 100, 3)])
    write_csv(folder / "per_sequence.csv", "layer,sequences,time_us", [("sampler", 1, 7), ("sampler", 9, 15)])
    points = [(p, 0, n, k, p + n * k / 100) for p in (0, 100) for n in (0, 10) for k in (0, 1000) if p or n]
    before = [(100, 500, n, k, 600 + n * k / 100) for n in (0, 10) for k in (0, 1000)]
    write_csv(folder / "attention.csv", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", [*points, *before])
    return folder


def test_a_cost_model_from_an_event_log(capsys: Captured, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    text = run(capsys, "fit-cost-model", write_log(tmp_path / "log.jsonl", 60), "--out", out)
    assert "60 steps, half of them within 0.0%, all together " in text
    model = read_cost_model(out)
    for work in (StepWork(5, 900), StepWork(0, 0, ((64, 128),)), StepWork(8, 4000, ((0, 16),))):
        assert model.seconds(work) == pytest.approx(COST.seconds(work), rel=0.01)
    shown = table(run(capsys, "simulate", TRACE, "--cost-model", out))
    assert shown["completed"] == ["12"]


def test_a_cost_model_from_layer_times(capsys: Captured, tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    text = run(capsys, "fit-cost-model", write_tables(tmp_path / "tables"), "--layers", 2, "--out", out)
    assert "tables of 2 layers, 2 sizes" in text
    model = read_cost_model(out)
    # 100 prompt tokens: two layers of mlp (110) and of two norms (101 each), the embedding, one sequence, attention
    assert model.seconds(StepWork(0, 0, ((0, 100),))) == pytest.approx((2 * (110 + 202) + 3 + 7 + 2 * 100) * 1e-6)
    assert model.seconds(StepWork(10, 10_000)) == pytest.approx((2 * (20 + 22) + 3 + 16 + 2 * 100) * 1e-6)
    assert run(capsys, "simulate", TRACE, "--cost-model", out, "--requests", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonesuch"], "nonesuch cannot be read"),
        ([TRACE], "azure_code.csv, line 1"),
        (["short.jsonl"], "the log has 5 steps; at least 20 are needed"),
        (["tables"], "say how many the model has, with --layers"),
        (["empty", "--layers", 2], "the layer times cannot be read"),
        (["odd", "--layers", 2], "dense.csv must have the columns layer, tokens, time_us"),
        (["long.jsonl", "--layers", 2], "--layers is for a folder of layer times"),
        (["long.jsonl", "--out", "no/such/folder/cost.json"], "no/such/folder/cost.json"),
    ],
)
def test_what_no_cost_model_can_be_made_of(
    arguments: list[object], message: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "short.jsonl", 5)
    write_log(tmp_path / "long.jsonl", 30)
    write_tables(tmp_path / "tables")
    (tmp_path / "empty").mkdir()
    write_csv(write_tables(tmp_path / "odd") / "dense.csv", "operation,tokens,time_us", [("mlp", 1, 2)])
    out = [] if "--out" in arguments else ["--out", "cost.json"]
    assert message in fails(capsys, "fit-cost-model", *arguments, *out)
    assert not (tmp_path / "cost.json").exists()


def test_what_fit_cost_model_must_be_told(capsys: Captured) -> None:
    assert "the following arguments are required: --out" in refused(capsys, "fit-cost-model", "log")
    assert "'0' is not a whole number from 1 on" in refused(capsys, "fit-cost-model", ".", "--layers", 0, "--out", "x")


# The parser, and its page


def commands() -> Mapping[str, argparse.ArgumentParser]:
    (found,) = (action.choices for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert isinstance(found, Mapping)
    return found


def test_a_command_must_be_given(capsys: Captured) -> None:
    assert "required: COMMAND" in refused(capsys)
    assert "invalid choice: 'nonesuch'" in refused(capsys, "nonesuch")


@pytest.mark.source_tree
@pytest.mark.parametrize("command", ["policies", "new-policy", "simulate", "fit-cost-model"])
def test_the_reference_page_has_every_option_with_its_default(command: str) -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text("utf-8")
    (section,) = re.findall(rf"^## {command}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    rows = dict(re.findall(r"^\| `(--[\w-]+)` \|\s*`?([^|`]*?)`?\s*\|", section, re.MULTILINE))
    places = re.findall(r"^\| `([A-Z]+)(?: …)?` \|", section, re.MULTILINE)
    actions = [action for action in commands()[command]._actions if action.dest != "help"]
    known = {action.option_strings[0]: action for action in actions if action.option_strings}
    assert set(rows) == set(known)
    assert places == [action.metavar for action in actions if not action.option_strings]
    engine = {"--policy": "fcfs", "--eviction-policy": "lru"}
    for option, action in known.items():
        default = "" if action.default is None else str(action.default)
        assert rows[option] == engine.get(option, default), option
        for choice in action.choices or ():
            assert f"`{choice}`" in section, f"{option} {choice}"


@pytest.mark.source_tree
def test_the_reference_page_has_every_command() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text("utf-8")
    assert re.findall(r"^\$ asyncsched ([\w-]+) ", page, re.MULTILINE) == list(commands())


# The report


def test_the_report(capsys: Captured, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    options = ["--policy", "fcfs", "--policy", "vtc", "--tenants", "a=3,b=1", "--rows", 2]
    text = run(capsys, "simulate", TRACE, *options, "--html", out)
    assert f"report: {out}" in text
    html = out.read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert html.rstrip().endswith("</html>")
    assert {"fcfs", "vtc"} <= set(re.findall(r"<th>(\w+)</th>", html))
    assert html.count("<svg") >= 3
    assert not re.findall(r"(?:src|href)=[\"']?http", html), "it must need no network"
