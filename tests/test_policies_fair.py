"""Orders that share between tenants and between programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from asyncsched.errors import ConfigError
from asyncsched.policies import vtc
from asyncsched.policies.dlpm import DLPM
from asyncsched.policies.fcfs import FCFS
from asyncsched.policies.lpm import LPM
from asyncsched.policies.priority import Priority
from asyncsched.policies.program import Program
from asyncsched.policies.vtc import VTC
from asyncsched.policy import EngineView, RequestView, Service, StepReport
from asyncsched.testing.fake_views import FakeRequest, FakeView, change

from .control_helpers import ONE_LOOP, Simulation, prompt, simulation

FAIR: list[Callable[..., Any]] = [VTC, DLPM]


class Server:
    """Tells a policy what an engine would: who comes, who is served how much, who goes."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.waiting: list[FakeRequest] = []
        self.step = 0
        self._count = 0

    def come(self, tenant: str = "", count: int = 1, **attributes: Any) -> list[FakeRequest]:
        """Requests arrive."""
        new = []
        for _ in range(count):
            self._count += 1
            new.append(FakeRequest(number=self._count, tenant=tenant, waiting_since_step=self.step + 1, **attributes))
            self.waiting.append(new[-1])
            self.tell("on_submit", new[-1])
        return new

    def tell(self, hook: str, argument: Any) -> None:
        """Call a hook of the policy, and of one that it wraps."""
        for member in (self.policy, *getattr(self.policy, "parts", ())):
            if hasattr(member, hook):
                getattr(member, hook)(argument)

    def view(self, cached: dict[int, int] | None = None) -> FakeView:
        """The next step."""
        self.step += 1
        return FakeView(step=self.step, waiting=tuple(self.waiting), cached=cached or {})

    def admit(self, count: int, cached: dict[int, int] | None = None) -> list[FakeRequest]:
        """A step admits so many, as the policy says; the engine asks for one more to see that it does not fit."""
        admitted: list[FakeRequest] = []
        for request in self.policy.order(list(self.waiting), self.view(cached)):
            if len(admitted) == count:
                break
            self.waiting.remove(request)
            admitted.append(request)
        return admitted

    def serve(self, requests: Iterable[FakeRequest], output: int = 1) -> None:
        """Compute prompts and outputs of requests, and end them."""
        requests = list(requests)
        for request in requests:
            self.tell("on_step", self.report({request: request.prompt_tokens}, []))
            for _ in range(output):
                self.tell("on_step", self.report({}, [request]))
        for request in requests:
            change(request, prefill_left=0)
            self.tell("on_finish", request)

    def report(self, prefill: dict[FakeRequest, int], sampled: Sequence[FakeRequest]) -> StepReport:
        """A step's report."""
        tenants: dict[str, Service] = {}
        for request, tokens in prefill.items():
            tenants[request.tenant] = Service(tokens, 0)
        for request in sampled:
            tenants[request.tenant] = Service(0, 1)
        numbers = {request.number: tokens for request, tokens in prefill.items()}
        return StepReport(self.step, 0.02, numbers, [request.number for request in sampled], tenants)


def tenants(requests: Iterable[FakeRequest]) -> str:
    """Whose requests they are, one letter each."""
    return "".join(request.tenant for request in requests)


@pytest.mark.parametrize(
    "make",
    [
        lambda: VTC(input_weight=0.0),
        lambda: VTC(output_weight=float("nan")),
        lambda: VTC(shares={"a": 0.0}),
        lambda: DLPM(quantum=0),
        lambda: DLPM(age_steps=0),
        lambda: DLPM(shares={"a": -1.0}),
        lambda: Program(quantum=0),
        lambda: Program(growth=1.0),
        lambda: Program(output_weight=0.0),
        lambda: Program(age_steps=0),
        lambda: Program(forget_s=-1.0),
    ],
)
def test_impossible_options_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=r"(vtc|dlpm|program): .* must be"):
        make()


# The bound that both fair orders promise


