"""The admission task: from a submission to requests in the waiting set."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from .config import EngineConfig
from .contract import IntArray
from .errors import (
    AdmissionRejectedError,
    AsyncschedError,
    EmptyPromptError,
    InvalidParamsError,
    InvalidRequestError,
    InvalidTokenError,
    PromptTooLongError,
    QueueFullError,
    RequestTooLargeError,
    TokenizeError,
)
from .events import Submitted
from .planner import Planner
from .policy import EngineView
from .request import Request, Submission
from .sampling_params import SamplingParams
from .state import ControlState
from .text import TextAssembler
from .tokenizer import Tokenizer
from .wakeup import Signal

LONG_TEXT = 32_768
"""Characters from which a text is encoded in a worker thread of its own, so that others need not wait for it."""

BATCH = 64
"""Most short texts encoded in one go."""


class Admission:
    """Takes submissions in order, validates and tokenises them, and asks the admission policy. Loop thread only.

    Text is always encoded in a worker thread: a tokenizer may take its time, the loop may not.
    """

    def __init__(
        self, state: ControlState, planner: Planner, view: EngineView, config: EngineConfig, tokenizer: Tokenizer | None
    ) -> None:
        self._state = state
        self._planner = planner
        self._view = view
        self._tokenizer = tokenizer
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens
        self._wait_when_full = config.when_full == "wait"
        self._lobby: deque[Submission] = deque()
        self._texts: deque[Submission] = deque()
        self._text = Signal()
        # Limiters of its own, as the default one belongs to the application; long texts must not
        # delay short ones.
        self._short = anyio.CapacityLimiter(1)
        self._long = anyio.CapacityLimiter(2)

    def check(self, prompt: Any, params: SamplingParams) -> IntArray | None:
        """Check what can be checked without the engine's state; returns the prompt if it is token ids. Any thread.

        Raises:
            InvalidRequestError: the prompt, parameters or token ids are impossible.
        """
        self._check_params(params)
        if _is_token_ids(prompt):
            return self._checked(prompt, params)
        if self._tokenizer is None:
            raise InvalidParamsError("this model has no tokenizer: pass the prompt as token ids")
        return None

    def submit(self, submission: Submission) -> None:
        """Check what can be checked at once and queue the submission. One step, no await.

        Raises:
            InvalidRequestError: the prompt, parameters or token ids are impossible.
            QueueFullError: the waiting room is full and ``when_full`` is ``"refuse"``.
        """
        state = self._state
        tokens = self.check(submission.prompt, submission.params)
        if not self._wait_when_full and not self._has_room(submission.params.n, 0 if tokens is None else len(tokens)):
            state.counters.rejected += 1
            raise QueueFullError(f"{self.queued} requests are waiting already; retry later or raise max_queued_requests/tokens")
        if tokens is not None:
            self._make_requests(submission, tokens)
        state.live[submission.request_id] = submission
        state.counters.submitted += 1
        state.arrivals.put(submission, "lobby")
        self._lobby.append(submission)
        state.lobby.set()

    @property
    def queued(self) -> int:
        """Requests that wait, in the waiting set or on their way to it."""
        return len(self._state.waiting) + self._state.arrivals.requests

    async def run(self) -> None:
        """Admit what has been submitted."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._encode_short, tasks)
            while True:
                await self._state.lobby.wait()
                while self._lobby and self._may_take(self._lobby[0]):
                    self._take(tasks)

    def _may_take(self, submission: Submission) -> bool:
        """False while a submission has to stay in the lobby, because what was taken before it fills the waiting room."""
        return submission.ended or not self._wait_when_full or self._has_room(submission.params.n, 0, lobby=False)

    def _take(self, tasks: TaskGroup) -> None:
        """Take up the next submission."""
        submission = self._lobby.popleft()
        if submission.ended:
            return
        self._state.arrivals.put(submission, "taken")
        if submission.requests:
            self._enter(submission, tasks)
        elif _size(submission.prompt) >= LONG_TEXT:
            tasks.start_soon(self._encode, [submission], tasks, self._long)
        else:
            self._texts.append(submission)
            self._text.set()

    async def _encode_short(self, tasks: TaskGroup) -> None:
        """Encode short texts, a batch at a time, which keeps them in order of arrival."""
        while True:
            await self._text.wait()
            while self._texts:
                batch = [self._texts.popleft() for _ in range(min(BATCH, len(self._texts)))]
                await self._encode(batch, tasks, self._short)

    async def _encode(self, batch: list[Submission], tasks: TaskGroup, limiter: anyio.CapacityLimiter) -> None:
        """Tokenise in a worker thread; a text that fails fails alone."""
        wanted = [submission for submission in batch if not submission.ended]
        answers = await anyio.to_thread.run_sync(self._encode_all, [s.prompt for s in wanted], limiter=limiter)
        for submission, answer in zip(wanted, answers, strict=True):
            if submission.ended:
                continue
            try:
                if isinstance(answer, BaseException):
                    raise answer
                self._make_requests(submission, self._checked(answer, submission.params))
            except AsyncschedError as exc:
                self.refuse(submission, exc)
            else:
                self._enter(submission, tasks)

    def _encode_all(self, prompts: Sequence[Any]) -> list[Any]:
        """Worker thread. Token ids, token counts (too long), or the exception, per prompt."""
        assert self._tokenizer is not None
        limit = self._state.limits.max_model_len
        answers: list[Any] = []
        for special, group in _runs(prompts):
            try:
                texts = [p if isinstance(p, str) else self._tokenizer.render_chat(p, add_generation_prompt=True) for p in group]
                hopeless = [len(text) > limit * self._tokenizer.longest_token for text in texts]
                encoded = iter(
                    self._tokenizer.encode(
                        [text for text, skip in zip(texts, hopeless, strict=True) if not skip],
                        add_special_tokens=special,
                        limit=limit,
                    )
                )
                answers += [
                    len(text) // self._tokenizer.longest_token if skip else next(encoded)
                    for text, skip in zip(texts, hopeless, strict=True)
                ]
            except Exception as exc:
                if len(group) > 1:  # find out which one it was
                    for prompt in group:
                        answers += self._encode_all([prompt])
                elif isinstance(exc, AsyncschedError):
                    answers.append(exc)
                else:
                    error = TokenizeError(f"the tokenizer raised {exc!r} on this prompt")
                    error.__cause__ = exc
                    answers.append(error)
        return answers

    def _enter(self, submission: Submission, tasks: TaskGroup) -> None:
        """Let the admission policy look, then queue."""
        self._state.arrivals.put(submission, "taken")  # its tokens are known now
        if self._state.policies.annotates:
            tasks.start_soon(self._annotate, submission)
        else:
            self._queue(submission)

    async def _annotate(self, submission: Submission) -> None:
        for request in submission.requests:
            await self._state.policies.annotate(request)
        if not submission.ended:
            self._queue(submission)

    def _queue(self, submission: Submission) -> None:
        with self._state.working("admission", submission.request_id):
            self._queue_requests(submission)

    def _queue_requests(self, submission: Submission) -> None:
        state = self._state
        state.arrivals.remove(submission)
        if not self._wait_when_full and not _is_token_ids(submission.prompt):
            tokens = sum(len(request.prompt) for request in submission.requests)
            if self._over_tokens(tokens):  # could not be known before it was tokenised
                state.counters.rejected += 1
                self.refuse(submission, QueueFullError(f"over {self._max_tokens} tokens are waiting already; retry later"))
                return
        reason = state.policies.admit(submission.requests[0], self._view)
        if reason is not None:
            state.counters.rejected += 1
            self.refuse(submission, AdmissionRejectedError(f"refused by the admission policy: {reason}"))
            return
        prefix = state.events.prefix(submission.requests[0], state.limits.page_size) if state.events.listeners else ()
        for request in submission.requests:
            if request.ended:
                continue
            state.enqueue(request)
            state.policies.on_submit(request)
            if state.events.listeners:
                state.events.emit(Submitted.of(request, state.clock(), prefix))
        self._planner.wake.set()

    def refuse(self, submission: Submission, error: AsyncschedError) -> None:
        """End a submission that will not run."""
        for request in submission.requests:
            self._state.release(request, "error", error=error)
        submission.error = error
        self._state.retire(submission)
        submission.wake()

    def _has_room(self, requests: int, tokens: int, *, lobby: bool = True) -> bool:
        """True if so much more may wait; always if nothing waits. Without ``lobby``, what is in it does not count."""
        arrivals = self._state.arrivals
        waiting = len(self._state.waiting) + (arrivals.requests if lobby else arrivals.taken)
        if not waiting:
            return True
        if self._max_requests is not None and waiting + requests > self._max_requests:
            return False
        return not self._over_tokens(tokens)

    def _over_tokens(self, tokens: int) -> bool:
        """True if ``tokens`` more would be over the bound."""
        waiting = self._state.waiting_tokens + self._state.arrivals.tokens
        return self._max_tokens is not None and waiting > 0 and waiting + tokens > self._max_tokens

    def _make_requests(self, submission: Submission, prompt: IntArray) -> None:
        """Create the ``n`` requests; each with a seed of its own."""
        state, params = self._state, submission.params
        room = state.limits.max_model_len - len(prompt)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        pages = -(-max(len(prompt), len(prompt) + max_new - 1) // state.limits.page_size)
        if pages > state.limits.pages:
            raise RequestTooLargeError(
                f"prompt ({len(prompt)} tokens) + max_tokens ({max_new}) need {pages} pages of {state.limits.page_size}; "
                f"the pool has {state.limits.pages}: lower max_tokens or enlarge the pool"
            )
        eos = () if params.ignore_eos or self._tokenizer is None else self._tokenizer.eos_ids
        stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        shareable = state.prefix_cache or params.n > 1
        salt = submission.options.cache_salt if state.prefix_cache else f"\0{submission.number}"
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            submission.requests.append(
                Request(
                    submission.number + index,
                    submission,
                    index,
                    prompt,
                    max_new=max_new,
                    seed=(seed + index) % 2**63,
                    stop_ids=stop_ids,
                    namespace=salt,
                    shareable=shareable,
                    assembler=self.assembler(params),
                )
            )

    def assembler(self, params: SamplingParams) -> TextAssembler | None:
        """What turns the tokens of a request with these parameters into text. Any thread."""
        if self._tokenizer is None or not params.detokenize:
            return None
        return TextAssembler(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop,
            min_tokens=params.min_tokens,
        )

    def _checked(self, tokens: Any, params: SamplingParams) -> IntArray:
        """Token ids as int32, within the vocabulary and the model's length."""
        limits = self._state.limits
        longest = limits.max_model_len - (0 if params.max_tokens == 0 else 1)
        length = tokens if isinstance(tokens, int) else len(tokens)
        if length > longest:
            raise PromptTooLongError(
                f"the prompt has {'at least ' if isinstance(tokens, int) else ''}{length} tokens; the model's length of "
                f"{limits.max_model_len} leaves room for {longest}: shorten it, or raise max_model_len if the model allows"
            )
        if not length:
            raise EmptyPromptError("the prompt has no tokens; pass some text, or a begin-of-sequence token")
        try:
            wide = np.asarray(tokens)
            if wide.ndim != 1 or wide.dtype.kind not in "iu":
                raise ValueError(f"got {wide.dtype} with {wide.ndim} dimensions")
        except (ValueError, OverflowError) as exc:
            raise InvalidTokenError(f"a prompt of token ids must be one flat sequence of whole numbers: {exc}") from exc
        bad = (wide < 0) | (wide >= limits.vocab_size)
        if bad.any():
            raise InvalidTokenError(
                f"token id {wide[bad][0]} at position {int(bad.argmax())} is outside the vocabulary "
                f"(0 … {limits.vocab_size - 1})"
            )
        return wide.astype(np.int32)

    def _check_params(self, params: SamplingParams) -> None:
        vocab = self._state.limits.vocab_size
        for field, ids in params.token_ids().items():
            for token in ids:
                if not 0 <= token < vocab:
                    raise InvalidTokenError(f"{field}: token id {token} is outside the vocabulary (0 … {vocab - 1})")
        if params.stop and self._tokenizer is None:
            raise InvalidParamsError("stop strings need a tokenizer, which this model does not have; use stop_token_ids")
        if params.allowed_token_ids is not None and set(params.allowed_token_ids) <= set(params.bad_token_ids):
            raise InvalidParamsError("bad_token_ids covers all of allowed_token_ids: nothing could be sampled")


def _is_token_ids(prompt: Any) -> bool:
    """True for token ids, False for text and conversations.

    Raises:
        InvalidRequestError: it is none of them.
    """
    if isinstance(prompt, np.ndarray):
        return True
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"a prompt is text, a sequence of token ids or a list of messages, not {type(prompt).__name__}"
        )
    if not (prompt and isinstance(prompt[0], Mapping)):
        return True
    if not all(isinstance(message, Mapping) for message in prompt):
        raise InvalidRequestError("a conversation is a list of messages, each a mapping with role and content")
    return False


def _size(prompt: Any) -> int:
    """Characters of a text or of a conversation."""
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content", ""))) for message in prompt)


def _runs(prompts: Sequence[Any]) -> list[tuple[bool, list[Any]]]:
    """Consecutive prompts that are encoded alike: plain text with special tokens, chats without."""
    runs: list[tuple[bool, list[Any]]] = []
    for prompt in prompts:
        special = isinstance(prompt, str)
        if not runs or runs[-1][0] != special:
            runs.append((special, []))
        runs[-1][1].append(prompt)
    return runs
