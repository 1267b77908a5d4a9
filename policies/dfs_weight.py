"""Depth first through the prefix tree, heaviest branch first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import attrgetter

from ..policy import EngineView, PrefixView, RequestView
from ._cache_aware import CacheAware


@dataclass(eq=False, slots=True)
class _Branch:
    """A cached run, the waiting requests that hit nothing deeper, by number, and what hangs below.

    Attributes:
        count: Waiting requests that hit it.
        weight: Most that did so at once. It does not shrink while they are served, so that a branch that
            was begun is gone through.
    """

    count: int = 0
    weight: int = 0
    requests: dict[int, RequestView] = field(default_factory=dict)
    children: dict[PrefixView, _Branch] = field(default_factory=dict)


@dataclass(eq=False)
class DFSWeight(CacheAware):
    """Serves the prefix tree branch by branch; of several branches, the one that most waiting requests hit goes first.

    SGLang's ``dfs-weight`` (schedule_policy.py). Going depth first, a cache that holds one prompt is
    enough for every hit (Zheng et al., NeurIPS 2024, section 3); by weight, what most requests wait for
    is used before it is evicted. Requests with nothing cached come last, by arrival; those that have
    waited ``age_steps`` steps get every fourth admission.

    Two things differ. SGLang looks every request up for every batch; here a step looks up ``lookups`` of
    them, so their places in the tree may be some steps old. And a branch keeps the weight it had while
    its requests are served; SGLang turns to another as soon as more wait for that.

    Not for workloads without shared prefixes: it then costs the look-ups and orders like ``fcfs``.
    Where all requests hit one prefix and little else, ``lpm`` does as well for less.

    Args:
        age_steps: Steps after which a waiting request counts as starved.
        refresh_steps: How many steps a look-up of the cached path stays good.
        lookups: Most look-ups in one step, a few µs each.
        defer_tokens: A request waits while another computes at least so many tokens of a prefix that
            both share; ``None`` has them computed twice. Matters only where chunks are capped.
    """

    api_version = 1
    name = "dfs-weight"
    refresh_steps: int = 1  # a branch is to be gone through from the step that begins it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._root = _Branch()
        self._paths: dict[int, tuple[PrefixView, ...]] = {}  # request number → its way down from the root, if any

    def _look_up(self, request: RequestView, view: EngineView) -> None:
        path = tuple(view.prefixes(request))
        if path == self._paths.get(request.number, ()):
            return
        self._drop(request.number)
        if not path:
            return
        self._paths[request.number] = path
        branch = self._root
        for prefix in path:
            below = branch.children.get(prefix)
            if below is None:
                below = branch.children[prefix] = _Branch()
            branch = below
            branch.count += 1
            branch.weight = max(branch.weight, branch.count)
        branch.requests[request.number] = request

    def _drop(self, number: int) -> None:
        branch = self._root
        for prefix in self._paths.pop(number, ()):
            below = branch.children[prefix]
            below.count -= 1
            if not below.count:  # so nothing further down has any, either
                del branch.children[prefix]
                return
            branch = below
        branch.requests.pop(number, None)

    def _sorted(self, waiting: Sequence[RequestView], wanted: AbstractSet[int]) -> Iterator[RequestView]:
        """What is below a run before what ends with it, the heaviest child first (ties by first look-up)."""
        stack = [(self._root, False)]
        while stack:
            branch, below_done = stack.pop()
            if not below_done:
                stack.append((branch, True))
                children = list(branch.children.values())[::-1]
                stack.extend((child, False) for child in sorted(children, key=attrgetter("weight")))
                continue
            for number in sorted(branch.requests):
                if number in wanted:
                    yield branch.requests[number]
        for request in waiting:
            if request.number in wanted and request.number not in self._paths:
                yield request
