"""What policies are asked and told, what they can decide, and that they can break nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio
import pytest

from asyncsched.errors import AdmissionRejectedError, EngineDeadError, InvalidDecisionError, RejectedError
from asyncsched.policies.lpm import LPM
from asyncsched.policy import EngineView, PrefillBudget, RequestView, StepReport
from asyncsched.testing import check_invariants

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation
from .order_helpers import leftovers

Waiting = Sequence[RequestView]


class Ordered:
    """A scheduling policy with an order of the test's own."""

    def __init__(self, order: Callable[[Waiting, EngineView], Any]) -> None:
        self._order = order

    def order(self, waiting: Waiting, view: EngineView) -> Any:
        return self._order(waiting, view)


class Budgeted:
    """Arrival order and a prefill budget of the test's own."""

    def __init__(self, budget: Callable[[EngineView], Any]) -> None:
        self._budget = budget

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting

    def budget(self, view: EngineView) -> Any:
        return self._budget(view)


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, str, int, int]] = []
        self.finished: list[tuple[int, int]] = []
        self.reports: list[StepReport] = []

    def order(self, waiting: Waiting, view: EngineView) -> Iterable[RequestView]:
        return waiting

    def on_submit(self, request: RequestView) -> None:
        self.submitted.append((request.number, request.request_id, request.prompt_tokens, request.max_tokens))

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_finish(self, request: RequestView) -> None:
        self.finished.append((request.number, request.generated_tokens))


class Admitting:
    """Arrival order inside, and a door of the test's own."""

    def __init__(self, admit: Callable[[RequestView, EngineView], Any]) -> None:
        self._admit = admit

    def admit(self, request: RequestView, view: EngineView) -> Any:
        return self._admit(request, view)


class Annotating(Admitting):
    """Attaches what a coroutine returns."""

    def __init__(
        self, annotate: Callable[[RequestView], Any], admit: Callable[[RequestView, EngineView], Any] | None = None
    ) -> None:
        super().__init__(admit or (lambda request, view: None))
        self._annotate = annotate

    async def annotate(self, request: RequestView) -> Any:
        return await self._annotate(request)


def five(sim: Simulation, **options: Any) -> None:
    """Five requests that need a step each before the next can start (with one row)."""
    for index in range(5):
        sim.send(prompt(4, index), 2, **options)


# Order


async def test_fcfs_serves_in_arrival_order() -> None:
    async with simulation(policy="fcfs", max_rows=2) as sim:
        for index in range(7):
            sim.send(prompt(4, index), 1 + index % 3)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4, 5, 6, 7]


async def test_a_policys_order_is_followed() -> None:
    async with simulation(policy=Ordered(lambda waiting, view: sorted(waiting, key=lambda r: -r.priority)), max_rows=1) as sim:
        for index, priority in enumerate([1, 3, 2, 3]):
            sim.send(prompt(4, index), 2, priority=priority)
        await sim.finish()
        assert sim.joined() == [2, 4, 3, 1]
        assert sim.statistics.policy_faults == {}


async def test_the_answer_is_pulled_no_further_than_needed() -> None:
    pulled: list[int] = []

    def order(waiting: Waiting, view: EngineView) -> Iterator[RequestView]:
        for request in waiting:
            pulled.append(request.number)
            yield request

    async with simulation(policy=Ordered(order), max_rows=2) as sim:
        five(sim)
        await sim.settle()
        assert pulled in ([1, 2], [1, 2, 3])
        await sim.finish()


