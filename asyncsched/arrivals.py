"""How much is on its way into the waiting set."""

from __future__ import annotations

from typing import Literal

from .request import Submission

Phase = Literal["lobby", "taken"]


class Arrivals:
    """Counts submissions between ``stream()`` and the waiting set. Loop thread only.

    A submission is in the ``lobby`` until the admission task takes it up, then ``taken`` while it is
    tokenised and looked at by the admission policy. Whatever ends it on the way takes it out.
    """

    def __init__(self) -> None:
        self._requests = {"lobby": 0, "taken": 0}
        self._tokens = {"lobby": 0, "taken": 0}
        self._where: dict[int, tuple[Phase, int, int]] = {}

    @property
    def requests(self) -> int:
        """Requests on their way (``n`` completions count ``n``)."""
        return self._requests["lobby"] + self._requests["taken"]

    @property
    def taken(self) -> int:
        """Requests that the admission task has taken up."""
        return self._requests["taken"]

    @property
    def tokens(self) -> int:
        """Prompt tokens on their way, as far as they are known."""
        return self._tokens["lobby"] + self._tokens["taken"]

    def put(self, submission: Submission, phase: Phase) -> None:
        """Note that a submission has entered ``phase``."""
        self.remove(submission)
        requests, tokens = submission.params.n, sum(len(request.prompt) for request in submission.requests)
        self._where[submission.number] = phase, requests, tokens
        self._requests[phase] += requests
        self._tokens[phase] += tokens

    def remove(self, submission: Submission) -> None:
        """Note that a submission waits now, or has ended. Idempotent."""
        found = self._where.pop(submission.number, None)
        if found is not None:
            phase, requests, tokens = found
            self._requests[phase] -= requests
            self._tokens[phase] -= tokens