class Watch:
    """Lets everybody in, and notes how far apart the service of two tenants is while both have requests waiting."""

    def __init__(self, shares: dict[str, float]) -> None:
        self.gaps: list[float] = []
        self.served = {"a": 0.0, "b": 0.0}
        self.sim: Simulation | None = None
        self._shares = shares

    def admit(self, request: RequestView, view: EngineView) -> None:
        return None

    def on_step(self, report: StepReport) -> None:
        for tenant, service in report.tenants.items():
            cost = service.prompt_tokens + 2 * service.output_tokens
            self.served[tenant] += cost / self._shares.get(tenant, 1.0)
        assert self.sim is not None
        if len({request.submission.options.tenant for request in self.sim.state.waiting.values()}) == 2:
            self.gaps.append(abs(self.served["a"] - self.served["b"]))


BOUND = 2 * max(24, 2 * 4 * 40)
"""Twice the dearest prompt or batch: 4 rows of up to 40 tokens at 2 each (Sheng et al., theorem 4.4)."""


@pytest.mark.parametrize("make", [VTC, lambda: VTC(shares={"a": 2.0}), lambda: DLPM(quantum=64), FCFS])
@ONE_LOOP
async def test_backlogged_tenants_are_served_alike(make: Callable[[], Any]) -> None:
    """Though one sends twice as many requests, three times as long."""
    policy = make()
    watch = Watch(getattr(policy, "shares", {}))
    options: dict[str, Any] = {"max_rows": 4, "token_budget": 64, "depth": 2}
    async with simulation(policy=policy, admission_policy=watch, strict_policies=True, **options) as sim:
        watch.sim = sim
        for index in range(60):
            sim.send(prompt(24, index), 16, tenant="a")
        for index in range(30):
            sim.send(prompt(8, 100 + index), 4, tenant="b")
        await sim.finish()
    assert len(watch.gaps) > 20
    if make is FCFS:
        assert max(watch.gaps) > BOUND, "by arrival it must be unfair, or the test shows nothing"
    else:
        assert max(watch.gaps) <= BOUND


@pytest.mark.parametrize("policy", ["vtc", "dlpm", "fcfs"])
async def test_a_light_tenant_does_not_wait_for_a_heavy_one(policy: str) -> None:
    policies = {"vtc": VTC(), "dlpm": DLPM(quantum=50), "fcfs": FCFS()}
    async with simulation(policy=policies[policy], max_rows=2, depth=1, strict_policies=True) as sim:
        for index in range(20):
            sim.send(prompt(8, index), 4, tenant="heavy")
        await sim.settle()
        await sim.step(10)
        light = sim.send(prompt(8, 50), 4, tenant="light")
        await sim.finish()
        place = sim.joined().index(light.number)
        assert place == 20 if policy == "fcfs" else place <= 10


# Virtual token counters


def test_one_step_does_not_admit_all_of_one_tenant() -> None:
    server = Server(VTC())
    server.come("a", 6, prompt_tokens=10)
    server.come("b", 3, prompt_tokens=20)
    assert tenants(server.admit(6)) == "abaaba", "a prompt of 20 weighs as much as two of 10"


def test_output_weighs_double_and_shares_divide() -> None:
    server = Server(VTC(shares={"b": 2.0}))
    for tenant in "ab":
        server.come(tenant, 8, prompt_tokens=10)
    first = server.admit(2)
    assert tenants(first) == "ab"
    server.serve(first, output=10)  # 30 each, of which b is charged half
    assert tenants(server.admit(4)) == "bbba", "5 for a prompt of b; then both are at 30, and a came first"


def test_time_away_earns_nothing() -> None:
    """A tenant that comes back is lifted to the lowest counter of those that wait."""
    server = Server(VTC())
    server.come("b", 1, prompt_tokens=10)
    server.come("a", 21, prompt_tokens=10)
    server.serve(server.admit(11))  # a is at ten times 12, b at 12 and away
    server.come("b", 10, prompt_tokens=10)
    assert tenants(server.admit(8)) == "abababab"


