"""The engine inside the application's event loop: many loops, threads, tasks, and ways to leave."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio
import uvloop
from blockbuster import BlockBuster

import asyncsched.engine
from asyncsched import (
    Backend,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineError,
    WrongLoopError,
)
from asyncsched.testing import ByteTokenizer, SimulatedExecutor, check_invariants

from .engine_helpers import (
    ASYNCIO,
    GUARD,
    LIMITS,
    STARTING,
    BlockedTokenizer,
    Rig,
    assert_threads_end,
    asyncio_tasks,
    limits,
    oracle,
    read,
    tokens_of,
    turns,
    until,
)

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Boom(Exception):
    """The application's own exception."""


class Loader:
    """Stands in for the model loader: a new simulated backend per start."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.executors: list[SimulatedExecutor] = []
        self.threads: list[int] = []
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.proceed.set()
        self.error: Exception | None = None

    def __call__(self, config: EngineConfig) -> Backend:
        self.threads.append(threading.get_ident())
        self.entered.set()
        assert self.proceed.wait(GUARD)
        if self.error is not None:
            raise self.error
        self.executors.append(SimulatedExecutor(LIMITS, **self.options))
        return Backend(self.executors[-1], None, "simulated")


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    """What ``Engine()`` without a backend loads."""
    loader = Loader()
    monkeypatch.setattr(asyncsched.engine, "load_backend", loader)
    return loader


async def ask(engine: Engine, seed: int = 0) -> None:
    result = await engine.generate(PROMPT, seed=seed, max_tokens=5)
    assert result.token_ids == oracle(PROMPT, seed, 5)


# One engine object, several loops


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_engine_in_two_loops_one_after_the_other(loader: Loader, backend: str) -> None:
    engine = Engine()

    async def main() -> None:
        async with engine:
            await ask(engine)

    for _ in range(2):
        anyio.run(main, backend=backend)
    asyncio.run(main())
    assert len(loader.executors) == 3
    assert all(executor.closed for executor in loader.executors)
    assert threading.get_ident() not in loader.threads


def test_an_engine_left_running_in_a_loop_that_ended(loader: Loader) -> None:
    engine = Engine()

    async def start() -> None:
        await engine.start()
        await ask(engine)

    async def use() -> None:
        for call in (lambda: engine.stream([1]), engine.statistics, engine.events, lambda: engine.abort("x")):
            with pytest.raises(WrongLoopError, match=r"another event loop.*one engine per loop"):
                call()
        with pytest.raises(WrongLoopError):
            await engine.generate([1])

    asyncio.run(start())
    assert loader.executors[0].closed  # the end of its loop has ended it
    asyncio.run(use())
    with pytest.raises(WrongLoopError):
        engine.statistics()  # no loop at all


def test_an_engine_whose_loop_is_gone_can_be_closed_and_started_in_another(loader: Loader) -> None:
    """Closing what has ended already is no mistake, wherever it is done."""
    engine = Engine()

    async def start() -> None:
        await engine.start()
        await turns()

    async def restart() -> None:
        await engine.aclose()
        async with engine:
            await ask(engine)

    asyncio.run(start())
    asyncio.run(restart())


# Several engines


async def test_two_engines_in_one_loop() -> None:
    async with Rig() as first, Rig(depth=1) as second:
        async with anyio.create_task_group() as tasks:
            for i in range(10):
                tasks.start_soon(ask, first.engine, i)
                tasks.start_soon(ask, second.engine, i)
        assert first.statistics.finished["length"] == second.statistics.finished["length"] == 10
        assert not first.engine.abort("request-1")
        stream = first.engine.stream([1], max_tokens=3, request_id="same")
        other = second.engine.stream([1], max_tokens=3, request_id="same")
        first.engine.abort("same")
        assert len(tokens_of(await read(other))) == 3
        stream.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_one_engine_per_thread(backend: str) -> None:
    errors: list[BaseException] = []

    async def main() -> None:
        async with Rig() as rig:
            for i in range(10):
                await ask(rig.engine, i)

    def run() -> None:
        try:
            anyio.run(main, backend=backend)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# asyncio's own modes


def test_debug_mode_finds_nothing() -> None:
    async def main() -> None:
        asyncio.get_running_loop().slow_callback_duration = GUARD
        async with Rig() as rig:
            async with rig.engine.stream(PROMPT, max_tokens=50) as stream:
                async for _ in stream:
                    break
            await ask(rig.engine)

    asyncio.run(main(), debug=True)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_eager_tasks() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
        async with Rig() as rig:
            tasks = [asyncio.create_task(ask(rig.engine, i)) for i in range(20)]
            await asyncio.gather(*tasks)
            async for _ in rig.engine.stream(PROMPT, max_tokens=50):
                break
            gc.collect()
            await until(lambda: rig.released)

    asyncio.run(main())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_plain_asyncio_program(runner: Any) -> None:
    """Without anyio's runner nothing but the running loop tells the engine where it is."""

    async def main() -> None:
        async with Rig() as rig:
            await asyncio.gather(*(ask(rig.engine, i) for i in range(20)))
            stream = rig.engine.stream(PROMPT, max_tokens=50)
            await until(lambda: rig.statistics.running)
            del stream  # released from a callback of the loop
            gc.collect()
            await until(lambda: rig.released and not rig.statistics.steps_in_flight)
            check_invariants(rig.engine, idle=True)

    runner(main())


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_calls_from_callbacks_of_the_loop(runner: Any) -> None:
    """``call_soon`` and signal handlers run in the loop, but in no task."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with Rig(hold=True) as rig:
            outcome: list[Any] = []

            def callback() -> None:
                try:
                    outcome.append(rig.engine.abort("a"))
                    outcome.append(rig.engine.stream([1], seed=0, max_tokens=3))
                    outcome.append(rig.engine.statistics())
                    other.close()
                except BaseException as exc:
                    outcome.append(exc)

            stream = rig.engine.stream([1], max_tokens=9, request_id="a")
            other = rig.engine.stream([1], max_tokens=9)
            await rig.step(2)
            loop.call_soon(callback)
            await turns(20)
            assert outcome[0] is True
            rig.executor.unhold()
            assert (await read(stream))[-1].finish_reason == "abort"
            assert tokens_of(await read(outcome[1])) == oracle([1], 0, 3)
            assert outcome[2].finished["abort"] == 1
            assert other.finish_reason == "abort"

    runner(main())


# Starting and closing


async def test_start_and_close_in_different_tasks() -> None:
    """As in a notebook, where every cell is a task."""
    rig = Rig()
    engine = rig.engine

    async def start_cell() -> None:
        assert await engine.start() is engine

    async def ask_cell() -> None:
        await ask(engine)

    async def close_cell() -> None:
        await engine.aclose()
        await engine.aclose()

    for cell in (start_cell, ask_cell, ask_cell, close_cell):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cell)
    assert rig.executor.closed


async def test_an_engine_outlives_the_scope_it_was_started_in() -> None:
    rig = Rig()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(rig.engine.start)
        await until(lambda: rig.executor._deliver is not None)
        await turns()
        tasks.cancel_scope.cancel()
    await ask(rig.engine)
    await rig.engine.aclose()


async def test_the_applications_exceptions_are_not_wrapped() -> None:
    for error in (Boom("mine"), KeyError("k"), ExceptionGroup("own", [Boom()])):
        rig = Rig()
        with pytest.raises(type(error)) as caught:
            async with rig.engine:
                raise error
        assert caught.value is error
        assert rig.executor.closed


async def test_cancellation_passes_through_the_block() -> None:
    rig = Rig()
    with anyio.CancelScope() as scope:
        async with rig.engine:
            scope.cancel()
            await rig.engine.generate([1])
    assert scope.cancelled_caught
    assert rig.executor.closed


@ASYNCIO
async def test_native_cancellation_passes_through_the_block() -> None:
    rig = Rig(hold=True)
    started = asyncio.Event()

    async def main() -> None:
        async with rig.engine:
            started.set()
            await rig.engine.generate([1], max_tokens=50)

    task = asyncio.create_task(main())
    await started.wait()
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.executor.closed


async def test_every_reader_learns_of_the_close() -> None:
    rig = Rig(limits(max_rows=8, pages=128), hold=True)
    outcomes: list[BaseException] = []

    async def reader(i: int) -> None:
        try:
            if i % 4 == 0:
                await rig.engine.generate([i], max_tokens=50, n=2)
            else:
                async with rig.engine.stream([i], max_tokens=50) as stream:
                    async for _ in stream:
                        pass
        except EngineClosedError as exc:
            outcomes.append(exc)

    async with anyio.create_task_group() as tasks, rig.engine:
        for i in range(200):
            tasks.start_soon(reader, i)
        await until(lambda: rig.statistics.submitted == 200)
        unread = [rig.engine.stream([i], max_tokens=5) for i in range(5)]
        await rig.step(3)
    assert len(outcomes) == 200
    assert all("closed" in str(error) for error in outcomes)
    for stream in unread:
        with pytest.raises(EngineClosedError):
            await read(stream)
    assert rig.executor.closed


async def test_texts_that_are_being_tokenised_learn_of_the_close() -> None:
    tokenizer = BlockedTokenizer()
    rig = Rig(limits(vocab_size=tokenizer.vocab_size), tokenizer=tokenizer)
    errors: list[BaseException] = []

    async def reader() -> None:
        try:
            await rig.engine.generate("text")
        except EngineClosedError as exc:
            errors.append(exc)
        tokenizer.open.set()  # only the answer comes at once; the thread is waited for

    async with anyio.create_task_group() as tasks, rig.engine:
        tasks.start_soon(reader)
        await until(tokenizer.entered.is_set)
    assert len(errors) == 1


async def test_closing_waits_for_the_device() -> None:
    release, closing = threading.Event(), threading.Event()

    class SlowToClose(SimulatedExecutor):
        def close(self) -> None:
            assert threading.get_ident() != loop_thread
            closing.set()
            assert release.wait(GUARD)
            super().close()

    loop_thread = threading.get_ident()
    executor = SlowToClose(LIMITS)
    engine = Engine(backend=Backend(executor, None, "simulated"))
    await engine.start()
    closed = False

    async def close() -> None:
        nonlocal closed
        await engine.aclose()
        closed = True

    with anyio.fail_after(GUARD):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            await until(closing.is_set)
            await turns()
            assert not closed
            tasks.cancel_scope.cancel()  # even a cancelled close waits
            await anyio.lowlevel.cancel_shielded_checkpoint()
            assert not closed
            release.set()
    assert executor.closed


async def test_a_device_that_does_not_close_is_given_up() -> None:
    release = threading.Event()

    class NeverCloses(SimulatedExecutor):
        def close(self) -> None:
            assert release.wait(GUARD)
            super().close()

    engine = Engine(backend=Backend(NeverCloses(LIMITS), None, "simulated"), close_timeout=0.01)
    async with engine:
        await ask(engine)
    release.set()


async def test_every_closer_waits_for_the_end() -> None:
    """The second of two closing tasks may rely on the engine being closed as much as the first."""
    rig = Rig()
    await rig.engine.start()
    seen: list[bool] = []

    async def close() -> None:
        await rig.engine.aclose()
        seen.append(rig.executor.closed)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        tasks.start_soon(close)
    assert seen == [True, True]


async def test_submissions_while_closing_are_refused() -> None:
    rig = Rig(hold=True)
    refused: list[BaseException] = []

    async def stubborn() -> None:
        for _ in range(3):
            try:
                await rig.engine.generate([1], max_tokens=5)
            except EngineError as exc:
                refused.append(exc)

    async with anyio.create_task_group() as tasks, rig.engine:
        tasks.start_soon(stubborn)
        await turns()
    assert [type(error) for error in refused] == [EngineClosedError] * 3


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_model_is_loaded_off_the_loop(loader: Loader, backend: str) -> None:
    async def main() -> None:
        engine = Engine()
        loader.entered.clear()
        loader.proceed.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.start)
            await until(loader.entered.is_set)
            await turns()  # the loop is alive while the model loads
            with pytest.raises(EngineClosedError):
                engine.stream([1])
            with pytest.raises(EngineError, match="started already"):
                await engine.start()
            loader.proceed.set()
        await ask(engine)
        await engine.aclose()

    anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_start_that_is_cancelled(loader: Loader, backend: str) -> None:
    """The block is not entered; the engine can be started again; what was loaded is closed."""

    async def main() -> None:
        engine = Engine()
        loader.entered.clear()
        loader.proceed.clear()
        entered = False

        async def enter() -> None:
            nonlocal entered
            async with engine:
                await anyio.lowlevel.checkpoint()
                entered = True

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
            await until(loader.entered.is_set)
            tasks.cancel_scope.cancel()
            loader.proceed.set()
        assert not entered
        with pytest.raises(EngineClosedError):
            engine.stream([1])
        assert all(executor.closed for executor in loader.executors)
        async with engine:
            await ask(engine)

    anyio.run(main, backend=backend)
    assert all(executor.closed for executor in loader.executors)


def test_a_native_cancel_of_the_start(loader: Loader) -> None:
    async def main() -> None:
        engine = Engine()
        loader.entered.clear()
        loader.proceed.clear()
        task = asyncio.create_task(engine.start())
        await until(loader.entered.is_set)
        task.cancel()
        await turns()
        loader.proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with engine:
            await ask(engine)

    asyncio.run(main())
    assert len(loader.executors) == 2
    assert all(executor.closed for executor in loader.executors)


def test_a_model_that_cannot_be_loaded(loader: Loader) -> None:
    async def main() -> None:
        engine = Engine()
        loader.error = asyncsched.ModelNotFoundError("no such model")
        with pytest.raises(asyncsched.ModelNotFoundError, match="no such model"):
            async with engine:
                pass  # pragma: no cover
        with pytest.raises(EngineClosedError):
            engine.stream([1])
        loader.error = None
        async with engine:
            await ask(engine)

    anyio.run(main)


async def test_an_executor_that_does_not_start_is_closed() -> None:
    class Unstartable(SimulatedExecutor):
        def start(self, deliver: Any) -> None:
            raise Boom("no device")

    executor = Unstartable(LIMITS)
    engine = Engine(backend=Backend(executor, None, "simulated"))
    with pytest.raises(Boom):
        await engine.start()
    assert executor.closed
    with pytest.raises(EngineClosedError):
        engine.statistics()


# Good neighbours


@contextmanager
def unchanged_process() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    interval = sys.getswitchinterval()
    hooks = (sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.showwarning)
    yield
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    assert sys.getswitchinterval() == interval
    assert (sys.excepthook, threading.excepthook, sys.unraisablehook, warnings.showwarning) == hooks


def test_nothing_global_is_changed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        handler, factory = loop.get_exception_handler(), loop.get_task_factory()
        with unchanged_process():
            async with Rig(tokenizer=ByteTokenizer(), limits=limits(vocab_size=269)) as rig:
                with unchanged_process():
                    await rig.engine.generate("a text", max_tokens=4)
                    assert (loop.get_exception_handler(), loop.get_task_factory()) == (handler, factory)

    with unchanged_process():
        asyncio.run(main())


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with Rig(tokenizer=ByteTokenizer(), limits=limits(vocab_size=269)) as rig:
            await rig.engine.generate(["a text"] * 10, max_tokens=4)

    for _ in range(3):
        asyncio.run(main())
    assert_threads_end(before)


@ASYNCIO
async def test_no_task_is_left() -> None:
    before = asyncio_tasks()
    async with Rig() as rig:
        await ask(rig.engine)
        assert asyncio_tasks() > before
    await turns()
    assert asyncio_tasks() == before


@ASYNCIO
async def test_an_idle_engine_schedules_nothing() -> None:
    """No timer, no polling: once the work is done, the loop has no callback of the engine's."""
    loop = asyncio.get_running_loop()
    async with Rig(tokenizer=ByteTokenizer(), limits=limits(vocab_size=269)) as rig:
        await rig.engine.generate(["a text", "another"], max_tokens=4)
        rig.engine.stream([1], max_tokens=50).close()
        await rig.settle()
        await turns(20)
        plans = len(rig.plans)
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
            ready: Any = loop._ready  # type: ignore[attr-defined]
            assert len(ready) == 0
        scheduled: Any = loop._scheduled  # type: ignore[attr-defined]
        assert not [handle for handle in scheduled if not handle.cancelled() and "asyncsched" in repr(handle)]
        assert len(rig.plans) == plans


