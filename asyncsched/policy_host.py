"""Asking the policies, and checking what they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .errors import InvalidDecisionError
from .logs import get_logger
from .policy import EngineView, PrefillBudget, StepReport

if TYPE_CHECKING:
    from .config import EngineConfig
    from .radix import Node
    from .request import Request

from .registry import load_policy


class PolicyHost:
    """The three policies of an engine behind one guard. Loop thread only.

    A hook that raises or answers outside its contract counts as a fault; the engine then does what
    it would do without the policy (arrival order, the whole budget, least recently used), or, with
    ``strict``, passes the error on.

    Attributes:
        faults: Mistakes so far, by hook.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.strict = config.strict_policies
        self.faults: dict[str, int] = {}
        self._log = get_logger("policy")
        self.scheduling = load_policy(config.policy, "order")
        self.eviction = load_policy(config.eviction_policy, "key")
        self.admission = None if config.admission_policy is None else load_policy(config.admission_policy, "admit")
        self._budget: Callable[[EngineView], PrefillBudget] | None = getattr(self.scheduling, "budget", None)
        self._victims: Callable[[Any, int, EngineView], Iterable[Any]] | None = getattr(self.scheduling, "victims", None)
        self._on_submit: Callable[[Any], None] | None = getattr(self.scheduling, "on_submit", None)
        self._on_step: Callable[[StepReport], None] | None = getattr(self.scheduling, "on_step", None)
        self._on_finish: Callable[[Any], None] | None = getattr(self.scheduling, "on_finish", None)

    @property
    def wants_steps(self) -> bool:
        """True if the scheduling policy listens to step reports."""
        return self._on_step is not None

    def order(self, waiting: dict[int, Request], view: EngineView) -> Iterator[Request]:
        """The waiting requests in the policy's order, pulled lazily; arrival order after a fault."""
        requests = list(waiting.values())
        by_view = {id(request.view): request for request in requests}
        seen: set[int] = set()
        try:
            answer: Iterable[Any] = self.scheduling.order([request.view for request in requests], view)
            for chosen in answer:
                request = by_view.get(id(chosen))
                if request is None or request.number in seen:
                    raise InvalidDecisionError(f"order() answered {chosen!r}, which is not one of the waiting requests")
                if request.number not in waiting:
                    continue  # it left the waiting set while the policy was being asked
                seen.add(request.number)
                yield request
        except Exception as exc:
            self._fault("order", exc)
            for request in requests:
                if request.number not in seen and request.number in waiting:
                    yield request

    def budget(self, view: EngineView, tokens: int, chunk: int) -> PrefillBudget:
        """How much prefill this step may do: at most ``tokens`` in all, ``chunk`` of one request."""
        if self._budget is None:
            return PrefillBudget(tokens, chunk)
        try:
            answer = self._budget(view)
            whole = isinstance(answer, PrefillBudget) and isinstance(answer.tokens, int) and isinstance(answer.chunk, int)
            if not whole or answer.tokens < 0 or answer.chunk < 1:
                raise InvalidDecisionError(f"budget() answered {answer!r}; need whole numbers, tokens >= 0 and chunk >= 1")
        except Exception as exc:
            self._fault("budget", exc)
            return PrefillBudget(tokens, chunk)
        return PrefillBudget(min(answer.tokens, tokens), min(answer.chunk, chunk))

    def victims(self, running: list[Request], needed: int, view: EngineView | None) -> list[Request]:
        """Who gives up its row when ``needed`` pages are missing, first victim first; every running request once.

        The policy's choices come first; those it leaves out follow, latest admitted first.
        """
        chosen: list[Request] = []
        if self._victims is not None and view is not None:
            by_view = {request.number: request for request in running}
            try:
                for answer in self._victims([request.view for request in running], needed, view):
                    request = by_view.pop(getattr(answer, "number", -1), None)
                    if request is None or request.view is not answer:
                        raise InvalidDecisionError(f"victims() answered {answer!r}, which is not one of the running requests")
                    chosen.append(request)
            except Exception as exc:
                self._fault("victims", exc)
        return chosen + [request for request in reversed(running) if request not in chosen]

    def eviction_key(self, node: Node) -> EvictionKey:
        """The eviction policy's key for a prefix, made safe to compare."""
        try:
            key = self.eviction.key(node)
            bool(key < key)  # one that has no order shows here
        except Exception as exc:
            self._fault("key", exc)
            key = None
        return EvictionKey(key, (node.last_used, -node.depth), self._fault)

    def admit(self, request: Request, view: EngineView) -> str | None:
        """``None``, or why the admission policy refuses the request."""
        if self.admission is None:
            return None
        try:
            reason = self.admission.admit(request.view, view)
            if reason is not None and not isinstance(reason, str):
                raise InvalidDecisionError(f"admit() answered {reason!r}; need None or a reason")
        except Exception as exc:
            self._fault("admit", exc)
            return None
        return reason

    @property
    def annotates(self) -> bool:
        """True if the admission policy attaches hints."""
        return getattr(self.admission, "annotate", None) is not None

    async def annotate(self, request: Request) -> None:
        """Attach the admission policy's hints."""
        try:
            hints = await self.admission.annotate(request.view)  # type: ignore[union-attr]
            request.hints = {**request.hints, **(hints or {})}
        except Exception as exc:
            self._fault("annotate", exc)

    def on_submit(self, request: Request) -> None:
        """Tell the scheduling policy of a new request."""
        request.announced = True
        if self._on_submit is not None:
            self._tell("on_submit", self._on_submit, request.view)

    def on_finish(self, request: Request) -> None:
        """Tell the scheduling policy that a request it was told of has ended."""
        if self._on_finish is not None and request.announced:
            self._tell("on_finish", self._on_finish, request.view)

    def on_step(self, report: StepReport) -> None:
        """Tell the scheduling policy what a step served."""
        if self._on_step is not None:
            self._tell("on_step", self._on_step, report)

    def _tell(self, hook: str, function: Callable[[Any], None], argument: Any) -> None:
        try:
            function(argument)
        except Exception as exc:
            self._fault(hook, exc)

    def _fault(self, hook: str, exc: Exception) -> None:
        if self.strict:
            raise exc
        self.faults[hook] = count = self.faults.get(hook, 0) + 1
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th … time: a policy that always fails must not flood the log
            self._log.warning("policy_fault", hook=hook, error=repr(exc), count=count)


class EvictionKey:
    """A policy's eviction key; keys that cannot be compared are ordered by least recent use instead.

    Args:
        key: What the policy answered; ``None`` if it raised.
        fallback: Step of the last use and negated depth.
        fault: Told of keys that cannot be compared.
    """

    __slots__ = ("_fallback", "_fault", "_key")

    def __init__(self, key: Any, fallback: tuple[int, int], fault: Callable[[str, Exception], None]) -> None:
        self._key = key
        self._fallback = fallback
        self._fault = fault

    def __lt__(self, other: EvictionKey) -> bool:
        if self._key is not None and other._key is not None:
            try:
                return bool(self._key < other._key)
            except Exception as exc:
                self._fault("key", exc)
        return self._fallback < other._fallback

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EvictionKey):
            return NotImplemented
        if self._key is not None and other._key is not None:
            try:
                return bool(self._key == other._key)
            except Exception as exc:
                self._fault("key", exc)
        return self._fallback == other._fallback

    __hash__ = None  # type: ignore[assignment]  # ordered, not looked up