def test_a_new_tenant_comes_in_where_the_last_one_stopped_waiting() -> None:
    policy = VTC()
    server = Server(policy)
    server.come("a", 10, prompt_tokens=10)
    *served, running = server.admit(10)
    server.serve(served)
    policy.on_step(server.report({running: 10}, [running]))
    server.come("b", 4, prompt_tokens=10)
    server.come("a", 4, prompt_tokens=10)
    assert tenants(server.admit(8)) == "babababa"


def test_whoever_is_ahead_keeps_waiting_however_often_it_leaves() -> None:
    """A counter outlives the tenant's last request while others are there."""
    server = Server(VTC())
    server.come("b", 20, prompt_tokens=10)
    server.come("a", 1, prompt_tokens=100)
    server.serve(server.admit(2))
    assert "a" not in {request.tenant for request in server.waiting}
    server.come("a", 1, prompt_tokens=100)
    assert tenants(server.admit(8)) == "bbbbbbbb"


def test_counters_start_again_when_nobody_is_left() -> None:
    policy = VTC()
    server = Server(policy)
    server.come("a", 3, prompt_tokens=100)
    server.serve(server.admit(3))
    assert policy._ledger.spent == {}
    server.come("a", 2, prompt_tokens=10)
    server.come("b", 2, prompt_tokens=10)
    assert tenants(server.admit(4)) == "abab"


def test_many_names_gain_nothing_and_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a flood of tenants with one request each, one that is ahead of them all gets its turn, and memory is bounded."""
    monkeypatch.setattr(vtc, "REMEMBERED", 16)
    policy = VTC()
    server = Server(policy)
    old, _ = server.come("old", 2, prompt_tokens=500)[::-1]
    server.come("base", 3, prompt_tokens=10)
    server.serve(server.admit(2))
    for index in range(1000):
        server.come(f"new {index}", prompt_tokens=10)
        server.serve(server.admit(1), output=10)
        assert len(policy._ledger.spent) <= len(policy._ledger.live) + 17
        if old not in server.waiting:
            break
    assert old not in server.waiting
    assert index > 16, "it is 500 ahead of all that come, who count 30 each"


@pytest.mark.parametrize("make", FAIR)
def test_what_did_not_fit_costs_nothing(make: Callable[[], Any]) -> None:
    """The first of the order is pulled step by step without being admitted; that must not count against its tenant."""
    policy = make()
    server = Server(policy)
    server.come("a", 1, prompt_tokens=1000)
    server.come("b", 1, prompt_tokens=1000)
    for _ in range(5):
        assert server.admit(0) == []
    assert tenants(server.admit(2)) == "ab"


@pytest.mark.parametrize("make", FAIR)
def test_an_order_that_is_read_to_its_end_costs_nothing_either(make: Callable[[], Any]) -> None:
    """As a policy does that sorts what this one answers."""
    policy = make()
    server = Server(policy)
    server.come("a", 2, prompt_tokens=1000)
    server.come("b", 1, prompt_tokens=1000)
    for _ in range(3):
        assert tenants(policy.order(list(server.waiting), server.view())) in ("aba", "aab")
    policy.order(list(server.waiting), server.view())
    assert server.admit(0) == []
    assert policy._ledger.spent["a"] == policy._ledger.spent["b"]


@pytest.mark.parametrize("make", FAIR)
def test_prompts_are_charged_once_and_only_what_was_computed(make: Callable[[], Any]) -> None:
    policy = make()
    server = Server(policy)
    server.come("other", 1)
    request, gone = server.come("a", 2, prompt_tokens=100)
    before = policy._ledger.spent["a"]
    admitted = server.admit(3, cached={request.number: 60})
    assert request in admitted
    assert gone in admitted
    granted = policy._ledger.spent["a"] - before - 40 - 100  # a quantum, perhaps
    for tokens in (30, 10):  # its own 40, in two chunks
        policy.on_step(server.report({request: tokens}, []))
    assert policy._ledger.spent["a"] == before + granted + 140
    policy.on_step(server.report({gone: 30}, []))
    policy.on_finish(FakeRequest(number=gone.number, tenant="a", prompt_tokens=100, prefill_left=70))  # cancelled
    assert policy._ledger.spent["a"] == before + granted + 70
    policy.on_step(server.report({request: 25}, []))  # computed again, for whatever reason
    assert policy._ledger.spent["a"] == before + granted + 95


@pytest.mark.parametrize("make", FAIR)
def test_a_request_may_end_while_the_order_is_being_pulled(make: Callable[[], Any]) -> None:
    policy = make()
    server = Server(policy)
    server.come("a", 2)
    server.come("b", 1)
    order = policy.order(list(server.waiting), server.view())
    first = next(order)
    for request in server.waiting:
        if request is not first:
            policy.on_finish(request)
    assert list(order) == []
    policy.on_finish(first)
    assert policy._ledger.spent == {}


@pytest.mark.parametrize("make", FAIR)
def test_within_classes_tenants_are_compared_per_class(make: Callable[..., Any]) -> None:
    """The inner order sees a part of the queue at a time; its accounts must not be confused by that."""
    server = Server(Priority(within=make(**({"quantum": 10} if make is DLPM else {}))))
    for tenant in "aabb":
        server.come(tenant, 1, prompt_tokens=10, priority=1)
    for tenant in "ccdd":
        server.come(tenant, 1, prompt_tokens=10, priority=0)
    for _ in range(3):
        assert server.admit(0) == []
    first = server.admit(5)
    assert tenants(first) == "cdcda"
    server.serve(first, output=0)
    assert tenants(server.admit(3)) == "bab"


# Deficit longest prefix match


@pytest.mark.parametrize(("quantum", "expected"), [(10, "ababababab"), (100, "aaaaabbbbb"), (30, "aaabbbaabb")])
def test_a_quantum_of_cached_requests_then_the_others(quantum: float, expected: str) -> None:
    """a's requests hit the cache and go first, as far as its quantum reaches: 10 tokens each are not cached."""
    server = Server(DLPM(quantum=quantum))
    server.come("b", 5, prompt_tokens=10)
    hot = server.come("a", 5, prompt_tokens=100)
    assert tenants(server.admit(10, cached={request.number: 90 for request in hot})) == expected


