"""A step that was launched, until its result is in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...contract import IntArray, StepResult, TokenLogprobs
from ..sampling_failures import FAILURES
from .device import Arrival, Device, DeviceClock, Event
from .kernels.logprobs import Logprobs

PromptLogprobs = dict[int, tuple[TokenLogprobs | None, ...]]


@dataclass(slots=True)
class LaunchedStep:
    """One step on its way; ``compute_thread.Pending``.

    Attributes:
        step: The plan's number.
        rows: Rows that get a token, int32 ``[n]``.
        began, ended: Before and behind its work on the compute stream.
        arrival: int32 ``[2, n or more]``, tokens and status, then the four tensors of ``Logprobs`` if there are any.
        wanted: Row → how many of the likeliest tokens it wants with its token's log-probability.
        prompt_logprobs: By row, known already.
        launching: When the compute thread began and ended with it, ``time.monotonic``.
        device, clock: To read errors and times with.
    """

    step: int
    rows: IntArray
    began: Event
    ended: Event
    arrival: Arrival
    wanted: dict[int, int]
    prompt_logprobs: PromptLogprobs | None
    launching: tuple[float, float]
    device: Device
    clock: DeviceClock

    def finish(self) -> StepResult:
        """Wait, and read the result. Completion thread only.

        Raises:
            DeviceLostError: the device failed.
        """
        try:
            sampled, *scores = self.arrival.wait()
            launched_at, completed_at = self.clock.at(self.began), self.clock.at(self.ended)
        except Exception as error:
            lost = self.device.lost(error)
            if lost is None:
                raise
            raise lost from error
        count = self.rows.size
        tokens, status = sampled.numpy()[:, :count]
        return StepResult(
            self.step,
            self.rows,
            np.ascontiguousarray(tokens),
            logprobs=self._logprobs(Logprobs(*scores)) if scores else None,
            prompt_logprobs=self.prompt_logprobs,
            failed={int(self.rows[i]): FAILURES[int(status[i])] for i in np.flatnonzero(status)} or None,
            launched_at=launched_at,
            completed_at=completed_at,
            launching=self.launching,
        )

    def _logprobs(self, found: Logprobs) -> dict[int, TokenLogprobs]:
        return {row: found.entry(i, self.wanted[row]) for i, row in enumerate(self.rows.tolist()) if row in self.wanted}
