"""One life of an engine: its parts, wired together, from start to close."""

from __future__ import annotations

import threading
from typing import Any

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
from .events import EventBus
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
        self._watchdog = Watchdog(self.state, config)
        self.planner = Planner(
            self.state, self.placement, view, backend.executor, config, evict=evict, watch=self._watchdog.wake
        )
        self._timekeeper = Timekeeper(self.state, self.planner, config)
        self.evictor = Evictor(self.state, config, self.placement.evict, evict)
        self.finisher = Finisher(self.state, self.planner, config, self._die)
        self.admission = Admission(self.state, self.planner, view, config, backend.tokenizer)
        self.dropped: Inbox[Submission] = Inbox(self.binding, self.abort)
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

    def submit(self, prompt: Any, params: SamplingParams, options: RequestOptions, request_id: str | None) -> Submission:
        """Register and queue a request: one step, no await, so that nothing can be cancelled in between."""
        if self._dead is not None:
            raise EngineDeadError(str(self._dead)) from self._dead.__cause__
        if self._closing.is_set():
            raise EngineClosedError("the engine is closing; no new requests")
        if self.draining:
            raise EngineDrainingError("the engine is draining; it takes new requests after resume()")
        if request_id is None:
            request_id = self._made_up_id()
        elif not isinstance(request_id, str):
            raise InvalidParamsError(f"request_id={request_id!r} must be a string")
        elif request_id in self.state.live:
            raise DuplicateRequestError(
                f"request id {request_id!r} belongs to a live request; wait for it or choose another id"
            )
        submission = Submission(self._numbers + 1, request_id, prompt, params, options, self.state.clock())
        self._numbers += params.n  # reserved now, so that numbers are in order of arrival whatever tokenising takes
        self.admission.submit(submission)
        self._timekeeper.watch(submission)
        return submission

    def _made_up_id(self) -> str:
        """An id no live request has."""
        number = self._numbers + 1
        while f"request-{number}" in self.state.live:
            number += 1
        return f"request-{number}"

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

    def use_policies(self, policies: PolicySet) -> None:
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
