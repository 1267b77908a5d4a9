"""Logging: structlog's logger, obtained late, never configured. The application decides where events go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Logger:
    """A structlog logger whose trouble stays its own.

    Where events go is the application's business: a closed pipe or a processor that raises must not
    reach the code that only wanted to say something, least of all while it handles a failure.

    Args:
        logger: structlog's.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, level: str) -> Callable[..., None]:
        log = getattr(self._logger, level)

        def safely(event: str, **details: Any) -> None:
            with suppress(Exception):
                log(event, **details)

        return safely


def get_logger(part: str) -> Logger:
    """The logger of one part of the engine, with the part bound.

    structlog is imported here and not at the top: it is a quarter of what ``import asyncsched`` would cost.
    """
    import structlog

    return Logger(structlog.get_logger("asyncsched", part=part))