def test_within_a_tenant_the_longest_cached_prefix_goes_first() -> None:
    server = Server(DLPM())
    requests = server.come("a", 4, prompt_tokens=100)
    cached = dict(zip((request.number for request in requests), (0, 32, 64, 32), strict=True))
    assert [request.number for request in server.admit(4, cached)] == [3, 2, 4, 1]


def test_within_a_tenant_nobody_waits_for_ever() -> None:
    server = Server(DLPM(age_steps=20, quantum=1e9))
    (cold,) = server.come("a", prompt_tokens=100)
    for _ in range(30):
        hot = server.come("a", 2, prompt_tokens=100)
        server.serve(server.admit(1, cached={request.number: 96 for request in hot}))
        if cold not in server.waiting:
            break
    assert server.step == 21


@ONE_LOOP
async def test_a_hot_prefix_does_not_starve_other_tenants() -> None:
    """With lpm one tenant's flood of cached requests goes first for ever; here the other one gets every quantum its share."""

    async def served_cold(policy: Any) -> int:
        async with simulation(policy=policy, max_rows=1, depth=1, strict_policies=True) as sim:
            hot = prompt(16, 1)
            sim.send(hot, 1, tenant="hot")
            await sim.run_out()
            sim.executor.hold()
            cold = [sim.send(prompt(9, 10 + index), 2, tenant="cold").number for index in range(6)]
            for index in range(4):
                sim.send([*hot, index], 2, tenant="hot")
            for index in range(40):
                sim.send([*hot, index, index], 2, tenant="hot")
                await sim.step()
            served = sum(number in sim.joined() for number in cold)
            await sim.finish()
            return served

    assert await served_cold(LPM(age_steps=1000)) <= 1
    assert await served_cold(DLPM(quantum=20)) == 6


