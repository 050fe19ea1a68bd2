"""Handlers in processes of their own: called, killed, replaced."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from asyncjobq import JobCancelled, Scheduler
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.processes import HandlerProcesses
from asyncjobq.run import JobRun, Stop
from conformance import computing
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.runs import ended, run_of
from conformance.steps import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")

TESTS = Path(__file__).parents[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[HandlerProcesses]:
    made = HandlerProcesses()
    yield made
    await made.aclose()


@pytest.fixture
def call(processes: HandlerProcesses) -> Callable[..., Any]:
    """Give what runs one attempt of a handler in a process."""

    async def outcome(function: Any, args: str = "{}", **how: Any) -> Outcome:
        async with asyncio.timeout(3 * PATIENCE):
            return await ended(in_process(processes, function, args, **how))

    return outcome


def in_process(processes: HandlerProcesses, function: Any, args: str, **how: Any) -> JobRun:
    options = {"run_in": "process", **how.pop("options", {})}
    run = run_of(function, args=args, options=options, processes=processes, **how)
    run._grace = 5.0
    return run


async def exists(file: Path) -> bool:
    return file in set(file.parent.iterdir())


async def gone(pid: int) -> bool:
    """Tell whether a process is no more, or a zombie that nobody but its new parent can clear."""
    return _is_gone(pid)


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class TestCall:
    async def test_returns_what_the_function_returns(self, call: Callable[..., Any]) -> None:
        assert (await call(computing.add, '{"a":2}')).result == "3"
        assert (await call(computing.mirror, '{"point":{"x":1,"y":2}}')).result == '{"x":2,"y":1}'
        assert (await call(computing.Tools.double, '{"n":4}')).result == "8"

    async def test_is_made_elsewhere_and_there_again(self, call: Callable[..., Any]) -> None:
        pids = {(await call(computing.pid)).result for _ in range(2)}
        assert len(pids) == 1
        assert pids != {str(os.getpid())}

    async def test_leaves_the_output_alone(self, capfd: pytest.CaptureFixture[str]) -> None:
        async with aclosing(HandlerProcesses()) as fresh:
            run = in_process(fresh, computing.say, '{"text":"here"}')
            assert (await ended(run)).ending == Ending.SUCCEEDED
        assert capfd.readouterr() == ("here\n", "")

    async def test_that_cannot_be_stored_fails(self, call: Callable[..., Any]) -> None:
        outcome = await call(computing.unstorable)
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, None)
        assert "its result cannot be stored" in outcome.error
        outcome = await call(computing.add, '{"a":123}', max_result_bytes=2)
        assert "2 are allowed" in outcome.error

    async def test_goes_on_at_a_signal_that_is_meant_for_the_worker(
        self, call: Callable[..., Any], tmp_path: Path
    ) -> None:
        file, answer = tmp_path / "pid", tmp_path / "answer"
        args = f'{{"file":"{file}","answer":"{answer}"}}'
        task = asyncio.ensure_future(call(computing.wait_for, args))
        await until(lambda: exists(file))
        pid = int(file.read_text())
        assert os.getpgid(pid) != os.getpgid(0)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        answer.touch()
        assert (await task).result == '"in spite of it"'

    async def test_of_what_is_not_there_says_so(self, call: Callable[..., Any]) -> None:
        def moved() -> None: ...

        moved.__qualname__, moved.__module__ = "moved", computing.__name__
        outcome = await call(moved)
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, None)
        assert "moved is not found in conformance.computing" in outcome.error


class TestErrors:
    async def test_come_with_type_message_and_place(self, call: Callable[..., Any]) -> None:
        outcome = await call(computing.fail_deeply)
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, 7.0)
        assert outcome.summary == "OwnError: 7: no such thing"
        assert outcome.failure.type == "OwnError"
        assert "in fail_deeply" in outcome.error
        assert "KeyError: 'missing'" in outcome.error
        assert "process_program" not in outcome.error

    @pytest.mark.parametrize(
        ("name", "fail_on", "retried"),
        [
            ("own", OSError, True),
            ("own", computing.OwnError, False),
            ("own", ValueError, False),
            ("group", KeyError, True),
            ("group", OSError, False),
            ("exit", (), True),
            ("interrupt", (), True),
        ],
    )
    async def test_are_retried_by_their_class(
        self, call: Callable[..., Any], name: str, fail_on: Any, retried: bool
    ) -> None:
        args, options = f'{{"name":"{name}"}}', {"fail_on": fail_on}
        outcome = await call(computing.raise_error, args, options=options)
        assert (outcome.ending, outcome.retry_after is not None) == (Ending.FAILED, retried)

    @pytest.mark.parametrize(
        ("name", "ending", "delay"),
        [
            ("retry", Ending.FAILED, 30.0),
            ("snooze", Ending.SNOOZED, 60.0),
            ("fail", Ending.FAILED, None),
            ("cancel", Ending.CANCELLED, None),
        ],
    )
    async def test_that_end_the_attempt_do_so(
        self, call: Callable[..., Any], name: str, ending: Ending, delay: float | None
    ) -> None:
        outcome = await call(computing.raise_error, f'{{"name":"{name}"}}')
        assert (outcome.ending, outcome.retry_after) == (ending, delay)


class TestDeath:
    @pytest.mark.parametrize(
        ("how", "told"),
        [
            ("exit", "ended with exit code 3"),
            ("kill", "was killed by SIGKILL"),
            ("close", "ended with exit code 1"),
        ],
    )
    async def test_fails_the_attempt_and_the_next_has_another(
        self, call: Callable[..., Any], how: str, told: str
    ) -> None:
        outcome = await call(computing.die, f'{{"how":"{how}"}}')
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, 7.0)
        assert outcome.failure.type == "HandlerProcessError"
        assert f"The handler's process {told} before" in outcome.error
        assert (await call(computing.add, '{"a":2}')).result == "3"

    async def test_while_it_waits_fails_nobody(self, call: Callable[..., Any]) -> None:
        first = int((await call(computing.pid)).result)
        os.kill(first, signal.SIGKILL)
        outcome = await call(computing.pid)
        assert outcome.ending == Ending.SUCCEEDED
        assert int(outcome.result) != first

    @pytest.mark.parametrize("stop", [Stop.CANCELLED, Stop.LEASE_LOST, Stop.INTERRUPTED, None])
    async def test_comes_with_the_end_of_the_attempt(
        self, processes: HandlerProcesses, tmp_path: Path, stop: Stop | None
    ) -> None:
        """At the deadline, if nobody stops it before; what it has started goes with it."""
        file = tmp_path / "pids"
        run = in_process(processes, computing.spin, f'{{"file":"{file}"}}')
        run.deadline = None if stop else run.deadline
        task = asyncio.ensure_future(ended(run))
        await until(lambda: exists(file))
        run.stop(stop or Stop.TIMED_OUT)
        outcome = await task
        assert outcome.ending == Ending[(stop or Stop.TIMED_OUT).name]
        for pid in file.read_text().split():
            await until(functools.partial(gone, int(pid)))

    async def test_comes_at_the_deadline(self, call: Callable[..., Any], tmp_path: Path) -> None:
        assert (await call(computing.add, '{"a":1}')).ending == Ending.SUCCEEDED  # it has started
        outcome = await call(computing.spin, f'{{"file":"{tmp_path / "pids"}"}}', timeout=0.3)
        assert outcome.ending == Ending.TIMED_OUT

    @pytest.mark.parametrize("function", ["spin", "hold_lock"])
    async def test_comes_with_that_of_the_worker(self, tmp_path: Path, function: str) -> None:
        """Also where that is killed with -9, and the handler never lets anything else run."""
        file = tmp_path / "pids"
        program = (
            "import asyncio; from asyncjobq import Handlers; from conformance import computing; "
            "from asyncjobq.processes import HandlerProcesses; "
            "spin = Handlers().handler(run_in='process')"
            f"(computing.{function}); "
            f'args = \'{{"file":"{file}"}}\'; '
            "asyncio.run(HandlerProcesses().run(spin, args, 1000))"
        )
        paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONPATH": paths}
        start = functools.partial(subprocess.Popen, [sys.executable, "-c", program])
        with await asyncio.to_thread(start, env=environment) as worker:
            try:
                await until(lambda: exists(file))
            finally:  # or a test that is late would wait for it for ever
                worker.kill()
        pids = [int(pid) for pid in file.read_text().split()]
        try:
            for pid in pids:
                await until(functools.partial(gone, pid))
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


async def test_in_the_program_itself(tmp_path: Path) -> None:
    """A script is run again for its functions, under another name than `__main__`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, os\n"
        "from asyncjobq import Scheduler\n"
        "scheduler = Scheduler('sqlite+aiosqlite:///jobs.db')\n"
        "@scheduler.handler(run_in='process')\n"
        "def other(pid: int) -> bool:\n"
        "    return pid != os.getpid()\n"
        "async def main():\n"
        "    await scheduler.create_schema()\n"
        "    job = await scheduler.enqueue(other.job(os.getpid()))\n"
        "    await scheduler.drain()\n"
        "    print(await scheduler.wait(job))\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-X", "dev", "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # What asyncio says of a step that took long says how busy the machine is.
    said = [line for line in ran.stderr.splitlines() if not line.startswith("Executing <")]
    assert (ran.stdout, said) == ("True\n", [])


async def test_in_a_worker(jobs: Jobs, tmp_path: Path) -> None:
    """It computes, is killed when its job is cancelled, and its slot serves the next."""
    scheduler: Scheduler = jobs.another(concurrency=1, poll_interval=0.1)
    add = scheduler.handler(run_in="process")(computing.add)
    spin = scheduler.handler(run_in="process")(computing.spin)
    file = tmp_path / "pids"
    async with serving(scheduler, seconds=4 * PATIENCE):
        assert await scheduler.wait(await scheduler.enqueue(add.job(1, b=2))) == 3
        hung = await scheduler.enqueue(spin.job(str(file)))
        after = await scheduler.enqueue(add.job(5))
        await until(lambda: exists(file))
        await scheduler.cancel(hung)
        with pytest.raises(JobCancelled):
            await scheduler.wait(hung)
        for pid in file.read_text().split():
            await until(functools.partial(gone, int(pid)))
        assert await scheduler.wait(after) == 6
