"""Stop strings: find the first one to be complete, and hold back no more text than needed."""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache


class StopStrings:
    """Watches one request's text for stop strings, wherever its pieces are cut.

    The stop string whose last character comes first ends the text; of several that end at the same
    character, the first in ``stops``. What is held back between calls is exactly the longest suffix
    of the text that is a proper prefix of some stop string, and nothing at all with ``include``,
    when that suffix belongs to the text either way. Lengths are in characters (code points), so a
    cut never splits one.

    The matching is an automaton over all stops at once (Aho and Corasick, "Efficient string
    matching", CACM 18(6), 1975): time is linear in the text, however long and repetitive the stops
    are. Its state names the held text (a prefix of a stop), so none is stored. Text that begins no
    stop is passed over by one regular expression, at C speed.

    Not thread-safe; one per request, any thread.

    Args:
        stops: The stop strings, none of them empty.
        include: Keep the stop string at the end of the text.
    """

    __slots__ = ("_automaton", "_include", "_state", "consumed", "stopped_by")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._automaton = _build(stops)
        self._include = include
        self._state = 0
        self.stopped_by: str | None = None
        self.consumed = 0
        """Characters of the last fed text up to the end of the stop string that it completed."""

    def feed(self, text: str, *, check: bool = True) -> tuple[str, str | None]:
        """Take the next piece of text.

        Args:
            text: Continues what was fed before.
            check: ``False`` lets stop strings pass that become complete in this piece. One that
                begins in it may still become complete in a later piece.

        Returns:
            The text that is safe to emit now, and the stop string that ended it, if any. After a
            stop, further text is ignored.
        """
        if self.stopped_by is not None:
            return "", self.stopped_by
        automaton = self._automaton
        before = state = self._state
        find_first = automaton.find_first
        index = 0
        if not state:
            first = find_first(text)
            if first is None:
                return text, None
            index = first.start()
        children, fallback, ends, resume = automaton.children, automaton.fallback, automaton.ends, automaton.resume
        length = len(text)
        while index < length:
            character = text[index]
            index += 1
            while (following := children[state].get(character, 0)) == 0 and state:
                state = fallback[state]
            state = following
            if not state:
                first = find_first(text, index)
                if first is None:
                    break
                index = first.start()
            elif ends[state] is not None:
                if check:
                    return self._stop(text, index, before, state)
                state = resume[state]
        self._state = state
        if self._include:
            return text, None
        return self._upto(before, text, automaton.depths[before] + length - automaton.depths[state]), None

    def finish(self) -> str:
        """Return what was held back, when the text ended for another reason. Idempotent."""
        held = "" if self._include else self._held(self._state)
        self._state = 0
        return held

    def _stop(self, text: str, index: int, before: int, state: int) -> tuple[str, str]:
        stop = self._automaton.ends[state]
        assert stop is not None
        self.stopped_by = stop
        self.consumed = index
        self._state = 0
        if self._include:
            return text[:index], stop
        return self._upto(before, text, self._automaton.depths[before] + index - len(stop)), stop

    def _upto(self, before: int, text: str, count: int) -> str:
        """The first ``count`` characters of what state ``before`` held back followed by ``text``."""
        held = self._automaton.depths[before]
        if count <= held:  # slice once: holding a long prefix must not copy it on every call
            return self._automaton.words[before][:count]
        return self._held(before) + text[: count - held]

    def _held(self, state: int) -> str:
        return self._automaton.words[state][: self._automaton.depths[state]]


class _Automaton:
    """States over all stops; state 0 is "no prefix matches". Immutable once built, so it is shared.

    Attributes:
        children: Per state, character → state.
        fallback: Per state, the state of its longest proper suffix.
        depths: Per state, how many characters it has matched.
        words: Per state, a stop that begins with what it has matched.
        ends: Per state, the first-listed stop that ends there.
        resume: Per state, the state to go on from if a stop that ends there is let pass: its longest
            suffix that is a proper prefix of a stop.
        find_first: Finds the next character that begins a stop.
    """

    __slots__ = ("children", "depths", "ends", "fallback", "find_first", "resume", "words")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depths = [0]
        self.words = [""]
        rank: dict[int, int] = {}
        for position, stop in enumerate(stops):
            rank.setdefault(self._insert(stop), position)
        self.fallback = [0] * len(self.children)
        self.resume = list(range(len(self.children)))
        queue = deque(self.children[0].values())
        while queue:  # breadth first: a state's fallback is shallower, so it is complete already
            state = queue.popleft()
            fallback = self.fallback[state]
            rank[state] = min(rank.get(state, len(stops)), rank.get(fallback, len(stops)))
            if not self.children[state]:
                self.resume[state] = self.resume[fallback]
            for character, child in self.children[state].items():
                target = fallback
                while target and character not in self.children[target]:
                    target = self.fallback[target]
                self.fallback[child] = self.children[target].get(character, 0)
                queue.append(child)
        self.ends = [stops[r] if (r := rank.get(state, len(stops))) < len(stops) else None for state in range(len(rank) + 1)]
        characters = "".join(map(re.escape, self.children[0]))
        self.find_first = re.compile(f"[{characters}]" if characters else r"(?!)").search

    def _insert(self, stop: str) -> int:
        """Add the states of one stop; returns its last."""
        state = 0
        for depth, character in enumerate(stop, 1):
            child = self.children[state].get(character)
            if child is None:
                child = len(self.children)
                self.children[state][character] = child
                self.children.append({})
                self.depths.append(depth)
                self.words.append(stop)
            state = child
        return state


@lru_cache(maxsize=64)  # most requests of a program share their stops
def _build(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
