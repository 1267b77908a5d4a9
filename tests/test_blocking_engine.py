"""The engine for synchronous programs: several threads, streams, and leaving it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from asyncsched import (
    Backend,
    BlockingEngine,
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidTokenError,
    PolicyNotFoundError,
)
from asyncsched.testing import ByteTokenizer, SimulatedExecutor

from .engine_helpers import GUARD, LIMITS, assert_threads_end, limits, oracle, text_of, tokens_of

PROMPT = [3, 1, 4, 1, 5, 9]


class Boom(Exception):
    """The application's own exception."""


def blocking(**options: Any) -> tuple[BlockingEngine, SimulatedExecutor]:
    executor = SimulatedExecutor(LIMITS, **options)
    return BlockingEngine(backend=Backend(executor, None, "simulated")), executor


def in_threads(count: int, function: Callable[[int], None]) -> None:
    """Run ``function(0 … count − 1)``, each in a thread; the first exception is raised here."""
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            function(i)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_one_answer() -> None:
    engine, executor = blocking()
    with engine:
        result = engine.generate(PROMPT, seed=0, max_tokens=6)
        assert result.token_ids == oracle(PROMPT, 0, 6)
        batch = engine.generate([[1], [2]], seed=0, max_tokens=3)
        assert [one.token_ids for one in batch] == [oracle([1], 0, 3), oracle([2], 0, 3)]
        assert engine.statistics().finished["length"] == 3
    assert executor.closed


def test_text_and_chat() -> None:
    tokenizer = ByteTokenizer()
    executor = SimulatedExecutor(limits(vocab_size=tokenizer.vocab_size))
    with BlockingEngine(backend=Backend(executor, tokenizer, "simulated")) as engine:
        result = engine.generate("hello", seed=0, max_tokens=6, ignore_eos=True)
        assert result.text == tokenizer.decode(result.token_ids)
        chat = engine.chat([{"role": "user", "content": "hello"}], seed=0, max_tokens=6, ignore_eos=True)
        assert chat.prompt_token_ids[0] == 259
        with engine.stream("hello", seed=0, max_tokens=6, ignore_eos=True) as chunks:
            assert text_of(chunks) == result.text


def test_streams_from_many_threads() -> None:
    engine, _ = blocking()

    def work(i: int) -> None:
        with engine.stream([i], seed=i, max_tokens=9) as chunks:
            assert tokens_of(chunks) == oracle([i], i, 9)
        assert engine.generate([i, i], seed=i, max_tokens=4).token_ids == oracle([i, i], i, 4)

    with engine:
        in_threads(12, work)
        assert engine.statistics().finished["length"] == 24


def test_leaving_a_stream_early_releases_it() -> None:
    engine, _ = blocking(hold=True)
    with engine:
        with engine.stream(PROMPT, max_tokens=50):
            assert engine.statistics().running + engine.statistics().waiting == 1
        with pytest.raises(Boom), engine.stream(PROMPT, max_tokens=50):
            raise Boom
        numbers = engine.statistics()
        assert (numbers.running, numbers.waiting, numbers.finished["abort"]) == (0, 0, 2)


def test_break_in_the_middle() -> None:
    engine, _ = blocking()
    with engine:
        with engine.stream(PROMPT, seed=0, max_tokens=100) as chunks:
            for chunk in chunks:
                assert chunk.token_ids == oracle(PROMPT, 0, 100)[: len(chunk.token_ids)]
                break
        assert engine.statistics().running == 0
        assert engine.generate(PROMPT, seed=0, max_tokens=3).token_ids == oracle(PROMPT, 0, 3)


def test_abort_from_another_thread() -> None:
    engine, _ = blocking(hold=True)
    with engine:
        outcome: list[Any] = []

        def work(i: int) -> None:
            if i == 0:
                outcome.append(engine.generate(PROMPT, max_tokens=50, request_id="a"))
            else:
                while not engine.abort("a"):
                    pass

        in_threads(2, work)
        assert outcome[0].finish_reason == "abort"
        assert not engine.abort("a")


