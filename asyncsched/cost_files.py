"""Cost models in files: what ``asyncsched fit-cost-model`` writes and the ``cost_model`` option reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .cost import CostModel, LinearCost
from .cost_tables import Curve, Grid, SkewTable, TableCost
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
    if callable(getattr(spec, "seconds", None)) and not isinstance(spec, type):
        model: CostModel = spec
        return model
    raise ConfigError(f"cost_model={spec!r}: give an object with seconds(work), or the path of a file")


def read_cost_model(path: Path) -> LinearCost | TableCost:
    """Read a file that ``write_cost_model`` wrote.

    Raises:
        ConfigError: the file is missing or something else.
    """
    try:
        fields = json.loads(path.read_text())
        kind = fields.pop("kind")
        if kind == "linear":
            return LinearCost(**{name: float(value) for name, value in fields.items()})
        if kind == "table":
            a, b, c, d = (np.array(axis, np.float64) for axis in fields["attention"]["axes"])
            grid = np.array(fields["attention"]["seconds"], np.float64)
            parts = _curve(fields["per_token"]), _curve(fields["per_sequence"]), Grid((a, b, c, d), grid)
            return TableCost(*parts, _skew(fields["skew"]))
        raise ValueError(f"kind {kind!r} is not known")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{path} is not a cost model: {exc!r}; make one with `asyncsched fit-cost-model`") from exc


def write_cost_model(model: LinearCost | TableCost, path: Path) -> None:
    """Write a model to a JSON file."""
    if isinstance(model, LinearCost):
        fields: dict[str, Any] = {"kind": "linear", **asdict(model)}
    else:
        grid = {"axes": [axis.tolist() for axis in model.attention.axes], "seconds": model.attention.seconds.tolist()}
        curves = {
            name: {"sizes": curve.sizes.tolist(), "seconds": curve.seconds.tolist()}
            for name, curve in (("per_token", model.per_token), ("per_sequence", model.per_sequence))
        }
        skew = None
        if model.skew is not None:
            skew = {
                "edges": [edge.tolist() for edge in model.skew.edges],
                "shares": model.skew.shares.tolist(),
            }
        fields = {"kind": "table", **curves, "attention": grid, "skew": skew}
    path.write_text(json.dumps(fields) + "\n")


def _curve(fields: dict[str, list[float]]) -> Curve:
    return Curve(np.array(fields["sizes"], np.float64), np.array(fields["seconds"], np.float64))


def _skew(fields: dict[str, Any] | None) -> SkewTable | None:
    if fields is None:
        return None
    edges = tuple(np.array(edge, np.float64) for edge in fields["edges"])
    return SkewTable(edges, np.array(fields["shares"], np.float64))
