"""Asking one policy as the engine does, and writing down what is wrong with its answers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from math import isnan
from typing import Any

from ..policy import PrefillBudget, StepReport
from ..policy_set import HOOKS, PolicySet
from .fake_views import FakePrefix, FakeRequest, FakeView

_END = object()


class Questions:
    """The hooks of a policy that is used for some kinds of decisions.

    Nothing that a hook raises or answers gets out of here: of each hook the first mistake is written down.

    Args:
        policy: The policy.
        kinds: The engine options that it is used for.
        watch: Compare everything a policy was shown before and after each question.

    Attributes:
        hooks: The deciding hooks that it has, by name.
        members: The policy and those it wraps.
        answers: Everything it has answered, in plain values.
        problems: Hook → its first mistake.
        changes: Hook → what it changed of what it was shown, the first time.
        spent: Hook → seconds so far.
        step: For the texts; kept up to date by whoever asks.
    """

    def __init__(self, policy: Any, kinds: Collection[str], *, watch: bool = False) -> None:
        policies = PolicySet(**{kind: policy if kind in kinds else None for kind in HOOKS})
        sought = {
            "order": policies.hook("order", "policy"),
            "preempt_for": policies.hook("preempt_for", "policy"),
            "budget": policies.hook("budget", "budget_policy", "policy"),
            "victims": policies.hook("victims", "preemption_policy", "policy"),
            "key": policies.hook("key", "eviction_policy"),
            "begin": policies.hook("begin", "eviction_policy"),
            "on_evict": policies.hook("on_evict", "eviction_policy"),
            "admit": policies.hook("admit", "admission_policy"),
        }
        self.hooks: dict[str, Callable[..., Any]] = {name: hook for name, hook in sought.items() if hook is not None}
        self.members = list(policies.members())
        self.answers: list[tuple[Any, ...]] = []
        self.problems: dict[str, str] = {}
        self.changes: dict[str, str] = {}
        self.spent: dict[str, float] = {}
        self.step = 0
        self._watch = watch

    @property
    def evicts(self) -> bool:
        """True if it decides which prefix goes."""
        return "key" in self.hooks

    def order(self, waiting: Sequence[FakeRequest], view: FakeView) -> Iterator[FakeRequest]:
        """The waiting requests in the policy's order, pulled one by one; arrival order after a mistake."""
        answered = set()
        if "order" in self.hooks:
            for request in self._checked("order", waiting, view, list(waiting), view):
                answered.add(request.number)
                self.answers.append(("order", request.number))
                yield request
            if "order" not in self.problems:
                return
        yield from (request for request in waiting if request.number not in answered)

    def victims(self, running: Sequence[FakeRequest], pages: int, view: FakeView) -> list[FakeRequest]:
        """Who gives up its row; empty without an opinion."""
        return self._chosen("victims", running, view, list(running), pages, view)

    def preempt_for(self, request: FakeRequest, running: Sequence[FakeRequest], view: FakeView) -> list[FakeRequest]:
        """Who may lose its row for a waiting request; empty without an opinion."""
        return self._chosen("preempt_for", running, view, request, list(running), view)

    def budget(self, view: FakeView) -> PrefillBudget | None:
        """The split of a step; ``None`` without a possible answer."""
        if "budget" not in self.hooks:
            return None
        answer = self._ask("budget", view)
        if not isinstance(answer, PrefillBudget) or not _whole(answer.tokens, 0) or not _whole(answer.chunk, 1):
            self.problem("budget", f"answered {answer!r}; answer a PrefillBudget of whole numbers, tokens >= 0 and chunk >= 1")
            return None
        self.answers.append(("budget", answer.tokens, answer.chunk, bool(answer.decode)))
        return answer

    def admit(self, request: FakeRequest, view: FakeView) -> bool:
        """Whether a request may enter."""
        if "admit" not in self.hooks:
            return True
        reason = self._ask("admit", request, view)
        if reason is not None and not isinstance(reason, str):
            self.problem("admit", f"answered {reason!r}; answer None, or the reason for refusing as text")
        self.answers.append(("admit", request.number, reason))
        return reason is None

    def key(self, prefix: FakePrefix) -> Any:
        """The eviction key of a prefix; ``None`` after a mistake."""
        key = self._ask("key", prefix)
        try:
            bool(key < key)
        except Exception as exc:
            self.problem("key", f"answered {key!r}, which has no order ({exc}); answer numbers, texts or tuples of them")
            return None
        if _has_nan(key):
            self.problem("key", f"answered {key!r}; a NaN in a key breaks every order")
            return None
        return key

    def begin(self, view: FakeView) -> bool:
        """Whether the keys are to be read again."""
        again = self._ask("begin", view) if "begin" in self.hooks else False
        if not isinstance(again, bool):
            self.problem("begin", f"answered {again!r}; answer True to have every key read again, else False")
        return again is True

    def on_evict(self, prefix: FakePrefix) -> None:
        """Tell that a prefix goes."""
        if "on_evict" in self.hooks:
            self._ask("on_evict", prefix)

    def tell(self, hook: str, argument: Any) -> None:
        """Call a hook of the policy and of those it wraps."""
        for member in self.members:
            function = getattr(member, hook, None)
            if function is not None:
                self._call(hook, function, argument)

    def problem(self, hook: str, what: str) -> None:
        """Write down a mistake, the first of each hook."""
        self.problems.setdefault(hook, f"{hook}() {what} [step {self.step}]")

    def _ask(self, hook: str, *args: Any) -> Any:
        return self._call(hook, self.hooks[hook], *args)

    def _call(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        before = snapshot(args) if self._watch else ()
        answer = None
        try:
            answer = self._timed(hook, function, *args)
        except Exception as exc:
            self.problem(hook, f"raised {exc!r}")
        if self._watch:
            self._compare(hook, before, snapshot(args))
        return answer

    def _timed(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.spent[hook] = self.spent.get(hook, 0.0) + time.perf_counter() - started

    def _chosen(self, hook: str, running: Sequence[FakeRequest], view: FakeView, *args: Any) -> list[FakeRequest]:
        if hook not in self.hooks:
            return []
        chosen = list(self._checked(hook, running, view, *args))
        self.answers.append((hook, *(request.number for request in chosen)))
        return chosen

    def _checked(self, hook: str, given: Sequence[FakeRequest], view: FakeView, *args: Any) -> Iterator[FakeRequest]:
        """A policy's answer, request by request, up to its first mistake."""
        left = {request.number: request for request in given}
        known = left.copy()
        before = snapshot((given, view)) if self._watch else ()
        try:
            answer = self._timed(hook, lambda: iter(self.hooks[hook](*args)))
            while True:
                chosen = self._timed(hook, next, answer, _END)
                if self._watch:
                    self._compare(hook, before, snapshot((given, view)))
                if chosen is _END:
                    return
                number = getattr(chosen, "number", None)
                if not isinstance(number, int) or known.get(number) is not chosen:
                    self.problem(hook, f"answered {chosen!r}, which it was not given; answer with those objects themselves")
                    return
                request = left.pop(number, None)
                if request is None:
                    self.problem(hook, f"answered request {number} twice in one call")
                    return
                yield request
                if self._watch:
                    before = snapshot((given, view))  # between two answers the engine has acted on the first
        except Exception as exc:
            self.problem(hook, f"raised {exc!r}")

    def _compare(self, hook: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
        if before != after:
            changed = next(f"{old} became {new}" for old, new in zip(before, after, strict=True) if old != new)
            self.changes.setdefault(
                hook, f"{hook}() changed what it was shown ({changed}); keep notes in the policy, by request number"
            )


def snapshot(shown: Any) -> tuple[Any, ...]:
    """All values of the views in ``shown``, copied: ``(what, attribute, value)`` each."""
    found: list[Any] = []
    views: list[Any] = []
    for item in shown:
        if isinstance(item, FakeView):
            views += [item, *item.running, *item.waiting]
        else:
            views += item if isinstance(item, list | tuple) else [item]
    for view in views:
        if isinstance(view, FakeRequest | FakePrefix):
            for field in fields(view):
                value = getattr(view, field.name)
                found.append((field.name, copy.deepcopy(dict(value)) if field.name == "hints" else value))
        elif isinstance(view, FakeView):
            found += [("step", view.step), ("now", view.now), ("cached", dict(view.cached)), ("free_pages", view.free_pages)]
        elif isinstance(view, StepReport):
            found.append(("report", copy.deepcopy(view)))
    return tuple(found)


def _has_nan(key: Any) -> bool:
    if isinstance(key, tuple):
        return any(_has_nan(part) for part in key)
    return isinstance(key, float) and isnan(key)


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
