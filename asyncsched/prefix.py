"""A cached prefix: a run of pages in the radix tree, and who used it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .contract import EMPTY_INTS, IntArray


@dataclass(frozen=True, slots=True)
class Use:
    """Who used a prefix, and when on the engine's clock; for eviction policies."""

    at: float = 0.0
    priority: int = 0
    tenant: str = ""
    program_id: str | None = None


NOBODY = Use()


class Node:
    """A run of pages below its parent; eviction policies see it as ``policy_views.PrefixView``.

    Attributes:
        key: The tokens of the run as int32 bytes; a whole number of pages.
        pages: Page ids, int32 ``[len(key) // page_bytes]``.
        refs: Users of this node or of one below it.
        last_used: Step of the last match.
        hits: Matches so far.
        created: Step whose plan inserted it.
        since: First step that computed a part of it; if any of ``since … created`` fails, so does it.
            After ``created`` for what is known to be good.
        depth: Tokens from the root to the end of this run.
        use: Who used it last.
        entry: Its latest place in the eviction queue; older ones are void.
    """

    __slots__ = (
        "children",
        "created",
        "depth",
        "entry",
        "hits",
        "key",
        "last_used",
        "number",
        "pages",
        "parent",
        "refs",
        "since",
        "use",
    )

    def __init__(
        self, number: int, key: bytes, pages: IntArray, parent: Node | None, since: int, created: int, depth: int
    ) -> None:
        self.number = number
        self.key = key
        self.pages = pages
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.refs = 0
        self.last_used = created
        self.hits = 0
        self.since = since
        self.created = created
        self.depth = depth
        self.use = NOBODY
        self.entry: tuple[Any, int, Node] | None = None

    @property
    def tokens(self) -> int:
        """Tokens in this run."""
        return len(self.key) // 4

    @property
    def used_at(self) -> float:
        """Time of the last use."""
        return self.use.at

    @property
    def priority(self) -> int:
        """Priority of who used it last."""
        return self.use.priority

    @property
    def tenant(self) -> str:
        """Tenant of who used it last."""
        return self.use.tenant

    @property
    def program_id(self) -> str | None:
        """Program of who used it last."""
        return self.use.program_id


class Root(Node):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(0, b"", EMPTY_INTS, None, 1, 0, 0)
        self.namespace = namespace
