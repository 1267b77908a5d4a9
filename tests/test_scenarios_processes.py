"""Whole programs in processes of their own: how they end, what they leave, and what importing does.

Cases from reports of other engines; each test names the report it comes from. The device is the simulated one,
on a real compute thread.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sends signals and reads /proc")

LIMIT = 60
"""Seconds after which a program that does not end is a failure; nothing is measured by it."""

PRELUDE = """
import asyncio, os, signal, sys, threading
import asyncsched
from asyncsched.gpu.compute_thread import ComputeThread
from asyncsched.testing import SimulatedExecutor, expected_tokens


class Threaded(SimulatedExecutor):
    def start(self, deliver):
        self._thread = ComputeThread(lambda plan: self.run(plan, 0.0, 0.0), deliver, "compute")

    def submit(self, plan):
        self._thread.submit(plan)

    def close(self):
        self._thread.close()


LIMITS = asyncsched.ExecutorLimits(max_rows=8, pages=4096, page_size=64, max_model_len=200_000, vocab_size=1000)


def backend():
    return asyncsched.Backend(Threaded(LIMITS), None, "simulated")


def children():
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += file.read().split()
    return found

"""


def start(script: str, tmp_path: Path) -> subprocess.Popen[str]:
    path = tmp_path / "program.py"
    path.write_text(PRELUDE + script)
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(script: str, tmp_path: Path, code: int = 0) -> str:
    """Run a program to its end and return what it printed; it must print nothing to its error output."""
    with start(script, tmp_path) as process:
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"the program does not end; it printed {process.communicate()}")
    assert (process.returncode, err) == (code, ""), out
    return out


SERVE = """
async def main():
    async with asyncsched.Engine(backend=backend()) as engine:
        gone = engine.stream([1, 2], max_tokens=100_000)
        await anext(aiter(gone))
        gone.close()  # cancelled streams before
        dropped = engine.stream([3], max_tokens=100_000)
        async for chunk in dropped:
            break
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        told = False
        async with engine.stream([4, 5], max_tokens=150_000) as stream:
            async for chunk in stream:
                if not told:
                    print("streaming", flush=True)
                    told = True

try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("stopped", [thread.name for thread in threading.enumerate() if thread.name == "compute"], flush=True)
"""


def test_sigterm_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    """ai-dynamo/dynamo 9343: the process hung after SIGTERM when streams had been cancelled before."""
    with start(SERVE, tmp_path) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "streaming\n"
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=LIMIT)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, "")
    assert out == "stopped []\n"


def test_a_killed_process_has_no_children_to_leave(tmp_path: Path) -> None:
    """sgl-project/sglang 23213, 4480; vllm-project/vllm 55510, 44751, 50529: orphans held the device's memory."""
    script = """
async def main():
    async with asyncsched.Engine(backend=backend()) as engine:
        async with engine.stream([4, 5], max_tokens=150_000) as stream:
            await anext(aiter(stream))
            print(children(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    assert run(script, tmp_path, code=-signal.SIGKILL) == "[]\n"


@pytest.mark.parametrize("how", ["return", "raise", "running"])
def test_a_program_that_never_closes_its_engine_ends(tmp_path: Path, how: str) -> None:
    """vllm-project/vllm 3996: a program with a living engine never exited."""
    script = f"""
async def main():
    global engine, stream
    engine = await asyncsched.Engine(backend=backend()).start()
    stream = engine.stream([1, 2], max_tokens=150_000)
    await anext(aiter(stream))
    if {how!r} == "raise":
        raise SystemExit(0)

if {how!r} == "running":  # not even the loop is closed: the compute thread must not hold the process
    asyncio.new_event_loop().run_until_complete(main())
    print("end", flush=True)
    sys.stderr = open(os.devnull, "w")  # asyncio complains of the tasks that were left
else:
    try:
        asyncio.run(main())
    finally:
        print("end", flush=True)
"""
    assert run(script, tmp_path) == "end\n"


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """vllm-project/vllm 9826; groundlight/r1_vlm 59; sgl-project/sglang 5647: spawned processes ran the script again."""
    script = """
print("top")
with asyncsched.BlockingEngine(backend=backend()) as engine:
    result = engine.generate([1, 2, 3], seed=5, max_tokens=6)
    print(list(result.token_ids) == expected_tokens([1, 2, 3], 5, 6, 1000), children())
print([thread.name for thread in threading.enumerate() if thread.name == "compute"])
"""
    assert run(script, tmp_path) == "top\nTrue []\n[]\n"


def test_imported_built_and_run_in_a_thread(tmp_path: Path) -> None:
    """sgl-project/sglang 2536, 18752, 6723; volcengine/verl 1163: signal handlers could be set in the main thread only."""
    script = """
for name in [name for name in sys.modules if name.startswith("asyncsched")]:
    del sys.modules[name]
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
answers = []

def work():
    import asyncsched
    from asyncsched.testing import SimulatedExecutor

    async def main():
        executor = SimulatedExecutor(asyncsched.ExecutorLimits(8, 64, 4, 128, 1000))
        async with asyncsched.Engine(backend=asyncsched.Backend(executor, None, "simulated")) as engine:
            answers.append(list((await engine.generate([1, 2], seed=1, max_tokens=4)).token_ids))

    asyncio.run(main())

threads = [threading.Thread(target=work) for _ in range(2)]  # two threads, each with a loop of its own
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(answers == [expected_tokens([1, 2], 1, 4, 1000)] * 2)
print({number: signal.getsignal(number) for number in signal.valid_signals()} == before)
"""
    assert run(script, tmp_path) == "True\nTrue\n"


def test_two_loops_one_after_the_other_and_a_fork(tmp_path: Path) -> None:
    """sgl-project/sglang 1606, 1612; vllm-project/vllm 17208, 12754, 8893: a second loop hung; a fork after import failed."""
    script = """
engine = asyncsched.Engine(backend=backend())

async def use():
    try:
        return list((await engine.generate([1, 2], seed=1, max_tokens=4)).token_ids)
    except asyncsched.AsyncschedError as exc:
        return type(exc).__name__

async def first():
    await engine.start()
    return await use()

print(asyncio.run(first()) == expected_tokens([1, 2], 1, 4, 1000))
print(asyncio.run(use()))

async def fresh():
    async with asyncsched.Engine(backend=backend()) as engine:
        return list((await engine.generate([1, 2], seed=1, max_tokens=4)).token_ids)

print(asyncio.run(fresh()) == expected_tokens([1, 2], 1, 4, 1000))
sys.stdout.flush()
child = os.fork()  # every engine is closed, so there are no threads
if not child:
    os._exit(0 if asyncio.run(fresh()) == expected_tokens([1, 2], 1, 4, 1000) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert run(script, tmp_path) == "True\nWrongLoopError\nTrue\n0\n"


def test_used_inside_a_running_loop(tmp_path: Path) -> None:
    """InternLM/lmdeploy 1399; sgl-project/sglang 185, 5533, 4319; argilla-io/distilabel 501: "loop already running"."""
    script = """
async def main():
    async with asyncsched.Engine(backend=backend()) as engine:
        print(len((await engine.generate([1, 2], max_tokens=4)).token_ids))
    blocking = asyncsched.BlockingEngine(backend=backend())
    with blocking:  # in a thread of its own, so that it works here too, though it blocks this loop
        print(len(blocking.generate([1, 2], max_tokens=4).token_ids))

asyncio.run(main())
"""
    assert run(script, tmp_path) == "4\n4\n"
