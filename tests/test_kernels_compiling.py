"""What start-up costs: parts without code of their own, the kernel cache, and memory that loading leaves behind."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from asyncsched.config import EngineConfig
from asyncsched.errors import WeightsError
from asyncsched.gpu.kernels import _jit
from asyncsched.gpu.kernels._fragment import Fragment
from asyncsched.gpu.kernels._jit import kernel, part
from asyncsched.gpu.loading import open_checkpoint
from asyncsched.gpu.loading.gguf_file import GGUFWeights
from asyncsched.gpu.loading.gguf_header import read_header
from asyncsched.gpu.loading.release import release_freed_memory

from .models_helpers import TINY

CPU = torch.device("cpu")


def dummy_folder(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY}))


def test_parts_are_compiled_into_kernels_and_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    @part
    def twice(x: Any) -> Any:
        return x + x

    @part
    def four_times(x: Any) -> Any:
        return twice(twice(x))

    def entry(values: Any) -> None:
        for i in range(values.size):
            values[i] = four_times(values[i])

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    for _ in range(2):  # compiled, then from the cache
        numbers: NDArray[np.int64] = np.arange(5)
        compiled: Any = kernel(entry)
        compiled(numbers)
        assert numbers.tolist() == [0, 4, 8, 12, 16]
    assert sum(compiled.stats.cache_hits.values()) == 1
    dispatcher: Any = four_times
    (result,) = dispatcher.overloads.values()
    assert isinstance(result.library, Fragment)
    assert result.library.get_pointer_to_function(result.fndesc.llvm_func_name) == 0
    assert result.type_annotation is None


def test_a_kernel_whose_code_cannot_be_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warned: list[str] = []

    class Logger:
        def warning(self, event: str, **details: str) -> None:
            warned.append(f"{event}: {details['reason']}")

    def full(self: Any, name: str) -> Any:
        raise OSError("no space left on device")

    def negated(x: int) -> int:
        return -x

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile._open_for_write", full)
    monkeypatch.setattr(_jit, "get_logger", lambda part: Logger())
    assert kernel(negated)(3) == -3
    assert warned == ["no kernel cache: no space left on device"]


SAMPLING = """
import numpy as np, torch
from asyncsched.contract import EMPTY_INTS, RowJoin
from asyncsched.gpu.sampler import Sampler
from asyncsched.sampling_params import SamplingParams

sampler = Sampler(1, 300)
params = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, repetition_penalty=1.1, logprobs=3)
sampler.join(RowJoin(row=0, number=0, pages=EMPTY_INTS, cached=0, params=params, seed=5))
logits = torch.linspace(-3, 3, 300)[None]
output = sampler.sample(logits, np.zeros(1, np.int32))
print(output.tokens.tolist(), output.logprobs, sampler.prompt_logprobs(logits, output.tokens, 2))

from asyncsched.gpu.kernels.sampling import report_rows, sample_rows
print([sum(kernel.stats.cache_hits.values()) for kernel in (sample_rows, report_rows)])
"""


@pytest.mark.slow
def test_kernels_from_the_cache_answer_as_those_just_compiled(tmp_path: Path) -> None:
    def answer() -> list[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", SAMPLING], env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()

    compiled, cached = answer(), answer()
    assert (compiled[1], cached[1]) == ("[0, 0]", "[1, 1]")
    assert compiled[0] == cached[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_weight_keeps_its_file_in_memory(tmp_path: Path) -> None:
    dummy_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.ones(64, 8)}, file)
    with open_checkpoint(EngineConfig(model=str(tmp_path), dtype="float32")) as checkpoint:
        kept = checkpoint.tensor("model.norm.weight", (8,))
        assert str(file) in Path("/proc/self/maps").read_text()
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert kept.sum() == 8.0


def test_a_gguf_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GGUFWeights(read_header(file), {"num_attention_heads": 1, "num_key_value_heads": 1, "model_type": "llama"})
    assert weights.read("model.norm.weight", (64,), torch.float32, CPU).sum() == 64.0
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size - 128)
    with pytest.raises(WeightsError, match=r"ends within tensor 'output_norm.weight'; download it again"):
        weights.read("model.norm.weight", (64,), torch.float32, CPU)
    file.unlink()
    with pytest.raises(WeightsError, match=r"'output_norm.weight' cannot be read .* download it again"):
        weights.read("model.norm.weight", (64,), torch.float32, CPU)


def test_releasing_memory_needs_no_particular_c_library(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Glibc:
        malloc_trim = staticmethod(asked.append)

    release_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Glibc)
    release_freed_memory()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    release_freed_memory()
    assert asked == [0]
