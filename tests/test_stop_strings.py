"""Stop strings: earliest completion, least possible hold-back, and the tokens they use up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, SupportsIndex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched.stop_strings import StopStrings
from asyncsched.testing import ByteTokenizer
from asyncsched.text import TextAssembler, TextDelta

TOKENIZER = ByteTokenizer()
NAUGHTY: list[str] = json.loads((Path(__file__).parent / "data" / "text" / "blns.json").read_text("utf-8"))

# Few letters make overlaps, shared prefixes and stops inside stops the rule.
stop_sets = st.lists(st.text("ab世", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
texts = st.lists(st.text("ab世", max_size=6), max_size=10)


def first_stop(text: str, stops: tuple[str, ...], start: int = 0) -> tuple[int, str] | None:
    """By definition: the stop with the earliest end over ``start``, ties by list order."""
    for end in range(start + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return end, stop
    return None


def held_length(text: str, stops: tuple[str, ...]) -> int:
    """By definition: the longest suffix that is a proper prefix of some stop."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


def run(pieces: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stops, include)
    out = []
    for piece in pieces:
        text, stopped_by = watcher.feed(piece)
        out.append(text)
        if stopped_by is not None:
            return out, stopped_by
    return [*out, watcher.finish()], None


def assemble(tokens: list[int], group: int = 1, **options: Any) -> tuple[str, str | None, int]:
    """The whole text, what stopped it, and the tokens used, fed ``group`` at a time."""
    assembler = TextAssembler(TOKENIZER, **options)
    text, used = "", 0
    for at in range(0, len(tokens), group):
        delta = assembler.feed(tokens[at : at + group])
        text += delta.text
        used += delta.used
        if delta.stopped_by is not None:
            assert assembler.feed(tokens[at + group :]) == TextDelta("", delta.stopped_by, 0)
            assert assembler.finish() == ""
            return text, delta.stopped_by, used
    return text + assembler.finish(), None, used


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stopped_by"),
    [
        (["an or", "gani", "zation"], ("gani",), "an or", "gani"),  # at a piece
        (["an ", "organization"], ("gani",), "an or", "gani"),  # inside a piece
        (["an org", "an", "ization"], ("gani",), "an or", "gani"),  # across three pieces
        (["a", "a", "a", "b"], ("aab",), "a", "aab"),  # overlapping with itself
        (["aaab"], ("aab",), "a", "aab"),
        (["abcd"], ("bcd", "bc"), "a", "bc"),  # earliest completion, not the longest
        (["abcd"], ("abcd", "cd"), "", "abcd"),  # tie: list order
        (["abcd"], ("cd", "abcd"), "ab", "cd"),
        (["abxab", "c"], ("abc",), "abx", "abc"),
        (["ab"], ("abc", "b"), "a", "b"),  # a stop inside the prefix of another
        (["short"], ("short and sweet",), "short", None),  # longer than everything generated
        (["short"], ("x" * 1000,), "short", None),
        (["a世", "界b"], ("世界",), "a", "世界"),
        (["a^-]\\", "b"], ("^-", "]\\b"), "a", "^-"),  # characters special to a pattern
        (["a-", "]\\b"], ("]\\b",), "a-", "]\\b"),
        ([], ("a",), "", None),
    ],
)
def test_stops(pieces: list[str], stops: tuple[str, ...], text: str, stopped_by: str | None) -> None:
    out, by = run(pieces, stops)
    assert by == stopped_by
    assert "".join(out) == text
    out, by = run(pieces, stops, include=True)
    assert by == stopped_by
    assert "".join(out) == text + (stopped_by or "")


