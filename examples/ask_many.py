"""Ask a small model a dozen questions at once and watch the answers stream in.

Usage: python examples/ask_many.py [--model MODEL] [--max-tokens N] [--policy NAME]

All questions share one long system prompt, whose keys and values are computed once. Everything
runs on the CPU, in this process, in this program's own event loop.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from statistics import median, quantiles

import anyio
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import asyncsched

SYSTEM = """You are a careful and friendly assistant who writes for curious readers.

Guidelines for every answer:
1. Begin with the answer itself. Do not repeat the question, do not announce what you are about to do.
2. Prefer short sentences and common words. When a technical term is needed, say in a few words what it means.
3. Use an example from everyday life wherever one helps. One good example is worth more than three vague ones.
4. If the question asks for a list, give between three and five points, each on its own line, each a full sentence.
5. If the question asks for code, give one complete function with a one-line comment, and nothing around it.
6. If something is not known, or people disagree about it, say so plainly and name the main positions.
7. Never invent names of people, places, books, laws or numbers. If you are not sure of a number, give a range.
8. Keep the tone warm but not flattering. Do not use exclamation marks. Do not praise the question.
9. Numbers below ten are written as words, larger ones as digits. Use metric units.
10. End when the answer is complete. Do not add a summary, an offer of further help, or a question of your own.

The reader may be of any age and from any country. Avoid idioms that only work in one language, avoid
brand names, and avoid assuming a particular season, currency or school system. Where customs differ
between countries, mention the difference in one sentence instead of picking one of them silently.
"""

QUESTIONS = [  # from MT-bench (FastChat, Apache-2.0), some shortened
    "Could you write a captivating short story beginning with the sentence: The old abandoned house at the end of the street "
    "held a secret that no one had ever discovered.",
    "Describe a vivid and unique character, using strong imagery and creative language, in fewer than two paragraphs.",
    "Write a descriptive paragraph about a bustling marketplace, incorporating sensory details.",
    "Imagine yourself as a doctor who is asked for innovative remedies. What do you suggest for a cold?",
    "Please explain the process of photosynthesis in layman's terms.",
    "What are some business etiquette norms when doing business in Japan?",
    "Suggest five award-winning documentary films with brief background descriptions for aspiring filmmakers to study.",
    "Discuss antitrust laws and their impact on market competition.",
    "Write a simple website in HTML. When a user clicks the button, it shows a joke.",
    "Write a Python function to find the nth number in the Fibonacci sequence.",
    "How did the US states get their names?",
    "Describe the structure and function of DNA.",
]


@dataclass
class Line:
    """One request on the screen."""

    question: str
    answer: str = ""
    tokens: int = 0
    stamps: list[float] = field(default_factory=list)
    started: float = 0.0
    outcome: str = "waiting"


def view(lines: list[Line], width: int) -> Table:
    """The live table: question, tokens so far, and the end of the answer."""
    table = Table(expand=True, show_edge=False, pad_edge=False)
    table.add_column("question", ratio=2, no_wrap=True, overflow="ellipsis")
    table.add_column("tokens", justify="right", width=6)
    table.add_column("answer", ratio=5, no_wrap=True, overflow="crop")
    table.add_column("", width=8)
    for line in lines:
        tail = " ".join(line.answer.split())[-max(20, width * 5 // 9) :]
        table.add_row(line.question, str(line.tokens), Text(tail), line.outcome)
    return table


async def ask(engine: asyncsched.Engine, line: Line, max_tokens: int) -> None:
    """Stream one answer into its line."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": line.question}]
    line.started = time.perf_counter()
    async with engine.stream(messages, max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.1) as stream:
        async for chunk in stream:
            line.answer += chunk.text
            line.tokens += len(chunk.token_ids)
            line.stamps.append(time.perf_counter())
            line.outcome = chunk.finish_reason or "…"


def percentiles(values: list[float]) -> str:
    """Median, p90 and p99 in milliseconds."""
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return f"p50 {median(values) * 1e3:.0f} ms   p90 {cuts[89] * 1e3:.0f} ms   p99 {cuts[98] * 1e3:.0f} ms"


def summary(lines: list[Line], statistics: asyncsched.Statistics, seconds: float) -> Table:
    """What the run amounted to."""
    ttft = [line.stamps[0] - line.started for line in lines]
    itl = [after - before for line in lines for before, after in zip(line.stamps, line.stamps[1:], strict=False)]
    table = Table(show_header=False, show_edge=False)
    table.add_row("requests", f"{len(lines)}, at once, one event loop, one compute thread")
    table.add_row(
        "output",
        f"{statistics.generated_tokens} tokens in {seconds:.1f} s: {statistics.generated_tokens / seconds:.0f} tokens/s",
    )
    table.add_row("time to first token", percentiles(ttft))
    table.add_row("inter-token latency", percentiles(itl))
    table.add_row("prefix cache", f"{statistics.hit_rate:.0%} of {statistics.prompt_tokens} prompt tokens found")
    busy = statistics.device_busy / seconds
    table.add_row(
        "steps", f"{statistics.steps}, of which {statistics.overlap:.0%} were submitted before the one ahead had finished"
    )
    table.add_row(
        "compute thread", f"busy {busy:.0%} of the time, {statistics.device_idle * 1e3:.0f} ms idle between overlapped steps"
    )
    return table


async def main(options: argparse.Namespace) -> None:
    """Load, ask, show."""
    console = Console()
    lines = [Line(question) for question in QUESTIONS]
    console.print(f"loading [bold]{options.model}[/] …")
    loading = time.perf_counter()
    async with asyncsched.Engine(options.model, policy=options.policy, max_model_len=2048) as engine:
        console.print(f"ready in {time.perf_counter() - loading:.1f} s; asking {len(lines)} questions at once\n")
        started = time.perf_counter()
        with Live(view(lines, console.width), console=console, refresh_per_second=8, transient=True) as live:
            async with anyio.create_task_group() as tasks:
                for line in lines:
                    tasks.start_soon(ask, engine, line, options.max_tokens)
                while any(line.outcome in ("waiting", "…") for line in lines):
                    live.update(view(lines, console.width))
                    await anyio.sleep(0.125)
        seconds = time.perf_counter() - started
        statistics = engine.statistics()
    for line in lines:
        console.print(Text(line.question, style="bold cyan"))
        console.print(Text(line.answer.strip() + (" […]" if line.outcome == "length" else "") + "\n"))
    console.print(summary(lines, statistics, seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--policy", default="lpm")
    anyio.run(main, parser.parse_args())
