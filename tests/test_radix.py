"""The radix tree of cached prefixes: by example, and against a dictionary of page prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from asyncsched.contract import IntArray
from asyncsched.prefix import Node
from asyncsched.radix import RadixTree

PAGE = 4


class EndlessError(BaseException):
    """Not an ``Exception``, so that nothing takes it for a policy's mistake."""


def by_use(node: Node) -> tuple[int, int]:
    """Least recently used first, tails before heads."""
    return node.last_used, -node.depth


def tree(page_size: int = PAGE) -> RadixTree:
    return RadixTree(page_size, by_use)


def raw(tokens: Iterable[int]) -> bytes:
    return np.array(list(tokens), np.int32).tobytes()


def ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def run(first: int, pages: int, size: int = PAGE) -> list[int]:
    """Tokens of ``pages`` pages; different ``first`` differ in every page."""
    return [first * 1000 + index for index in range(pages * size)]


def insert(cache: RadixTree, tokens: Sequence[int], pages: Sequence[int], step: int = 1, namespace: str = "") -> Node:
    """Insert from the root, as if nothing were held; the caller takes what is cached as it is."""
    node, found = cache.match(namespace, raw(tokens), step)
    size = cache.page_size
    node, _ = cache.extend(node, raw(tokens[len(found) * size :]), ints(*pages[len(found) :]), step)
    return node


def lookup(cache: RadixTree, tokens: Sequence[int], namespace: str = "", step: int = 1) -> list[int]:
    pages: list[int] = cache.match(namespace, raw(tokens), step)[1].tolist()
    return pages


def evicted(cache: RadixTree, count: int) -> list[int]:
    return [page for pages in cache.evict(count) for page in pages.tolist()]


def sizes(cache: RadixTree) -> tuple[int, int, int]:
    return cache.pages, cache.locked_pages, cache.evictable


# Matching


def test_nothing_is_cached_in_the_beginning() -> None:
    cache = tree()
    assert lookup(cache, run(1, 2)) == []
    assert cache.peek("", raw(run(1, 2))) == 0
    assert list(cache.nodes()) == []


def test_match_returns_the_pages_of_the_longest_prefix() -> None:
    cache = tree()
    insert(cache, run(1, 3), [5, 6, 7])
    assert lookup(cache, run(1, 3)) == [5, 6, 7]
    assert lookup(cache, run(1, 3) + run(2, 1)) == [5, 6, 7]
    assert lookup(cache, run(1, 3)[: 2 * PAGE]) == [5, 6]
    assert lookup(cache, run(1, 3)[:PAGE] + run(2, 2)) == [5]
    assert lookup(cache, run(2, 2)) == []


def test_only_whole_pages_match() -> None:
    cache = tree()
    insert(cache, run(1, 2), [5, 6])
    assert lookup(cache, run(1, 2)[: 2 * PAGE - 1]) == [5]
    assert lookup(cache, run(1, 2)[: PAGE - 1]) == []
    assert cache.peek("", raw(run(1, 2)[: 2 * PAGE - 1])) == PAGE


