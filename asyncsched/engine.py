"""The engine: starts the control tasks and the executor, and is what callers talk to."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, overload

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from .backend import Backend, load_backend
from .config import EngineConfig
from .contract import ExecutorLimits
from .cost_files import load_cost_model
from .errors import ConfigError, EngineClosedError, EngineError, InvalidParamsError
from .events import EventStream
from .health import Health
from .own_loop import OwnLoopRun
from .policy_set import HOOKS, PolicySet
from .request import RequestOptions
from .results import Result
from .run import Run
from .sampling_params import FIELD_NAMES, SamplingParams
from .statistics import Statistics
from .stream import TokenStream
from .timeline import Trace
from .tokenizer import Message, Tokenizer

Prompt = str | Sequence[int] | NDArray[np.integer[Any]] | Sequence[Message]
"""Text, token ids, or chat messages."""

KEEP: Any = object()
"""Stands for an argument that was left out."""

_OPTION_NAMES = tuple(f.name for f in fields(RequestOptions))


class Engine:
    """An inference engine inside the running event loop (asyncio or trio).

    Use ``async with Engine(...)``, or ``await start()`` and ``await aclose()`` where a block does not
    fit (notebooks). Every method belongs to the loop and thread the engine was started in; from
    elsewhere use ``BlockingEngine``.

    Args:
        model: Shorthand for ``EngineConfig.model``.
        config: All options at once; further keywords override it.
        backend: An executor (and tokenizer) to use instead of loading the model, for tests and
            simulations.
        **options: Fields of ``EngineConfig``.

    Raises:
        ConfigError: an option is unknown or impossible.
    """

    def __init__(
        self, model: str | None = None, *, config: EngineConfig | None = None, backend: Backend | None = None, **options: Any
    ) -> None:
        if model is not None:
            options["model"] = model
        if config is None:
            config = EngineConfig.from_options(options)
        elif options:
            try:
                config = replace(config, **options)
            except TypeError:
                EngineConfig.from_options(options)  # says which option is unknown
                raise
        self.config = config
        self._given = backend
        self._run: Run | OwnLoopRun | None = None
        self._starting = False
        self._used_backend = False

    # Life

    async def start(self) -> Self:
        """Load the model and start the control tasks.

        Raises:
            ModelError: the model cannot be found, read or run.
            PolicyError: a policy cannot be loaded.
            EngineError: already started.
        """
        if self._run is not None or self._starting:
            raise EngineError("the engine is started already; use it, or close it first")
        if self._given is not None and self._used_backend:
            raise EngineError("the backend given to this engine was closed with it; make a new Engine")
        self._starting = True
        try:
            policies = await anyio.to_thread.run_sync(PolicySet.load, {kind: getattr(self.config, kind) for kind in HOOKS})
            cost_model = await anyio.to_thread.run_sync(load_cost_model, self.config.cost_model)
            backend = self._given
            if backend is None:
                backend = await _Loading(self.config).backend()
            self._used_backend = True
            try:
                kind = OwnLoopRun if self.config.own_loop else Run
                run = kind(self.config, backend, policies, cost_model)
                await run.start()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(backend.executor.close)
                raise
            self._run = run
        finally:
            self._starting = False
        return self

    async def aclose(self) -> None:
        """End every open request, stop the tasks, join the compute thread, free the memory. Idempotent."""
        run = self._run
        if run is not None and not run.over:
            run.check()
            await run.close()
        if self._run is run:  # another task may have closed and started it meanwhile
            self._run = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Requests

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> TokenStream:
        """Submit a request and return its stream at once.

        Args:
            prompt: Text, token ids, or chat messages (rendered with the model's template).
            params: Sampling parameters; further keywords override single fields.
            request_id: An id of your own, unique among live requests.
            **options: Fields of ``SamplingParams`` and of ``RequestOptions``.

        Raises:
            InvalidRequestError: the request cannot be served as it is; the text says what to change.
                What shows only after tokenising is raised from the stream instead.
            QueueFullError: too much is waiting.
            EngineClosedError, EngineDeadError, WrongLoopError: not now, or not from here.
        """
        run = self._running()
        sampling, rest = _split(params, options)
        submission = run.submit(prompt, sampling, rest, request_id)
        return TokenStream(submission, run.abort, run.drop)

    @overload
    async def generate(
        self, prompt: str | Sequence[Message], params: SamplingParams | None = None, **options: Any
    ) -> Result: ...
    @overload
    async def generate(self, prompt: Sequence[int], params: SamplingParams | None = None, **options: Any) -> Result: ...
    @overload
    async def generate(
        self,
        prompt: Sequence[str] | Sequence[Sequence[int]] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> list[Result]: ...
    async def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Result | list[Result]:
        """The whole answer to one prompt, or the answers to a batch (a list of texts or of token lists), in order.

        Raises as ``stream``; a failed request of a batch ends the others.
        """
        if not _is_batch(prompt):
            async with self.stream(prompt, params, **options) as stream:
                return await stream.result()
        if "request_id" in options:
            raise InvalidParamsError("request_id names one request; a batch cannot share it")
        streams: list[TokenStream] = []
        try:
            for one in prompt:
                streams.append(self.stream(one, params, **options))  # noqa: PERF401 - what was submitted must be closed
            return [await stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    async def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Result:
        """The answer to a conversation, ``[{"role": "user", "content": "…"}, …]``.

        Raises:
            ChatTemplateError: the model has no chat template, or it refused the messages.
        """
        async with self.stream(messages, params, **options) as stream:
            return await stream.result()

    def abort(self, request_id: str) -> bool:
        """End a request by its exact id; its reader gets what there is and finish reason ``abort``.

        Returns False if no such request is live.
        """
        run = self._running()
        submission = run.live(request_id)
        if submission is None:
            return False
        run.abort(submission)
        return True

    # Operations

    async def drain(self) -> None:
        """Take no new requests and return when all live ones have ended. ``resume`` takes new ones again.

        On a paused engine that is after ``resume``, or when they are aborted.
        """
        await self._running().drain()

    async def pause(self, mode: Literal["finish", "keep", "abort"] = "keep") -> None:
        """Stop computing, and return when no step is in flight. New requests queue up. Idempotent.

        Args:
            mode: ``finish`` lets running requests end first; ``keep`` freezes them where they are;
                ``abort`` ends every live request.
        """
        run = self._running()
        if mode not in ("finish", "keep", "abort"):
            raise ConfigError(f"pause mode {mode!r}: use finish, keep or abort")
        await run.pause(mode)

    def resume(self) -> None:
        """Undo ``pause`` and ``drain``. Idempotent."""
        self._running().resume()

    def health(self) -> Health:
        """Whether the engine makes progress, and what holds it up. Never raises for a dead or closed engine."""
        return Health("closed") if self._run is None else self._run.health()

    async def flush_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns how many pages that freed."""
        return await self._running().flush_cache()

    async def set_policy(self, policy: Any = KEEP, **policies: Any) -> None:
        """Swap policies while the engine runs, between two steps, with nothing lost.

        The new policy is told of every live request (``on_submit``) before it is asked anything. If it
        cannot be loaded nothing changes.

        Args:
            policy: The scheduling policy: name, options, class or instance. Left out, it stays.
            **policies: The same for ``budget_policy``, ``preemption_policy``, ``eviction_policy`` and
                ``admission_policy``; ``None`` does without (not for ``eviction_policy``).

        Raises:
            PolicyError: a policy cannot be loaded.
            ConfigError: there is no such kind of policy, or the engine cannot do without it.
        """
        run = self._running()
        unknown = set(policies) - set(HOOKS)
        if unknown:
            raise ConfigError(f"unknown kind of policy {min(unknown)!r}: use {', '.join(HOOKS)}")
        specs = policies if policy is KEEP else {"policy": policy, **policies}
        await run.use_policies(partial(PolicySet.load, specs))

    # Looking at it

    def statistics(self) -> Statistics:
        """A snapshot in numbers."""
        return self._running().statistics()

    def events(self, capacity: int = 10_000) -> EventStream:
        """What happens from now on, as an async iterator."""
        return self._running().listen(capacity)

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Record a timeline: ``async with engine.trace("out.json"): …`` writes it when the block ends.

        For https://ui.perfetto.dev: tracks for the control tasks, the compute thread, the device and every request.

        Raises:
            EngineError: on entering, if a recording is under way; ``OSError`` on leaving, if the file cannot be written.
        """
        return Trace(self._running(), path)

    @property
    def limits(self) -> ExecutorLimits:
        """Rows, pages and lengths of the running engine."""
        return self._running().backend.executor.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self._running().backend.tokenizer

    @property
    def model_name(self) -> str:
        """The model's name."""
        return self._running().backend.model_name

    def _running(self) -> Run | OwnLoopRun:
        run = self._run
        if run is None:
            raise EngineClosedError("the engine is not running; use `async with Engine(...)` or `await engine.start()`")
        run.check()
        return run


def _split(params: SamplingParams | None, options: Mapping[str, Any]) -> tuple[SamplingParams, RequestOptions]:
    """Sort keywords into sampling parameters and request options."""
    sampling = {name: value for name, value in options.items() if name in FIELD_NAMES}
    rest = {name: value for name, value in options.items() if name in _OPTION_NAMES}
    unknown = [name for name in options if name not in sampling and name not in rest]
    if unknown:
        from difflib import get_close_matches

        hint = get_close_matches(unknown[0], [*FIELD_NAMES, *_OPTION_NAMES], 1)
        raise InvalidParamsError(f"unknown option {unknown[0]!r}" + (f"; did you mean {hint[0]!r}?" if hint else ""))
    if params is not None and not isinstance(params, SamplingParams):
        raise InvalidParamsError(
            f"params must be a SamplingParams, not {type(params).__name__}; or pass its fields as keywords"
        )
    if params is None:
        return SamplingParams(**sampling), RequestOptions(**rest)
    return replace(params, **sampling) if sampling else params, RequestOptions(**rest)


def _is_batch(prompt: Any) -> bool:
    """A list of texts, of token lists, or of conversations."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, str) or (isinstance(first, Sequence) and not isinstance(first, Mapping))


class _Loading:
    """Loads a backend in a worker thread; one that nobody waits for any more is closed when it is ready."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._loaded: Backend | None = None
        self._given_up = False

    async def backend(self) -> Backend:
        """The loaded backend."""
        try:
            return await anyio.to_thread.run_sync(self._load)
        except BaseException:  # a native cancel does not wait for the thread
            with self._lock:
                self._given_up, loaded = True, self._loaded
            if loaded is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(loaded.executor.close)
            raise

    def _load(self) -> Backend:
        backend = load_backend(self._config)
        with self._lock:
            self._loaded = backend
            given_up = self._given_up
        if given_up:
            backend.executor.close()
        return backend