def test_errors_arrive_as_they_are() -> None:
    engine, _ = blocking(lost_at=6)
    with engine:
        with pytest.raises(InvalidTokenError, match="outside the vocabulary"):
            engine.generate([-1])
        with pytest.raises(InvalidTokenError):
            engine.stream([-1])
        assert engine.generate(PROMPT, seed=0, max_tokens=2).token_ids == oracle(PROMPT, 0, 2)
        with pytest.raises(EngineDeadError, match="lost in step 6") as caught:
            engine.generate(PROMPT, max_tokens=50)
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_exception_in_the_body_is_not_wrapped() -> None:
    engine, executor = blocking()
    boom = Boom()
    with pytest.raises(Boom) as caught, engine:
        raise boom
    assert caught.value is boom
    assert executor.closed


def test_use_outside_the_block() -> None:
    engine, _ = blocking()
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate([1]),
        lambda: engine.stream([1]),
        lambda: engine.chat([]),
        lambda: engine.abort("a"),
        engine.statistics,
    ]
    for again in (False, True):
        for call in calls:
            with pytest.raises(EngineClosedError, match="with BlockingEngine"):
                call()
        if not again:
            with engine:
                engine.generate([1], max_tokens=1)


def test_entering_twice() -> None:
    engine, _ = blocking()
    with engine:
        with pytest.raises(Exception, match="started already"), engine:
            pass  # pragma: no cover
        assert engine.generate([1], seed=0, max_tokens=1).token_ids == oracle([1], 0, 1)


def test_a_stream_that_outlives_the_engine() -> None:
    engine, executor = blocking(hold=True)
    with engine:
        manager = engine.stream(PROMPT, max_tokens=50)
        chunks = manager.__enter__()
        engine._open().call(executor.step, 3)
        next(chunks)
    with pytest.raises(EngineClosedError):
        next(chunks)
    manager.__exit__(None, None, None)


def test_readers_in_other_threads_learn_of_the_close() -> None:
    engine, _ = blocking(hold=True)
    started = threading.Barrier(5)
    outcomes: list[BaseException] = []

    def reader(i: int) -> None:
        try:
            if i % 2:
                started.wait(GUARD)
                engine.generate([i], max_tokens=50)
            else:
                with engine.stream([i], max_tokens=50) as chunks:
                    started.wait(GUARD)
                    list(chunks)
        except BaseException as exc:
            outcomes.append(exc)

    threads = [threading.Thread(target=reader, args=(i,)) for i in range(4)]
    with engine:
        for thread in threads:
            thread.start()
        started.wait(GUARD)
        while engine.statistics().submitted < 4:
            pass
    for thread in threads:
        thread.join(GUARD)
    assert [type(error) for error in outcomes] == [EngineClosedError] * 4


def test_a_start_that_fails_leaves_nothing() -> None:
    before = set(threading.enumerate())
    executor = SimulatedExecutor(LIMITS)
    engine = BlockingEngine(backend=Backend(executor, None, "simulated"), policy="nope")
    with pytest.raises(PolicyNotFoundError), engine:
        pass  # pragma: no cover
    with pytest.raises(EngineClosedError):
        engine.statistics()
    with pytest.raises(ConfigError, match="did you mean 'depth'"):
        BlockingEngine(dept=1)
    assert_threads_end(before)


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        engine, _ = blocking()
        with engine:
            engine.generate(PROMPT, max_tokens=3)
    assert_threads_end(before)


def test_the_engine_runs_in_a_thread_that_is_not_the_main_one() -> None:
    """And so does the whole program, if it wants to."""

    def work(i: int) -> None:
        engine, _ = blocking()
        with engine:
            assert engine.generate([i], seed=i, max_tokens=4).token_ids == oracle([i], i, 4)

    in_threads(4, work)
