"""A tokenizer from the vocabulary inside a GGUF file."""

from __future__ import annotations

from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ...errors import ModelError, UnsupportedModelError
from ...logs import get_logger
from .chat import DEFAULT, ChatTemplate
from .gguf_config import generation_config
from .gguf_header import GGUFHeader
from .tokenizer import HFTokenizer

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPLITS = {  # how the tokenizer of each family cuts text before merging
    "llama3": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_FAMILIES = {  # tokenizer.ggml.pre → family
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "tekken": "tekken",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "codeshell": "digits",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "default": "gpt2",
}
_WHOLE_WORDS = ("llama3", "tekken")  # a word that is one token skips the merges; a text begins with the start token
_SPACE_MARK = "▁"


def gguf_tokenizer(header: GGUFHeader) -> HFTokenizer | None:
    """Build the tokenizer; ``None`` if the file has no vocabulary. Worker thread only.

    Raises:
        UnsupportedModelError: neither byte-level BPE (``gpt2``) nor SentencePiece BPE (``llama``).
        ModelError: the vocabulary is inconsistent.
    """
    metadata = header.metadata
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModelError(f"{header.path} has a tokenizer of kind {kind!r}; supported: gpt2, llama")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
    named = {
        name: tokens[metadata[key]]
        for name, key in (
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        )
        if 0 <= metadata.get(key, -1) < len(tokens)
    }
    try:
        library = _byte_level(metadata, tokens, types) if kind == "gpt2" else _sentence_piece(metadata, tokens, types)
        _add_markers(library, metadata, named)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{header.path} has an inconsistent vocabulary ({error}); convert the model again") from error
    template = metadata.get("tokenizer.chat_template")
    chat = ChatTemplate({DEFAULT: template} if template else {}, named)
    return HFTokenizer(library, eos_ids=tuple(generation_config(header)["eos_token_id"]), chat=chat)


def _byte_level(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    family = _family(metadata)
    if family is None:
        name = metadata["tokenizer.ggml.pre"]
        get_logger("loading").warning("unknown pre-tokenizer: text is cut as for GPT-2", pre=name)
    merges = [_pair(merge) for merge in metadata["tokenizer.ggml.merges"]]
    model = BPE(vocab=_vocabulary(tokens, types), merges=merges, ignore_merges=family in _WHOLE_WORDS)
    library = Tokenizer(model)
    if family == "qwen2":
        library.normalizer = normalizers.NFC()
    cut = [pre_tokenizers.Split(Regex(_SPLITS[family]), "isolated")] if family in _SPLITS else []
    digits = [pre_tokenizers.Digits(individual_digits=True)] if family == "digits" else []
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut)  # its own cut is GPT-2's
    library.pre_tokenizer = pre_tokenizers.Sequence([*cut, *digits, words])
    library.decoder = decoders.ByteLevel()
    _add_tokens(library, tokens, types)
    return library


def _family(metadata: dict[str, Any]) -> str | None:
    return _FAMILIES.get(metadata.get("tokenizer.ggml.pre", "default"))


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    vocabulary = _vocabulary(tokens, types)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    model = BPE(
        vocab=vocabulary,
        merges=_merges_by_score(normal, vocabulary, metadata["tokenizer.ggml.scores"]),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=TokenType.BYTE in types,
    )
    library = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    mark = normalizers.Replace(" ", _SPACE_MARK)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE_MARK), mark]) if prefix else mark
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    library.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip],
    )
    _add_tokens(library, tokens, types)
    return library


def _merges_by_score(normal: set[str], vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges behind SentencePiece scores (Kudo and Richardson, 2018).

    SentencePiece joins the neighbours whose union has the highest score; a merge list joins the pair
    that comes first. So: every way to cut a piece in two pieces, by falling score of the union.
    """
    cuts = [
        (-scores[vocabulary[piece]], vocabulary[piece[:at]], vocabulary[piece[at:]], piece[:at], piece[at:])
        for piece in normal
        for at in range(1, len(piece))
        if piece[:at] in normal and piece[at:] in normal
    ]
    return [(left, right) for _, _, _, left, right in sorted(cuts)]


def _vocabulary(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Token → id, without the fillers that pad a vocabulary to a round size."""
    if len(tokens) != len(types):
        raise ValueError(f"{len(tokens)} tokens but {len(types)} token types")
    return {token: at for at, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != TokenType.UNUSED}


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _add_tokens(library: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens that are found in the text before anything else."""
    special = {TokenType.CONTROL: True, TokenType.UNKNOWN: True, TokenType.USER_DEFINED: False}
    added = [
        AddedToken(token, special=special[TokenType(kind)], normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in special and token
    ]
    library.add_tokens(added)


def _add_markers(library: Tokenizer, metadata: dict[str, Any], named: dict[str, str]) -> None:
    """Have ``add_special_tokens`` put the start and end tokens around a text, where the model wants them."""
    starts = metadata["tokenizer.ggml.model"] == "llama" or _family(metadata) in _WHOLE_WORDS
    first = [named["bos_token"]] if metadata.get("tokenizer.ggml.add_bos_token", starts) and "bos_token" in named else []
    last = [named["eos_token"]] if metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in named else []
    if first or last:
        ids = [(token, library.token_to_id(token)) for token in dict.fromkeys(first + last)]
        library.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], pair=None, special_tokens=ids)
