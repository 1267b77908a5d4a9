"""Does a policy keep the rules? For authors of policies, in any test framework or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..policy_set import HOOKS
from ..registry import load_policy
from . import conformance_checks as checks
from . import conformance_form as forms
from . import conformance_load as load
from .conformance_checks import Subject
from .conformance_engine import engine


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What ``check_policy`` has found out about a policy that passed.

    Attributes:
        policy: Its class, as ``module:Class``.
        kinds: The engine options it can be used for.
        passed: Names of the checks.
        waiver: Why it may starve requests, if it says so.
        microseconds: Median per step by hook and ``"total"``, and per call of ``admit``, which is not in the total;
            empty if it was not measured.
        waiting: How many requests waited while that was measured.
    """

    policy: str
    kinds: tuple[str, ...]
    passed: tuple[str, ...]
    waiver: str | None
    microseconds: Mapping[str, float]
    waiting: int

    def __str__(self) -> str:
        lines = [f"{self.policy} as {', '.join(self.kinds)}: passed {', '.join(self.passed)}"]
        if self.waiver is not None:
            lines.append(f"starvation {self.waiver}")
        if self.microseconds:
            per_step = (f"{hook} {spent}" for hook, spent in self.microseconds.items() if hook not in ("total", "admit"))
            lines.append(f"{self.microseconds['total']} µs per step with {self.waiting:,} waiting ({', '.join(per_step)})")
            if "admit" in self.microseconds:
                lines.append(f"{self.microseconds['admit']} µs per call of admit")
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A policy breaks rules; the text lists every check that failed, what was seen, and what to do.

    Attributes:
        failures: ``(check, what was seen)``.
    """

    def __init__(self, policy: str, failures: Collection[tuple[str, str]]) -> None:
        self.failures = tuple(failures)
        super().__init__(f"{policy} fails:" + "".join(f"\n- {check}: {seen}" for check, seen in failures))


def check_policy(
    factory: Any,
    *,
    kind: str | Collection[str] | None = None,
    cost: bool = True,
    waiting: int = 1000,
    allowance: float = 300e-6,
    patience: int = 5000,
    seed: int = 0,
    backend: str = "asyncio",
) -> ConformanceReport:
    """Check that a policy keeps the rules of ``asyncsched.policy``; takes a few seconds. Not inside an event loop.

    ``form``: it has the right ``api_version``, and deciding hooks that can be called without ``await``.
    ``options``: they survive JSON and make an equal policy. ``answers``: in arbitrary situations it
    answers with what it was given, and nothing twice. ``determinism``: what it is shown decides, and
    nothing else. ``purity``: it changes nothing that it is shown. ``lifecycle``: it copes with
    cancellation and preemption, and leaves nobody out for ever. ``starvation``: no flood of
    newcomers that it likes better keeps a request waiting for ever; a class may renounce this by
    ``starvation = "waived: reason"``. ``memory``: it forgets what has ended. ``engine``: with it a real
    engine on a simulated device answers right. ``cost``: it is quick enough.

    Args:
        factory: Makes a fresh policy: its class, a function without parameters, or whatever the engine's
            options take but an instance.
        kind: The engine option, or several, that it is meant for; by default all whose hook it has.
        cost: Measure time, on made-up views, which answer a little faster than an engine's. Leave it out
            where a busy machine must not make a test fail.
        waiting: Requests that wait while time is measured.
        allowance: Seconds that all its hooks may take per step, and ``admit`` per call (medians).
        patience: Steps within which every request must be served.
        seed: Of the arbitrary situations.
        backend: Event loop of the engine, ``"asyncio"`` or ``"trio"``.

    Returns:
        What was checked and measured.

    Raises:
        ConformanceError: a check failed.
    """
    name, make = _maker(factory)
    try:
        policy = make()
    except Exception as exc:
        raise ConformanceError(name, [("form", f"no policy could be made: {exc}")]) from exc
    name = f"{type(policy).__module__}:{type(policy).__qualname__}"
    kinds = _kinds(policy, kind)
    failures = [("form", seen) for seen in forms.form(policy, kinds)]
    if failures:
        raise ConformanceError(name, failures)
    subject = Subject(make, kinds, patience, waiting, seed)
    wanted: dict[str, Callable[[], list[str]]] = {
        "options": lambda: forms.options(policy, HOOKS[kinds[0]]),
        "answers": lambda: checks.answers(subject),
        "determinism": lambda: checks.determinism(subject),
        "purity": lambda: checks.purity(subject),
        "lifecycle": lambda: checks.lifecycle(subject),
        "starvation": lambda: load.starvation(subject),
        "memory": lambda: checks.memory(subject),
        "engine": lambda: engine(subject, backend),
    }
    waiver = forms.waiver(policy)
    if waiver is not None:
        del wanted["starvation"]
    for check, function in wanted.items():
        failures += [(check, seen) for seen in function()]
    microseconds = load.cost(subject) if cost else {}
    if microseconds and microseconds["total"] > allowance * 1e6:
        failures.append(("cost", _too_slow(microseconds, waiting, allowance)))
    if microseconds.get("admit", 0.0) > allowance * 1e6:
        failures.append(("cost", _slow_admission(microseconds["admit"], waiting, allowance)))
    if failures:
        raise ConformanceError(name, failures)
    return ConformanceReport(name, kinds, ("form", *wanted, *(("cost",) if cost else ())), waiver, microseconds, waiting)


def _maker(factory: Any) -> tuple[str, Callable[[], Any]]:
    """What to call it in an error, and a function that makes one."""
    if isinstance(factory, str | Mapping):
        return str(factory), lambda: load_policy(factory, "__init__")  # any method: what it can do is found out later
    if callable(factory):
        return getattr(factory, "__qualname__", repr(factory)), factory
    raise TypeError(f"{factory!r} is one policy; pass its class, or a function that makes a fresh one for every check")


def _kinds(policy: Any, kind: str | Collection[str] | None) -> tuple[str, ...]:
    if kind is None:
        return tuple(option for option, hook in HOOKS.items() if callable(getattr(policy, hook, None)))
    kinds = (kind,) if isinstance(kind, str) else tuple(kind)
    unknown = [option for option in kinds if option not in HOOKS]
    if unknown:
        raise TypeError(f"kind {unknown[0]!r} is not an engine option; use {', '.join(HOOKS)}")
    return kinds


def _too_slow(microseconds: Mapping[str, float], waiting: int, allowance: float) -> str:
    dearest = max((hook for hook in microseconds if hook not in ("total", "admit")), key=microseconds.__getitem__)
    return (
        f"{microseconds['total']:.0f} µs per step with {waiting:,} waiting, most of it in {dearest}(), where "
        f"{allowance * 1e6:.0f} are allowed; compute what does not change in on_submit, use a heap or a generator instead of "
        "sorting everything, and ask for cached_prefix of a few requests per step only"
    )


def _slow_admission(microseconds: float, waiting: int, allowance: float) -> str:
    return (
        f"{microseconds:.0f} µs per call of admit() with {waiting:,} waiting, where {allowance * 1e6:.0f} are allowed; many "
        "may come between two steps, so keep what does not change within one (view.step), or sums that on_submit and on_finish "
        "keep up to date"
    )
