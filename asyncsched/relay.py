"""Between an engine in an event loop of its own and the streams in the application's: updates, once per step.

On the engine's side a ``RelayedSubmission`` is woken like any other; the ``Relay`` then reads what is
new and posts it, one message for everything that a step brought. On the application's side the
``Mirror`` applies it to submissions of the same classes that a ``TokenStream`` reads in any engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio

from .bridge import LoopBinding
from .contract import TokenLogprobs
from .request import FinishReason, Request, Submission
from .sampling_params import SamplingParams
from .text import TextAssembler


@dataclass(slots=True)
class RequestUpdate:
    """What is new of one request.

    Attributes:
        request: On the engine's side; only what never changes may be read elsewhere.
        tokens: Output tokens since the last update.
        logprobs: The same tokens', if asked for.
        facts: Set with the first token and at the end.
    """

    request: Request
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    facts: RequestFacts | None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a reader can see of a request beside its tokens."""

    cached: int
    admitted_at: float | None
    first_token_at: float | None
    finished_at: float | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    error: BaseException | None
    prompt_logprobs: list[TokenLogprobs | None] | None


@dataclass(slots=True)
class Update:
    """What is new of one submission.

    Attributes:
        local: The submission on the application's side.
        requests: Its requests that have news.
        error: Why it never became requests.
        arrived_at: On the engine's clock, which all stamps are of.
    """

    local: Submission
    requests: list[RequestUpdate]
    error: BaseException | None
    arrived_at: float


@dataclass(slots=True)
class Batch:
    """Everything that a step brought.

    Attributes:
        locals, tokens: Submissions on the application's side of which one token is all that is new, and those tokens.
        updates: What is new of others.
    """

    locals: list[Submission] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)


class RelayedSubmission(Submission):
    """A submission whose reader is in another loop: every token wakes it, and waking it queues the token or an update.

    Attributes:
        plain: It has one request, whose tokens need no attention and whose first one was sent.
    """

    __slots__ = ("known", "local", "plain", "queued", "relay", "sent")

    def __init__(self, local: Submission, relay: Relay, *args: Any) -> None:
        super().__init__(*args)
        self.local = local
        self.relay = relay
        self.plain = False
        self.attentive = True
        self.queued = False
        self.sent = [0] * self.params.n
        self.known = [False] * self.params.n

    def wake(self, token: int | None = None) -> None:
        """Queue the token if it is all that is new, else an update."""
        if self.queued:
            return
        if token is not None and self.plain:
            request = self.requests[0]
            if request.received == self.sent[0] + 1 and request.row is not None and request.rows is not None:
                self.sent[0] += 1
                request.rows.listening[request.row] = True
                self.relay.pass_on(self.local, token)
                return
        self.queued = True
        self.relay.ready(self)


class Relay:
    """The engine's side: collects the submissions that were woken and posts their updates. Engine's loop only.

    Args:
        binding: The engine's loop.
        post: Takes a batch of updates to the application's loop.
    """

    def __init__(self, binding: LoopBinding, post: Callable[[Batch], None]) -> None:
        self._binding = binding
        self._post = post
        self._ready: list[RelayedSubmission] = []
        self._batch = Batch()

    def pass_on(self, local: Submission, token: int) -> None:
        """One token is all that is new of a submission; it leaves when the step that brought it is done with."""
        if not self._ready and not self._batch.locals:
            self._binding.call_soon(self._flush)
        self._batch.locals.append(local)
        self._batch.tokens.append(token)

    def ready(self, submission: RelayedSubmission) -> None:
        """A submission has other news; they leave at the same time."""
        if not self._ready and not self._batch.locals:
            self._binding.call_soon(self._flush)
        self._ready.append(submission)

    def refuse(self, local: Submission, error: BaseException) -> None:
        """A submission was not accepted."""
        self._post(Batch(updates=[Update(local, [], error, local.arrived_at)]))

    def _flush(self) -> None:
        batch, self._batch = self._batch, Batch()
        ready, self._ready = self._ready, []
        batch.updates = [_news(submission) for submission in ready]
        self._post(batch)


