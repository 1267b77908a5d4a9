"""Fitting a linear cost model to measured steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..cost import LinearCost
from ..errors import ConfigError
from ..events import StepCompleted


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted model and how well it does.

    Attributes:
        model: The model.
        steps: Steps it was fitted to.
        error: Median of the relative errors, without sign.
        bias: Predicted time of all steps together over the measured one, less 1.
    """

    model: LinearCost
    steps: int
    error: float
    bias: float


def fit_steps(steps: Iterable[StepCompleted]) -> Fit:
    """Least squares on relative errors with coefficients that are not negative.

    Relative, since otherwise a few long prefill steps would decide about the many short decode steps.
    Coefficients that come out negative are set to zero and the others fitted again (an active-set
    step of Lawson and Hanson's NNLS, 1974; enough for five of them).

    Raises:
        ConfigError: there are too few steps.
    """
    measured = [
        (step.work, step.completed_at - step.launched_at)
        for step in steps
        if not step.failed and step.completed_at > step.launched_at
    ]
    if len(measured) < 20:
        raise ConfigError(f"the log has {len(measured)} steps; at least 20 are needed to fit a cost model")
    features = np.array([work.features for work, _ in measured])
    seconds = np.array([seconds for _, seconds in measured])
    weighted, ones = features / seconds[:, None], np.ones(len(seconds))
    active = np.flatnonzero(np.any(features > 0, axis=0))
    solution = np.zeros(features.shape[1])
    while True:
        scale = np.abs(weighted[:, active]).max(axis=0)
        found = np.linalg.lstsq(weighted[:, active] / scale, ones, rcond=None)[0] / scale
        if (found >= 0).all():
            solution[active] = found
            break
        active = active[found >= 0]
    predicted = features @ solution
    return Fit(
        LinearCost(*solution.tolist()),
        len(measured),
        float(np.median(np.abs(predicted / seconds - 1))),
        float(predicted.sum() / seconds.sum() - 1),
    )
