"""One sequence on its way through the engine, and the caller's submission it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from .contract import EMPTY_INTS, IntArray, TokenLogprobs
from .errors import InvalidParamsError
from .prefix import Node, Use
from .request_view import RequestFace
from .rows import STOP_SLOTS, RowTable
from .sampling_params import SamplingParams
from .wakeup import Waiter

if TYPE_CHECKING:
    from .text import TextAssembler

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What a caller can say about a request beside its prompt and sampling.

    Attributes:
        priority: For policies; lower is served first.
        tenant: For policies; who pays.
        deadline: Seconds from submission by which it should have finished. Policies see it; a request
            that still waits when it passes ends with ``DeadlineExpiredError``.
        queue_timeout: Seconds it may wait for a row; ``None`` is the engine's default.
        timeout: Seconds it may take in all; ``None`` is the engine's default.
        ttft_target, tpot_target: For policies; seconds in which the first token, and each further one,
            should come.
        program_id: For policies; requests of one program share it.
        hints: For policies; anything.
        cache_salt: Prefixes are shared only between requests of the same salt.
    """

    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    queue_timeout: float | None = None
    timeout: float | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    program_id: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.hints, Mapping):
            raise InvalidParamsError(f"hints={self.hints!r} must be a mapping")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidParamsError(f"priority={self.priority!r} must be a whole number")
        for name in ("tenant", "cache_salt", "program_id"):
            text = getattr(self, name)
            if not isinstance(text, str) and not (name == "program_id" and text is None):
                raise InvalidParamsError(f"{name}={text!r} must be a string")
        for name in ("deadline", "queue_timeout", "timeout", "ttft_target", "tpot_target"):
            seconds = getattr(self, name)
            if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds < float("inf")):
                raise InvalidParamsError(f"{name}={seconds!r} must be a number of seconds, at least 0")


class Submission:
    """What one call of ``stream`` or ``generate`` asked for: ``n`` requests on one prompt. Loop thread only.

    Attributes:
        number: Number of its first request; the others follow.
        prompt: As given: text, token ids, or chat messages.
        requests: Empty until the prompt is tokenised.
        error: Why it never became requests, or why the engine gave up.
        cancelled: Given up by the caller before it became requests.
        attentive: A consumer waits for the next token (not just for the end).
    """

    __slots__ = (
        "_new_waiter", "_waiter", "arrived_at", "attentive", "cancelled", "error", "number", "options", "params", "prompt",
        "request_id", "requests",
    )  # fmt: skip

    def __init__(
        self, number: int, request_id: str, prompt: Any, params: SamplingParams, options: RequestOptions, arrived_at: float,
        new_waiter: Callable[[], Waiter],
    ) -> None:  # fmt: skip
        self.number = number
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.options = options
        self.arrived_at = arrived_at
        self.requests: list[Request] = []
        self.error: BaseException | None = None
        self.cancelled = False
        self.attentive = False
        self._new_waiter = new_waiter
        self._waiter: Waiter | None = None

    @property
    def ended(self) -> bool:
        """True when nothing more will come."""
        if self.error is not None or self.cancelled:
            return True
        return bool(self.requests) and all(request.ended for request in self.requests)

    def wake(self, token: int | None = None) -> None:
        """Let the consumer look again, if one waits.

        Args:
            token: The one it waits for, if that is all that is new.
        """
        waiter = self._waiter
        if waiter is None:
            return
        self._waiter = None
        self.attentive = False
        if not waiter.done():  # else the consumer was cancelled just now
            waiter.set_result(token)

    def changed(self, *, tokens: bool) -> Waiter:
        """Await this for the next ``wake``: with ``tokens`` for the next token, else for the end. One consumer at a time.

        The value is the token that ``wake`` passed on, or ``None``.
        """
        waiter = self._waiter = self._new_waiter()
        self.attentive = tokens
        if tokens:
            for request in self.requests:
                if request.row is not None and request.rows is not None:
                    request.rows.listening[request.row] = True
        return waiter