def test_a_page_is_shared_only_up_to_the_first_difference() -> None:
    """Prompts that part inside a page share nothing of that page, and both keep a copy of their own."""
    cache = tree()
    one = run(1, 3)
    other = [*one[:6], 999, *one[7:]]  # differs in the second page
    insert(cache, one, [0, 1, 2])
    insert(cache, other, [9, 3, 4])  # its own first page is not needed: it is cached
    assert lookup(cache, one) == [0, 1, 2]
    assert lookup(cache, other) == [0, 3, 4]
    assert sizes(cache) == (5, 0, 5)
    assert cache.peek("", raw(other[:6])) == PAGE


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_run_is_split_on_a_page_boundary(cut: int) -> None:
    cache = tree()
    node = insert(cache, run(1, 4), [0, 1, 2, 3])
    upper, pages = cache.match("", raw(run(1, 4)[: cut * PAGE + PAGE // 2]), 2)
    assert pages.tolist() == [0, 1, 2, 3][:cut]
    assert (upper.depth, node.depth) == (cut * PAGE, 4 * PAGE)
    assert node.parent is upper
    assert [len(n.key) for n in cache.nodes()] == [cut * PAGE * 4, (4 - cut) * PAGE * 4]
    assert cache.pages == 4
    assert lookup(cache, run(1, 4)) == [0, 1, 2, 3]


def test_a_match_counts_hits_and_use_on_the_whole_path() -> None:
    cache = tree()
    insert(cache, run(1, 2), [0, 1], step=1)
    insert(cache, run(1, 2) + run(2, 1), [0, 1, 2], step=2)
    cache.match("", raw(run(1, 2)), 5)
    upper, lower = cache.nodes()
    assert (upper.last_used, upper.hits) == (5, 2)
    assert (lower.last_used, lower.hits) == (2, 0)
    assert (upper.created, lower.created) == (1, 2)


def test_peek_agrees_with_match_and_changes_nothing() -> None:
    cache = tree()
    insert(cache, run(1, 3), [0, 1, 2])
    before = [(n.number, n.key, n.last_used, n.hits) for n in cache.nodes()], cache.epoch
    for length in range(3 * PAGE + 1):
        assert cache.peek("", raw(run(1, 3)[:length])) == length // PAGE * PAGE
    assert cache.peek("nowhere", raw(run(1, 3))) == 0
    assert ([(n.number, n.key, n.last_used, n.hits) for n in cache.nodes()], cache.epoch) == before


def test_page_size_one_matches_token_by_token() -> None:
    cache = tree(1)
    insert(cache, [7, 8, 9], [0, 1, 2])
    assert lookup(cache, [7, 8, 1]) == [0, 1]
    assert cache.peek("", raw([7])) == 1


def test_the_epoch_changes_whenever_a_match_may_answer_otherwise() -> None:
    cache = tree()
    seen = [cache.epoch]
    insert(cache, run(1, 2), [0, 1])
    seen.append(cache.epoch)
    insert(cache, run(1, 2) + run(2, 1), [0, 1, 2])
    seen.append(cache.epoch)
    cache.evict(1)
    seen.append(cache.epoch)
    cache.clear()
    seen.append(cache.epoch)
    assert len(set(seen)) == len(seen)


# Inserting


def test_extend_says_which_pages_it_took() -> None:
    cache = tree()
    root = cache.root("")
    _, taken = cache.extend(root, raw(run(1, 3)), ints(0, 1, 2), 1)
    assert taken == [(0, 3)]
    _, taken = cache.extend(root, raw(run(1, 3)), ints(3, 4, 5), 2)
    assert taken == []
    _, taken = cache.extend(root, raw(run(1, 3) + run(2, 2)), ints(3, 4, 5, 6, 7), 3)
    assert taken == [(3, 5)]
    assert lookup(cache, run(1, 3) + run(2, 2)) == [0, 1, 2, 6, 7]
    assert cache.pages == 5


def test_extend_below_a_held_node_meets_what_others_inserted_meanwhile() -> None:
    """Two requests share one page and then compute the same second page and different third ones."""
    cache = tree()
    node = insert(cache, run(1, 1), [0])
    cache.lock(node)
    cache.lock(node)
    first, taken = cache.extend(node, raw(run(2, 1) + run(3, 1)), ints(1, 2), 2)
    cache.move_lock(node, first)
    assert taken == [(0, 2)]
    second, taken = cache.extend(node, raw(run(2, 1) + run(4, 1)), ints(3, 4), 3)
    cache.move_lock(node, second)
    assert taken == [(1, 2)], "the page both have computed stays with the second request"
    assert first.depth == second.depth == 3 * PAGE
    assert first.parent is second.parent
    assert [(n.depth, n.refs) for n in sorted(cache.nodes(), key=lambda n: (n.depth, n.created))] == [
        (PAGE, 2), (2 * PAGE, 2), (3 * PAGE, 1), (3 * PAGE, 1),
    ]  # fmt: skip
    assert sizes(cache) == (4, 4, 0)


def test_extend_may_be_told_to_stop_where_others_were_first() -> None:
    cache = tree()
    node = insert(cache, run(1, 1), [0])
    insert(cache, run(1, 1) + run(2, 2), [0, 1, 2], step=2)
    before = [(n.number, n.key, n.last_used) for n in cache.nodes()], cache.epoch
    assert cache.extend(node, raw(run(2, 1) + run(3, 1)), ints(3, 4), 9, over=False) == (node, [])
    assert ([(n.number, n.key, n.last_used) for n in cache.nodes()], cache.epoch) == before
    end, taken = cache.extend(node, raw(run(3, 1)), ints(4), 9, over=False)
    assert (end.depth, taken) == (2 * PAGE, [(0, 1)])


def test_extend_that_ends_inside_a_run_splits_it() -> None:
    cache = tree()
    insert(cache, run(1, 4), [0, 1, 2, 3])
    node, taken = cache.extend(cache.root(""), raw(run(1, 4)[: 2 * PAGE]), ints(8, 9), 2)
    assert taken == []
    assert node.depth == 2 * PAGE
    assert lookup(cache, run(1, 4)) == [0, 1, 2, 3]


def test_extending_by_nothing_stays_where_it_is() -> None:
    cache = tree()
    node = insert(cache, run(1, 1), [0])
    assert cache.extend(node, b"", ints(), 2) == (node, [])


# Locks


def test_locks_count_along_the_path() -> None:
    cache = tree()
    upper = insert(cache, run(1, 2), [0, 1])
    left = insert(cache, run(1, 2) + run(2, 1), [0, 1, 2])
    right = insert(cache, run(1, 2) + run(3, 3), [0, 1, 3, 4, 5])
    assert sizes(cache) == (6, 0, 6)
    cache.lock(left)
    assert (upper.refs, left.refs, right.refs) == (1, 1, 0)
    assert sizes(cache) == (6, 3, 3)
    cache.lock(right)
    cache.lock(right)
    assert (upper.refs, left.refs, right.refs) == (3, 1, 2)
    assert sizes(cache) == (6, 6, 0)
    cache.unlock(left)
    assert (upper.refs, left.refs, right.refs) == (2, 0, 2)
    assert sizes(cache) == (6, 5, 1)
    cache.unlock(right)
    cache.unlock(right)
    assert sizes(cache) == (6, 0, 6)


def test_splitting_a_locked_run_keeps_both_parts_locked() -> None:
    cache = tree()
    node = insert(cache, run(1, 3), [0, 1, 2])
    cache.lock(node)
    upper, _ = cache.match("", raw(run(1, 3)[:PAGE]), 2)
    assert (upper.refs, node.refs) == (1, 1)
    assert sizes(cache) == (3, 3, 0)
    cache.lock(upper)
    cache.unlock(node)
    assert (upper.refs, node.refs) == (1, 0)
    assert sizes(cache) == (3, 1, 2)
    cache.unlock(upper)
    assert sizes(cache) == (3, 0, 3)


def test_move_lock_counts_the_new_part_only() -> None:
    cache = tree()
    old = insert(cache, run(1, 1), [0])
    cache.lock(old)
    new = insert(cache, run(1, 1) + run(2, 2), [0, 1, 2])
    cache.move_lock(old, new)
    assert (old.refs, new.refs) == (1, 1)
    assert sizes(cache) == (3, 3, 0)
    cache.move_lock(new, new)
    assert (old.refs, new.refs) == (1, 1)
    cache.unlock(new)
    assert sizes(cache) == (3, 0, 3)


def test_a_lock_on_the_empty_prefix_locks_nothing() -> None:
    cache = tree()
    root = cache.root("")
    cache.lock(root)
    insert(cache, run(1, 2), [0, 1])
    assert sizes(cache) == (2, 0, 2)
    assert evicted(cache, 2) == [0, 1]
    cache.unlock(root)


# Eviction


def test_eviction_follows_the_key() -> None:
    cache = tree()
    for index in (1, 2, 3):
        insert(cache, run(index, 1), [index], step=index)
    cache.match("", raw(run(1, 1)), 9)  # the oldest was used last
    assert evicted(cache, 1) == [2]
    assert evicted(cache, 1) == [3]
    assert evicted(cache, 1) == [1]
    assert cache.pages == 0


def test_a_custom_key_is_obeyed() -> None:
    cache = RadixTree(PAGE, lambda node: -node.created)
    for index in (1, 2, 3):
        insert(cache, run(index, 1), [index], step=index)
    assert evicted(cache, 3) == [3, 2, 1]


def test_the_tail_goes_before_the_head() -> None:
    cache = tree()
    insert(cache, run(1, 4), [0, 1, 2, 3])
    assert evicted(cache, 1) == [3]
    assert evicted(cache, 2) == [1, 2]
    assert lookup(cache, run(1, 4)) == [0]
    (node,) = cache.nodes()
    assert (node.depth, len(node.key), cache.pages) == (PAGE, PAGE * 4, 1)


def test_parents_are_evicted_once_their_children_are_gone() -> None:
    cache = tree()
    insert(cache, run(1, 2), [0, 1], step=1)
    insert(cache, run(1, 2) + run(2, 2), [0, 1, 2, 3], step=2)
    insert(cache, run(1, 2) + run(3, 2), [0, 1, 4, 5], step=3)
    order = evicted(cache, 6)
    assert sorted(order) == [0, 1, 2, 3, 4, 5]
    assert set(order[-2:]) == {0, 1}, "what both build on goes last"


@pytest.mark.parametrize("count", range(8))
def test_partial_eviction_is_exact(count: int) -> None:
    cache = tree()
    insert(cache, run(1, 3), [0, 1, 2], step=1)
    insert(cache, run(2, 4), [3, 4, 5, 6], step=2)
    assert len(evicted(cache, count)) == count
    assert cache.pages == 7 - count
    assert len(lookup(cache, run(2, 4))) == min(4, 7 - count)


def test_eviction_stops_at_what_is_in_use() -> None:
    cache = tree()
    node = insert(cache, run(1, 3), [0, 1, 2])
    insert(cache, run(2, 1), [3])
    held, _ = cache.match("", raw(run(1, 3)[: 2 * PAGE]), 2)
    cache.lock(held)
    assert sorted(evicted(cache, 100)) == [2, 3]
    assert lookup(cache, run(1, 3)) == [0, 1]
    assert node.parent is None
    cache.unlock(held)
    assert sorted(evicted(cache, 100)) == [0, 1]
    assert evicted(cache, 1) == []


def test_a_parent_freed_while_its_child_was_held_is_evicted_later() -> None:
    """The last user of a chain leaves: every part of it must be found again."""
    cache = tree()
    lower = insert(cache, run(1, 3), [0, 1, 2])
    cache.lock(lower)
    cache.match("", raw(run(1, 1)), 2)
    cache.match("", raw(run(1, 2)), 3)
    cache.unlock(lower)
    assert sorted(evicted(cache, 3)) == [0, 1, 2]


def test_stale_heap_entries_do_no_harm() -> None:
    """Locked, hit, extended and split after they were queued for eviction."""
    cache = tree()
    used = insert(cache, run(1, 1), [1], step=1)
    cache.lock(used)
    insert(cache, run(2, 1), [2], step=2)
    insert(cache, run(2, 1) + run(5, 1), [2, 5], step=3)  # no longer a leaf
    insert(cache, run(3, 1), [3], step=4)
    cache.match("", raw(run(3, 1)), 9)  # hit since
    insert(cache, run(4, 2), [4, 6], step=5)
    cache.match("", raw(run(4, 1)), 6)  # split
    assert evicted(cache, 1) == [5]
    assert evicted(cache, 1) == [2]
    assert evicted(cache, 1) == [6]
    assert evicted(cache, 1) == [4]
    assert evicted(cache, 1) == [3]
    assert evicted(cache, 1) == []
    cache.unlock(used)
    assert evicted(cache, 1) == [1]


def test_a_prefix_that_was_queued_twice_is_not_evicted_for_its_old_entry() -> None:
    """Every lock and unlock queues it again; a later hit makes all of the entries stale."""
    cache = tree()
    used = insert(cache, run(1, 1), [1], step=1)
    for _ in range(3):
        cache.lock(used)
        cache.unlock(used)
    insert(cache, run(2, 1), [2], step=2)
    cache.match("", raw(run(1, 1)), 3)
    assert evicted(cache, 1) == [2]
    insert(cache, run(3, 1), [3], step=4)
    cache.match("", raw(run(1, 1)), 5)
    assert evicted(cache, 1) == [3]


def test_the_heap_does_not_grow_with_use() -> None:
    cache = tree()
    node, *_ = [insert(cache, run(index, 1), [index]) for index in range(4)]
    for _ in range(2000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._heap) < 200
    assert sorted(evicted(cache, 9)) == [0, 1, 2, 3]


def test_a_key_that_grows_with_every_question_does_not_stop_eviction() -> None:
    """A key may grow between two questions; a policy that counts its calls must not hang the loop."""
    asked = 0

    def key(node: Node) -> int:
        nonlocal asked
        asked += 1
        if asked > 10_000:
            raise EndlessError
        return asked

    cache = RadixTree(PAGE, key)
    insert(cache, run(1, 2), [0, 1])
    insert(cache, run(2, 2), [2, 3])
    assert len(evicted(cache, 3)) == 3
    assert asked < 100


# Namespaces, removal


def test_namespaces_share_nothing() -> None:
    cache = tree()
    insert(cache, run(1, 2), [0, 1], namespace="a")
    assert lookup(cache, run(1, 2), namespace="b") == []
    insert(cache, run(1, 2), [2, 3], namespace="b")
    assert lookup(cache, run(1, 2), namespace="a") == [0, 1]
    assert lookup(cache, run(1, 2), namespace="b") == [2, 3]
    assert cache.pages == 4


def test_empty_namespaces_are_forgotten() -> None:
    cache = tree()
    root, _ = cache.match("a", raw(run(1, 1)), 1)
    cache.lock(root)
    node, _ = cache.extend(root, raw(run(1, 2)), ints(0, 1), 1)
    cache.move_lock(root, node)
    cache.evict(10)
    assert set(cache._roots) == {"a"}, "a held root stays"
    cache.unlock(node)
    cache.evict(1)
    assert set(cache._roots) == {"a"}
    cache.evict(1)
    assert cache._roots == {}
    for _ in range(3):  # a request that leaves nothing behind
        root, _ = cache.match("b", raw(run(1, 1)), 1)
        cache.lock(root)
        cache.unlock(root)
    assert cache._roots == {}
    cache.peek("c", raw(run(1, 1)))
    assert cache._roots == {}


def test_a_namespace_that_lost_its_pages_while_held_takes_new_ones() -> None:
    cache = tree()
    insert(cache, run(1, 1), [0], namespace="a")
    root = cache.root("a")
    cache.lock(root)
    cache.evict(1)
    node, _ = cache.extend(root, raw(run(2, 1)), ints(1), 2)
    cache.move_lock(root, node)
    assert lookup(cache, run(2, 1), namespace="a") == [1]
    cache.unlock(node)


def test_spoilt_by_finds_a_steps_nodes_and_what_was_built_on_them() -> None:
    cache = tree()
    insert(cache, run(1, 1), [0], step=1)
    insert(cache, run(1, 1) + run(2, 2), [0, 1, 2], step=2)
    insert(cache, run(1, 1) + run(2, 2) + run(3, 1), [0, 1, 2, 3], step=3)
    insert(cache, run(4, 1), [4], step=2)
    insert(cache, run(5, 1), [5], step=3)
    found = cache.spoilt_by(2)
    assert sorted(page for node in found for page in node.pages.tolist()) == [1, 2, 3, 4]
    assert cache.spoilt_by(9) == set()
    assert sorted(page for pages in cache.remove(found) for page in pages.tolist()) == [1, 2, 3, 4]
    assert lookup(cache, run(1, 1) + run(2, 2)) == [0]
    assert lookup(cache, run(5, 1)) == [5]
    assert cache.pages == 2
    assert evicted(cache, 9) == [0, 5]


def test_a_page_that_took_several_steps_is_spoilt_by_each_of_them() -> None:
    cache = tree()
    root = cache.root("")
    cache.extend(root, raw(run(1, 2)), ints(0, 1), 5, since=3)
    cache.extend(root, raw(run(2, 1)), ints(2), 5, since=6)  # known to be good
    cache.match("", raw(run(1, 1)), 9)
    spoilt = [sum(len(node.pages) for node in cache.spoilt_by(step)) for step in range(8)]
    assert spoilt == [0, 0, 0, 2, 2, 2, 0, 0]


def test_a_split_does_not_change_which_step_inserted_a_page() -> None:
    cache = tree()
    insert(cache, run(1, 2), [0, 1], step=1)
    cache.match("", raw(run(1, 2)), 2)
    cache.match("", raw(run(1, 1)), 3)
    assert len(cache.spoilt_by(1)) == 2
    assert cache.spoilt_by(2) == cache.spoilt_by(3) == set()


def test_clear_spares_what_is_in_use() -> None:
    cache = tree()
    node = insert(cache, run(1, 2), [0, 1])
    insert(cache, run(1, 2) + run(2, 1), [0, 1, 2])
    insert(cache, run(3, 1), [3], namespace="other")
    cache.lock(node)
    assert sorted(page for pages in cache.clear() for page in pages.tolist()) == [2, 3]
    assert sizes(cache) == (2, 2, 0)
    assert cache.clear() == []
    cache.unlock(node)
    assert sorted(page for pages in cache.clear() for page in pages.tolist()) == [0, 1]
    assert cache._roots == {}


# Against a dictionary


Prefix = tuple[str, tuple[int, ...]]


class Model(RuleBasedStateMachine):
    """Random use of the tree beside ``{(namespace, tokens of whole pages): page}``.

    A lock is a prefix that someone holds; a page is locked if it lies on the path of one.
    """

    page_size = PAGE

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree(self.page_size, by_use)
        self.pages: dict[Prefix, int] = {}
        self.computed: dict[Prefix, range] = {}
        self.used: dict[Prefix, int] = {}
        self.held: list[tuple[Prefix, Node]] = []
        self.step = 0
        self.issued = 0

    def draw(self, data: st.DataObject) -> Prefix:
        """A few pages of very few kinds, so that prefixes collide and part anywhere inside a page."""
        namespace = data.draw(st.sampled_from(["", "", "x"]))
        kinds = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
        tokens: list[int] = []
        for kind in kinds:
            page = [0] * self.page_size
            if kind:  # differs in the first or in the last token
                page[0 if kind == 1 else -1] = kind
            tokens += page
        tokens += [0] * data.draw(st.integers(0, self.page_size - 1))
        return namespace, tuple(tokens)

    def prefixes(self, namespace: str, tokens: Sequence[int]) -> list[Prefix]:
        return [(namespace, tuple(tokens[:end])) for end in range(self.page_size, len(tokens) + 1, self.page_size)]

    def known(self, namespace: str, tokens: Sequence[int]) -> list[Prefix]:
        found = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.pages:
                break
            found.append(prefix)
        return found

    def locked(self) -> set[Prefix]:
        return {prefix for (namespace, tokens), _ in self.held for prefix in self.prefixes(namespace, tokens)}

    def fresh(self, count: int) -> list[int]:
        self.issued += count
        return list(range(self.issued - count, self.issued))

    def forget(self, pages: list[int]) -> None:
        """Pages have left the tree: none in use, each with all that was built on it."""
        gone = {prefix for prefix, page in self.pages.items() if page in set(pages)}
        assert len(gone) == len(pages) == len(set(pages))
        assert not gone & self.locked()
        for prefix in gone:
            del self.pages[prefix], self.computed[prefix], self.used[prefix]
        for namespace, tokens in self.pages:
            assert all(prefix in self.pages for prefix in self.prefixes(namespace, tokens)), "a head went before its tail"

    def touch(self, prefixes: Iterable[Prefix]) -> None:
        self.used.update(dict.fromkeys(prefixes, self.step))

    def leaves(self) -> set[Prefix]:
        """Unused pages on which nothing is built."""
        inner = {(namespace, tokens[: -self.page_size]) for namespace, tokens in self.pages}
        return set(self.pages) - inner - self.locked()

    @rule(data=st.data(), later=st.booleans())
    def look(self, data: st.DataObject, later: bool) -> None:
        self.step += later
        namespace, tokens = self.draw(data)
        expected = [self.pages[prefix] for prefix in self.known(namespace, tokens)]
        before = self.fingerprint()
        assert self.tree.peek(namespace, raw(tokens)) == len(expected) * self.page_size
        assert self.fingerprint() == before
        node, pages = self.tree.match(namespace, raw(tokens), self.step)
        assert pages.tolist() == expected
        self.touch(self.known(namespace, tokens))
        assert node.depth == len(expected) * self.page_size
        if not expected:  # a look at an unknown namespace must not make it known for ever
            self.tree.lock(node)
            self.tree.unlock(node)

    @rule(data=st.data(), hold=st.booleans(), later=st.booleans(), lead=st.sampled_from([0, 0, 1, -1]))
    def serve(self, data: st.DataObject, hold: bool, later: bool, lead: int) -> None:
        """What a request does: match, lock, insert the rest, and let go now or later."""
        self.step += later
        namespace, tokens = self.draw(data)
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        node, found = self.tree.match(namespace, raw(whole), self.step)
        self.touch(self.known(namespace, whole))
        self.tree.lock(node)
        self.insert(namespace, whole, len(found), node, hold, lead)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hold=st.booleans(), lead=st.sampled_from([0, 0, 1, -1]), over=st.booleans())
    def go_on(self, data: st.DataObject, hold: bool, lead: int, over: bool) -> None:
        """A holder extends its prefix by pages that others may have inserted since."""
        index = data.draw(st.integers(0, len(self.held) - 1))
        (namespace, tokens), node = self.held.pop(index)
        more = self.draw(data)[1]
        whole = tokens + more[: len(more) // self.page_size * self.page_size]
        first = len(tokens) // self.page_size
        if over or len(self.known(namespace, whole)) == first:
            self.insert(namespace, whole, first, node, hold, lead, over)
            return
        pages = ints(*self.fresh(len(whole) // self.page_size - first))
        assert self.tree.extend(node, raw(whole[len(tokens) :]), pages, self.step, over=False) == (node, [])
        self.held.append(((namespace, tokens), node))

    def insert(
        self, namespace: str, tokens: tuple[int, ...], first: int, node: Node, hold: bool, lead: int, over: bool = True
    ) -> None:
        path = self.prefixes(namespace, tokens)
        cached = len(self.known(namespace, tokens))
        mine = self.fresh(len(path) - first)
        end, taken = self.tree.extend(
            node, raw(tokens[first * self.page_size :]), ints(*mine), self.step, self.step - lead, over=over
        )
        self.tree.move_lock(node, end)
        assert taken == ([(cached - first, len(path) - first)] if cached < len(path) else [])
        for prefix, page in zip(path[cached:], mine[cached - first :], strict=True):
            self.pages[prefix] = page
            self.computed[prefix] = range(self.step - lead, self.step + 1)
        self.touch(path[first:])
        if hold:
            self.held.append(((namespace, tokens), end))
        else:
            self.tree.unlock(end)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        _, node = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.tree.unlock(node)

    @rule(count=st.sampled_from([1, 1, 2, 3]))
    def evict(self, count: int) -> None:
        available = len(self.pages) - len(self.locked())
        leaves, used = self.leaves(), {page: self.used[prefix] for prefix, page in self.pages.items()}
        pages = evicted(self.tree, count)
        assert len(pages) == min(count, available)
        self.forget(pages)
        spared = [self.used[prefix] for prefix in leaves & set(self.pages)]
        assert not pages or not spared or max(used[page] for page in pages) <= min(spared), "not the least recently used"

    @precondition(lambda self: len(self.pages) > 9)
    @rule(at_once=st.booleans())
    def clear(self, at_once: bool) -> None:
        """Nothing unused is beyond its reach, nor beyond eviction's."""
        pages = [page for run in self.tree.clear() for page in run.tolist()] if at_once else evicted(self.tree, 1000)
        assert len(pages) == len(self.pages) - len(self.locked())
        self.forget(pages)

    @precondition(lambda self: len(self.pages) > 5)
    @rule(data=st.data())
    def fail_a_step(self, data: st.DataObject) -> None:
        """Everything a step computed a part of goes, with what was built on it, once its users have left."""
        step = data.draw(st.integers(max(0, self.step - 2), self.step))
        doomed = {
            prefix
            for prefix in self.pages
            if any(step in self.computed[upper] for upper in self.prefixes(prefix[0], prefix[1]))
        }
        nodes = self.tree.spoilt_by(step)
        assert sorted(page for node in nodes for page in node.pages.tolist()) == sorted(self.pages[p] for p in doomed)
        for held in list(self.held):
            if held[1] in nodes:
                self.held.remove(held)
                self.tree.unlock(held[1])
        self.forget([page for run in self.tree.remove(nodes) for page in run.tolist()])

    def fingerprint(self) -> list[Any]:
        return [(n.number, n.key, n.pages.tolist(), n.refs, n.last_used, n.hits, n.depth) for n in self.tree.nodes()]

    @invariant()
    def the_tree_says_what_the_dictionary_says(self) -> None:
        found: dict[Prefix, int] = {}
        locked = 0
        path: dict[int, Prefix] = {}
        for namespace, root in self.tree._roots.items():
            path[id(root)] = namespace, ()
            assert root.children or root.refs, "an empty namespace is kept"
        for node in self.tree.nodes():
            assert node.parent is not None
            namespace, above = path[id(node.parent)]
            tokens = tuple(np.frombuffer(node.key, np.int32).tolist())
            assert len(tokens) == len(node.pages) * self.page_size > 0
            assert node.parent.children[node.key[: self.page_size * 4]] is node
            assert node.depth == len(above) + len(tokens)
            assert node.refs == sum(
                held_namespace == namespace and held[: node.depth] == above + tokens for (held_namespace, held), _ in self.held
            )
            locked += len(node.pages) if node.refs else 0
            path[id(node)] = namespace, above + tokens
            for index, page in enumerate(node.pages.tolist()):
                found[namespace, above + tokens[: (index + 1) * self.page_size]] = page
        assert found == self.pages
        assert (self.tree.pages, self.tree.locked_pages) == (len(self.pages), locked)
        assert locked == len(self.locked())
        for (_, tokens), node in self.held:
            assert node.depth == len(tokens)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_use_equals_a_dictionary(page_size: int) -> None:
    sized = type(f"ModelOf{page_size}", (Model,), {"page_size": page_size})
    brisk = settings(max_examples=80, stateful_step_count=60, deadline=None, derandomize=True)
    run_state_machine_as_test(sized, settings=brisk)
