"""The conformance kit: it passes what keeps the rules, and each check finds the policy that breaks its rule."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from asyncsched.errors import ConfigError
from asyncsched.policies.lpm import LPM
from asyncsched.policy import EngineView, PrefillBudget, PrefixView, RequestView, StepReport
from asyncsched.policy_set import HOOKS
from asyncsched.testing import ConformanceError, ConformanceReport, FakePrefix, FakeRequest, FakeView, check_policy
from asyncsched.testing.conformance_checks import Subject, answers, lifecycle, purity

Waiting = Sequence[RequestView]
ALL = ("form", "options", "answers", "determinism", "purity", "lifecycle", "starvation", "memory", "engine")


class ShortestFirst:
    """Short prompts first, old requests before all others: a policy as somebody might write it."""

    api_version = 1

    def __init__(self, age_steps: int = 64) -> None:
        self.age_steps = age_steps

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        def rank(request: RequestView) -> tuple[int, int]:
            aged = view.step - request.waiting_since_step >= self.age_steps
            return (0 if aged else 1 + request.prompt_tokens, request.number)

        return sorted(waiting, key=rank)


def check(factory: Any, **options: Any) -> ConformanceReport:
    return check_policy(factory, cost=False, patience=600, **options)


def failing(factory: Any, **options: Any) -> dict[str, str]:
    """The checks that fail, with what they say."""
    with pytest.raises(ConformanceError) as caught:
        check(factory, **options)
    for name, text in caught.value.failures:
        assert f"- {name}: {text}" in str(caught.value)
    return dict(caught.value.failures)


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the check that takes longest, where it has nothing to say."""
    monkeypatch.setattr("asyncsched.testing.conformance.engine", lambda subject, backend: [])


def findings(check: Callable[[Subject], list[str]], factory: Any) -> str:
    """What one check alone has to say."""
    kinds = tuple(kind for kind, hook in HOOKS.items() if hasattr(factory, hook))
    return "\n".join(check(Subject(factory, kinds, patience=600, waiting=50, seed=0)))


QUICKLY = pytest.mark.usefixtures("without_engine")


class Ordered(ShortestFirst):
    """Arrival order, for subclasses that do something wrong."""

    def __init__(self) -> None:
        super().__init__()

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting


# What passes


def test_a_plain_policy_passes_every_check() -> None:
    report = check(ShortestFirst)
    assert report.policy == f"{__name__}:ShortestFirst"
    assert report.kinds == ("policy",)
    assert report.passed == ALL
    assert (report.waiver, dict(report.microseconds)) == (None, {})
    assert "ShortestFirst as policy: passed form" in str(report)


@QUICKLY
@pytest.mark.parametrize(
    "factory", ["lpm", {"name": "lpm", "age_steps": 100}, "asyncsched.policies.lpm:LPM", LPM, lambda: LPM()]
)
def test_whatever_makes_a_policy_can_be_checked(factory: Any) -> None:
    assert check(factory).policy == "asyncsched.policies.lpm:LPM"


def test_another_event_loop() -> None:
    assert check(ShortestFirst, backend="trio").passed == ALL


@QUICKLY
def test_the_kinds_are_found_by_the_hooks() -> None:
    class Everything(ShortestFirst):
        def budget(self, view: EngineView) -> PrefillBudget:
            return PrefillBudget(max(1, view.token_budget - view.decoding), 32)

        def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
            return reversed(running)

        def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterator[RequestView]:
            yield from (candidate for candidate in running if candidate.priority > request.priority)

        def key(self, prefix: PrefixView) -> int:
            return prefix.last_used

        def admit(self, request: RequestView, view: EngineView) -> str | None:
            return "too long" if request.prompt_tokens > 1000 else None

        async def annotate(self, request: RequestView) -> dict[str, Any]:
            return {"seen": True}

    kinds = ("policy", "budget_policy", "preemption_policy", "eviction_policy", "admission_policy")
    assert check(Everything).kinds == kinds
    assert check(Everything, kind="eviction_policy").kinds == ("eviction_policy",)
    assert check(Everything, kind=["policy", "admission_policy"]).kinds == ("policy", "admission_policy")