def test_a_newcomer_waits_for_the_next_quantum() -> None:
    server = Server(DLPM(quantum=50))
    server.come("a", 6, prompt_tokens=20)
    server.serve(server.admit(1))
    server.come("b", 6, prompt_tokens=20)
    assert tenants(server.admit(8)) == "aaaabbba", "a has 28 left, which is two more; then both get 50"


def test_credit_is_not_saved_up() -> None:
    """A tenant that has a request running and none waiting gets no more than one quantum, however many the others spend."""
    server = Server(DLPM(quantum=50))
    server.come("b", prompt_tokens=10)
    server.come("a", 30, prompt_tokens=20)
    assert tenants(server.admit(20)) == "b" + "a" * 19
    server.come("b", 10, prompt_tokens=20)
    order = tenants(server.admit(12))
    assert "bbb" in order
    assert "bbbb" not in order


def test_debtors_that_stay_away_are_forgotten_when_their_debt_is_paid() -> None:
    policy = DLPM(quantum=50)
    server = Server(policy)
    server.come("a", prompt_tokens=120)
    server.come("b", 6, prompt_tokens=50)
    server.serve(server.admit(1))
    for known in ({"a", "b"}, {"b"}):  # 72 are two quanta, and each request of b is one
        server.admit(1)
        assert policy._ledger.spent.keys() == known


def test_a_debt_outlives_the_request_that_made_it_and_no_longer() -> None:
    policy = DLPM(quantum=50)
    server = Server(policy)
    server.come("a", prompt_tokens=500)
    server.come("b", 14, prompt_tokens=50)
    server.serve(server.admit(1))
    (late,) = server.come("a", prompt_tokens=10)
    assert tenants(server.admit(11, {late.number: 9})) == "b" * 10 + "a", "500 are ten quanta, however well it is cached"
    server.serve([late])
    assert policy._ledger.spent.keys() == {"b"}


# Programs


def test_the_program_that_was_served_least_goes_first() -> None:
    server = Server(Program(quantum=50))
    server.serve(server.come(program_id="long", prompt_tokens=200))
    server.serve(server.come(program_id="short", prompt_tokens=20))
    server.waiting.clear()
    calls = [*server.come(program_id="long"), *server.come(program_id="short"), *server.come(), *server.come(program_id="long")]
    assert server.admit(4) == [calls[1], calls[2], calls[0], calls[3]]


def test_calls_of_programs_served_about_the_same_go_by_arrival() -> None:
    """Programs in one level are not cut into each other."""
    server = Server(Program(quantum=50))
    server.serve(server.come(program_id="one", prompt_tokens=60))
    server.serve(server.come(program_id="two", prompt_tokens=90))
    server.waiting.clear()
    calls = [*server.come(program_id="two"), *server.come(program_id="one"), *server.come(program_id="two")]
    assert server.admit(3) == calls


def test_the_last_step_of_a_call_counts_though_it_is_reported_after_its_end() -> None:
    policy = Program(quantum=50)
    server = Server(policy)
    (classify,) = server.come(program_id="agent", prompt_tokens=200)
    server.waiting.clear()
    policy.on_finish(classify)
    policy.on_step(server.report({classify: 200}, [classify]))
    calls = [*server.come(program_id="agent"), *server.come(program_id="new")]
    assert server.admit(2) == calls[::-1]


def test_programs_are_remembered_between_calls_and_forgotten_after_a_while() -> None:
    policy = Program(quantum=50, forget_s=60.0)
    server = Server(policy)

    def order(now: float) -> list[RequestView]:
        return list(policy.order(server.waiting, FakeView(step=server.step, now=now)))

    for program in ("busy", "gone"):
        server.serve(server.come(program_id=program, prompt_tokens=200))
    server.waiting.clear()
    server.come()
    order(100.0)
    server.serve(server.come(program_id="busy", prompt_tokens=200))
    server.waiting.pop()
    order(150.0)
    assert policy._programs.keys() == {"busy", "gone"}
    order(160.0)
    assert policy._programs.keys() == {"busy"}, "its time begins anew with every call"
    (call,) = server.come(program_id="busy")
    order(1000.0)
    assert policy._programs.keys() == {"busy"}, "it has a call waiting"
    server.serve([call])
    server.waiting.pop()
    order(1001.0)
    order(1061.0)
    assert policy._programs == {}