@settings(deadline=None, max_examples=300)
@given(texts, stop_sets, st.booleans())
def test_matches_the_definition_and_holds_back_no_more(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    watcher = StopStrings(stops, include)
    fed = emitted = ""
    for piece in pieces:
        before = len(fed)
        fed += piece
        text, stopped_by = watcher.feed(piece)
        emitted += text
        expected = first_stop(fed, stops)
        if expected is not None:
            end, stop = expected
            assert stopped_by == stop
            assert watcher.consumed == end - before
            assert emitted == (fed[:end] if include else fed[: end - len(stop)])
            assert watcher.feed("more") == ("", stop)
            assert watcher.finish() == ""
            return
        assert stopped_by is None
        assert emitted == (fed if include else fed[: len(fed) - held_length(fed, stops)])
    assert emitted + watcher.finish() == fed
    assert watcher.finish() == ""


@settings(deadline=None, max_examples=300)
@given(texts, texts, stop_sets)
def test_stops_completed_unchecked_are_let_pass(free: list[str], rest: list[str], stops: tuple[str, ...]) -> None:
    watcher = StopStrings(stops, include=False)
    fed = emitted = ""
    for piece in free:
        fed += piece
        text, stopped_by = watcher.feed(piece, check=False)
        assert stopped_by is None
        emitted += text
        assert emitted == fed[: len(fed) - held_length(fed, stops)]
    start = len(fed)
    expected = first_stop(fed + "".join(rest), stops, start)
    for piece in rest:
        text, stopped_by = watcher.feed(piece)
        emitted += text
        if stopped_by is not None:
            break
    else:
        assert expected is None
        assert emitted + watcher.finish() == fed + "".join(rest)
        return
    assert expected is not None
    end, stop = expected
    assert stopped_by == stop
    assert emitted == (fed + "".join(rest))[: end - len(stop)]


def test_naughty_strings_as_stops() -> None:
    for stop in NAUGHTY:
        if stop:
            assert run([*stop, "tail"], (stop,)) == ([""] * len(stop), stop)
            assert run([*stop[:-1]], (stop,)) == ([""] * (len(stop) - 1) + [stop[:-1]], None)


def test_cost_is_linear_in_adversarial_text() -> None:
    class Counting(list[dict[str, int]]):
        looked_up = 0

        def __getitem__(self, index: SupportsIndex) -> dict[str, int]:  # type: ignore[override]  # no slices here
            Counting.looked_up += 1
            return super().__getitem__(index)

    watcher = StopStrings(("a" * 3000 + "b", "a" * 2999 + "c"), include=False)
    watcher._automaton.children = Counting(watcher._automaton.children)
    text = ("a" * 4000 + "x") * 3
    emitted = "".join(watcher.feed(character)[0] for character in text)
    assert emitted + watcher.finish() == text
    assert Counting.looked_up <= 2 * len(text)


def test_equal_stops_share_one_automaton() -> None:
    assert StopStrings(("once", "twice"), False)._automaton is StopStrings(("once", "twice"), True)._automaton


# --- with tokens ---


def test_stop_across_three_tokens_counts_them() -> None:
    tokens = list(b"xyEND and more")
    for group in (1, 2, 3, 4, 5, 100):
        assert assemble(tokens, group, stop=("END",)) == ("xy", "END", 5)
        assert assemble(tokens, group, stop=("END",), include_stop=True) == ("xyEND", "END", 5)


def test_stop_inside_a_token_cuts_it() -> None:
    (hello,) = TOKENIZER.encode(["hello"], add_special_tokens=False, limit=9)
    assert hello == [263]
    assert assemble([ord(">"), 263, ord("!")], 3, stop=("ell",)) == (">h", "ell", 2)
    assert assemble([ord(">"), 263, ord("!")], 1, stop=("ell",), include_stop=True) == (">hell", "ell", 2)


def test_stop_completed_by_the_last_byte_of_a_character() -> None:
    tokens = [*"a世".encode(), ord("b")]
    for group in (1, 2, 5):
        assert assemble(tokens, group, stop=("世",)) == ("a", "世", 4)


def test_held_back_text_and_half_a_character_are_flushed_in_order() -> None:
    assembler = TextAssembler(TOKENIZER, stop=("END",))
    assert assembler.feed([*b"xEN"]) == TextDelta("x", None, 3)
    assert assembler.feed(["世".encode()[0]]) == TextDelta("", None, 1)
    assert assembler.finish() == "EN\ufffd"
    assert assembler.finish() == ""


def test_without_stops_everything_passes() -> None:
    assert assemble(list("a世END".encode()), 2) == ("a世END", None, 7)
    assert TextAssembler(TOKENIZER).feed([]) == TextDelta("", None, 0)


def test_special_tokens_do_not_break_a_stop_unless_shown() -> None:
    tokens = [*b"EN", 257, *b"D!"]
    assert assemble(tokens, stop=("END",)) == ("", "END", 4)
    assert assemble(tokens, stop=("END",), skip_special_tokens=False) == ("EN<|eos|>D!", None, 5)


@pytest.mark.parametrize("group", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [
        (0, ("x", "ab", 3)),
        (3, ("x", "ab", 3)),  # completes exactly at token 3
        (4, ("xab", "ab", 5)),  # let pass once; the next one counts
        (5, ("xab", "ab", 5)),  # begins before token 5, completes with it
        (6, ("xababc", None, 6)),
        (100, ("xababc", None, 6)),
    ],
)
def test_min_tokens(group: int, min_tokens: int, expected: tuple[str, str | None, int]) -> None:
    assert assemble(list(b"xababc"), group, stop=("ab",), min_tokens=min_tokens) == expected


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([*b"ab", *"世".encode(), 257, 263, 267, 268]), max_size=30),
    st.lists(st.sampled_from(["a", "ab", "aa", "世", "b世", "\ufffd", "llo", "ohe", " a"]), min_size=1, max_size=3).map(tuple),
    st.integers(1, 8),
    st.integers(0, 8),
    st.booleans(),
)
def test_grouping_does_not_change_the_answer(
    tokens: list[int], stops: tuple[str, ...], group: int, min_tokens: int, include: bool
) -> None:
    one_by_one = assemble(tokens, 1, stop=stops, min_tokens=min_tokens, include_stop=include)
    assert assemble(tokens, group, stop=stops, min_tokens=min_tokens, include_stop=include) == one_by_one
    text, stopped_by, used = one_by_one
    whole = TOKENIZER.decode(tokens[:used])
    if stopped_by is None:
        assert (text, used) == (whole, len(tokens))
    else:
        assert used >= min_tokens
        assert whole.startswith(text + ("" if include else stopped_by))