@QUICKLY
def test_a_waived_check_is_left_out_and_reported() -> None:
    class Unfair(ShortestFirst):
        starvation = "waived: an offline queue is finite"

        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            return sorted(waiting, key=lambda request: request.prompt_tokens)

    report = check(Unfair)
    assert report.waiver == "waived: an offline queue is finite"
    assert report.passed == tuple(name for name in ALL if name != "starvation")
    Unfair.starvation = "waived"
    assert set(failing(Unfair)) == {"starvation"}, "a waiver needs a reason"


@QUICKLY
def test_what_is_measured_is_reported() -> None:
    report = check_policy(ShortestFirst, waiting=50, allowance=1e9)
    assert report.passed == (*ALL, "cost")
    assert report.microseconds["order"] > 0
    assert report.microseconds["total"] >= report.microseconds["order"]
    assert "µs per step with 50 waiting (order " in str(report)


# What fails


@QUICKLY
def test_too_slow() -> None:
    with pytest.raises(
        ConformanceError, match=r"- cost: .* per step with 50 waiting, most of it in order\(\), where 0 are allowed"
    ):
        check_policy(ShortestFirst, waiting=50, allowance=0.0)


class Doorkeeper:
    """Lets everybody in, after a while, by its own stopwatch."""

    api_version = 1

    def __init__(self) -> None:
        self.seconds = 0.0

    def admit(self, request: RequestView, view: EngineView) -> None:
        self.seconds += 1.0