def test_programs_served_much_get_every_fourth_turn_once_they_have_waited_long() -> None:
    policy = Program(quantum=50, age_steps=10)
    server = Server(policy)
    server.serve(server.come(program_id="long", prompt_tokens=5000))
    server.waiting.clear()
    server.come(program_id="long", count=3)
    turns = []
    for _ in range(30):
        server.come(count=2)
        turns.append(server.admit(1)[0].program_id)
    assert [index for index, program in enumerate(turns) if program] == [10, 14, 18]


@ONE_LOOP
async def test_short_programs_end_earlier_than_by_arrival() -> None:
    """Two long agents keep the engine busy; each of eight short ones makes two calls, one after the other."""

    async def mean_end(policy: Any) -> float:
        ends: list[int] = []
        async with simulation(policy=policy, max_rows=2, depth=1, strict_policies=True) as sim:
            for index in range(24):
                sim.send(prompt(8, index), 6, program_id=f"long {index % 2}")
            await sim.settle()
            await sim.step(14)
            calls = {f"short {n}": sim.send(prompt(4, 40 + n), 2, program_id=f"short {n}") for n in range(8)}
            second: set[str] = set()
            while calls:
                await sim.step()
                for program, call in list(calls.items()):
                    if call.stream.finish_reason is None:
                        continue
                    if program in second:
                        ends.append(len(sim.plans))
                        del calls[program]
                    else:
                        second.add(program)
                        calls[program] = sim.send(prompt(4, 60 + len(second)), 2, program_id=program)
            await sim.finish()
        return sum(ends) / len(ends)

    assert await mean_end(Program(quantum=32)) < 0.7 * await mean_end(FCFS())


# All of them


@pytest.mark.parametrize("make", [*FAIR, Program])
@ONE_LOOP
async def test_what_has_ended_is_forgotten(make: Callable[[], Any]) -> None:
    policy = make()
    async with simulation(policy=policy, max_rows=2, strict_policies=True) as sim:
        await busy(sim)
        kept = vars(policy._ledger) if make is not Program else {}
        assert not any(value for value in [*vars(policy).values(), *kept.values()] if isinstance(value, dict) and value != {})


async def busy(sim: Simulation) -> None:
    """Requests of several tenants, two of which are given up."""
    for index in range(10):
        sim.send(prompt(4 + index, index), 3, tenant="abc"[index % 3])
    await sim.settle()
    await sim.step(2)
    sim.engine.abort(sim.sent[0].stream.request_id)
    sim.engine.abort(sim.sent[-1].stream.request_id)
    await sim.finish()


@pytest.mark.parametrize("make", [*FAIR, Program])
@ONE_LOOP
async def test_it_may_come_in_the_middle(make: Callable[[], Any]) -> None:
    """Requests that began to wait before it came are ordered all the same."""
    async with simulation(max_rows=1, strict_policies=True) as sim:
        for index in range(5):
            sim.send(prompt(4, index), 3, tenant="ab"[index % 2], program_id="p")
        await sim.settle()
        await sim.step()
        await sim.engine.set_policy(make())
        await sim.finish()


@pytest.mark.parametrize("make", [*FAIR, Program])
def test_requests_that_were_never_announced_are_ordered(make: Callable[[], Any]) -> None:
    waiting = [FakeRequest(number=n, tenant="ab"[n % 2], program_id="p" if n % 3 else None) for n in range(1, 7)]
    assert sorted(request.number for request in make().order(waiting, FakeView())) == [1, 2, 3, 4, 5, 6]
