"""Asking the policies, and checking what they answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import InvalidDecisionError
from .policy import EngineView, PrefillBudget, StepReport
from .policy_guard import Guard

if TYPE_CHECKING:
    from .policy_set import PolicySet
    from .prefix import Node
    from .request import Request

_END = object()


class PolicyHost:
    """The policies of an engine behind one guard. Loop thread only.

    A hook that raises or answers outside its contract counts as a fault; the engine then does what
    it would do without the policy (arrival order, the whole budget, latest admitted first, least
    recently used), or, with ``strict``, passes the error on.

    Args:
        policies: The policies to begin with.
        guard: Counts their mistakes.
    """

    def __init__(self, policies: PolicySet, guard: Guard) -> None:
        self.guard = guard
        self.use(policies)

    def use(self, policies: PolicySet) -> None:
        """Ask these policies from now on."""
        self.guard.forgive()
        self.policies = policies
        self._order = policies.policy.order
        self._budget = policies.hook("budget", "budget_policy", "policy")
        self._victims = policies.hook("victims", "preemption_policy", "policy")
        self._preempt_for = policies.hook("preempt_for", "policy")
        self._key = policies.eviction_policy.key
        self._begin = policies.hook("begin", "eviction_policy")
        self._on_evict = policies.hook("on_evict", "eviction_policy")
        self._admit = policies.hook("admit", "admission_policy")
        members = list(policies.members())

        def having(hook: str) -> list[Callable[..., Any]]:
            return [getattr(policy, hook) for policy in members if getattr(policy, hook, None) is not None]

        self._annotate = having("annotate")
        self.background = [policy for policy in members if getattr(policy, "run", None) is not None]
        self._on_submit, self._on_step, self._on_finish = having("on_submit"), having("on_step"), having("on_finish")
        self.wants_steps = bool(self._on_step)
        self.makes_way = self._preempt_for is not None
        self.annotates = bool(self._annotate)

    @property
    def faults(self) -> dict[str, int]:
        """Mistakes so far, by hook."""
        return self.guard.faults

    def order(self, waiting: dict[int, Request], view: EngineView) -> Iterator[Request]:
        """The waiting requests in the policy's order, pulled lazily; arrival order after a fault."""
        requests = list(waiting.values())
        seen: set[int] = set()
        if not self.guard.rests("order"):
            try:
                for chosen in self._pull("order", self._order, [request.view for request in requests], view):
                    request = _find(chosen, waiting)
                    if request is None:
                        if any(chosen is known.view for known in requests) and chosen.number not in seen:
                            continue  # it left the waiting set while the policy was being asked
                        raise InvalidDecisionError(f"order() answered {chosen!r}, which is not one of the waiting requests")
                    if request.number in seen:
                        raise InvalidDecisionError(f"order() answered {chosen!r} twice")
                    seen.add(request.number)
                    yield request
                return
            except Exception as exc:
                self.guard.fault("order", exc)
        for request in requests:
            if request.number not in seen and request.number in waiting:
                yield request

    def _pull(self, hook: str, ask: Callable[..., Iterable[Any]], *args: Any) -> Iterator[Any]:
        """The policy's answer to one question, item by item; over its time allowance counts once."""
        answer, spent, slow = None, 0.0, False
        try:
            while True:
                started = time.perf_counter()
                if answer is None:
                    answer = iter(ask(*args))
                chosen = next(answer, _END)
                spent += time.perf_counter() - started
                if spent > self.guard.allowance and not slow:
                    slow = not self.guard.took(hook, spent)
                if chosen is _END:
                    return
                yield chosen
        finally:
            if not slow:  # only now is it known to have been quick
                self.guard.took(hook, min(spent, self.guard.allowance))

    def budget(self, view: EngineView, tokens: int, chunk: int, decode: int) -> PrefillBudget:
        """How much prefill this step may do: ``chunk`` of one request, and in all ``tokens`` less the ``decode`` rows."""
        whole = PrefillBudget(max(0, tokens - decode), chunk)
        if self._budget is None or self.guard.rests("budget"):
            return whole
        try:
            answer = self.guard.timed("budget", self._budget, view)
            if not isinstance(answer, PrefillBudget) or not _whole(answer.tokens, 0) or not _whole(answer.chunk, 1):
                raise InvalidDecisionError(f"budget() answered {answer!r}; need whole numbers, tokens >= 0 and chunk >= 1")
        except Exception as exc:
            self.guard.fault("budget", exc)
            return whole
        most = whole.tokens if answer.decode else tokens
        return PrefillBudget(min(answer.tokens, most), min(answer.chunk, chunk), bool(answer.decode))

    def victims(self, running: list[Request], needed: int, view: EngineView | None) -> Iterator[Request]:
        """Who gives up its row when ``needed`` pages are missing, pulled lazily; every running request once.

        The policy's choices come first; those it leaves out follow, latest admitted first, as do all
        that are left after a fault.
        """
        left = {request.number: request for request in running}
        if self._victims is not None and not self.guard.rests("victims"):
            yield from self._chosen("victims", self._victims, left, [request.view for request in running], needed, view)
        yield from reversed(left.values())

    def preempt_for(self, waiting: Request, running: list[Request], view: EngineView | None) -> list[Request]:
        """Who may lose its row so that ``waiting`` fits, first victim first; nobody else may."""
        if self._preempt_for is None or self.guard.rests("preempt_for"):
            return []
        left, faces = {request.number: request for request in running}, [request.view for request in running]
        return list(self._chosen("preempt_for", self._preempt_for, left, waiting.view, faces, view))

    def _chosen(self, hook: str, ask: Callable[..., Iterable[Any]], left: dict[int, Request], *args: Any) -> Iterator[Request]:
        """The policy's choice among ``left``, which it is taken out of, up to its first mistake."""
        try:
            for answer in self._pull(hook, ask, *args):
                request = _find(answer, left)
                if request is None:
                    raise InvalidDecisionError(f"{hook}() answered {answer!r}, which is not one of the running requests")
                del left[request.number]
                yield request
        except Exception as exc:
            self.guard.fault(hook, exc)

    def eviction_key(self, node: Node) -> EvictionKey:
        """The eviction policy's key for a prefix, made safe to compare."""
        try:
            key = self._key(node)
            bool(key < key)  # one that has no order shows here
        except Exception as exc:
            self.guard.fault("key", exc)
            key = None
        return EvictionKey(key, (node.last_used, -node.depth), self.guard.fault)

    def begin_eviction(self, view: EngineView | None) -> bool:
        """True if the eviction policy wants every key read again."""
        return self._begin is not None and self._tell("begin", self._begin, view) is True

    def on_evict(self, node: Node) -> None:
        """Tell the eviction policy that a prefix, or its tail, goes."""
        if self._on_evict is not None:
            self._tell("on_evict", self._on_evict, node)

    def admit(self, request: Request, view: EngineView) -> str | None:
        """``None``, or why the admission policy refuses the request."""
        if self._admit is None or self.guard.rests("admit"):
            return None
        try:
            reason = self.guard.timed("admit", self._admit, request.view, view)
            if reason is not None and not isinstance(reason, str):
                raise InvalidDecisionError(f"admit() answered {reason!r}; need None or a reason")
        except Exception as exc:
            self.guard.fault("admit", exc)
            return None
        return reason

    async def annotate(self, request: Request) -> None:
        """Attach the hints of every policy that has some."""
        for annotate in self._annotate:
            try:
                hints = await annotate(request.view)
                request.hints = MappingProxyType({**request.hints, **(hints or {})})
            except Exception as exc:
                self.guard.fault("annotate", exc)

    def on_submit(self, request: Request) -> None:
        """Tell of a new request."""
        request.announced = True
        for hook in self._on_submit:
            self._tell("on_submit", hook, request.view)

    def introduce(self, request: Request, known: set[int]) -> None:
        """Tell policies that came later of a request; not those whose ``id`` is in ``known``."""
        for policy in self.policies.members():
            hook = getattr(policy, "on_submit", None)
            if hook is not None and id(policy) not in known:
                self._tell("on_submit", hook, request.view)

    def on_finish(self, request: Request) -> None:
        """Tell that a request that was announced has ended."""
        if request.announced:
            for hook in self._on_finish:
                self._tell("on_finish", hook, request.view)

    def on_step(self, report: StepReport) -> None:
        """Tell what a step served."""
        for hook in self._on_step:
            self._tell("on_step", hook, report)

    def _tell(self, hook: str, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return self.guard.timed(hook, function, argument)
        except Exception as exc:
            self.guard.fault(hook, exc)
            return None


def _find(answer: Any, requests: dict[int, Request]) -> Request | None:
    """The request whose view a policy has answered, if it is one of ``requests``."""
    number = getattr(answer, "number", None)
    request = requests.get(number) if isinstance(number, int) else None
    return request if request is not None and request.view is answer else None


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


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