def test_an_idle_engine_never_wakes_up_trio() -> None:
    class Counter(trio.abc.Instrument):
        steps = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.steps += task is not main_task

    counter = Counter()
    main_task: trio.lowlevel.Task | None = None

    async def main() -> None:
        nonlocal main_task
        main_task = trio.lowlevel.current_task()
        async with Rig() as rig:
            await ask(rig.engine)
            await rig.settle()
            await turns(20)
            before = counter.steps
            assert before
            await turns(200)
            assert counter.steps == before

    trio.run(main, instruments=[counter])


@ASYNCIO
async def test_starting_does_not_block_the_loop(no_blocking_calls: BlockBuster) -> None:
    """Policies are found by reading the metadata of what is installed: files, so not on the loop."""
    engine = Engine(backend=Backend(SimulatedExecutor(LIMITS), None, "simulated"), policy="lpm")
    for function in no_blocking_calls.functions.values():
        for place in STARTING:
            function.can_block_functions.remove(place)
    try:
        await engine.start()
    finally:
        for function in no_blocking_calls.functions.values():
            function.can_block_functions += STARTING
        await engine.aclose()


def test_importing_is_cheap_and_quiet() -> None:
    """Nothing of torch, trio or a model loader comes with the import."""
    heavy = {"torch", "trio", "numba", "transformers", "uvloop", "tokenizers"}
    script = f"import sys, asyncsched; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert done.stderr == ""


def test_every_public_coroutine_is_one() -> None:
    for name in ("start", "aclose", "generate", "chat"):
        assert inspect.iscoroutinefunction(getattr(Engine, name))
    for name in ("stream", "abort", "statistics", "events"):
        assert not inspect.iscoroutinefunction(getattr(Engine, name))
