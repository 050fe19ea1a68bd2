"""One scheduler object in several event loops, one after the other; what a dead loop leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from asyncjobq import Scheduler, SchedulerStateError
from asyncjobq.backends import loops
from conformance.running import serving


def test_one_scheduler_in_several_loops(database_url: str) -> None:
    """As programs have that make it at import and call asyncio.run again and again."""
    scheduler = Scheduler(database_url, poll_interval=0.1)

    @scheduler.handler
    async def work(n: int) -> int:
        return n

    async def once(n: int, close: bool) -> None:
        await scheduler.create_schema()
        async with serving(scheduler):
            assert await scheduler.wait(await scheduler.enqueue(work.job(n))) == n
        if close:
            await scheduler.aclose()

    for n in range(3):
        asyncio.run(once(n, close=False))
    asyncio.run(once(3, close=True))


async def test_a_forked_process_does_not_use_the_connections_that_it_has_copies_of(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Scheduler(database_url) as scheduler:
        await scheduler.create_schema()
        with monkeypatch.context() as patch:
            patch.setattr(loops.os, "getpid", lambda: -1)  # as in the other process
            with pytest.raises(SchedulerStateError, match="forked while an event loop ran"):
                await scheduler.find()
        assert await scheduler.find() == []


@pytest.fixture
def threads_before() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in threading.enumerate() if t not in before and "asyncjobq" in t.name]
    assert left == []


@pytest.mark.usefixtures("threads_before")
def test_a_scheduler_that_is_never_closed_leaves_no_thread(database_url: str) -> None:
    async def once() -> None:
        await Scheduler(database_url).create_schema()

    asyncio.run(once())