class Request:
    """One sequence. Loop thread only.

    Attributes:
        number: Internal number, never reused; everything in flight is tagged with it.
        fill: Tokens whose keys and values must be computed before sampling: the prompt, and after
            a preemption the output so far.
        row: Row it holds, or ``None`` while it waits; ``lease`` is the number of this hold (0: none).
        pages: Its block table, int32; ``donated`` marks the entries that belong to the radix tree.
        own_pages: How many of its pages only it holds: those that are not marked.
        node: Locked end of its prefix in the radix tree.
        inserted: Leading pages of ``fill`` that are in the tree below ``node``.
        computed: Tokens of ``fill`` computed or planned.
        page_since: First step that computed a part of the first page that is not in the tree yet.
        announced: The scheduling policy knows of it.
        resumed_at: Output tokens it had when it got its row.
        cached: Prompt tokens that were found in the cache when it was first admitted.
        output: Sampled tokens, except those still in the row's window.
    """

    __slots__ = (
        "_fill_bytes", "admitted_at", "announced", "assembler", "cached", "computed", "donated", "error", "fed", "fill",
        "finish_reason", "finished_at", "first_token_at", "hints", "index", "inserted", "lease", "logprobs", "max_new",
        "namespace", "node", "number", "output", "own_pages", "page_since", "pages", "preemptions", "prompt", "prompt_logprobs",
        "resumed_at", "row", "rows", "seed", "shareable", "stop_ids", "stop_reason", "submission", "text_closed",
        "unread_text", "view", "waiting_since_step",
    )  # fmt: skip

    def __init__(
        self, number: int, submission: Submission, index: int, prompt: IntArray, *, max_new: int, seed: int,
        stop_ids: tuple[int, ...], namespace: str, shareable: bool, assembler: TextAssembler | None,
    ) -> None:  # fmt: skip
        self.number = number
        self.submission = submission
        self.index = index
        self.prompt = prompt
        self.fill = prompt
        self._fill_bytes: tuple[IntArray, bytes] = EMPTY_INTS, b""
        self.max_new = max_new
        self.seed = seed
        self.stop_ids = stop_ids
        self.namespace = namespace
        self.shareable = shareable
        self.assembler = assembler
        self.hints: Mapping[str, Any] = MappingProxyType(dict(submission.options.hints))
        self.waiting_since_step = 0
        self.preemptions = 0
        self.row: int | None = None
        self.lease = 0
        self.rows: RowTable | None = None
        self.pages = EMPTY_INTS
        self.donated: NDArray[np.bool_] = np.empty(0, np.bool_)
        self.own_pages = 0
        self.node: Node | None = None
        self.inserted = 0
        self.page_since = 0
        self.resumed_at = 0
        self.announced = False
        self.computed = 0
        self.cached = 0
        self.output: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if submission.params.logprobs is None else []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None if submission.params.prompt_logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: BaseException | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.fed = 0
        self.unread_text = ""
        self.text_closed = False
        self.view = RequestFace(self)

    def twin(self, submission: Submission, assembler: TextAssembler | None) -> Request:
        """A request of the same kind without row or output, for a reader in another thread."""
        return Request(
            self.number, submission, self.index, self.prompt, max_new=self.max_new, seed=self.seed, stop_ids=self.stop_ids,
            namespace=self.namespace, shareable=self.shareable, assembler=assembler,
        )  # fmt: skip

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        return self.submission.params

    @property
    def ended(self) -> bool:
        """True once it has a finish reason."""
        return self.finish_reason is not None

    def reusable(self, page_size: int) -> bytes:
        """The part of the fill that may come from the cache, as int32 bytes: whole pages, and never the last token."""
        if not self.shareable or self.prompt_logprobs is not None:
            return b""
        fill, found = self._fill_bytes
        if fill is not self.fill:  # it is looked up again and again while the request waits, and seldom changes
            fill = self.fill
            found = fill[: (len(fill) - 1) // page_size * page_size].tobytes()
            self._fill_bytes = fill, found
        return found

    def use(self, now: float) -> Use:
        """Its mark on the prefixes it uses."""
        options = self.submission.options
        return Use(now, options.priority, options.tenant, options.program_id)

    @property
    def received(self) -> int:
        """Output tokens that have arrived."""
        if self.row is None or self.rows is None:
            return len(self.output)
        return self.rows.received.item(self.row)

    @property
    def eager(self) -> bool:
        """True if every token needs attention when it arrives, not when it is read."""
        params = self.params
        return bool(params.stop) or params.logprobs is not None or len(self.stop_ids) > STOP_SLOTS

    def tokens_from(self, start: int) -> list[int]:
        """Output tokens from position ``start`` on, as far as they have arrived."""
        tokens = self.output[start:]
        if self.row is not None and self.rows is not None:
            tokens.extend(self.rows.pending(self.row, len(self.output))[max(0, start - len(self.output)) :])
        return tokens

    def flush(self) -> None:
        """Move the tokens in the row's window to ``output``."""
        if self.row is not None and self.rows is not None:
            self.output.extend(self.rows.pending(self.row, len(self.output)))

    def feed_text(self) -> str | None:
        """Detokenise what has arrived since the last call; returns the stop string that was completed."""
        if self.assembler is None or self.text_closed:
            return None
        tokens = self.tokens_from(self.fed)
        if self.finish_reason == "stop" and isinstance(self.stop_reason, int | None) and not self.params.include_stop:
            tokens = tokens[: len(self.output) - 1 - self.fed]  # the stop token itself is not text
        stopped_by = None
        if tokens:
            delta = self.assembler.feed(tokens)
            self.fed += delta.used
            self.unread_text += delta.text
            stopped_by = delta.stopped_by
        if stopped_by is not None:
            self.text_closed = True
        elif self.ended:
            self.unread_text += self.assembler.finish()
            self.text_closed = True
        return stopped_by

    def take_text(self) -> str:
        """Text since the last call."""
        self.feed_text()
        text, self.unread_text = self.unread_text, ""
        return text
