"""What every weight source says when a tensor is not the one that was asked for."""

from __future__ import annotations

from pathlib import Path

from ...errors import WeightsError


def check_shape(name: str, file: Path, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape than the architecture has.

    Raises:
        WeightsError: naming tensor, file and both shapes.
    """
    if expected != found:
        raise WeightsError(
            f"tensor {name!r} in {file} has shape {list(found)}, expected {list(expected)}; "
            "configuration and weights are not of the same model"
        )


def missing(name: str, place: Path) -> WeightsError:
    """The error for a tensor that is nowhere in the checkpoint."""
    return WeightsError(f"tensor {name!r} is missing from {place}; download the model again, or check its architecture")
