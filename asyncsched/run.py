"""One life of an engine: its parts, wired together, from start to close."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import anyio
import anyio.to_thread

from .admission import Admission
from .backend import Backend
from .bridge import Inbox, LoopBinding
from .config import EngineConfig
from .contract import Executor, StepResult
from .cost import CostModel, StepCosts
from .errors import (
    DuplicateRequestError,
    EngineClosedError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    InvalidParamsError,
)
from .events import EventBus, EventStream
from .eviction import Evictor
from .finish import Finisher
from .health import Health, examine
from .logs import get_logger
from .placement import Placement
from .planner import Planner
from .policy_background import Background
from .policy_guard import Guard
from .policy_host import PolicyHost
from .policy_set import PolicySet
from .request import RequestOptions, Submission
from .sampling_params import SamplingParams
from .state import ControlState
from .statistics import Statistics, snapshot
from .timers import Timekeeper, Watchdog
from .views import PlanningView
from .wakeup import Signal


class Run:
    """The control tasks, the executor and the state they share. Loop thread only."""

    def __init__(self, config: EngineConfig, backend: Backend, policies: PolicySet, cost_model: CostModel | None) -> None:
        self.config = config
        self.backend = backend
        self.binding = LoopBinding()
        self.events = EventBus()
        limits = backend.executor.limits
        self.draining = False
        self.policies = PolicyHost(policies, Guard(config.strict_policies, config.policy_allowance))
        self.state = ControlState(
            limits,
            self.policies,
            clock=self.binding.clock,
            events=self.events,
            costs=StepCosts(cost_model),
            prefix_cache=config.prefix_cache,
        )
        evict = Signal()
        self.placement = Placement(self.state, config)
        self.view = view = PlanningView(self.state, self.placement, config)
        self.placement.view = view
        self._background = Background(self.policies, view)
        self._swapping = anyio.Lock()
        self._watchdog = Watchdog(self.state, config)
        self.planner = Planner(
            self.state, self.placement, view, backend.executor, config, evict=evict, watch=self._watchdog.wake
        )
        self._timekeeper = Timekeeper(self.state, self.planner, config)
        self.evictor = Evictor(self.state, config, self.placement.evict, evict)
        self.finisher = Finisher(self.state, self.planner, config, self._die)
        self.admission = Admission(self.state, self.planner, view, config, backend.tokenizer)
        self._dropped: Inbox[Submission] = Inbox(self.binding, self.abort)
        self._log = get_logger("engine")
        self._numbers = 0
        self._dead: EngineDeadError | None = None
        self._closing = anyio.Event()
        self._ended = anyio.Event()
        self._task: object = None

    async def start(self) -> None:
        """Start the executor and the tasks."""
        results: Inbox[StepResult] = Inbox(self.binding, self.finisher.receive)
        self.backend.executor.start(results.post)
        self._task = self.binding.spawn(self._host, "asyncsched-engine")

    @property
    def control(self) -> Run:
        """The run that decides: this one."""
        return self

    def check(self) -> None:
        """Refuse calls from another thread or loop."""
        self.binding.check()

    def refuse_when_over(self) -> None:
        """Refuse new requests when the engine is dead or closing. Any thread."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead.__cause__
        if self._closing.is_set():
            raise EngineClosedError("the engine is closing; no new requests")

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
        make: Callable[..., Submission] = Submission,
    ) -> Submission:
        """Register and queue a request: one step, no await, so that nothing can be cancelled in between."""
        self.refuse_when_over()
        refuse_when_draining(self.draining)
        request_id = checked_id(request_id, self.state.live, self._numbers + 1)
        number, binding = self._numbers + 1, self.binding
        submission = make(number, request_id, prompt, params, options, binding.clock(), binding.new_waiter)
        self._numbers += params.n  # reserved now, so that numbers are in order of arrival whatever tokenising takes
        self.admission.submit(submission)
        self._timekeeper.watch(submission)
        return submission

    def health(self) -> Health:
        """See ``Engine.health``."""
        lobby = self.admission.queued - len(self.state.waiting)
        return examine(
            self.state,
            blocked=self.planner.blocked,
            lobby=lobby,
            slow=self.config.slow_step_seconds,
            draining=self.draining,
            dead=self._dead,
        )

    def _swap(self, policies: PolicySet) -> None:
        """Replace the policies between two steps; the new ones are told of every request that was announced."""
        old = self.policies.policies
        self.policies.use(policies)
        known = {id(policy) for policy in old.members()}
        for submission in self.state.live.values():
            for request in submission.requests:
                if request.announced and not request.ended:
                    self.policies.introduce(request, known)
        if policies.eviction_policy is not old.eviction_policy:
            self.state.tree.requeue()
        self._background.restart()
        self.planner.wake.set()

    def abort(self, submission: Submission) -> None:
        """Release whatever a submission still holds. Idempotent."""
        if submission.ended:
            return
        if not submission.requests:
            submission.cancelled = True
            self.state.retire(submission)
            submission.wake()
        for request in submission.requests:
            self.state.release(request, "abort")
        self.planner.wake.set()
        self.state.notify()

    def live(self, request_id: str) -> Submission | None:
        """The live submission with this id."""
        return self.state.live.get(request_id)

    def drop(self, submission: Submission) -> None:
        """Abort a submission whose stream was dropped. Any thread."""
        self._dropped.post(submission)

    async def drain(self) -> None:
        """See ``Engine.drain``."""
        self.draining = True
        await self.state.until(lambda: not self.state.live)

    async def pause(self, mode: Literal["finish", "keep", "abort"]) -> None:
        """See ``Engine.pause``."""
        state = self.state
        if mode == "abort":
            for submission in list(state.live.values()):
                self.abort(submission)
        if mode == "finish" and state.mode == "running":
            state.mode = "finishing"
            await state.until(lambda: state.resumed or state.finishing_done)
            if state.resumed:
                return
        state.mode = "frozen"
        await state.until(lambda: not state.in_flight)

    def resume(self) -> None:
        """See ``Engine.resume``."""
        self.draining = False
        self.state.mode = "running"
        self.planner.wake.set()
        self.state.notify()

    async def flush_cache(self) -> int:
        """See ``Engine.flush_cache``."""
        return self.placement.evict(self.state.tree.evictable)

    async def use_policies(self, load: Callable[[PolicySet], PolicySet]) -> None:
        """See ``Engine.set_policy``; ``load`` makes the new policies from the present ones, in a worker thread."""
        async with self._swapping:  # of two changes at once the second starts from what the first has made
            policies = await anyio.to_thread.run_sync(load, self.policies.policies)
            if not self.state.over:
                self._swap(policies)

    def statistics(self) -> Statistics:
        """See ``Engine.statistics``. Any thread: only numbers are read, perhaps of two moments."""
        return snapshot(self.state, self.admission.queued - len(self.state.waiting))

    def listen(self, capacity: int) -> EventStream:
        """See ``Engine.events``."""
        return EventStream(self.events, capacity)

    async def close(self) -> None:
        """Stop everything. Shielded: a cancelled caller still gets its threads joined."""
        self._fail_all(EngineClosedError("the engine was closed"))
        self._closing.set()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    async def _host(self) -> None:
        """Holds the control tasks; ends with the engine."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.admission.run)
                tasks.start_soon(self.planner.run)
                tasks.start_soon(self.evictor.run)
                tasks.start_soon(self.finisher.run)
                tasks.start_soon(self._timekeeper.run)
                tasks.start_soon(self._watchdog.run)
                tasks.start_soon(self._background.run)
                await self._closing.wait()
                tasks.cancel_scope.cancel()
        except Exception as exc:
            dead = EngineDeadError(f"a control task failed: {_root(exc)!r}")
            dead.__cause__ = _root(exc)
            self._die(dead)
        finally:
            self._closing.set()
            self._fail_all(EngineClosedError("the engine was closed"))
            self.events.close()
            await self._close_executor()
            self._ended.set()

    @property
    def over(self) -> bool:
        """True once everything has stopped."""
        return self._ended.is_set()

    async def _close_executor(self) -> None:
        with anyio.CancelScope(shield=True):
            closed = await anyio.to_thread.run_sync(
                _close_within, self.backend.executor, self.config.close_timeout, limiter=anyio.CapacityLimiter(1)
            )
        if not closed:
            self._log.error("compute_thread_stuck", seconds=self.config.close_timeout)

    def _die(self, error: EngineDeadError) -> None:
        """The engine is beyond repair: tell everyone once, with the cause."""
        if self._dead is None:
            self._dead = error
            self._log.error("engine_dead", error=str(error))
            self._fail_all(error)

    def _fail_all(self, error: EngineError) -> None:
        self.state.over = True
        self.state.notify()
        for submission in list(self.state.live.values()):
            if not submission.requests:
                submission.error = error
                self.state.retire(submission)
                submission.wake()
            for request in submission.requests:
                self.state.release(request, "error", error=error)


def refuse_when_draining(draining: bool) -> None:
    """Refuse new requests while the engine drains."""
    if draining:
        raise EngineDrainingError("the engine is draining; it takes new requests after resume()")


def checked_id(request_id: str | None, live: Mapping[str, Submission], number: int) -> str:
    """The caller's id if it is free, or one made up from ``number``.

    Raises:
        InvalidParamsError: it is no string.
        DuplicateRequestError: a live request has it.
    """
    if request_id is None:
        while f"request-{number}" in live:
            number += 1
        return f"request-{number}"
    if not isinstance(request_id, str):
        raise InvalidParamsError(f"request_id={request_id!r} must be a string")
    if request_id in live:
        raise DuplicateRequestError(f"request id {request_id!r} belongs to a live request; wait for it or choose another id")
    return request_id


def _root(exc: BaseException) -> BaseException:
    """The first leaf of a group: what went wrong before everything else was cancelled."""
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[0]
    return exc


def _close_within(executor: Executor, seconds: float) -> bool:
    """Close in a thread that may be left behind: one that is stuck in a device cannot be stopped. Real seconds."""
    thread = threading.Thread(target=executor.close, name="asyncsched-close", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()
