"""Preempts who was admitted last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..policy import EngineView, RequestView


@dataclass(eq=False)
class Latest:
    """The request admitted last gives way first: what the engine does without a policy, as vLLM does.

    The earliest always goes on, so somebody always finishes. Not for classes of different
    importance: ``lowest-class`` looks at them. How often one request may be preempted before others
    are preferred is the engine's ``max_preemptions``, whatever the policy says.
    """

    api_version = 1

    def victims(self, running: Sequence[RequestView], pages: int, view: EngineView) -> Iterable[RequestView]:
        """Latest admitted first."""
        return reversed(running)
