"""Logging: structlog's logger, obtained late, never configured. The application decides where events go."""

from __future__ import annotations

from typing import Any


def get_logger(part: str) -> Any:
    """The logger of one part of the engine, with the part bound.

    structlog is imported here and not at the top: it is a quarter of what ``import asyncsched`` would cost.
    """
    import structlog

    return structlog.get_logger("asyncsched", part=part)
