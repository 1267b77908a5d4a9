"""Pieces of text add up to the one-shot decode and are never taken back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched.detokenizer import Detokenizer
from asyncsched.errors import ChatTemplateError
from asyncsched.testing import ByteTokenizer
from asyncsched.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "text"
NAUGHTY: list[str] = json.loads((DATA / "blns.json").read_text("utf-8"))
TOKENIZER = ByteTokenizer()
SENTENCEPIECE = ByteTokenizer(strips_leading_space=True)

token_lists = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)
# Bytes of multi-byte characters only, so that most runs are half valid.
hard_tokens = st.lists(st.sampled_from([*range(0x7E, 0xC6), *range(0xE0, 0x100), 0x20, *range(256, 269)]), max_size=40)


def graphemes() -> list[str]:
    """The strings of the Unicode grapheme break test."""
    found = []
    for line in (DATA / "GraphemeBreakTest.txt").read_text("utf-8").splitlines():
        points = [p for p in line.partition("#")[0].split() if p not in "÷×"]
        if points:
            found.append("".join(chr(int(p, 16)) for p in points))
    return found


def ids_of(tokenizer: ByteTokenizer, text: str) -> list[int]:
    (ids,) = tokenizer.encode([text], add_special_tokens=False, limit=10**9)
    assert isinstance(ids, list)
    return ids


def pieces(tokenizer: Tokenizer, tokens: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.feed([token]) for token in tokens), detokenizer.finish()]


def test_byte_tokenizer_is_a_tokenizer() -> None:
    tokenizer: Tokenizer = TOKENIZER
    assert tokenizer.eos_ids == (257,)
    assert (
        max(len(tokenizer.token_bytes(t).decode("utf-8", "replace")) for t in range(TOKENIZER.vocab_size))
        == tokenizer.longest_token
    )


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SENTENCEPIECE], ids=["plain", "strips"])
def test_naughty_strings_survive_in_pieces(tokenizer: ByteTokenizer) -> None:
    assert len(NAUGHTY) > 500
    for text in NAUGHTY:
        expected = text[1:] if tokenizer.strips_leading_space and text.startswith(" ") else text
        assert "".join(pieces(tokenizer, ids_of(tokenizer, text), skip=False)) == expected
        assert "".join(pieces(tokenizer, list(text.encode()), skip=False)) == expected


def test_graphemes_survive_in_bytes() -> None:
    texts = graphemes()
    assert len(texts) > 500
    for text in texts:
        got = pieces(TOKENIZER, list(text.encode("utf-8", "replace")))
        assert "".join(got) == text.encode("utf-8", "replace").decode()
        assert all(len(piece) <= 1 for piece in got)


def test_long_texts_survive() -> None:
    for name in ("UTF-8-demo.txt", "sonnet.txt"):
        text = (DATA / name).read_text("utf-8")
        assert "".join(pieces(TOKENIZER, ids_of(TOKENIZER, text))) == text


def test_character_split_over_tokens_comes_whole_and_at_once() -> None:
    assert pieces(TOKENIZER, list("世".encode())) == ["", "", "世", ""]
    assert pieces(TOKENIZER, list("a🦄b".encode())) == ["a", "", "", "", "🦄", "b", ""]


def test_incomplete_tail_is_emitted_once() -> None:
    for tail in ("世".encode()[:1], "世".encode()[:2], "🦄".encode()[:3]):
        detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
        assert detokenizer.feed([ord("x"), *tail]) == "x"
        assert detokenizer.finish() == "\ufffd"
        assert detokenizer.finish() == ""


def test_prompt_ending_in_half_a_character_does_not_leak() -> None:
    rest = "世".encode()[1:]  # the prompt ended with the first byte; the output continues it
    assert "".join(pieces(TOKENIZER, [*rest, ord("!")])) == "\ufffd\ufffd!"


def test_long_run_of_invalid_bytes_is_linear_and_complete() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    got = []
    for _ in range(4000):
        got.append(detokenizer.feed([0xE4]))
        assert len(detokenizer._pending) <= 3  # nothing accumulates, so no call can cost more than the first
    assert "".join(got) + detokenizer.finish() == "\ufffd" * 4000
    assert "".join(pieces(TOKENIZER, [0xFF] * 4000)) == "\ufffd" * 4000


def test_special_tokens_are_skipped_or_shown() -> None:
    tokens = [256, *b"hi", 257]
    assert "".join(pieces(TOKENIZER, tokens)) == "hi"
    assert "".join(pieces(TOKENIZER, tokens, skip=False)) == "<|bos|>hi<|eos|>"


def test_leading_space_is_dropped_once_and_only_at_the_start() -> None:
    assert "".join(pieces(SENTENCEPIECE, list(b"  a b"))) == " a b"
    assert "".join(pieces(SENTENCEPIECE, [256, *b" a"])) == "a"  # a skipped special is not a start
    assert "".join(pieces(SENTENCEPIECE, [256, *b" a"], skip=False)) == "<|bos|> a"
    assert "".join(pieces(TOKENIZER, list(b" a"))) == " a"


def test_feed_takes_any_iterable() -> None:
    def tokens() -> Iterator[int]:
        yield from b"ok"

    assert Detokenizer(TOKENIZER, skip_special_tokens=True).feed(tokens()) == "ok"
    assert Detokenizer(TOKENIZER, skip_special_tokens=True).feed(()) == ""


@settings(deadline=None)
@given(token_lists | hard_tokens, st.booleans(), st.booleans())
def test_pieces_add_up_to_the_one_shot_decode(tokens: list[int], skip: bool, strips: bool) -> None:
    tokenizer = SENTENCEPIECE if strips else TOKENIZER
    assert "".join(pieces(tokenizer, tokens, skip=skip)) == tokenizer.decode(tokens, skip_special_tokens=skip)


@settings(deadline=None)
@given(hard_tokens | token_lists, st.lists(st.integers(0, 40), max_size=5))
def test_grouping_of_tokens_does_not_matter(tokens: list[int], cuts: list[int]) -> None:
    grouped = Detokenizer(TOKENIZER, skip_special_tokens=True)
    single = Detokenizer(TOKENIZER, skip_special_tokens=True)
    bounds = [0, *sorted(min(c, len(tokens)) for c in cuts), len(tokens)]
    for low, high in pairwise(bounds):
        assert grouped.feed(tokens[low:high]) == "".join(single.feed([t]) for t in tokens[low:high])
    assert grouped.finish() == single.finish()


@settings(deadline=None)
@given(st.text(), st.data())
def test_never_half_a_character(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cut = data.draw(st.integers(0, len(raw)))
    so_far = Detokenizer(TOKENIZER, skip_special_tokens=True).feed(list(raw[:cut]))
    assert text.startswith(so_far)
    assert len(so_far.encode()) > cut - 4


@settings(deadline=None)
@given(hard_tokens, hard_tokens)
def test_copy_is_independent(tokens: list[int], more: list[int]) -> None:
    original = Detokenizer(SENTENCEPIECE, skip_special_tokens=True)
    original.feed(tokens)
    twin = original.copy()
    expected = twin.feed(more) + twin.finish()
    assert original.feed(more) + original.finish() == expected


@settings(deadline=None)
@given(st.text())
def test_byte_tokenizer_round_trip(text: str) -> None:
    ids = ids_of(TOKENIZER, text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert len(ids) * TOKENIZER.longest_token >= len(text)
    assert TOKENIZER.encode([text], add_special_tokens=True, limit=len(ids)) == [len(ids) + 1]
    assert TOKENIZER.encode([text], add_special_tokens=True, limit=len(ids) + 1) == [[256, *ids]]


def test_byte_tokenizer_chat() -> None:
    rendered = TOKENIZER.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert rendered == "<|user|>hi<|eos|><|assistant|>"
    assert ids_of(TOKENIZER, rendered) == [259, *b"hi", 257, 260]
    for message in ({"role": "alien", "content": "hi"}, {"role": "user", "content": None}, {}):
        with pytest.raises(ChatTemplateError):
            TOKENIZER.render_chat([message], add_generation_prompt=False)
