"""How long an answer is expected to be: from a hint, from a predictor, or at worst from ``max_tokens``."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeGuard

from ..errors import ConfigError, InvalidDecisionError
from ..policy import RequestView

HINT = "output_tokens"
"""The hint that carries the expected output length, in tokens."""


def expected_output(request: RequestView) -> float:
    """Output tokens that a request is expected to generate in all.

    Its hint ``output_tokens`` if that is a number of at least 0, and never more than ``max_tokens``,
    which is also the answer where there is no such hint.
    """
    hint = request.hints.get(HINT)
    return float(min(hint, request.max_tokens)) if _is_length(hint) else float(request.max_tokens)


def annotator(predictor: Any, policy: str) -> Callable[[RequestView], Awaitable[Mapping[str, Any]]]:
    """A hook ``annotate`` that asks a predictor about requests that bring no hint ``output_tokens``.

    Args:
        predictor: ``async (RequestView) -> float``, expected output tokens; or its dotted path,
            ``"package.module:function"``.
        policy: Name of the policy, for messages.

    Raises:
        ConfigError: it cannot be imported or called.
    """
    predict = _imported(predictor, policy) if isinstance(predictor, str) else predictor
    if not callable(predict):
        raise ConfigError(f'{policy}: predictor={predictor!r} cannot be called; give an async function or "module:function"')

    async def annotate(request: RequestView) -> Mapping[str, Any]:
        if HINT in request.hints:
            return {}
        tokens = await predict(request)
        if not _is_length(tokens):
            raise InvalidDecisionError(f"{policy}: the predictor answered {tokens!r}; need a number of tokens, at least 0")
        return {HINT: tokens}

    return annotate


def _imported(path: str, policy: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as exc:
        raise ConfigError(f'{policy}: predictor={path!r} could not be imported ({exc}); write "module:function"') from exc


def _is_length(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0  # false for nan