@QUICKLY
def test_admission_is_timed_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come between two steps; and it does not count as a part of the step."""
    keepers: list[Doorkeeper] = []

    def keeper() -> Doorkeeper:
        keepers.append(Doorkeeper())
        return keepers[-1]

    monkeypatch.setattr("asyncsched.testing.questions.time.perf_counter", lambda: sum(one.seconds for one in keepers))
    report = check_policy(keeper, waiting=50, allowance=1.5)
    assert report.microseconds == {"admit": 1e6, "total": 0.0}
    assert "1000000.0 µs per call of admit" in str(report)
    with pytest.raises(ConformanceError, match=r"- cost: 1000000 µs per call of admit\(\) with 50 waiting, where 900000 are"):
        check_policy(keeper, waiting=50, allowance=0.9)


def test_a_policy_must_be_made_afresh_for_every_check() -> None:
    with pytest.raises(TypeError, match="pass its class"):
        check(ShortestFirst())


def test_an_unknown_kind() -> None:
    with pytest.raises(TypeError, match="use policy, budget_policy"):
        check(ShortestFirst, kind="scheduling")


class Unversioned:
    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting


class Newer(Ordered):
    api_version = 99


class Undecided:
    api_version = 1


class Awaiting:
    api_version = 1

    async def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting


class Impatient(Ordered):
    def run(self, view: EngineView) -> None:
        """A background job that is no coroutine."""


class Picky(Ordered):
    def __init__(self) -> None:
        raise ConfigError("picky: no")


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Unversioned, "add `api_version = 1`"),
        (Newer, "api_version is 99"),
        (Undecided, "none of the methods order, budget"),
        (Awaiting, r"order\(\) is asynchronous"),
        (Impatient, r"run\(\) is no coroutine function"),
        (Picky, "no policy could be made: picky: no"),
        ("no-such-policy", "no policy could be made: no policy named"),
    ],
)
def test_form(factory: Any, text: str) -> None:
    with pytest.raises(ConformanceError, match=text) as caught:
        check(factory)
    assert {name for name, _ in caught.value.failures} == {"form"}


def test_the_hook_of_the_kind_must_be_there() -> None:
    assert failing(ShortestFirst, kind="eviction_policy") == {"form": "it has no method key(), which a eviction_policy needs"}


class Secretive(Ordered):
    def __init__(self, size: int = 1) -> None:
        self._size = size


class Locked(Ordered):
    def __init__(self, lock: Any = None) -> None:
        self.lock = lock or threading.Lock()


class Drifting(Ordered):
    def __init__(self, size: int = 1) -> None:
        self.size = size + 1


@dataclass(eq=False)
class Narrow:
    low: int = 5
    high: int = 1
    api_version = 1

    def __post_init__(self) -> None:
        if self.low > 5:
            raise ConfigError("low is too high")
        self.low += 1

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting


@QUICKLY
@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Secretive, "keep every option in an attribute of its name"),
        (Locked, "cannot be written as JSON"),
        (Drifting, "keep them as they are given"),
        (Narrow, "no policy can be made of its own options"),
    ],
)
def test_options(factory: Any, text: str) -> None:
    failures = failing(factory)
    assert set(failures) == {"options"}
    assert text in failures["options"]


@QUICKLY
def test_options_that_are_functions_or_policies_need_no_json() -> None:
    class Wrapping(Ordered):
        def __init__(self, predict: Callable[[RequestView], int] = lambda request: 3, within: Any = None) -> None:
            self.predict = predict
            self.within = within or ShortestFirst()

    assert check(Wrapping).passed == ALL


class Twice(Ordered):
    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return [*waiting, *waiting]


class Strange(Ordered):
    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return [FakeRequest(number=request.number) for request in waiting]


class Dividing(Ordered):
    def budget(self, view: EngineView) -> PrefillBudget:
        return PrefillBudget(view.token_budget // len(view.running), 1)


class Chunkless(Ordered):
    def budget(self, view: EngineView) -> PrefillBudget:
        return PrefillBudget(view.token_budget, 0)


class Greedy(Ordered):
    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterator[RequestView]:
        for _ in range(2):
            yield from running


class Eager(Ordered):
    def preempt_for(self, request: RequestView, running: Waiting, view: EngineView) -> Iterable[RequestView]:
        return [request]


class Evicting:
    api_version = 1

    def key(self, prefix: PrefixView) -> Any:
        return prefix.last_used


class NotANumber(Evicting):
    def key(self, prefix: PrefixView) -> Any:
        return prefix.hits, float("nan")


class Unsortable(Evicting):
    def key(self, prefix: PrefixView) -> Any:
        return prefix.program_id if prefix.hits else prefix.last_used


class Vague(Evicting):
    def begin(self, view: EngineView) -> Any:
        return None


class Admitting:
    api_version = 1

    def admit(self, request: RequestView, view: EngineView) -> Any:
        return request.prompt_tokens < 100


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Twice, "twice in one call"),
        (Strange, "which it was not given"),
        (Dividing, r"budget() raised ZeroDivisionError"),
        (Chunkless, "budget() answered PrefillBudget(tokens="),
        (Greedy, "victims() answered request"),
        (Eager, "preempt_for() answered"),
        (NotANumber, "a NaN in a key"),
        (Unsortable, "no order"),
        (Vague, "begin() answered None; answer True"),
        (Admitting, "answer None, or the reason"),
    ],
)
def test_answers(factory: Any, text: str) -> None:
    assert text in findings(answers, factory)


class Dicing(ShortestFirst):
    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        answer = list(waiting)
        if view.step % 50:  # now and then it behaves, so that nobody starves
            random.shuffle(answer)
        return answer


class Counting(ShortestFirst):
    calls = count()

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting if next(self.calls) % 3 else list(waiting)[::-1]


class Tossing(Evicting):
    def key(self, prefix: PrefixView) -> Any:
        return random.random()


@QUICKLY
@pytest.mark.parametrize("factory", [Dicing, Counting, Tossing])
def test_determinism(factory: Any) -> None:
    failures = failing(factory)
    assert set(failures) == {"determinism"}
    assert "no random numbers" in failures["determinism"]


class Annotating(Ordered):
    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        for request in waiting:
            if "notes" in request.hints:
                request.hints["notes"].append(view.step)
        return waiting


class Promoting(Ordered):
    def victims(self, running: Waiting, pages: int, view: EngineView) -> Iterable[RequestView]:
        for request in running:
            object.__setattr__(request, "preemptions", 0)
        return running


class Burning(Evicting):
    def key(self, prefix: PrefixView) -> Any:
        object.__setattr__(prefix, "tokens", 0)
        return prefix.last_used


class Tallying(Ordered):
    def on_step(self, report: StepReport) -> None:
        report.prefill[0] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (Annotating, "order() changed what it was shown (('hints', "),
        (Promoting, "victims() changed what it was shown (('preemptions', "),
        (Burning, "key() changed what it was shown (('tokens', "),
        (Tallying, "on_step() changed what it was shown"),
    ],
)
def test_purity(factory: Any, text: str) -> None:
    assert text in findings(purity, factory)


def test_views_of_the_kit_refuse_to_be_written() -> None:
    class Writing(Ordered):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            for request in waiting:
                request.hints["seen"] = True  # type: ignore[index]
            return waiting

    assert "does not support item assignment" in findings(answers, Writing)
    for view in (FakeRequest(number=1), FakeView(), FakePrefix()):
        for name in ("number", "step", "tokens", "notes"):
            with pytest.raises(AttributeError):
                setattr(view, name, 1)


class Dropping(ShortestFirst):
    """Takes a request that has begun for served, and does not know it any more when it comes back."""

    def __init__(self) -> None:
        super().__init__()
        self._queue: dict[int, RequestView] = {}

    def on_submit(self, request: RequestView) -> None:
        self._queue[request.number] = request

    def on_finish(self, request: RequestView) -> None:
        self._queue.pop(request.number, None)

    def on_step(self, report: StepReport) -> None:
        for number in report.prefill:
            self._queue.pop(number, None)

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return [request for request in waiting if request.number in self._queue]


class Confused(ShortestFirst):
    """Does not expect a request to be cancelled while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._started: set[int] = set()

    def on_step(self, report: StepReport) -> None:
        self._started.update(report.prefill)

    def on_finish(self, request: RequestView) -> None:
        self._started.remove(request.number)


