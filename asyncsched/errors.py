"""Every exception asyncsched raises, in one tree.

::

    AsyncschedError
    ├── ConfigError (ValueError)           an engine option is impossible
    ├── InvalidRequestError (ValueError)   one request is at fault; the engine is fine
    │   ├── InvalidParamsError             a sampling parameter is out of range
    │   ├── EmptyPromptError
    │   ├── PromptTooLongError             prompt over the model's length
    │   ├── RequestTooLargeError           prompt + max_tokens can never fit the page pool
    │   ├── InvalidTokenError              a token id outside the vocabulary
    │   ├── DuplicateRequestError          the id belongs to a live request
    │   ├── ChatTemplateError              the model has no (or a failing) chat template
    │   └── TokenizeError                  the tokenizer raised
    ├── RejectedError                      refused by load, not by content
    │   ├── QueueFullError                 the waiting room is full
    │   ├── EngineDrainingError            the engine finishes what it has
    │   └── AdmissionRejectedError         an admission policy said no
    ├── RequestFailedError                 an accepted request ended with ``error``
    │   ├── StepFailedError                the step that computed it raised
    │   └── RequestTimeoutError (TimeoutError)   over its time limit
    │       ├── QueueTimeoutError          waited too long for a row
    │       └── DeadlineExpiredError       its deadline passed while it waited
    ├── PolicyError
    │   ├── PolicyNotFoundError            unknown name; lists the known ones
    │   ├── PolicyLoadError                the plugin could not be imported or built
    │   └── InvalidDecisionError           a policy answered outside its contract
    ├── ModelError
    │   ├── ModelNotFoundError
    │   ├── WeightsError                   weights missing, truncated or of wrong shape
    │   ├── UnsupportedModelError
    │   └── NotEnoughMemoryError
    ├── TraceError (ValueError)            a workload trace or event log cannot be read, or changed as asked
    └── EngineError
        ├── EngineClosedError              not started yet, closing or closed
        ├── EngineDeadError                the device or a control task was lost
        └── WrongLoopError (RuntimeError)  called from another event loop or thread
"""

from __future__ import annotations


class AsyncschedError(Exception):
    """Base of every exception raised by asyncsched."""


class ConfigError(AsyncschedError, ValueError):
    """An engine option is impossible or contradicts another one."""


class InvalidRequestError(AsyncschedError, ValueError):
    """One request is at fault. Nothing was queued and the engine is unharmed."""


class InvalidParamsError(InvalidRequestError):
    """A sampling parameter is out of range or contradicts another one."""


class EmptyPromptError(InvalidRequestError):
    """The prompt has no tokens."""


class PromptTooLongError(InvalidRequestError):
    """The prompt leaves no room in the model's context length."""


class RequestTooLargeError(InvalidRequestError):
    """Prompt plus ``max_tokens`` needs more pages than the whole pool has."""


class InvalidTokenError(InvalidRequestError):
    """A token id lies outside the model's vocabulary."""


class DuplicateRequestError(InvalidRequestError):
    """The request id is in use by a request that has not ended yet."""


class ChatTemplateError(InvalidRequestError):
    """The model has no chat template, or the template refused the messages."""


class TokenizeError(InvalidRequestError):
    """The tokenizer raised on this prompt; the cause is chained."""


class RejectedError(AsyncschedError):
    """The engine refused a valid request because of load. Retry later."""


class QueueFullError(RejectedError):
    """The bound on waiting requests or waiting tokens is reached."""


class EngineDrainingError(RejectedError):
    """The engine is draining: it finishes what it has and takes nothing new until ``resume()``."""


class AdmissionRejectedError(RejectedError):
    """The admission policy refused the request; the reason is in the text."""


class RequestFailedError(AsyncschedError):
    """An accepted request ended with finish reason ``error``."""


class StepFailedError(RequestFailedError):
    """The step that computed this request raised; the cause is chained."""


class RequestTimeoutError(RequestFailedError, TimeoutError):
    """The request ran into its own time limit."""


class QueueTimeoutError(RequestTimeoutError):
    """The request waited longer than its ``queue_timeout`` without getting a row."""


class DeadlineExpiredError(RequestTimeoutError):
    """The request's deadline passed while it waited; nothing of it was computed."""


class PolicyError(AsyncschedError):
    """A policy could not be found, loaded or trusted."""


class PolicyNotFoundError(PolicyError):
    """No installed policy has this name; the text lists the known ones."""


class PolicyLoadError(PolicyError):
    """A policy plugin could not be imported or constructed; the cause is chained."""


class InvalidDecisionError(PolicyError):
    """A policy answered outside its contract (raised only with ``strict_policies=True``)."""


class ModelError(AsyncschedError):
    """A model cannot be found, read or run."""


class ModelNotFoundError(ModelError):
    """No such model folder, file or hub entry."""


class WeightsError(ModelError):
    """Weights are missing, truncated, or of the wrong shape or type."""


class UnsupportedModelError(ModelError):
    """The architecture, head size or data type is not supported by this backend."""


class NotEnoughMemoryError(ModelError):
    """The memory at hand does not hold the weights or one request's pages."""


class TraceError(AsyncschedError, ValueError):
    """A workload trace or an event log cannot be read; the text names the line."""


class EngineError(AsyncschedError):
    """The engine as a whole cannot serve."""


class EngineClosedError(EngineError):
    """The engine is not started, is closing, or is closed."""


class EngineDeadError(EngineError):
    """The device or a control task was lost; the cause is chained."""


class WrongLoopError(EngineError, RuntimeError):
    """Called from another event loop or thread than the one the engine lives in."""
