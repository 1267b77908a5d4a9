"""Reading policies and other small languages of the command line."""

from __future__ import annotations

import argparse
import json
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
            raise argparse.ArgumentTypeError(f"{pair!r} in {text!r} is not option=value")
        options[key.strip()] = _value(value)
    return options


def shares(text: str) -> dict[str, float]:
    """``name=weight,…``"""
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return {name.strip(): float(weight) for name, weight in pairs}
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=weight,name=weight") from exc


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