async def test_policies_see_the_requests_and_the_engine() -> None:
    seen: list[dict[str, Any]] = []

    def order(waiting: Waiting, view: EngineView) -> Waiting:
        for request in waiting:
            seen.append({name: getattr(request, name) for name in dir(request) if not name.startswith("_")})
            seen[-1]["cached"] = view.cached_prefix(request)
        names = ["step", "token_budget", "decoding", "free_rows", "free_pages", "evictable_pages", "total_pages", "page_size"]
        names += ["waiting_count", "waiting_tokens", "total_rows", "context_tokens", "max_model_len"]
        views.append({name: getattr(view, name) for name in names})
        views[-1]["running"] = [request.number for request in view.running]
        views[-1]["waiting"] = [request.number for request in view.waiting]
        return waiting

    views: list[dict[str, Any]] = []
    async with simulation(policy=Ordered(order), depth=1) as sim:
        sim.send(prompt(8, 1), 9)
        await sim.settle()
        await sim.step(2)
        seen.clear()
        views.clear()
        options: dict[str, Any] = {
            "priority": 4,
            "tenant": "acme",
            "deadline": 9.0,
            "ttft_target": 0.5,
            "program_id": "agent",
            "hints": {"class": "x"},
        }
        sim.send(prompt(11, 1), 3, request_id="mine", **options)
        await sim.step()
        (request,) = seen
        assert request["arrived_at"] + 9.0 == pytest.approx(request.pop("deadline"))
        del request["arrived_at"]
        assert request == {
            "number": 2, "request_id": "mine", "prompt_tokens": 11, "max_tokens": 3, "generated_tokens": 0, "prefill_left": 11,
            "preemptions": 0, "own_pages": 0, "first_token_at": None, "ttft_target": 0.5, "tpot_target": None,
            "waiting_since_step": 4, "priority": 4, "tenant": "acme", "program_id": "agent", "hints": {"class": "x"},
            "cached": 8,
        }  # fmt: skip
        assert views == [
            {
                "step": 4, "token_budget": 1024, "decoding": 1, "free_rows": 7, "free_pages": 60, "evictable_pages": 0,
                "total_pages": 64, "page_size": 4, "waiting_count": 1, "running": [1], "waiting": [2], "waiting_tokens": 11,
                "total_rows": 8, "context_tokens": 11, "max_model_len": 128,
            }
        ]  # fmt: skip
        await sim.finish()


async def test_views_cannot_be_written() -> None:
    def order(waiting: Waiting, view: EngineView) -> Waiting:
        for name in ("number", "priority", "hints"):
            with pytest.raises(AttributeError):
                setattr(waiting[0], name, 1)
        with pytest.raises(TypeError):
            waiting[0].hints["a"] = 1  # type: ignore[index]
        with pytest.raises(AttributeError):
            view.step = 3  # type: ignore[misc]
        return waiting

    async with simulation(policy=Ordered(order), strict_policies=True) as sim:
        sim.send(prompt(4), hints={"a": 0})
        await sim.finish()


