"""A cost model that interpolates in tables of measured times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .cost import StepWork

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a size: linear between the measured sizes, and beyond the last one on the last slope.

    Attributes:
        sizes, seconds: ``[n]``, sizes ascending, at least two.
    """

    sizes: Floats
    seconds: Floats

    def __call__(self, size: float) -> float:
        """Seconds at this size."""
        if size <= self.sizes[-1]:
            return float(np.interp(size, self.sizes, self.seconds))
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return float(self.seconds[-1] + slope * (size - self.sizes[-1]))


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds over four sizes: linear in each between the measured ones, and beyond the last one on the last slope.

    Attributes:
        axes: The sizes along each of the four dimensions, ascending.
        seconds: As many dimensions.
    """

    axes: tuple[Floats, Floats, Floats, Floats]
    seconds: Floats

    def __call__(self, *point: float) -> float:
        """Seconds at this point."""
        corners = []
        for value, axis in zip(point, self.axes, strict=True):
            low = min(max(int(np.searchsorted(axis, value, "right")) - 1, 0), len(axis) - 2)
            share = float((value - axis[low]) / (axis[low + 1] - axis[low]))
            corners.append(((low, 1.0 - share), (low + 1, share)) if share else ((low, 1.0),))
        total = 0.0
        for corner in product(*corners):
            weight = 1.0
            for _, part in corner:
                weight *= part
            total += weight * float(self.seconds[tuple(where for where, _ in corner)])
        return total


@dataclass(frozen=True, slots=True)
class SkewTable:
    """How far the attention of uneven rows lies between that of their mean context and that of their longest.

    Attributes:
        edges: Upper bounds of the buckets along: prompt tokens in the step, decoding rows, evenness
            ((mean − shortest) ÷ (longest − shortest)), longest context, tokens before the prompt chunk.
        shares: About 0 … 1 per bucket, as many dimensions.
    """

    edges: tuple[Floats, ...]
    shares: Floats

    def __call__(self, *point: float) -> float:
        """The share for this step."""
        where = (min(int(np.searchsorted(edge, value)), len(edge) - 1) for edge, value in zip(self.edges, point, strict=True))
        return float(self.shares[tuple(where)])


@dataclass(frozen=True, slots=True)
class TableCost:
    """A ``CostModel`` from measured parts of a model.

    Attributes:
        per_token: Everything that depends on the number of tokens in the step, all layers together.
        per_sequence: Everything that depends on the number of sampled sequences.
        attention: Attention of all layers over (prompt tokens in the step, tokens before them, decoding
            rows, context tokens per row).
        skew: What uneven contexts add; ``None`` if that was not measured.
    """

    per_token: Curve
    per_sequence: Curve
    attention: Grid
    skew: SkewTable | None = None

    def seconds(self, work: StepWork) -> float:
        """Time of a step with this work.

        The decoding rows count with their mean context, and with what uneven contexts add; the chunks of a
        step count as one, which is how such tables are keyed.
        """
        rows, prompt = work.decode_rows, work.prefill_tokens
        if not rows + prompt:
            return 0.0
        context = work.context_tokens / rows if rows else 0.0
        before = sum(start for start, _ in work.prefill)
        attention = self.attention(prompt, before, rows, context)
        if self.skew is not None and work.contexts is not None and work.contexts[0] < work.contexts[1]:
            shortest, longest = work.contexts
            evenness = (context - shortest) / (longest - shortest)
            share = self.skew(prompt, rows, evenness, longest, before)
            attention += share * (self.attention(prompt, before, rows, longest) - attention)
        return self.per_token(rows + prompt) + self.per_sequence(rows + len(work.prefill)) + attention
