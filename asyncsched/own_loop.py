"""An engine whose control plane has an event loop and a thread of its own (``own_loop=True``).

The application's loop may then block for as long as it likes: planning goes on, and the tokens wait
for it. Nothing of the engine's state is shared; submissions and calls go over as messages, and
updates come back as messages (``relay``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal, start_blocking_portal

from .backend import Backend
from .bridge import Inbox, LoopBinding
from .config import EngineConfig
from .cost import CostModel
from .errors import AsyncschedError, EngineClosedError
from .events import Event, EventBus, EventStream
from .health import Health
from .policy_set import PolicySet
from .relay import Batch, Mirror, Relay, RelayedSubmission
from .request import RequestOptions, Submission
from .run import Run, checked_id, refuse_when_draining
from .sampling_params import SamplingParams
from .statistics import Statistics

T = TypeVar("T")


class OwnLoopRun:
    """A ``Run`` in a thread of its own, behind the same methods. Application's loop only, unless said otherwise."""

    def __init__(self, config: EngineConfig, backend: Backend, policies: PolicySet, cost_model: CostModel | None) -> None:
        self.backend = backend
        self._make = partial(Run, config, backend, policies, cost_model)
        self._binding = LoopBinding()
        self._mirror = Mirror()
        self._updates: Inbox[Batch] = Inbox(self._binding, self._mirror.apply)
        self._events = EventBus()
        self._forwarded: Inbox[Event] = Inbox(self._binding, self._events.emit)
        self._forwarding = False
        self._thread = ExitStack()
        self._portal: BlockingPortal
        self._run: Run
        self._relay: Relay
        self._calls: Inbox[Callable[[], object]]
        self._numbers = 0
        self._draining = False  # what callers are told; the engine hears of it a moment later
        self.over = False

    # Life

    async def start(self) -> None:
        """Start the thread, and the engine in it."""
        await anyio.to_thread.run_sync(self._open)
        self._mirror.assembler = self._run.admission.assembler

    def _open(self) -> None:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio", name="asyncsched-control"))
            self._portal.call(self._begin)
            self._thread = stack.pop_all()

    async def _begin(self) -> None:
        self._run = run = self._make()
        self._relay = Relay(run.binding, self._updates.post)
        self._calls = Inbox(run.binding, lambda call: call())
        await run.start()

    async def close(self) -> None:
        """Stop everything and join the thread. Shielded."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._shut)
        self.over = True
        self._mirror.fail_all(EngineClosedError("the engine was closed"))
        self._events.close()

    def _shut(self) -> None:
        with self._thread:
            self._portal.call(self._run.close)

    @property
    def control(self) -> Run:
        """The run that decides."""
        return self._run

    def check(self) -> None:
        """Refuse calls from another thread or loop."""
        self._binding.check()

    # Requests

    def submit(self, prompt: Any, params: SamplingParams, options: RequestOptions, request_id: str | None) -> Submission:
        """Check a request and send it over: one step, no await.

        What only the engine's own loop knows, such as a full queue, ends the submission instead.
        """
        self._run.refuse_when_over()
        refuse_when_draining(self._draining)
        request_id = checked_id(request_id, self._mirror.live, self._numbers + 1)
        tokens = self._run.admission.check(prompt, params)
        number, binding = self._numbers + 1, self._binding
        local = Submission(number, request_id, prompt, params, options, binding.clock(), binding.new_waiter)
        self._numbers += params.n
        self._mirror.live[request_id] = local
        self._calls.post(partial(self._enter, local, prompt if tokens is None else tokens))
        return local

    def _enter(self, local: Submission, prompt: Any) -> None:
        """Engine's loop."""
        make = partial(RelayedSubmission, local, self._relay)
        try:
            self._run.submit(prompt, local.params, local.options, local.request_id, make)
        except AsyncschedError as exc:
            self._relay.refuse(local, exc)

    def live(self, request_id: str) -> Submission | None:
        """The live submission with this id."""
        return self._mirror.live.get(request_id)

    def abort(self, local: Submission) -> None:
        """End a submission at once here, and soon over there. Idempotent."""
        if not local.ended:
            self._mirror.abort(local)
            self._calls.post(partial(self._abort, local))

    def drop(self, local: Submission) -> None:
        """Abort a submission whose stream was dropped. Any thread."""
        self._calls.post(partial(self._abort, local))

    def _abort(self, local: Submission) -> None:
        """Engine's loop."""
        submission = self._run.live(local.request_id)
        if isinstance(submission, RelayedSubmission) and submission.local is local:
            self._run.abort(submission)

    # Operations

    async def drain(self) -> None:
        """See ``Engine.drain``."""
        self._draining = True
        await self._there(self._run.drain)
        await self._mirror.until_empty()  # what the last ones ended with may still be on its way

    async def pause(self, mode: Literal["finish", "keep", "abort"]) -> None:
        """See ``Engine.pause``."""
        await self._there(partial(self._run.pause, mode))

    def resume(self) -> None:
        """See ``Engine.resume``."""
        self._draining = False
        self._calls.post(self._run.resume)

    async def flush_cache(self) -> int:
        """See ``Engine.flush_cache``."""
        return await self._there(self._run.flush_cache)

    async def use_policies(self, load: Callable[[PolicySet], PolicySet]) -> None:
        """See ``Engine.set_policy``."""
        await self._there(partial(self._run.use_policies, load))

    async def _there(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function in the engine's loop and wait for it here, without blocking either loop."""
        call = _Call(function, self._binding)
        self._calls.post(partial(self._spawn, call))
        try:
            await call.done.wait()
        except BaseException:
            self._calls.post(call.cancel)
            raise
        return call.result()

    def _spawn(self, call: _Call[Any]) -> None:
        """Engine's loop."""
        call.task = self._run.binding.spawn(call.run, "asyncsched-call")

    # Looking at it

    def health(self) -> Health:
        """See ``Engine.health``."""
        return self._run.health()

    def statistics(self) -> Statistics:
        """See ``Engine.statistics``."""
        return self._run.statistics()

    def listen(self, capacity: int) -> EventStream:
        """See ``Engine.events``."""
        if not self._forwarding:
            self._forwarding = True
            self._calls.post(partial(self._run.events.forward, self._forwarded.post))
        return EventStream(self._events, capacity)


class _Call(Generic[T]):
    """A coroutine function that runs in another loop than its caller waits in."""

    def __init__(self, function: Callable[[], Awaitable[T]], home: LoopBinding) -> None:
        self.done = anyio.Event()
        self.task: object = None  # a reference, or the loop may lose the task
        self._function = function
        self._home = home
        self._scope: anyio.CancelScope | None = None  # of the other loop's kind
        self._value: list[T] = []
        self._error: BaseException = EngineClosedError("the engine was closed")

    async def run(self) -> None:
        """In the other loop."""
        try:
            with anyio.CancelScope() as self._scope:
                self._value.append(await self._function())
        except Exception as exc:
            self._error = exc
        finally:
            self._home.call_soon(self.done.set)

    def cancel(self) -> None:
        """In the other loop."""
        if self._scope is not None:
            self._scope.cancel()

    def result(self) -> T:
        """At home, once ``done``."""
        if not self._value:
            raise self._error
        return self._value[0]