async def test_reordering_the_sequence_in_place_does_no_harm() -> None:
    def order(waiting: Any, view: EngineView) -> Any:
        waiting.reverse()
        return waiting

    async with simulation(policy=Ordered(order), max_rows=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined() == [5, 4, 3, 2, 1]


# Longest prefix first


async def test_lpm_serves_the_longest_cached_prefix_first() -> None:
    async with simulation(policy="lpm", max_rows=1) as sim:
        sim.send(prompt(16, 1), 1)
        await sim.run_out()
        sim.executor.hold()
        for tokens in (prompt(9, 5), [*prompt(4, 1), 1, 2], [*prompt(16, 1), 1, 2], [*prompt(8, 1), 3, 4], prompt(12, 7)):
            sim.send(tokens, 1)
        await sim.finish()
        assert sim.joined() == [1, 4, 5, 3, 2, 6]


async def test_lpm_without_shared_prefixes_is_arrival_order() -> None:
    async with simulation(policy="lpm", max_rows=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("age_steps", [4, 12, 10_000])
@ONE_LOOP
async def test_lpm_does_not_starve_a_cold_request(age_steps: int) -> None:
    """A flood of requests with a cached prefix never ends; the cold one still starts in time."""
    async with simulation(policy={"name": "lpm", "age_steps": age_steps, "refresh_steps": 1}, max_rows=1, depth=1) as sim:
        hot = prompt(16, 1)
        sim.send(hot, 1)
        await sim.run_out()
        sim.executor.hold()
        for index in range(3):
            sim.send([*hot, index], 2)
        cold = sim.send(prompt(9, 2), 1)
        for index in range(30):
            sim.send([*hot, index, index], 2)
            await sim.step()
        started = [number for number in sim.joined() if number == cold.number]
        if age_steps > 1000:
            assert not started, "without ageing this traffic must starve it, or the test shows nothing"
        else:
            assert sim.join_of(cold.number)[0] <= 2 + age_steps + 4 * 2, "aged, and at most four of two steps were in its way"
        await sim.finish()


async def test_lpm_forgets_requests_that_have_ended() -> None:
    policy = LPM()
    async with simulation(policy=policy, max_rows=1) as sim:
        five(sim)
        aborted = sim.send(prompt(4, 9), 2)
        await sim.settle()
        sim.engine.abort(aborted.stream.request_id)
        await sim.finish()
    assert leftovers(policy) == {}


# An order that is none


class Stranger:
    """Claims to be a waiting request."""

    def __init__(self, number: Any) -> None:
        self.number = number


def half_a_generator(waiting: Waiting, view: EngineView) -> Iterator[RequestView]:
    yield waiting[-1]
    raise RuntimeError("lost my place")


@pytest.mark.parametrize(
    ("order", "error"),
    [
        (lambda waiting, view: 1 / 0, ZeroDivisionError),
        (lambda waiting, view: None, TypeError),
        (lambda waiting, view: 7, TypeError),
        (lambda waiting, view: [object()], InvalidDecisionError),
        (lambda waiting, view: [None, *waiting], InvalidDecisionError),
        (lambda waiting, view: [Stranger(waiting[0].number)], InvalidDecisionError),
        (lambda waiting, view: [Stranger([])], InvalidDecisionError),
        (lambda waiting, view: [Stranger(10_000)], InvalidDecisionError),
        (lambda waiting, view: [request.number for request in waiting], InvalidDecisionError),
        (lambda waiting, view: (1 / 0 for _ in waiting), ZeroDivisionError),
    ],
    ids=["raises", "none", "number", "foreign", "foreign-1st", "impostor", "unhashable", "unknown", "numbers", "generator"],
)
@ONE_LOOP
async def test_an_impossible_order_is_replaced_by_arrival_order(
    order: Callable[[Waiting, EngineView], Any], error: type[Exception]
) -> None:
    async with simulation(policy=Ordered(order), max_rows=2) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4, 5]
        assert sim.statistics.policy_faults["order"] >= 1
    async with simulation(policy=Ordered(order), max_rows=2, strict_policies=True) as sim:
        sent = sim.send(prompt(4), 2)
        sim.executor.unhold()
        with pytest.raises(EngineDeadError, match="control task failed") as caught:
            await sent.stream.result()
        assert isinstance(caught.value.__cause__, error)
        with pytest.raises(EngineDeadError):
            sim.send(prompt(4), 2)


async def test_a_generator_that_raises_midway_keeps_what_it_has_said() -> None:
    async with simulation(policy=Ordered(half_a_generator), max_rows=3, depth=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined()[:3] == [5, 1, 2]
        assert sim.statistics.policy_faults["order"] >= 1


async def test_naming_a_request_twice_is_a_fault() -> None:
    async with simulation(policy=Ordered(lambda waiting, view: [waiting[1], waiting[1], waiting[0]]), max_rows=4) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 2)
        await sim.settle()
        assert sim.joined() == [2, 1, 3]
        assert sim.statistics.policy_faults == {"order": 1}
        await sim.finish()


async def test_a_request_that_has_already_been_served_is_a_fault() -> None:
    stale: list[RequestView] = []

    def order(waiting: Waiting, view: EngineView) -> list[RequestView]:
        stale.extend(waiting)
        return stale

    async with simulation(policy=Ordered(order), max_rows=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined() == [1, 2, 3, 4, 5]
        assert sim.statistics.policy_faults["order"] >= 1


async def test_an_empty_order_never_hangs_the_engine() -> None:
    """Nothing runs and the policy wants nothing: the oldest request is served all the same."""
    answers: list[Any] = [[], (), iter(())]
    for answer in answers:
        async with simulation(policy=Ordered(lambda waiting, view, answer=answer: answer), max_rows=2) as sim:  # type: ignore[misc]
            five(sim)
            await sim.finish()
            assert sim.joined() == [1, 2, 3, 4, 5]
            assert sim.statistics.policy_faults == {}, "letting requests wait is a decision, not a fault"


async def test_what_is_left_out_waits_while_others_run() -> None:
    async with simulation(policy=Ordered(lambda waiting, view: [r for r in waiting if r.number != 1]), max_rows=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.joined() == [2, 3, 4, 5, 1]


async def test_a_policy_may_abort_a_request_while_it_is_asked() -> None:
    """Not a nice thing to do, but callers' code runs there: the request is gone and the rest goes on."""
    sims: list[Simulation] = []

    def order(waiting: Waiting, view: EngineView) -> Iterator[RequestView]:
        for request in waiting:
            if request.number == 2:
                sims[0].engine.abort(request.request_id)
            yield request

    async with simulation(policy=Ordered(order), max_rows=2) as sim:
        sims.append(sim)
        five(sim)
        await sim.finish()
        assert sim.joined() == [1, 3, 4, 5]
        assert sim.statistics.policy_faults == {}


async def test_faults_are_counted_one_by_one() -> None:
    async with simulation(policy=Ordered(lambda waiting, view: 1 / 0), max_rows=1, depth=1) as sim:
        five(sim)
        await sim.finish()
        assert sim.statistics.policy_faults["order"] >= 5


# Budget


async def test_a_budget_limits_prefill() -> None:
    async with simulation(policy=Budgeted(lambda view: PrefillBudget(10, 6)), depth=1) as sim:
        sim.send(prompt(9, 1), 8)
        sim.send(prompt(9, 2), 8)
        await sim.step(2)
        assert sim.shapes()[:2] == [[(1, 0, 6), (2, 0, 4)], [(1, 6, 3), (2, 4, 5)]]
        await sim.finish()


async def test_a_budget_may_put_decoding_first() -> None:
    policy = Budgeted(lambda view: PrefillBudget(0 if view.decoding else 1000, 1000))
    async with simulation(policy=policy) as sim:
        sim.send(prompt(4, 1), 6)
        await sim.settle()
        sim.send(prompt(4, 2), 2)
        await sim.step(3)
        assert sim.joined() == [1]
        await sim.finish()


async def test_a_budget_is_lowered_to_what_the_step_has() -> None:
    async with simulation(policy=Budgeted(lambda view: PrefillBudget(10**9, 10**9)), token_budget=16, chunk_cap=12) as sim:
        for index in range(3):
            sim.send(prompt(40, index), 5)
        await sim.finish()
        assert sim.shapes()[0] == [(1, 0, 12), (2, 0, 4)]
        assert max(size for shape in sim.shapes() for _, _, size in shape) == 12


@pytest.mark.parametrize(
    "answer",
    [None, 100, (10, 10), PrefillBudget(-1, 5), PrefillBudget(5, 0), PrefillBudget(5, -3), PrefillBudget(*"ab"), RuntimeError],
    ids=str,
)
@ONE_LOOP
async def test_an_impossible_budget_is_the_whole_budget(answer: Any) -> None:
    def budget(view: EngineView) -> Any:
        if answer is RuntimeError:
            raise RuntimeError("no idea")
        return answer

    async with simulation(policy=Budgeted(budget)) as sim:
        five(sim)
        await sim.finish()
        assert sim.shapes()[0] == [(number, 0, 4) for number in range(1, 6)]
        assert sim.statistics.policy_faults["budget"] >= 1


@pytest.mark.parametrize("tokens", [2.5, float("nan"), True], ids=str)
@ONE_LOOP
async def test_a_budget_of_no_whole_number_does_no_harm(tokens: Any) -> None:
    async with simulation(policy=Budgeted(lambda view: PrefillBudget(tokens, 4))) as sim:
        five(sim)
        await sim.finish()


async def test_a_budget_of_nothing_never_hangs_the_engine() -> None:
    async with simulation(policy=Budgeted(lambda view: PrefillBudget(0, 1)), token_budget=6) as sim:
        five(sim)
        sim.send(prompt(20, 9), 2)
        await sim.finish()


@pytest.mark.parametrize(("waiting", "max_rows", "pages"), [(0, 1, 8), (2, 3, 8), (2, 1, 64), (2, 3, 64)])
@ONE_LOOP
async def test_a_budget_that_dries_up_never_hangs_a_begun_prompt(waiting: int, max_rows: int, pages: int) -> None:
    """The first step is allowed a chunk, later ones nothing; nothing decodes that could be waited for."""
    policy = Budgeted(lambda view: PrefillBudget(8 if view.step == 1 else 0, 8))
    async with simulation(policy=policy, max_rows=max_rows, pages=pages) as sim:
        sim.send(prompt(20, 1), 4)
        for index in range(waiting):
            sim.send(prompt(20, 2 + index), 4)
        await sim.finish()


# What it is told


async def test_hooks_are_told_what_happens() -> None:
    policy = Listener()
    async with simulation(policy=policy, token_budget=10) as sim:
        sim.send(prompt(14, 1), 3, request_id="a")
        sim.send(prompt(4, 2), 1, request_id="b")
        sim.send(prompt(4, 3), 0, request_id="c")
        await sim.finish()
        assert policy.submitted == [(1, "a", 14, 3), (2, "b", 4, 1), (3, "c", 4, 0)]
        assert sorted(policy.finished) == [(1, 3), (2, 1), (3, 0)]
        assert [report.step for report in policy.reports] == [plan.step for plan in sim.plans]
        assert [dict(report.prefill) for report in policy.reports] == [{1: 10}, {1: 4, 2: 4, 3: 2}, {3: 2}, {}]
        assert [list(report.sampled) for report in policy.reports] == [[], [1, 2], [1], [1]]
        assert [report.served for report in policy.reports] == [{1: 10}, {1: 5, 2: 5, 3: 2}, {1: 1, 3: 2}, {1: 1}]


async def test_service_adds_up_to_prompt_and_output() -> None:
    """The prompt less what was cached, and every output token; the same by tenant."""
    policy = Listener()
    async with simulation(policy=policy, token_budget=12, chunk_cap=5, max_rows=3) as sim:
        for index in range(6):
            sim.send(prompt(7 + index % 2 * 6, index % 3), 1 + index, seed=index, tenant="ab"[index % 2])
        await sim.finish()
        served: dict[int, int] = {}
        tenants: dict[str, int] = {}
        for report in policy.reports:
            for tenant, service in report.tenants.items():
                tenants[tenant] = tenants.get(tenant, 0) + service.prompt_tokens + service.output_tokens
        for report in policy.reports:
            for number, tokens in report.served.items():
                served[number] = served.get(number, 0) + tokens
        for sent in sim.sent:
            cached = sent.stream.usage.cached_tokens
            assert served[sent.number] == len(sent.prompt) - cached + (sent.params.max_tokens or 0)
        assert tenants == {"a": sum(served[n] for n in (1, 3, 5)), "b": sum(served[n] for n in (2, 4, 6))}


async def test_every_ending_is_told_once() -> None:
    policy = Listener()
    async with simulation(policy=policy, max_rows=2) as sim:
        five(sim)
        sim.send(prompt(4, 7), 3, n=2)
        await sim.settle()
        sim.engine.abort(sim.sent[0].stream.request_id)  # running
        sim.engine.abort(sim.sent[4].stream.request_id)  # waiting
        sim.engine.abort(sim.sent[4].stream.request_id)
        sim.sent[0].stream.close()
        await sim.finish()
        assert sorted(number for number, _ in policy.finished) == [1, 2, 3, 4, 5, 6, 7]
        late = sim.send(prompt(4, 8), 3)
        await sim.settle()
        assert late.stream.finish_reason is None or policy.finished[-1][0] == late.number
    assert sorted(number for number, _ in policy.finished) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_only_requests_that_were_announced_are_reported_finished() -> None:
    """A policy that keeps accounts must be able to pair the two."""
    policy = Listener()
    gate = anyio.Event()

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        if request.request_id == "slow":
            await gate.wait()
        return {}

    door = Annotating(annotate, lambda request, view: "no" if request.request_id == "refused" else None)
    async with simulation(policy=policy, admission_policy=door) as sim:
        refused = sim.engine.stream(prompt(4), max_tokens=2, request_id="refused")
        slow = sim.engine.stream(prompt(4), max_tokens=2, request_id="slow")
        sim.send(prompt(4), 2, request_id="served")
        await sim.settle()
        slow.close()
        gate.set()
        await sim.finish()
        with pytest.raises(AdmissionRejectedError):
            await refused.result()
        assert {number for number, *_ in policy.submitted} == {number for number, _ in policy.finished}


@pytest.mark.parametrize("hook", ["on_submit", "on_step", "on_finish"])
@ONE_LOOP
async def test_a_hook_that_raises_is_a_fault_and_nothing_else(hook: str) -> None:
    class Clumsy(Listener):
        pass

    def fail(self: Listener, argument: object) -> None:
        raise RuntimeError("oops")

    setattr(Clumsy, hook, fail)
    async with simulation(policy=Clumsy()) as sim:
        five(sim)
        await sim.finish()
        assert sim.statistics.policy_faults[hook] >= 5 if hook != "on_step" else sim.statistics.policy_faults[hook] >= 2


# Admission


async def test_an_admission_policy_may_refuse() -> None:
    door = Admitting(lambda request, view: None if request.tenant == "paying" else f"{request.tenant} has no credit")
    async with simulation(admission_policy=door) as sim:
        sim.send(prompt(4, 1), 2, tenant="paying")
        refused = sim.engine.stream(prompt(4, 2), max_tokens=2, tenant="poor")
        sim.send(prompt(4, 3), 2, tenant="paying")
        sim.executor.unhold()
        with pytest.raises(AdmissionRejectedError, match="refused by the admission policy: poor has no credit") as caught:
            await refused.result()
        assert isinstance(caught.value, RejectedError)
        with pytest.raises(AdmissionRejectedError):
            async for _ in sim.engine.stream(prompt(4, 2), max_tokens=2, tenant="poor"):
                pass
        await sim.finish()
        assert sim.statistics.rejected == 2
        assert 2 not in sim.joined()


async def test_a_refused_id_may_be_used_again() -> None:
    door = Admitting(lambda request, view: "not now" if view.step == 1 else None)
    async with simulation(admission_policy=door, hold=False) as sim:
        refused = sim.engine.stream(prompt(4), max_tokens=2, request_id="x")
        with pytest.raises(AdmissionRejectedError):
            await refused.result()
        with pytest.raises(AdmissionRejectedError):
            await sim.engine.generate(prompt(4), max_tokens=2, request_id="x")
        check_invariants(sim.engine, idle=True)


async def test_an_admission_policy_sees_request_and_engine() -> None:
    seen: list[tuple[Any, ...]] = []

    def admit(request: RequestView, view: EngineView) -> None:
        seen.append((request.number, request.prompt_tokens, request.max_tokens, view.waiting_count, len(view.running)))

    async with simulation(admission_policy=Admitting(admit), max_rows=1) as sim:
        sim.send(prompt(4), 5)
        await sim.settle()
        sim.send(prompt(5), 6)
        sim.send(prompt(6), 7)
        await sim.settle()
        assert seen == [(1, 4, 5, 0, 0), (2, 5, 6, 0, 1), (3, 6, 7, 1, 1)]
        await sim.finish()


@pytest.mark.parametrize("answer", [RuntimeError, 5, True, ["no"]], ids=str)
@ONE_LOOP
async def test_an_impossible_admission_is_a_fault_and_accepts(answer: Any) -> None:
    def admit(request: RequestView, view: EngineView) -> Any:
        if answer is RuntimeError:
            raise RuntimeError("door is stuck")
        return answer

    async with simulation(admission_policy=Admitting(admit)) as sim:
        five(sim)
        await sim.finish()
        assert sim.statistics.policy_faults == {"admit": 5}


async def test_annotations_reach_the_scheduling_policy() -> None:
    async def annotate(request: RequestView) -> Mapping[str, Any]:
        await anyio.lowlevel.checkpoint()
        return {"length": {1: 30, 2: 10, 3: 20}[request.number]}

    shortest = Ordered(lambda waiting, view: sorted(waiting, key=lambda request: request.hints["length"]))
    async with simulation(policy=shortest, admission_policy=Annotating(annotate), max_rows=1) as sim:
        sim.send(prompt(4, 8), 2, hints={"length": 0, "mine": True})
        await sim.settle()
        for index in range(2):
            sim.send(prompt(4, index), 2)
        await sim.finish()
        assert sim.joined() == [1, 2, 3]
        assert sim.statistics.policy_faults == {}


async def test_annotations_add_to_the_callers_hints() -> None:
    seen: list[Mapping[str, Any]] = []

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        assert request.hints == {"a": 1, "b": 2}
        return {"b": 3, "c": 4}

    door = Annotating(annotate, lambda request, view: seen.append(request.hints))
    async with simulation(admission_policy=door) as sim:
        sim.send(prompt(4), hints={"a": 1, "b": 2})
        await sim.finish()
        assert seen == [{"a": 1, "b": 3, "c": 4}]


async def test_a_slow_annotation_holds_up_nobody_else_and_keeps_its_place() -> None:
    gate = anyio.Event()

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        if request.number == 1:
            await gate.wait()
        return {}

    async with simulation(admission_policy=Annotating(annotate), max_rows=1) as sim:
        for index in range(3):
            sim.send(prompt(4, index), 3)
        await sim.settle()
        assert sim.joined() == [2]
        gate.set()
        await sim.finish()
        assert sim.joined() == [2, 1, 3]


@pytest.mark.parametrize("answer", [RuntimeError, 5, ["a"], "text"], ids=str)
@ONE_LOOP
async def test_an_impossible_annotation_is_a_fault_and_accepts(answer: Any) -> None:
    async def annotate(request: RequestView) -> Any:
        if answer is RuntimeError:
            raise RuntimeError("predictor is down")
        return answer

    async with simulation(admission_policy=Annotating(annotate)) as sim:
        five(sim)
        await sim.finish()
        assert sim.statistics.policy_faults == {"annotate": 5}


async def test_an_annotation_of_nothing_is_no_fault() -> None:
    async def annotate(request: RequestView) -> None:
        return None

    async with simulation(admission_policy=Annotating(annotate)) as sim:
        sim.send(prompt(4), hints={"a": 1})
        await sim.finish()
        assert sim.statistics.policy_faults == {}


async def test_a_request_aborted_while_it_is_annotated_never_runs() -> None:
    gate = anyio.Event()

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        await gate.wait()
        return {}

    async with simulation(admission_policy=Annotating(annotate)) as sim:
        sent = sim.send(prompt(4), 2)
        sim.send(prompt(4, 1), 2)
        await sim.settle()
        sim.engine.abort(sent.stream.request_id)
        gate.set()
        await sim.finish()
        assert sim.joined() == [2]


async def test_closing_the_engine_ends_annotations() -> None:
    cancelled: list[int] = []

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(request.number)
        raise AssertionError

    async with simulation(admission_policy=Annotating(annotate)) as sim:
        sim.send(prompt(4), 2)
        await sim.settle()
    assert cancelled == [1]


@pytest.mark.parametrize("hook", ["admit", "annotate"])
@ONE_LOOP
async def test_a_strict_engine_passes_an_admission_error_on(hook: str) -> None:
    async def annotate(request: RequestView) -> Mapping[str, Any]:
        if hook == "annotate":
            raise RuntimeError("predictor is down")
        return {}

    def admit(request: RequestView, view: EngineView) -> None:
        if hook == "admit":
            raise RuntimeError("door is stuck")

    async with simulation(admission_policy=Annotating(annotate, admit), strict_policies=True) as sim:
        sent = sim.send(prompt(4), 2)
        sim.executor.unhold()
        with pytest.raises(EngineDeadError) as caught:
            await sent.stream.result()
        assert isinstance(caught.value.__cause__, RuntimeError)


# Victims (over-commitment)


class Victims(Listener):
    """Names the victims of the test's choice."""

    def __init__(self, victims: Callable[[Waiting, int, EngineView], Any]) -> None:
        super().__init__()
        self._victims = victims
        self.asked: list[list[int]] = []

    def victims(self, running: Waiting, pages: int, view: EngineView) -> Any:
        self.asked.append([request.number for request in running])
        return self._victims(running, pages, view)


OVER: dict[str, Any] = {"reserve": "expected", "pages": 21, "max_rows": 3, "max_preemptions": 100}


def three(sim: Simulation) -> None:
    """Three requests that fit as prompts but not with their outputs."""
    for index in range(3):
        sim.send(prompt(8, index), 24, seed=index)


def preempted(sim: Simulation) -> list[int]:
    """Numbers that have joined more than once, in order."""
    joined = sim.joined()
    return [number for index, number in enumerate(joined) if number in joined[:index]]


async def test_the_latest_admitted_gives_way_by_default() -> None:
    async with simulation(**OVER) as sim:
        three(sim)
        await sim.finish()
        assert sim.statistics.preemptions >= 1
        assert 1 not in preempted(sim)


async def test_a_policy_may_choose_the_victims() -> None:
    policy = Victims(lambda running, pages, view: [request for request in running if request.number == 1])
    async with simulation(policy=policy, **OVER) as sim:
        three(sim)
        await sim.finish()
        assert policy.asked[0] == [1, 2, 3]
        assert preempted(sim)[0] == 1
        assert sim.statistics.policy_faults == {}


@pytest.mark.parametrize(
    "answer",
    [
        lambda running, pages, view: 1 / 0,
        lambda running, pages, view: None,
        lambda running, pages, view: [object()],
        lambda running, pages, view: [Stranger(running[0].number)],
        lambda running, pages, view: [Stranger([])],
    ],
    ids=["raises", "none", "foreign", "same-number", "unhashable"],
)
@ONE_LOOP
async def test_impossible_victims_are_a_fault_and_the_engine_goes_on(answer: Callable[[Waiting, int, EngineView], Any]) -> None:
    async with simulation(policy=Victims(answer), **OVER) as sim:
        three(sim)
        await sim.finish()
        assert sim.statistics.policy_faults["victims"] >= 1
        assert sim.statistics.preemptions >= 1
