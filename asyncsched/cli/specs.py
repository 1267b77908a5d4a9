"""Reading policies and other small languages of the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any


def policy_spec(text: str) -> Any:
    """``name``, ``name,option=value,…``, ``package.module:Class,…`` or a JSON object.

    Values are JSON where they parse as JSON, else text.
    """
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {exc}") from exc
    name, *pairs = text.split(",")
    if not pairs:
        return name
    options: dict[str, Any] = {"name": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise argparse.ArgumentTypeError(
                f"{pair!r} in {text!r} is not option=value (for values with a comma, give a JSON object)"
            )
        options[key.strip()] = _value(value)
    return options


def shares(text: str) -> dict[str, float]:
    """``name=weight,…``"""
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return {name.strip(): float(weight) for name, weight in pairs}
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=weight,name=weight") from exc


def at_least(low: int) -> Callable[[str], int]:
    """Reads a whole number from ``low`` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} on")
        return int(text)

    return read


def output_limit(text: str) -> int | str:
    """``longest``, ``exact``, or a number of tokens."""
    return text if text in ("longest", "exact") else at_least(1)(text)


def hint_error(text: str) -> float | None:
    """A number, or ``none``."""
    try:
        return None if text == "none" else float(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor none") from exc


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
