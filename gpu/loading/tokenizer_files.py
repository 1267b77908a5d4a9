"""The tokenizer of a model folder: tokenizer.json and the files around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ...logs import get_logger
from .chat import DEFAULT, ChatTemplate
from .json_files import read_json_if_present
from .tokenizer import HFTokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> HFTokenizer | None:
    """Read tokenizer.json and what belongs to it; ``None`` if there is no tokenizer.json.

    Raises:
        ModelError: a file is unreadable.
        UnsupportedModelError: its tokens cannot be decoded one by one.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        get_logger("loading").warning("no tokenizer.json: the engine takes and yields token ids only", folder=str(folder))
        return None
    from tokenizers import Tokenizer

    try:
        library = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{file} cannot be read as a tokenizer ({error}); download it again") from error
    settings = read_json_if_present(folder / "tokenizer_config.json")
    named = _named_tokens(settings, read_json_if_present(folder / "special_tokens_map.json"))
    ends = [*_ids(generation_config.get("eos_token_id", config.get("eos_token_id")))]
    end = library.token_to_id(named["eos_token"]) if "eos_token" in named else None
    if end is not None:
        ends.append(end)
    chat = ChatTemplate(_templates(folder, settings), named)
    return HFTokenizer(library, eos_ids=tuple(dict.fromkeys(ends)), chat=chat)


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Text of the tokens that chat templates may name; the first source that has one wins."""
    named: dict[str, str] = {}
    for source in sources:
        for name in _NAMED:
            entry = source.get(name)
            text = entry.get("content") if isinstance(entry, dict) else entry
            if isinstance(text, str):
                named.setdefault(name, text)
    return named


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return {DEFAULT: file.read_text(encoding="utf-8")}
    found = settings.get("chat_template")
    if isinstance(found, str):
        return {DEFAULT: found}
    if isinstance(found, list):  # several, as {"name": …, "template": …}
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    return {}


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]
