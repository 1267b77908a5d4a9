"""CUDA graphs of decode steps, by the number of rows they are padded to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from .device import Device

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that decode steps are padded to. Those between powers of two are captured when they are first needed."""


class DecodeGraphs:
    """One graph per padded number of rows. Compute thread only, or the loading thread before it starts.

    Args:
        device: Captures.
        launch: Launches a decode step for so many rows on the current stream; safe while no row decodes.
        max_rows: Most rows there will be.
    """

    def __init__(self, device: Device, launch: Callable[[int], None], max_rows: int) -> None:
        self._device = device
        self._launch = launch
        self._sizes = [size for size in SIZES if size < max_rows] + [max_rows] * (max_rows <= SIZES[-1])
        self._replays: dict[int, Callable[[], None]] = {}

    @property
    def first(self) -> list[int]:
        """Sizes worth capturing before the first request, largest first: the smaller ones fit its memory."""
        return [size for size in reversed(self._sizes) if size & (size - 1) == 0 or size == self._sizes[-1]]

    @property
    def sizes(self) -> list[int]:
        """All sizes, ascending."""
        return self._sizes

    def padded(self, rows: int) -> int | None:
        """Rows of the smallest graph for so many; ``None`` if there is none."""
        at = bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else None

    def ready(self, size: int) -> bool:
        """Whether the graph of a size is there already."""
        return size in self._replays

    def capture(self, size: int) -> None:
        """Make the graph of a size, unless it is there. No row may decode: the step is run once to compile its kernels."""
        if size not in self._replays:
            self._launch(size)
            self._replays[size] = self._device.capture(lambda: self._launch(size))

    def replay(self, size: int) -> None:
        """Launch the graph of a size, which must be there."""
        self._replays[size]()
