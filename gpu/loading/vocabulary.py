"""The bytes each token stands for, as one table per tokenizer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE_MARK = "▁"  # SentencePiece writes a space as this
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_UNBOUNDED = sys.maxsize


def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al., GPT-2, 2019).

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the characters
    from U+0100 on, so that no token holds a space or a control character.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What decoding needs to know. Immutable, any thread.

    Attributes:
        table: Token id → its bytes; added tokens are their literal text, ids without a token are empty.
        special_ids: Tokens that ``skip_special_tokens`` leaves out.
        strips_leading_space: Decoding drops one space at the start of a text.
        longest_token: Most characters of input one token can stand for.
    """

    table: tuple[bytes, ...]
    special_ids: frozenset[int]
    strips_leading_space: bool
    longest_token: int


def build_vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Tabulate a tokenizer. Worker thread only: some hundred milliseconds for a large one.

    Raises:
        UnsupportedModelError: its decoder is not a concatenation of bytes per token (WordPiece, say).
    """
    to_bytes, strips = _decoder(tokenizer)
    pieces = tokenizer.get_vocab(with_added_tokens=False)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max([*pieces.values(), *added], default=-1) + 1)
    for piece, token in pieces.items():
        table[token] = to_bytes(piece)
    for token, entry in added.items():
        table[token] = entry.content.encode()
    return Vocabulary(
        table=tuple(table),
        special_ids=frozenset(token for token, entry in added.items() if entry.special),
        strips_leading_space=strips,
        longest_token=_longest_token(tokenizer, table),
    )


def _decoder(tokenizer: Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """How one piece becomes bytes, and whether a leading space is dropped."""
    steps = _parts(tokenizer.decoder, "decoders")
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(), False
    if kinds == ["Metaspace"] and steps[0]["replacement"] == _SPACE_MARK:
        return _piece_to_bytes(byte_pieces=False), steps[0]["prepend_scheme"] != "never"
    # SentencePiece models: Replace, ByteFallback, Fuse, and Strip if a space was put in front.
    fused = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    strips = [step for step in steps[fused:] if step["type"] == "Strip"]
    replaces = [step for step in steps[:fused] if step["type"] == "Replace"]
    plain = (
        set(kinds[:fused]) <= {"Replace", "ByteFallback"}
        and set(kinds[fused:]) <= {"Fuse", "Strip"}
        and [(step["pattern"], step["content"]) for step in replaces] == [({"String": _SPACE_MARK}, " ")]
        and all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in strips)
        and len(strips) <= 1
    )
    if not plain:
        raise UnsupportedModelError(
            f"tokens of this tokenizer cannot be decoded one by one (decoder: {', '.join(kinds) or 'none'}); "
            "byte-level BPE and SentencePiece tokenizers are supported"
        )
    return _piece_to_bytes(byte_pieces="ByteFallback" in kinds), bool(strips)


def _byte_level() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()
    characters = frozenset(alphabet)
    to_latin1 = {ord(character): chr(byte) for character, byte in alphabet.items()}

    def to_bytes(piece: str) -> bytes:
        if characters.issuperset(piece):
            return piece.translate(to_latin1).encode("latin-1")
        return piece.encode()

    return to_bytes


def _piece_to_bytes(*, byte_pieces: bool) -> Callable[[str], bytes]:
    def to_bytes(piece: str) -> bytes:
        match = _BYTE_PIECE.fullmatch(piece) if byte_pieces else None
        return bytes.fromhex(match[1]) if match else piece.replace(_SPACE_MARK, " ").encode()

    return to_bytes


def _longest_token(tokenizer: Tokenizer, table: list[bytes]) -> int:
    """A bound on the characters per token, for text whose characters the vocabulary covers.

    A token of n bytes stands for n characters at most, unless text shrinks before it is looked up.
    """
    normalizers = _parts(tokenizer.normalizer, "normalizers")
    pre_tokenizers = _parts(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    if (
        not all(_keeps_length(step) for step in normalizers)
        or not all(_keeps_text(step) for step in pre_tokenizers)
        or _fuses_unknown(tokenizer)
        or any(entry.lstrip or entry.rstrip for entry in added)  # such a token swallows the spaces around it
    ):
        return _UNBOUNDED
    longest = max(map(len, table), default=1)
    # Composition makes one character of up to four (U+1F82, three bytes) or of three (U+01D5, two bytes).
    return max(1, longest * 2 if any(step["type"] in ("NFC", "NFKC") for step in normalizers) else longest)


def _keeps_length(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return step["pattern"].get("String") == " " and len(step["content"]) >= 1
    return kind in ("NFC", "NFKC", "NFD", "NFKD", "Prepend", "Lowercase", "ByteLevel")


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")


def _fuses_unknown(tokenizer: Tokenizer) -> bool:
    """Whether a run of characters outside the vocabulary becomes one token."""
    from tokenizers.models import BPE

    model = tokenizer.model
    if not isinstance(model, BPE):
        return True
    if model.unk_token is None or not model.fuse_unk:
        return False
    return not (model.byte_fallback and all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256)))


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """The description of a tokenizer's component, sequences flattened."""
    if component is None:
        return []

    def flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
        return [leaf for part in step[key] for leaf in flatten(part)] if step["type"] == "Sequence" else [step]

    return flatten(json.loads(component.__getstate__()))