def _news(submission: RelayedSubmission) -> Update:
    submission.queued = False
    news = []
    for request in submission.requests:
        index = request.index
        start = submission.sent[index]
        tokens = request.tokens_from(start)
        if request.row is not None and request.rows is not None:
            request.rows.listening[request.row] = True
        facts = None
        if request.ended or (tokens and not submission.known[index]):
            submission.known[index] = True
            submission.plain = submission.params.n == 1 and not request.eager
            facts = _facts(request)
        elif not tokens:
            continue
        submission.sent[index] = end = start + len(tokens)
        logprobs = None if request.logprobs is None else request.logprobs[start:end]
        news.append(RequestUpdate(request, tokens, logprobs, facts))
    return Update(submission.local, news, submission.error, submission.arrived_at)


def _facts(request: Request) -> RequestFacts:
    return RequestFacts(
        request.cached,
        request.admitted_at,
        request.first_token_at,
        request.finished_at,
        request.finish_reason,
        request.stop_reason,
        request.error,
        None if request.prompt_logprobs is None else list(request.prompt_logprobs),
    )


class Mirror:
    """The application's side: its submissions, and what is known of them. Application's loop only.

    Attributes:
        assembler: Makes what turns a request's tokens into text.
        live: Submissions that have not ended, by id.
    """

    def __init__(self) -> None:
        self.assembler: Callable[[SamplingParams], TextAssembler | None] = lambda params: None
        self.live: dict[str, Submission] = {}
        self._watchers: list[anyio.Event] = []

    async def until_empty(self) -> None:
        """Wait until every submission has ended."""
        while self.live:
            event = anyio.Event()
            self._watchers.append(event)
            await event.wait()

    def apply(self, batch: Batch) -> None:
        """Bring submissions up to date and wake their readers."""
        for local, token in zip(batch.locals, batch.tokens, strict=True):
            request = local.requests[0]
            if request.finish_reason is None:  # else the application has given it up meanwhile
                request.output.append(token)
                local.wake(token)
        for update in batch.updates:
            local = update.local
            if local.ended:
                continue
            local.arrived_at = update.arrived_at
            for news in update.requests:
                self._apply(local, news)
            local.error = local.error or update.error
            if local.ended:
                self.retire(local)
            local.wake()

    def abort(self, local: Submission) -> None:
        """The application has given a submission up: nothing is delivered any more."""
        if not local.requests:
            local.cancelled = True
        for request in local.requests:
            if not request.ended:
                request.finish_reason = "abort"
        self.retire(local)
        local.wake()

    def fail_all(self, error: BaseException) -> None:
        """The engine is gone."""
        for local in list(self.live.values()):
            for request in local.requests:
                if not request.ended:
                    request.finish_reason, request.error = "error", error
            local.error = error
            self.retire(local)
            local.wake()

    def retire(self, local: Submission) -> None:
        """Forget a submission that has ended."""
        if self.live.get(local.request_id) is local:
            del self.live[local.request_id]
        if not self.live:
            watchers, self._watchers = self._watchers, []
            for event in watchers:
                event.set()

    def _apply(self, local: Submission, news: RequestUpdate) -> None:
        while len(local.requests) < local.params.n:  # the first news: the prompt has become requests
            siblings = news.request.submission.requests
            local.requests.append(siblings[len(local.requests)].twin(local, self.assembler(local.params)))
        request = local.requests[news.request.index]
        if request.ended:
            return
        request.output += news.tokens
        if news.logprobs is not None and request.logprobs is not None:
            request.logprobs += news.logprobs
        facts = news.facts
        if facts is None:
            return
        request.cached = facts.cached
        request.admitted_at, request.first_token_at = facts.admitted_at, facts.first_token_at
        request.prompt_logprobs = facts.prompt_logprobs
        request.finished_at, request.error = facts.finished_at, facts.error
        request.stop_reason, request.finish_reason = facts.stop_reason, facts.finish_reason
