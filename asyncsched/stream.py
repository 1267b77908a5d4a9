"""The stream a caller iterates over."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from .contract import TokenLogprobs
from .request import FinishReason, Request, Submission
from .results import Chunk, Completion, RequestTimes, Result, Usage, times_of, usage_of


class TokenStream:
    """Chunks of one request's output as they arrive; an async iterator and an async context manager.

    However iteration ends (exhausted, ``break``, an exception in the body, cancellation, a dropped
    reference), the request is released; ``async with`` makes the moment certain. A reader that is
    slow never holds up the engine: unread tokens merge into the next chunk. One reader at a time.

    Detokenisation happens here, in the reader's own task.
    """

    def __init__(self, submission: Submission, abort: Callable[[Submission], None], drop: Callable[[Submission], None]) -> None:
        self._submission = submission
        self._abort = abort
        self._drop = drop
        self._read = [0] * submission.params.n
        self._texts: list[list[str]] = [[] for _ in range(submission.params.n)]
        self._told = [False] * submission.params.n
        self._closed = False
        self._plain: Request | None = None  # the request, once known, if it is the only one and no token needs attention

    @property
    def request_id(self) -> str:
        """The caller's id, or the one the engine made up."""
        return self._submission.request_id

    @property
    def request_numbers(self) -> tuple[int, ...]:
        """The engine's own numbers of the ``n`` completions, as in plans and events; empty until the prompt is tokenised."""
        return tuple(request.number for request in self._submission.requests)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended; ``None`` while it has not."""
        if self._submission.requests:
            return self._submission.requests[0].finish_reason
        if self._submission.error is not None:
            return "error"
        return "abort" if self._submission.cancelled else None

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return usage_of(self._submission)

    @property
    def times(self) -> RequestTimes:
        """Stamps so far."""
        return times_of(self._submission)

    @property
    def text(self) -> str:
        """Text of the first completion that has been read so far."""
        return "".join(self._texts[0])

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            StopAsyncIteration: every completion has ended and its last chunk was delivered, or the
                stream was closed.
            AsyncschedError: the request was refused after all, or failed.
        """
        while not self._closed:
            plain = self._plain
            if plain is None or plain.finish_reason is not None or plain.received != self._read[0]:
                for request in self._submission.requests:
                    chunk = self._chunk(request)
                    if chunk is not None:
                        return chunk
                if self._submission.ended:
                    self._closed = True
                    if self._submission.error is not None:
                        raise _fresh(self._submission.error)
                    raise StopAsyncIteration
            try:
                token = await self._submission.changed(tokens=True)
            except BaseException:  # cancelled while waiting: nobody reads on
                self.close()
                raise
            if token is not None and plain is not None and not self._closed:
                return self._next(plain, token)
        raise StopAsyncIteration

    async def wait(self) -> None:
        """Wait for the end without reading; ``finish_reason``, ``usage`` and ``times`` say how it went.

        What has arrived can be read afterwards.

        Raises:
            AsyncschedError: the request was refused or failed.
        """
        try:
            while not self._submission.ended:
                await self._submission.changed(tokens=False)
        except BaseException:
            self.close()
            raise
        error = self._submission.error or next((r.error for r in self._submission.requests if r.error is not None), None)
        if error is not None:
            self._closed = True
            raise _fresh(error)

    async def result(self) -> Result:
        """Read to the end and return the whole answer.

        Raises:
            AsyncschedError: the request was refused or failed.
        """
        await self.wait()
        self._closed = True
        return self._result()

    def close(self) -> None:
        """Release the request now, if it still runs. Nothing is delivered afterwards. Idempotent. Loop thread only."""
        self._closed = True
        if not self._submission.ended:
            self._abort(self._submission)

    async def aclose(self) -> None:
        """``close``; takes effect before the first suspension."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything: only leave word.
        if not getattr(self, "_closed", True) and not self._submission.ended:
            self._drop(self._submission)

    def _next(self, request: Request, token: int) -> Chunk:
        """The next token of a plain request, which came with the wake-up: the usual case, at a fraction of the cost."""
        self._read[0] += 1
        request.fed += 1
        text = "" if request.assembler is None else request.assembler.feed_one(token)
        if text:
            self._texts[0].append(text)
        return Chunk(0, text, (token,))

    def _chunk(self, request: Request) -> Chunk | None:
        """What has arrived of one completion since it was last read, if anything."""
        index = request.index
        if self._told[index]:
            return None
        start = self._read[index]
        tokens = request.tokens_from(start)
        if not tokens and not request.ended:
            return None
        if request.error is not None and not tokens:
            self._told[index] = True
            self.close()
            raise _fresh(request.error)
        text = request.take_text()
        if text:
            self._texts[index].append(text)
        self._read[index] = start + len(tokens)
        final = request.ended and request.error is None
        self._told[index] = final
        if self._submission.params.n == 1 and not request.eager:
            self._plain = request
        logprobs = None if request.logprobs is None else tuple(request.logprobs[start : self._read[index]])
        return Chunk(index, text, tuple(tokens), logprobs, request.finish_reason if final else None)

    def _result(self) -> Result:
        submission = self._submission
        completions = []
        for request in submission.requests:
            self._texts[request.index].append(request.take_text())
            completions.append(_completion(request, "".join(self._texts[request.index])))
        first = submission.requests[0] if submission.requests else None
        prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        if first is not None and first.prompt_logprobs is not None:
            prompt_logprobs = tuple(first.prompt_logprobs)
        if first is None:  # aborted before it was tokenised
            completions = [Completion(index, "", (), "abort") for index in range(submission.params.n)]
        return Result(
            request_id=submission.request_id,
            prompt_token_ids=() if first is None else tuple(first.prompt.tolist()),
            completions=tuple(completions),
            usage=usage_of(submission),
            times=times_of(submission),
            prompt_logprobs=prompt_logprobs,
        )


def _completion(request: Request, text: str) -> Completion:
    assert request.finish_reason is not None
    return Completion(
        index=request.index,
        text=text,
        token_ids=tuple(request.output),
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=None if request.logprobs is None else tuple(request.logprobs),
    )


def _fresh(error: BaseException) -> BaseException:
    """A copy to raise: one exception object raised by many readers would collect all their tracebacks."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
