"""The tokenizer adapter: bytes of tokens against the library's own decoding, limits, bounds, and kinds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel, WordPiece

from asyncsched.errors import ModelError, TokenizeError, UnsupportedModelError
from asyncsched.gpu.loading.chat import ChatTemplate
from asyncsched.gpu.loading.gguf_header import GGUFHeader
from asyncsched.gpu.loading.gguf_tokenizer import gguf_tokenizer
from asyncsched.gpu.loading.tokenizer import HFTokenizer
from asyncsched.gpu.loading.tokenizer_files import folder_tokenizer
from asyncsched.gpu.loading.vocabulary import build_vocabulary, byte_alphabet

DATA = Path(__file__).parent / "data"
TEXTS: list[str] = [
    *json.loads((DATA / "text" / "blns.json").read_text(encoding="utf-8")),
    *(DATA / "text" / "UTF-8-demo.txt").read_text(encoding="utf-8").splitlines(keepends=True),
]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "Ġ"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("é", "x")]


def byte_level() -> Tokenizer:
    """All bytes, a few merges (some of which cut characters), and added tokens of every sort."""
    pieces = [*byte_alphabet(), *(left + right for left, right in MERGES[:-1])]
    library = Tokenizer(BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=MERGES[:-1]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>", "<｜begin▁of▁sentence｜>"])
    library.add_tokens(["<tool call>", "\t\t"])
    return library


def adapter(library: Tokenizer) -> HFTokenizer:
    return HFTokenizer(library, eos_ids=(), chat=ChatTemplate({}, {}))


def joined(tokenizer: HFTokenizer, ids: list[int]) -> str:
    text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    return text.removeprefix(" ") if tokenizer.strips_leading_space else text


def encode(tokenizer: HFTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    ids = tokenizer.encode([text], add_special_tokens=add_special_tokens, limit=sys.maxsize)[0]
    assert isinstance(ids, list)
    return ids


BYTE_LEVEL = byte_level()
ADAPTER = adapter(BYTE_LEVEL)


def test_the_byte_alphabet() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["a"], alphabet["Ġ"], alphabet["Ċ"], alphabet["Ã"]) == (ord("a"), ord(" "), ord("\n"), 0xC3)
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_bytes_give_back_naughty_strings(text: str) -> None:
    ids = encode(ADAPTER, text)
    assert joined(ADAPTER, ids) == text == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_bytes_of_any_tokens_decode_as_the_library_does(ids: list[int]) -> None:
    """Broken characters included: both put one U+FFFD per maximal broken part."""
    assert joined(ADAPTER, ids) == BYTE_LEVEL.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=40))
def test_skipping_special_tokens(ids: list[int]) -> None:
    kept = [token for token in ids if token not in ADAPTER.special_ids]
    assert joined(ADAPTER, kept) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


def test_special_and_added_tokens_are_their_literal_text() -> None:
    ids = encode(ADAPTER, "a<|end|><｜begin▁of▁sentence｜><tool call>\t\t")
    assert [ADAPTER.token_bytes(token).decode() for token in ids] == [
        "a",
        "<|end|>",
        "<｜begin▁of▁sentence｜>",
        "<tool call>",
        "\t\t",
    ]
    assert [token in ADAPTER.special_ids for token in ids] == [False, True, True, False, False]


@pytest.mark.parametrize("token", [-1, BYTE_LEVEL.get_vocab_size(), 10**9])
def test_ids_without_a_token_contribute_nothing(token: int) -> None:
    assert ADAPTER.token_bytes(token) == b""


def test_over_the_limit_only_the_number_is_returned() -> None:
    texts = ["abc", "", "z" * 1000, "the in"]
    assert ADAPTER.encode(texts, add_special_tokens=True, limit=3)[:3] == [encode(ADAPTER, "abc"), [], 1000]
    assert ADAPTER.encode(["abc"], add_special_tokens=True, limit=2) == [3]
    assert ADAPTER.encode([], add_special_tokens=True, limit=2) == []


def test_a_lone_surrogate_is_named() -> None:
    with pytest.raises(TokenizeError, match=r"not valid Unicode.*surrogates") as caught:
        ADAPTER.encode(["fine", "a\ud800"], add_special_tokens=True, limit=10)
    assert isinstance(caught.value.__cause__, TypeError)


def test_truncation_and_padding_of_the_file_are_off() -> None:
    library = byte_level()
    library.enable_truncation(2)
    library.enable_padding(length=9)
    assert len(encode(adapter(library), "zzzz")) == 4


@given(st.text(max_size=60))
def test_longest_token_is_a_bound(text: str) -> None:
    assert len(encode(ADAPTER, text)) >= len(text) / ADAPTER.longest_token


def bound(**changes: Any) -> int:
    library = byte_level()
    for name, value in changes.items():
        setattr(library, name, value)
    return adapter(library).longest_token


def test_longest_token_knows_what_shortens_text() -> None:
    plain = len("<｜begin▁of▁sentence｜>".encode())
    assert bound() == plain
    assert bound(normalizer=normalizers.NFC()) == 2 * plain  # "Ǖ" is three characters in, two bytes out
    assert bound(normalizer=normalizers.Replace(" ", "▁")) == plain
    assert bound(normalizer=normalizers.Strip()) == sys.maxsize
    assert bound(normalizer=normalizers.Replace(Regex(" +"), " ")) == sys.maxsize
    assert bound(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])) == sys.maxsize
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel()])
    assert bound(pre_tokenizer=digits) == plain
    assert bound(pre_tokenizer=pre_tokenizers.WhitespaceSplit()) == sys.maxsize
    assert bound(pre_tokenizer=pre_tokenizers.Split(" ", "removed")) == sys.maxsize
    assert bound(pre_tokenizer=pre_tokenizers.Split(" ", "isolated")) == plain
    greedy = byte_level()
    greedy.add_special_tokens([AddedToken("<|user|>", rstrip=True)])
    assert adapter(greedy).longest_token == sys.maxsize
    fused = Tokenizer(BPE(vocab={"?": 0}, merges=[], unk_token="?", fuse_unk=True))
    fused.decoder = decoders.ByteLevel()
    assert adapter(fused).longest_token == sys.maxsize


@pytest.mark.parametrize(
    "library",
    [Tokenizer(WordPiece(vocab={"[UNK]": 0})), Tokenizer(WordLevel(vocab={"a": 0}))],
    ids=["WordPiece", "no decoder"],
)
def test_decoders_that_join_words_are_refused(library: Tokenizer) -> None:
    if isinstance(library.model, WordPiece):
        library.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="cannot be decoded one by one"):
        adapter(library)


SENTENCE_PIECE: dict[str, Any] = json.loads((DATA / "loading" / "sentencepiece.json").read_text(encoding="utf-8"))


def sentence_piece(**changes: Any) -> HFTokenizer:
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": SENTENCE_PIECE["pieces"],
        "tokenizer.ggml.scores": SENTENCE_PIECE["scores"],
        "tokenizer.ggml.token_type": SENTENCE_PIECE["types"],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    built = gguf_tokenizer(GGUFHeader(Path("s.gguf"), metadata | changes, {}))
    assert built is not None
    return built


@pytest.mark.parametrize("text", SENTENCE_PIECE["ids"], ids=range(len(SENTENCE_PIECE["ids"])))
def test_sentence_piece_ids_are_its_own_librarys(text: str) -> None:
    tokenizer = sentence_piece()
    ids = encode(tokenizer, text)
    assert ids == SENTENCE_PIECE["ids"][text]
    assert joined(tokenizer, ids) == text
    assert encode(tokenizer, text, add_special_tokens=True) == [1, *ids]


def test_sentence_piece_details() -> None:
    tokenizer = sentence_piece()
    assert tokenizer.strips_leading_space
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_bytes(SENTENCE_PIECE["pieces"].index("<0xF0>")) == b"\xf0"
    assert tokenizer.token_bytes(SENTENCE_PIECE["pieces"].index("▁th")) == b" th"
    assert tokenizer.longest_token == max(
        len(piece.replace("▁", " ")) for piece in SENTENCE_PIECE["pieces"] if "<" not in piece
    )
    bare = sentence_piece(**{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True})
    assert not bare.strips_leading_space
    ids = encode(bare, "the thee", add_special_tokens=True)
    assert (ids[0], ids[-1], joined(bare, ids[1:-1])) == (1, 2, "the thee")


@pytest.mark.parametrize("text", TEXTS[::7], ids=range(len(TEXTS[::7])))
def test_sentence_piece_bytes_give_back_naughty_strings(text: str) -> None:
    tokenizer = sentence_piece()
    assert joined(tokenizer, encode(tokenizer, text)) == text


def gpt2(pre: str, text: str = "", **metadata: Any) -> HFTokenizer:
    """Byte-level BPE in which every part of an ASCII text is one token, however it is merged."""
    letters = {byte: character for character, byte in byte_alphabet().items()}
    spelled = "".join(letters[byte] for byte in text.encode("ascii"))
    parts = {spelled[start:stop] for start in range(len(spelled)) for stop in range(start + 2, len(spelled) + 1)}
    tokens = [*byte_alphabet(), *sorted(parts)]
    merges = [f"{part[:at]} {part[at:]}" for part in sorted(parts) for at in range(1, len(part))]
    control = [*tokens, "<s>", "[PAD]"]
    content = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": control,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 5],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(tokens),
    }
    built = gguf_tokenizer(GGUFHeader(Path("g.gguf"), content | metadata, {}))
    assert built is not None
    return built


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " 12345", "  ", " b", "!?", "\n", "\n", "IT", "'", "S"]),
        ("never-heard-of", ["a", " 12345", "  ", " b", "!?", "\n", "\n", "IT", "'", "S"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", "5", "  ", " b", "!?", "\n", "\n", "IT", "'", "S"]),
        ("llama-bpe", ["a", " ", "123", "45", "  ", " b", "!?\n\n", "IT", "'S"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", "5", "  ", " b", "!?\n\n", "IT", "'S"]),
        ("tekken", ["a", " ", "1", "2", "3", "4", "5", "  ", " b", "!?\n\n", "IT", "'S"]),
    ],
)
def test_how_each_family_cuts_text(pre: str, pieces: list[str]) -> None:
    text = "a 12345   b!?\n\nIT'S"
    assert "".join(pieces) == text
    tokenizer = gpt2(pre, text)
    assert [tokenizer.token_bytes(token).decode() for token in encode(tokenizer, text)] == pieces


def test_qwen2_composes_characters_first() -> None:
    assert joined(gpt2("qwen2"), encode(gpt2("qwen2"), "e\u0301")) == "é"
    assert joined(gpt2("gpt-2"), encode(gpt2("gpt-2"), "e\u0301")) == "e\u0301"


def test_start_tokens_follow_the_family_unless_the_file_says_otherwise() -> None:
    for pre, starts in (("llama-bpe", True), ("tekken", True), ("qwen2", False), ("smollm", False)):
        override: dict[str, Any] = {"tokenizer.ggml.add_bos_token": not starts}
        for tokenizer, expected in ((gpt2(pre), starts), (gpt2(pre, **override), not starts)):
            ids = encode(tokenizer, "a", add_special_tokens=True)
            assert (tokenizer.token_bytes(ids[0]) == b"<s>") == expected
            assert tokenizer.token_bytes(ids[-1]) == b"a"


def test_filler_tokens_never_match_and_say_nothing() -> None:
    tokenizer = gpt2("llama-bpe")
    assert joined(tokenizer, encode(tokenizer, "[PAD]")) == "[PAD]"
    assert len(encode(tokenizer, "[PAD]")) == 5
    assert tokenizer.token_bytes(257) == b""


@pytest.mark.parametrize(
    "damage",
    [
        {"tokenizer.ggml.merges": ["x qq"]},
        {"tokenizer.ggml.token_type": [1]},
    ],
)
def test_an_inconsistent_vocabulary_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="inconsistent vocabulary"):
        gpt2("gpt-2", **damage)


def test_a_folder_names_its_end_tokens_in_three_places(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    end = BYTE_LEVEL.token_to_id("<|end|>")

    def ends(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
        tokenizer = folder_tokenizer(tmp_path, config, generation)
        assert tokenizer is not None
        return tokenizer.eos_ids

    assert ends({}, {}) == (end,)
    assert ends({"eos_token_id": 5}, {}) == (5, end)
    assert ends({"eos_token_id": 5}, {"eos_token_id": [end, 7]}) == (end, 7)


def test_a_folder_without_or_with_a_broken_tokenizer(tmp_path: Path) -> None:
    assert folder_tokenizer(tmp_path, {}, {}) is None
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        folder_tokenizer(tmp_path, {}, {})


def test_metaspace_decoders_are_understood() -> None:
    library = Tokenizer(BPE(vocab={"▁": 0, "a": 1, "▁a": 2}, merges=[("▁", "a")]))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    found = build_vocabulary(library)
    assert found.table == (b" ", b"a", b" a")
    assert found.strips_leading_space
    library.decoder = decoders.Metaspace(prepend_scheme="never")
    assert not build_vocabulary(library).strips_leading_space
