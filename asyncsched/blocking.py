"""The engine for synchronous programs: the same API, an event loop in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from .engine import Engine, Prompt
from .errors import EngineClosedError
from .results import Chunk, Result
from .sampling_params import SamplingParams
from .statistics import Statistics
from .stream import TokenStream
from .tokenizer import Message


class BlockingEngine:
    """An ``Engine`` behind a blocking portal. Any thread may call it.

    Args:
        *args: As for ``Engine``.
        **options: As for ``Engine``.

    Example::

        with asyncsched.BlockingEngine("smollm2-135m") as engine:
            print(engine.generate("The capital of France is", max_tokens=8).text)
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._engine = Engine(*args, **options)
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(portal.wrap_async_context_manager(self._engine))
            self._portal = portal
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._portal = None
        self._stack.close()

    def generate(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> Any:
        """As ``Engine.generate``; blocks."""
        return self._call(lambda: self._engine.generate(prompt, params, **options))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None, **options: Any) -> Result:
        """As ``Engine.chat``; blocks."""
        result = self._call(lambda: self._engine.chat(messages, params, **options))
        assert isinstance(result, Result)
        return result

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AbstractContextManager[Iterator[Chunk]]:
        """As ``Engine.stream``, for ``with engine.stream(...) as chunks: for chunk in chunks: …``."""

        async def submit() -> TokenStream:
            return self._engine.stream(prompt, params, **options)

        return _BlockingStream(self._call, self._call(submit))

    def abort(self, request_id: str) -> bool:
        """As ``Engine.abort``."""

        async def abort() -> bool:
            return self._engine.abort(request_id)

        return bool(self._call(abort))

    def statistics(self) -> Statistics:
        """As ``Engine.statistics``."""

        async def read() -> Statistics:
            return self._engine.statistics()

        statistics = self._call(read)
        assert isinstance(statistics, Statistics)
        return statistics

    def _call(self, function: Any) -> Any:
        return self._open().call(function)

    def _open(self) -> BlockingPortal:
        if self._portal is None:
            raise EngineClosedError("the engine is not running; use `with BlockingEngine(...) as engine:`")
        return self._portal


class _BlockingStream:
    """Iterates a ``TokenStream`` through the portal; leaving the block releases the request."""

    def __init__(self, call: Callable[[Any], Any], stream: TokenStream) -> None:
        self._call = call  # refuses once the engine is closed
        self._stream = stream

    def __enter__(self) -> Iterator[Chunk]:
        return self._chunks()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(EngineClosedError):  # then it has ended with the engine
            self._call(self._stream.aclose)

    def _chunks(self) -> Iterator[Chunk]:
        while True:
            chunk = self._call(self._next)
            if chunk is None:
                return
            yield chunk

    async def _next(self) -> Chunk | None:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            return None
