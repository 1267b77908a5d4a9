"""Cost models in files: what ``asyncsched fit-cost-model`` writes and the ``cost_model`` option reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cost import CostModel, LinearCost
from .errors import ConfigError


def load_cost_model(spec: Any) -> CostModel | None:
    """The model an engine was given: ``None``, an object with ``seconds(work)``, or the path of a file.

    Raises:
        ConfigError: it is none of these, or the file does not hold a cost model.
    """
    if spec is None:
        return None
    if isinstance(spec, str | Path):
        return read_cost_model(Path(spec))
    if callable(getattr(spec, "seconds", None)):
        model: CostModel = spec
        return model
    raise ConfigError(f"cost_model={spec!r}: give an object with seconds(work), or the path of a file")


def read_cost_model(path: Path) -> CostModel:
    """Read a file that ``write_cost_model`` wrote.

    Raises:
        ConfigError: the file is missing or something else.
    """
    try:
        fields = json.loads(path.read_text())
        kind = fields.pop("kind")
        if kind != "linear":
            raise ValueError(f"kind {kind!r} is not known")
        return LinearCost(**{name: float(value) for name, value in fields.items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is not a cost model: {exc}; make one with `asyncsched fit-cost-model`") from exc


def write_cost_model(model: LinearCost, path: Path) -> None:
    """Write a model to a JSON file."""
    path.write_text(json.dumps({"kind": "linear", **asdict(model)}, indent=2) + "\n")