@QUICKLY
def test_lifecycle_after_a_preemption() -> None:
    failures = failing(Dropping)
    assert set(failures) == {"lifecycle"}
    assert "preempted" in failures["lifecycle"]


def test_lifecycle_with_a_cancellation() -> None:
    assert "on_finish() raised KeyError" in findings(lifecycle, Confused)


def preferring(rank: Callable[[RequestView, EngineView], Any]) -> type[Ordered]:
    """A policy that orders by ``rank`` for ever."""

    class Preferring(Ordered):
        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            return sorted(waiting, key=lambda request: (rank(request, view), request.number))

    return Preferring


@QUICKLY
@pytest.mark.parametrize(
    ("rank", "newcomers"),
    [
        (lambda request, view: request.prompt_tokens, "shorter"),
        (lambda request, view: -view.cached_prefix(request), "better cached"),
        (lambda request, view: request.priority, "of a higher class"),
        (lambda request, view: request.tenant != "favourite", "of another tenant"),
        (lambda request, view: request.deadline or 1e9, "of earlier deadlines"),
    ],
)
def test_starvation(rank: Callable[[RequestView, EngineView], Any], newcomers: str) -> None:
    with pytest.raises(ConformanceError) as caught:
        check(preferring(rank))
    ((name, text),) = caught.value.failures
    assert name == "starvation"
    assert f"was not served within 600 steps of a flood of newcomers {newcomers} (" in text


