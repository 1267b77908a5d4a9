"""Kernels compiled for a stand-in are those of the model it stands in for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncsched.config import EngineConfig
from asyncsched.gpu.compiling import compile_meanwhile
from asyncsched.gpu.cpu import load
from asyncsched.gpu.loading import open_checkpoint

from .models_helpers import TINY

COUNT = """
import pkgutil, sys, importlib
from numba.core.dispatcher import Dispatcher
from asyncsched.config import EngineConfig
from asyncsched.gpu import kernels
from asyncsched.gpu.compiling import compile_meanwhile
from asyncsched.gpu.cpu import load
from asyncsched.gpu.loading import open_checkpoint

modules = [importlib.import_module(f"{kernels.__name__}.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]

def compiled():
    found = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    return sum(len(value.overloads) for value in found.values())

config = EngineConfig(model=sys.argv[1], load_format="dummy", dtype=sys.argv[2], max_rows=3, page_size=16, pages=8)
with open_checkpoint(config) as checkpoint:
    thread = compile_meanwhile(checkpoint, config.page_size)
    thread.join()
before = compiled()
load(config)
print(before, compiled())
"""


def folder_of(path: Path, kind: str, **options: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": kind, **TINY, **options}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        ("llama", {}, "bfloat16"),
        ("llama", {"head_dim": 32, "num_key_value_heads": 6}, "float32"),
        ("qwen3", {"hidden_size": 64, "intermediate_size": 128}, "bfloat16"),
        ("mistral", {"sliding_window": 8}, "bfloat16"),
    ],
)
def test_nothing_is_left_to_compile(tmp_path: Path, kind: str, options: dict[str, Any], dtype: str) -> None:
    command = [sys.executable, "-c", COUNT, str(folder_of(tmp_path, kind, **options)), dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    before, after = map(int, done.stdout.splitlines()[-1].split())  # a log message may precede it
    assert before == after >= 5


def test_other_models_have_no_stand_in(tmp_path: Path) -> None:
    config = EngineConfig(model=str(folder_of(tmp_path, "gpt_neox")), load_format="dummy")
    with open_checkpoint(config) as checkpoint:
        assert compile_meanwhile(checkpoint, 16) is None


def test_what_goes_wrong_meanwhile_is_nobodys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def broken(*args: Any) -> Any:
        asked.append("compile")
        raise MemoryError("no room")

    monkeypatch.setattr("asyncsched.gpu.compiling.stand_in", broken)
    config = EngineConfig(model=str(folder_of(tmp_path, "llama")), load_format="dummy", max_rows=2, pages=4)
    assert load(config).executor.limits.max_rows == 2
    assert asked == ["compile"]
