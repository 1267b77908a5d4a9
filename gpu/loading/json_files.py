"""JSON files of a model folder. Any thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelError: unreadable, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a {type(content).__name__}, not an object; download it again")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """The same, or ``{}`` if there is no such file."""
    return read_json(path) if path.is_file() else {}
