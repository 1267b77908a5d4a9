"""Reading tables of measured layer times into a cost model.

The tables are those of LLMServingSim 2 (casys-kaist), times in µs: ``dense.csv`` (operation, tokens),
``attention.csv`` (prompt tokens, tokens before them, decoding rows, tokens per row), both of one
layer, ``per_sequence.csv`` (operation, sequences) of the model's end, and, if it was measured,
``skew_fit.csv`` (what uneven contexts add, by buckets).
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from ..cost_tables import Curve, Floats, Grid, SkewTable, TableCost
from ..errors import ConfigError

_TWICE = ("layernorm",)
"""Operations that a layer does twice; the others of ``dense.csv`` it does once."""

_ENDS = ("embedding", "final_layernorm")
"""Those that belong to no layer."""

_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def read_layer_times(folder: Path, layers: int) -> TableCost:
    """The cost model of a whole model of ``layers`` equal layers.

    Raises:
        ConfigError: a table is missing or incomplete.
    """
    return TableCost(
        _curve(folder / "dense.csv", "tokens", layers),
        _curve(folder / "per_sequence.csv", "sequences", 1),
        _attention(folder / "attention.csv", layers),
        _skew(folder / "skew_fit.csv"),
    )


def _curve(path: Path, size: str, layers: int) -> Curve:
    """All operations of the table together, each as often as it occurs."""
    measured: dict[str, dict[float, float]] = {}
    rows = _read(path, ("layer", size, "time_us"))
    for row, (sized, microseconds) in zip(rows, _numbers(path, rows, (size, "time_us")).tolist(), strict=True):
        measured.setdefault(row["layer"], {})[sized] = 1e-6 * microseconds
    short = [name for name, times in measured.items() if len(times) < 2]
    if short:
        raise ConfigError(f"{path} has times of one size only for {', '.join(short)}")
    sizes = np.array(sorted(set().union(*measured.values())))
    total = np.zeros(len(sizes))
    for name, times in measured.items():
        often = 1 if name in _ENDS else layers * (2 if name in _TWICE else 1)
        known = np.array(sorted(times.items()))
        total += often * np.interp(sizes, known[:, 0], known[:, 1])
    return Curve(sizes, total)


def _attention(path: Path, layers: int) -> Grid:
    points = _numbers(path, _read(path, (*_AXES, "time_us")), (*_AXES, "time_us"))
    axes = [np.unique(points[:, axis]) for axis in range(4)]
    if any(len(axis) < 2 or axis[0] != 0 for axis in axes):
        raise ConfigError(f"{path} does not cover prompts and decoding rows of several sizes, from none on")
    grid = np.full([len(axis) for axis in axes], np.nan)
    grid[tuple(np.searchsorted(axes[axis], points[:, axis]) for axis in range(4))] = 1e-6 * layers * points[:, 4]
    grid[0, 0, 0, 0] = 0.0
    _fill(grid, axes)
    return Grid((axes[0], axes[1], axes[2], axes[3]), grid)


def _fill(grid: Floats, axes: list[Floats]) -> None:
    """Complete a grid of which only a part was measured: tables hold several grids laid over each other, and
    lack what did not fit into memory.

    Linear along one axis after the other: between measured points, beyond the last one on the last
    slope, before the first one level.
    """
    grid[:, :, 0, :] = grid[:, :, 0, :1]  # no decoding rows: whatever their context
    grid[0] = grid[0, :1]  # no prompt: whatever came before it
    for axis in (3, 1, 0, 2):
        lines, sizes = np.moveaxis(grid, axis, -1), axes[axis]
        for where in np.ndindex(lines.shape[:-1]):
            line = lines[where]
            known = np.flatnonzero(~np.isnan(line))
            if not 2 <= len(known) < len(line):
                continue
            a, b = known[-2:]
            slope = (line[b] - line[a]) / (sizes[b] - sizes[a])
            beyond = line[b] + slope * (sizes[b + 1 :] - sizes[b])
            line[:] = np.interp(sizes, sizes[known], line[known])
            line[b + 1 :] = beyond
    np.nan_to_num(grid, copy=False)


def _skew(path: Path) -> SkewTable | None:
    """Shares by bucket; where one has no samples, that of the nearest bucket along one axis after the other."""
    if not path.exists():
        return None
    names = ("pc", "n_label", "skew_rate_label", "kv_big_label", "kp_label")
    rows = _read(path, (*names, "alpha"))
    shares = _numbers(path, rows, ("alpha",))[:, 0]
    try:
        bounds = np.array([[_bound(row[name]) for name in names] for row in rows])
    except ValueError as exc:
        raise ConfigError(f"{path} has a bucket that cannot be read: {exc}") from exc
    edges = tuple(np.unique(bounds[:, axis]) for axis in range(5))
    table = np.full([len(edge) for edge in edges], np.nan)
    table[tuple(np.searchsorted(edges[axis], bounds[:, axis]) for axis in range(5))] = shares
    for axis in (0, 4, 2, 3, 1):
        lines = np.moveaxis(table, axis, -1)
        for where in np.ndindex(lines.shape[:-1]):
            known = np.flatnonzero(~np.isnan(lines[where]))
            if len(known):
                nearest = np.abs(known[:, None] - np.arange(lines.shape[-1])).argmin(axis=0)
                lines[where] = lines[where][known[nearest]]
    return SkewTable(edges, table)


def _bound(label: str) -> float:
    """Upper bound of a bucket: ``16``, ``kp=0``, ``kvB<=16k``, ``sr<=15%``; ``sr>70%`` has none."""
    if ">" in label:
        return float("inf")
    text = label.rpartition("=")[2]
    if text.endswith("%"):
        return float(text[:-1]) / 100
    return float(text[:-1]) * 1024 if text.endswith("k") else float(text)


def _numbers(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...]) -> Floats:
    """These columns as numbers, ``[rows, columns]``."""
    try:
        return np.array([[float(row[name]) for name in columns] for row in rows])
    except ValueError as exc:
        raise ConfigError(f"{path} must hold numbers in {', '.join(columns)}: {exc}") from exc


def _read(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as exc:
        raise ConfigError(f"the layer times cannot be read: {exc}") from exc
    if not rows or any(row.get(name) is None for row in rows for name in columns):
        raise ConfigError(f"{path} must have the columns {', '.join(columns)}, in every line")
    return rows
