"""Handlers that do what none should: each has its end, and its slot comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncjobq import Scheduler, State, events, slots
from conformance.kit import Jobs
from conformance.running import serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


class OwnEnd(BaseException):
    """What no `except Exception` sees."""


class OwnError(Exception):
    """An error that nobody waits for."""


class Stubborn:
    """A handler that swallows its cancellations until it is let go."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.at_work = 0
        self.let_go = asyncio.Event()
        self.handler: Any = scheduler.handler("stubborn", timeout=0.05, max_attempts=1)(self._run)

    async def _run(self) -> str:
        self.at_work += 1
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        self.at_work -= 1
        return "late"

    async def returned(self) -> bool:
        return self.at_work == 0

    @asynccontextmanager
    async def let_go_at_last(self) -> AsyncIterator[None]:
        """Let it go also if the test fails: its loop would wait for it for ever."""
        try:
            yield
        finally:
            self.let_go.set()


@pytest.fixture
def scheduler(jobs: Jobs) -> Scheduler:
    return jobs.another(lease_ttl=6.0, concurrency=1, poll_interval=0.1)


@pytest.fixture
def work(scheduler: Scheduler) -> Callable[[], Awaitable[Any]]:
    """Give what runs an ordinary job, which needs a slot."""

    @scheduler.handler
    async def work() -> str:
        return "done"

    async def run() -> Any:
        return await scheduler.wait(await scheduler.enqueue(work.job()))

    return run


async def test_one_that_swallows_its_cancellation_is_left_behind(
    jobs: Jobs,
    scheduler: Scheduler,
    work: Callable[[], Awaitable[Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    stubborn, told = Stubborn(scheduler), list[events.LeftBehind]()
    scheduler.subscribe(told.append, events.LeftBehind)
    async with serving(scheduler), stubborn.let_go_at_last():
        job = await scheduler.enqueue(stubborn.handler.job())
        assert await work() == "done"
        row = await jobs.row(job)
        assert (row.state, row.error) == (State.FAILED, "timed out after 0.05 s")
        stubborn.let_go.set()
        await until(stubborn.returned)
        assert await work() == "done"
    assert await jobs.row(job) == row
    assert [(event.job_id, event.reason) for event in told] == [(job.id, "timed out")]
    assert "left behind, has ended" in caplog.text


async def test_only_so_many_are_left_behind_with_their_slots_in_use_again(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slots, "LEFT_BEHIND", 1)
    scheduler = jobs.another(lease_ttl=1.0, concurrency=2, poll_interval=0.05)
    stubborn = Stubborn(scheduler)

    async def are_left_behind() -> bool:
        return "3 handlers go on although their jobs have ended" in caplog.text

    async with serving(scheduler), stubborn.let_go_at_last():
        hung = await scheduler.enqueue_many([stubborn.handler.job() for _ in range(4)])
        await until(are_left_behind)
        assert scheduler._worker is not None
        assert scheduler._worker._slots.free <= 0

        async def are_failed() -> bool:
            return await jobs.states(*hung[:3]) == [State.FAILED] * 3

        await until(are_failed)
        assert await jobs.state(hung[3]) == State.READY
        stubborn.let_go.set()
        assert await scheduler.wait(hung[3]) == "late"


@pytest.mark.parametrize(
    "error",
    [OwnEnd(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)
async def test_one_that_raises_what_ends_programs_fails(
    jobs: Jobs, scheduler: Scheduler, work: Callable[[], Awaitable[Any]], error: BaseException
) -> None:
    @scheduler.handler(max_attempts=1)
    async def end() -> None:
        raise error

    @scheduler.handler(max_attempts=1)
    def end_thread() -> None:
        raise error

    async with serving(scheduler):
        ended = await scheduler.enqueue_many([end.job(), end_thread.job()])
        assert await work() == "done"
    assert await jobs.states(*ended) == [State.FAILED] * 2


async def test_tasks_that_one_leaves_behind_are_not_waited_for(
    scheduler: Scheduler, work: Callable[[], Awaitable[Any]]
) -> None:
    leaked: list[asyncio.Task[None]] = []

    async def break_later() -> None:
        await asyncio.sleep(0)
        raise OwnError

    @scheduler.handler
    async def leak() -> str:
        leaked.append(asyncio.create_task(asyncio.sleep(600)))
        leaked.append(asyncio.create_task(break_later()))
        return "done"

    async with serving(scheduler):
        assert await scheduler.wait(await scheduler.enqueue(leak.job())) == "done"
        assert await work() == "done"
    assert not leaked[0].done()
    leaked[0].cancel()
    assert isinstance((await asyncio.gather(*leaked, return_exceptions=True))[1], OwnError)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
class TestFork:
    """The new process ends where it would leave the handler."""

    @pytest.mark.parametrize(
        ("how", "code"), [("return", 1), ("raise", 1), ("await", 1), ("exit", 5)]
    )
    async def test_of_one_on_the_loop(
        self, scheduler: Scheduler, tmp_path: Path, how: str, code: int
    ) -> None:
        went_on = tmp_path / "went_on"

        @scheduler.handler(max_attempts=1)
        async def fork() -> int:
            child = os.fork()
            if child == 0:
                act_as_child(how)
                if how == "await":
                    await asyncio.sleep(0)
                    went_on.touch()
                return -1
            return exit_code(child)

        async with serving(scheduler):
            assert await scheduler.wait(await scheduler.enqueue(fork.job())) == code
        assert os.listdir(tmp_path) == []  # noqa: PTH208

    @pytest.mark.parametrize(("how", "code"), [("return", 1), ("raise", 1), ("exit", 5)])
    async def test_of_one_in_a_thread(self, scheduler: Scheduler, how: str, code: int) -> None:
        @scheduler.handler(max_attempts=1)
        def fork() -> int:
            child = os.fork()
            if child == 0:
                act_as_child(how)
                return -1
            return exit_code(child)

        async with serving(scheduler):
            assert await scheduler.wait(await scheduler.enqueue(fork.job())) == code


def act_as_child(how: str) -> None:
    """Be silent, and leave the handler in one of several ways; do not live on for long."""
    signal.alarm(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    if how == "raise":
        raise OwnError
    if how == "exit":
        sys.exit(5)


def exit_code(child: int) -> int:
    """Wait for a process, and return how it ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
