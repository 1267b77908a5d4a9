"""How many pages to keep for what running requests have yet to generate."""

from __future__ import annotations


class ReserveEstimate:
    """The share of its remaining output that a request is expected to need.

    Requests usually end long before ``max_tokens``. Reserving everything wastes memory; reserving
    nothing leads to preemptions. The estimate starts in between, decays with every step that goes
    well, and jumps after a preemption to what would have been needed (SGLang's new-token ratio).

    Args:
        start: Share at the beginning.
        floor: Lowest share.
        decay: Subtracted per step.
    """

    def __init__(self, start: float = 0.7, floor: float = 0.1, decay: float = 0.001) -> None:
        self.share = start
        self._floor = floor
        self._decay = decay

    def step(self) -> None:
        """A step was planned without shortage."""
        self.share = max(self._floor, self.share - self._decay)

    def shortage(self, generated: int, limit: int) -> None:
        """Pages ran out while running requests had generated ``generated`` of at most ``limit`` tokens."""
        used = generated / limit if limit else 1.0
        self.share = min(1.0, max(self.share, used) + 0.2)
