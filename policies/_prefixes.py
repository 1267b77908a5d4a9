"""What orders that look at the prefix cache share: few look-ups per step, and no prefix computed twice at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from ..policy import EngineView, RequestView


class Turns:
    """Whose cached prefix is looked up in a step: a few requests, so that a step's cost does not grow with the queue.

    The cache changes with every step, but a somewhat old answer orders nearly as well.

    Args:
        per_step: Most look-ups in one step.
        fresh_steps: Steps for which an answer stays good.
    """

    def __init__(self, per_step: int, fresh_steps: int) -> None:
        self._per_step = per_step
        self._fresh_steps = fresh_steps
        self._step, self._left = 0, per_step
        self._new: dict[int, RequestView] = {}  # never looked up
        self._looked: dict[int, tuple[int, RequestView]] = {}  # number → step of the look-up; oldest look-up first

    def next(self, newcomers: Iterable[RequestView], step: int) -> list[RequestView]:
        """The requests to look up now: new ones first, ``newcomers`` last of these, then those whose look-up is oldest.

        May be called several times in a step.
        """
        if step != self._step:
            self._step, self._left = step, self._per_step
        looked, new = self._looked, self._new
        for request in newcomers:
            if request.number not in looked:
                new[request.number] = request
        due = list(islice(new.values(), self._left))
        for since, request in islice(looked.values(), self._left - len(due)):
            if step - since < self._fresh_steps:
                break
            due.append(request)
        for request in due:
            new.pop(request.number, None)
            looked.pop(request.number, None)  # so that it goes to the end
            looked[request.number] = step, request
        self._left -= len(due)
        return due

    def forget(self, number: int) -> None:
        """The request waits no longer; if it does so again, it is new."""
        self._new.pop(number, None)
        self._looked.pop(number, None)


class Deferral:
    """Holds back requests whose prompt begins with something that another request is just computing.

    In-batch prefix caching of SGLang (schedule_policy.py, pull request 2442): side by side both would
    compute what they share; a little later the second one finds it cached. SGLang puts a request last
    until 32 of its tokens are cached; here what counts is how much of the shared part is still to be
    computed.

    It matters only where a prompt is computed over several steps beside others, that is, with a chunk
    cap or a budget policy: the engine shares a prompt's pages from the step that computes them, and
    without a cap a long prompt leaves no room in its step.

    Args:
        tokens: Hold back for so many shared tokens that are still to be computed; ``None`` never does.
        per_call: Most comparisons of two prompts in one call of ``sift``, which ends where they run out.
    """

    def __init__(self, tokens: int | None, per_call: int) -> None:
        self._tokens = tokens
        self._per_call = per_call
        self._named: dict[int, RequestView] = {}  # chosen in the last call; perhaps placed since
        # Requests whose prompts are being computed, and the tokens each shares with requests that wait.
        self._leaders: dict[int, tuple[RequestView, dict[int, int]]] = {}

    def held(self) -> set[int]:
        """Numbers of the requests known to be held back now. Called before every order."""
        for request in self._named.values():
            self._watch(request)
        self._named.clear()
        for number, (leader, _) in list(self._leaders.items()):
            if not _computing(leader):
                del self._leaders[number]
        return {
            number
            for leader, shared in self._leaders.values()
            for number, tokens in shared.items()
            if self._worthwhile(leader, tokens)
        }

    def sift(self, order: Iterable[RequestView], view: EngineView) -> Iterator[RequestView]:
        """``order`` without those to be held back."""
        left = self._per_call
        for request in order:
            if self._leaders:
                if left <= 0:
                    return
                compared, held = self._compare(request, view)
                left -= compared
                if held:
                    continue
            yield request

    def watch(self, order: Iterable[RequestView]) -> Iterator[RequestView]:
        """``order``, watching whether the prompt of each is computed now."""
        if self._tokens is None:
            yield from order
            return
        for request in order:
            self._named[request.number] = request
            yield request
            self._watch(request)  # the planner has placed it before it asks for another one

    def forget(self, request: RequestView) -> None:
        """The request has ended."""
        self._named.pop(request.number, None)
        self._leaders.pop(request.number, None)
        for _, shared in self._leaders.values():
            shared.pop(request.number, None)

    def _watch(self, request: RequestView) -> None:
        if _computing(request):
            self._leaders.setdefault(request.number, (request, {}))

    def _compare(self, request: RequestView, view: EngineView) -> tuple[int, bool]:
        """Compare a request with those being computed: how many comparisons that took, and whether it must wait."""
        compared = 0
        for leader, shared in self._leaders.values():
            tokens = shared.get(request.number)
            if tokens is None:
                tokens = shared[request.number] = view.shared_prefix(leader, request)
                compared += 1
            if self._worthwhile(leader, tokens):
                return compared, True
        return compared, False

    def _worthwhile(self, leader: RequestView, shared: int) -> bool:
        computed = leader.prompt_tokens + leader.generated_tokens - leader.prefill_left
        return self._tokens is not None and shared - computed >= self._tokens


def _computing(request: RequestView) -> bool:
    """True if the request holds a row, and with it pages, and its prompt is not computed to its end."""
    return request.prefill_left > 0 and request.own_pages > 0