@QUICKLY
def test_starvation_by_the_latest_first_in_every_flood() -> None:
    with pytest.raises(ConformanceError) as caught:
        check(preferring(lambda request, view: -request.number))
    assert [name for name, _ in caught.value.failures] == ["starvation"] * 7


@QUICKLY
def test_starvation_by_a_budget() -> None:
    class Closed:
        api_version = 1

        def budget(self, view: EngineView) -> PrefillBudget:
            return PrefillBudget(0, 1)

    assert {"starvation", "lifecycle"} == set(failing(Closed))


class Collecting(ShortestFirst):
    def __init__(self) -> None:
        super().__init__()
        self._tenants: dict[str, int] = {}

    def on_submit(self, request: RequestView) -> None:
        self._tenants[request.tenant] = request.number


class Recalling(ShortestFirst):
    """Forgets a request when it ends, and learns of it again from a report that comes later."""

    def __init__(self) -> None:
        super().__init__()
        self._served: dict[int, int] = {}

    def on_step(self, report: StepReport) -> None:
        for number in report.sampled:
            self._served[number] = self._served.get(number, 0) + 1

    def on_finish(self, request: RequestView) -> None:
        self._served.pop(request.number, None)


class Hoarding(Evicting):
    def __init__(self) -> None:
        self._known: list[PrefixView] = []

    def on_evict(self, prefix: PrefixView) -> None:
        self._known.append(prefix)


@QUICKLY
@pytest.mark.parametrize("factory", [Collecting, Recalling, Hoarding])
def test_memory(factory: Any) -> None:
    failures = failing(factory)
    assert set(failures) == {"memory"}
    assert "forget them in on_finish" in failures["memory"]


@QUICKLY
def test_a_bounded_memory_may_fill_up_slowly() -> None:
    class Remembering(ShortestFirst):
        def __init__(self) -> None:
            super().__init__()
            self._last: list[float] = []

        def on_submit(self, request: RequestView) -> None:
            self._last = [*self._last[-1500:], request.arrived_at]

    assert check(Remembering).passed == ALL


def test_engine() -> None:
    class Fastidious(Ordered):
        """Works on the kit's views only."""

        def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
            if not isinstance(view, FakeView):
                raise RuntimeError("not what I was tested with")
            return waiting

    failures = failing(Fastidious)
    assert set(failures) == {"engine"}
    assert "faults of order()" in failures["engine"]


# Views to test with


def test_fake_views_are_complete() -> None:
    for fake, protocol in ((FakeRequest(number=1), RequestView), (FakePrefix(), PrefixView), (FakeView(), EngineView)):
        wanted = {name for name in vars(protocol) if not name.startswith("_")}
        assert wanted <= set(dir(fake)), f"{type(fake).__name__} lacks {wanted - set(dir(fake))}"


def test_a_fake_view_adds_up() -> None:
    running = [
        FakeRequest(number=1, prompt_tokens=10, generated_tokens=5, prefill_left=0),
        FakeRequest(number=2, prompt_tokens=30, prefill_left=8),
    ]
    waiting = [FakeRequest(number=3, prompt_tokens=7), FakeRequest(number=4, prompt_tokens=9, hints={"class": "chat"})]
    view = FakeView(running=running, waiting=waiting, total_rows=5, cached={3: 4, 4: 6}, shared={(3, 4): 2})
    assert (view.decoding, view.context_tokens, view.free_rows) == (1, 15, 3)
    assert (view.waiting_count, view.waiting_tokens) == (2, 16)
    assert [view.cached_prefix(request) for request in (*running, *waiting)] == [0, 0, 4, 6]
    assert [view.shared_prefix(waiting[1], other) for other in (waiting[0], running[0])] == [2, 0]
    assert view.prefixes(waiting[0]) == ()
    assert (waiting[0].prefill_left, waiting[1].request_id, waiting[1].hints["class"]) == (7, "request-4", "chat")
