"""Event loops and small engines for the tests of the control plane."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from blockbuster import BlockBuster

from .engine_helpers import STARTING, Rig

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, which may be by any test that imports transformers.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every event loop the engine must run in."""
    return request.param


@pytest.fixture(scope="session")
def _watchdog() -> BlockBuster:
    watchdog = BlockBuster("asyncsched")
    for function in watchdog.functions.values():
        function.can_block_functions += STARTING
    return watchdog


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest, _watchdog: BlockBuster) -> Iterator[BlockBuster]:
    """The control plane must not block an asyncio loop: no file, lock or sleep below a frame of ``asyncsched``."""
    if "anyio_backend" not in request.fixturenames:
        yield _watchdog
        return
    _watchdog.activate()
    try:
        yield _watchdog
    finally:
        _watchdog.deactivate()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """A small engine, checked for leaks when the test ends."""
    async with Rig(guard=math.inf) as rig:
        yield rig


@pytest.fixture
async def held() -> AsyncIterator[Rig]:
    """A small engine whose device computes only when told (``step``)."""
    async with Rig(hold=True, guard=math.inf) as rig:
        yield rig
