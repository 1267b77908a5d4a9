"""A radix tree over token pages: which prefixes have their keys and values in the pool.

The tree of SGLang's RadixAttention (Zheng et al., NeurIPS 2024) at page granularity. An edge holds
a run of whole pages; children are found by the bytes of their first page, so that matching is one
dictionary look-up and one ``memcmp`` per edge, whatever its length. Hits are therefore always
confirmed by the tokens themselves, never by a hash alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .contract import EMPTY_INTS, IntArray
from .prefix import NOBODY, Node, Root, Use

EvictionKey = Callable[[Node], Any]


class RadixTree:
    """Prefixes by namespace. Loop thread only.

    Args:
        page_size: Tokens per page.
        eviction_key: Orders evictable leaves, smallest first; asked when a leaf becomes evictable
            and once more before it is evicted.
        on_evict: Told of every leaf that goes, or loses its tail, by eviction.
    """

    def __init__(self, page_size: int, eviction_key: EvictionKey, on_evict: Callable[[Node], None] = lambda node: None) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * 4
        self.eviction_key = eviction_key
        self.on_evict = on_evict
        self.pages = 0
        self.locked_pages = 0
        self.epoch = 0  # changes whenever a match may give another answer
        self._roots: dict[str, Root] = {}
        self._numbers = 0
        self._nodes = 0
        self._heap: list[tuple[Any, int, Node]] = []

    @property
    def evictable(self) -> int:
        """Pages held by prefixes nobody uses."""
        return self.pages - self.locked_pages

    def root(self, namespace: str) -> Root:
        """The root of a namespace; prefixes never match across namespaces. Empty unused ones vanish."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def peek(self, namespace: str, tokens: bytes) -> int:
        """Tokens of ``tokens`` (int32 bytes) that are cached, in whole pages. Changes nothing."""
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return 0
        size, position = self.page_bytes, 0
        while (child := node.children.get(tokens[position : position + size])) is not None:
            end = position + len(child.key)
            if tokens[position:end] != child.key:
                position += self._common(child.key, tokens[position:end])
                break
            position, node = end, child
        return position // 4

    def path(self, namespace: str, tokens: bytes) -> list[Node]:
        """The nodes that ``match`` would hit, from the root on; the last one perhaps in part. Changes nothing."""
        node: Node | None = self._roots.get(namespace)
        found: list[Node] = []
        size, position = self.page_bytes, 0
        while node is not None and (child := node.children.get(tokens[position : position + size])) is not None:
            found.append(child)
            end = position + len(child.key)
            if tokens[position:end] != child.key:
                break
            position, node = end, child
        return found

    def match(self, namespace: str, tokens: bytes, step: int, use: Use = NOBODY) -> tuple[Node, IntArray]:
        """The longest cached prefix of ``tokens``: its last node (split to fit) and its pages."""
        node: Node = self.root(namespace)
        runs: list[IntArray] = []
        size, position = self.page_bytes, 0
        while (child := node.children.get(tokens[position : position + size])) is not None:
            end = position + len(child.key)
            whole = tokens[position:end] == child.key
            if not whole:
                child = self._split(child, self._common(child.key, tokens[position:end]))
                end = position + len(child.key)
            child.last_used, child.use = step, use
            child.hits += 1
            runs.append(child.pages)
            position, node = end, child
            if not whole:
                break
        if not runs:
            return node, EMPTY_INTS
        return node, runs[0] if len(runs) == 1 else np.concatenate(runs)

    def extend(
        self,
        node: Node,
        tokens: bytes,
        pages: IntArray,
        step: int,
        since: int | None = None,
        *,
        over: bool = True,
        use: Use = NOBODY,
    ) -> tuple[Node, list[tuple[int, int]]]:
        """Insert ``tokens`` (whole pages, int32 bytes) with their ``pages`` below ``node``.

        Args:
            node: Where to begin.
            tokens: The run.
            pages: Its pages.
            step: The step whose plan this belongs to.
            since: The first step that computes any of it; ``step + 1`` if it is known to be good;
                by default ``step``.
            over: Walk over runs that another request has inserted meanwhile; they keep their own
                pages. Otherwise nothing is inserted if there is one.
            use: On whose behalf.

        Returns:
            The node at the end, and the ranges ``(first, last)`` of ``pages`` that the tree has
            taken over; the others stay with the caller.
        """
        size, position = self.page_bytes, 0
        while position < len(tokens):
            child = node.children.get(tokens[position : position + size])
            if child is None:
                first, last = position // size, len(tokens) // size
                depth = node.depth + (len(tokens) - position) // 4
                child = self._node(tokens[position:], pages[first:last], node, step if since is None else since, step, depth)
                child.use = use
                self._attach(node, child)
                self.pages += last - first
                self._push(child)
                return child, [(first, last)]
            if not over:
                break
            run = tokens[position : position + len(child.key)]
            if run != child.key:
                child = self._split(child, self._common(child.key, run))
            child.last_used, child.use = step, use
            position, node = position + len(child.key), child
        return node, []

    def lock(self, node: Node) -> None:
        """Count one user of ``node`` and of everything above it."""
        cursor: Node | None = node
        while cursor is not None:
            if not cursor.refs:
                self.locked_pages += len(cursor.pages)
            cursor.refs += 1
            cursor = cursor.parent

    def unlock(self, node: Node) -> None:
        """Undo one ``lock`` of ``node``."""
        cursor: Node | None = node
        while cursor is not None:
            cursor.refs -= 1
            if not cursor.refs:
                self.locked_pages -= len(cursor.pages)
                self._push(cursor)
                self._forget_if_empty(cursor)
            cursor = cursor.parent

    def move_lock(self, old: Node, new: Node) -> None:
        """Replace a lock on ``old`` by one on ``new``, which lies at or below it."""
        cursor: Node | None = new
        while cursor is not None and cursor is not old:
            if not cursor.refs:
                self.locked_pages += len(cursor.pages)
            cursor.refs += 1
            cursor = cursor.parent

    def evict(self, count: int) -> list[IntArray]:
        """Drop at least ``count`` pages of unused prefixes, or all of them if there are fewer.

        The tail of a run goes before its head. Returns the freed pages, in runs.
        """
        freed: list[IntArray] = []
        renewed: set[int] = set()  # nodes whose key has been brought up to date: once is enough
        while count > 0 and self._heap:
            entry = heapq.heappop(self._heap)
            key, number, node = entry
            if entry is not node.entry or not _evictable(node):
                continue  # queued anew, in use again, no longer a leaf, or gone
            if number not in renewed and self.eviction_key(node) != key:
                renewed.add(number)
                self._push(node)
                continue
            self.on_evict(node)
            surplus = len(node.pages) - count
            if surplus > 0:
                freed.append(node.pages[surplus:])
                node.depth -= count * self.page_size
                node.key, node.pages = node.key[: surplus * self.page_bytes], node.pages[:surplus]
                heapq.heappush(self._heap, entry)
                self.pages -= count
                break
            freed.append(self._detach(node))
            count -= len(node.pages)
        if freed:
            self.epoch += 1
        return freed

    def requeue(self) -> None:
        """Read the eviction key of every evictable leaf again."""
        self._heap, old = [], self._heap
        for entry in old:
            node = entry[2]
            if entry is node.entry and _evictable(node):
                node.entry = (self.eviction_key(node), node.number, node)
                self._heap.append(node.entry)
        heapq.heapify(self._heap)

    def spoilt_by(self, step: int) -> set[Node]:
        """The nodes that ``step`` computed a part of, and all below them."""
        found: set[Node] = set()
        for node in self.nodes():
            if node.since <= step <= node.created or node.parent in found:
                found.add(node)
        return found

    def remove(self, nodes: set[Node]) -> list[IntArray]:
        """Remove ``nodes``, closed downwards and without users; returns their pages."""
        assert not any(node.refs for node in nodes), "a node in use cannot be removed"
        order = sorted(nodes, key=lambda node: node.depth, reverse=True)
        if order:
            self.epoch += 1
        return [self._detach(node) for node in order]

    def clear(self) -> list[IntArray]:
        """Remove every prefix that nobody uses; returns the pages."""
        return self.remove({node for node in self.nodes() if not node.refs})

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack: list[Node] = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _node(self, key: bytes, pages: IntArray, parent: Node, since: int, step: int, depth: int) -> Node:
        self._numbers += 1
        self._nodes += 1
        return Node(self._numbers, key, pages, parent, since, step, depth)

    def _attach(self, parent: Node, child: Node) -> None:
        parent.children[child.key[: self.page_bytes]] = child
        child.parent = parent
        self.epoch += 1

    def _detach(self, node: Node) -> IntArray:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key[: self.page_bytes]]
        node.parent = None
        self._nodes -= 1
        self.pages -= len(node.pages)
        self._push(parent)
        self._forget_if_empty(parent)
        return node.pages

    def _forget_if_empty(self, node: Node) -> None:
        if isinstance(node, Root) and not node.refs and not node.children:
            self._roots.pop(node.namespace, None)

    def _push(self, node: Node) -> None:
        if not _evictable(node):
            return
        node.entry = (self.eviction_key(node), node.number, node)
        heapq.heappush(self._heap, node.entry)
        if len(self._heap) > 64 + 2 * self._nodes:  # mostly void entries: drop them
            self._heap = [entry for entry in self._heap if entry is entry[2].entry and _evictable(entry[2])]
            heapq.heapify(self._heap)

    def _split(self, node: Node, size: int) -> Node:
        """Cut ``node`` after ``size`` bytes; returns the new upper part."""
        parent, cut = node.parent, size // self.page_bytes
        assert parent is not None
        upper = self._node(
            node.key[:size], node.pages[:cut], parent, node.since, node.created, node.depth - (len(node.key) - size) // 4
        )
        upper.refs, upper.last_used, upper.hits, upper.use = node.refs, node.last_used, node.hits, node.use
        node.key, node.pages = node.key[size:], node.pages[cut:]
        self._attach(parent, upper)
        self._attach(upper, node)
        return upper

    def _common(self, a: bytes, b: bytes) -> int:
        """Bytes of whole pages that ``a`` and ``b`` share at their start."""
        n = min(len(a), len(b)) // self.page_bytes * self.page_bytes
        differ = np.frombuffer(a, np.int32, n // 4) != np.frombuffer(b, np.int32, n // 4)
        where = int(differ.argmax()) if differ.any() else n // 4
        return where // self.page_size * self.page_bytes


def _evictable(node: Node) -> bool:
    return not node.refs and not node.children and node.parent is not None
