"""The equations that must hold after every step, and at idle."""

from __future__ import annotations

import numpy as np

from ..engine import Engine
from ..state import ControlState


class InvariantError(AssertionError):
    """An equation does not hold; the text says which."""


def check_invariants(engine: Engine, *, idle: bool = False) -> None:
    """Check pages, rows, references and the registry of a running engine.

    Args:
        engine: Started, in this loop. With ``own_loop`` it must be idle, since another thread owns what is read.
        idle: Also require that nothing is live, in flight or held.

    Raises:
        InvariantError: an equation does not hold.
    """
    run = engine._running()
    check_state(run.control.state, idle=idle)


def check_state(state: ControlState, *, idle: bool = False) -> None:
    """As ``check_invariants``, on the control plane's state."""
    requests = [request for request in state.by_row if request is not None]
    owned = [request.pages[~request.donated] for request in requests]
    cached = [node.pages for node in state.tree.nodes()]
    everything = np.concatenate([state.pool.free_pages(), state.pool.limbo_pages(), *owned, *cached])
    _require(len(everything) == state.pool.total, f"{len(everything)} pages accounted for, {state.pool.total} exist")
    _require(len(np.unique(everything)) == len(everything), "a page is owned twice")
    _require(sum(map(len, cached)) == state.tree.pages, "the tree's page count is off")
    rows = state.rows
    _require(rows.free + rows.limbo + len(requests) == rows.max_rows, "rows are lost")
    _require(rows.in_use == len(requests), "a row has a lease but no request")
    for request in requests:
        row = request.row
        _require(row is not None and state.by_row[row] is request, f"request {request.number} and its row disagree")
        _require(not request.ended, f"request {request.number} has ended but holds a row")
    users: dict[int, int] = {}
    for request in requests:
        node = request.node
        while node is not None:
            users[id(node)] = users.get(id(node), 0) + 1
            node = node.parent
    locked = 0
    for node in state.tree.nodes():
        _require(node.refs == users.get(id(node), 0), f"a prefix counts {node.refs} users, has {users.get(id(node), 0)}")
        locked += len(node.pages) if node.refs else 0
    _require(locked == state.tree.locked_pages, "the tree's locked page count is off")
    if idle:
        _require(not state.outstanding and not state.in_flight, "steps are in flight")
        _require(not state.live and not state.waiting and not state.prefilling, "requests are live")
        _require(not requests and rows.free == rows.max_rows, "rows are held")
        _require(state.pool.free + state.tree.pages == state.pool.total, "pages are held")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise InvariantError(what)
