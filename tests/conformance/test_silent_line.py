"""A line to the server that falls silent: nothing comes over it any more, and it raises nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from sqlalchemy import make_url

from asyncjobq import Scheduler, renewing, worker
from asyncjobq.backends import bounded, servers
from conformance.kit import Jobs
from conformance.running import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.requires("server")]


class Line:
    """Passes on what goes between a scheduler and its server, until it falls silent."""

    def __init__(self) -> None:
        self._passing = asyncio.Event()
        self._passing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self._over = False

    async def listen(self, host: str, port: int) -> int:
        """Connect whoever comes with this address; returns the port to come to."""

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            passing = self._passing
            self._writers.append(writer)
            await passing.wait()
            if self._over:
                return
            far_reader, far_writer = await asyncio.open_connection(host, port)
            self._writers.append(far_writer)
            for one, other in ((reader, far_writer), (far_reader, writer)):
                task = asyncio.create_task(self._pass(one, other, passing))
                self._tasks.add(task)

        self._server = await asyncio.start_server(connect, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def fall_silent(self, *, for_newcomers: bool) -> None:
        """Pass nothing more on the connections that there are, and on new ones if asked."""
        self._passing.clear()
        if not for_newcomers:
            self._passing = asyncio.Event()
            self._passing.set()

    async def close(self) -> None:
        """End it, and all its connections."""
        self._over = True
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._passing.set()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    @staticmethod
    async def _pass(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event
    ) -> None:
        try:
            with suppress(ConnectionError):
                while data := await reader.read(65536):
                    await passing.wait()
                    writer.write(data)
                    await writer.drain()
            await passing.wait()  # nor does it say that the other side has gone
        finally:
            writer.close()


@asynccontextmanager
async def working(jobs: Jobs) -> AsyncIterator[tuple[Scheduler, Line]]:
    """Give a scheduler with a handler, and the line to its server."""
    line, url = Line(), make_url(jobs.url)
    here = await line.listen(url.host or "", url.port or 0)
    here_url = url.set(host="127.0.0.1", port=here)
    scheduler = Scheduler(here_url, poll_interval=0.05, lease_ttl=1, stop_timeout=0.1)

    @scheduler.handler
    async def work() -> int:
        return 1

    try:
        async with jobs.limited_time():
            yield scheduler, line
    finally:
        await line.close()


def idle(scheduler: Scheduler) -> Callable[[], Awaitable[bool]]:
    """Return what tells whether the scheduler has ended its jobs, and has looked for more since."""
    since: list[float] = []

    async def looked() -> bool:
        worker = scheduler._worker
        assert worker is not None
        if worker._slots.empty and not since:
            since.append(worker._tick.chores_at)
        return bool(since) and worker._tick.chores_at > since[0]

    return looked


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what is waited for a silent line."""
    monkeypatch.setattr(bounded, "PATIENCE", 1.0)
    monkeypatch.setattr(bounded, "RENEWAL_PATIENCE", 0.5)
    monkeypatch.setattr(renewing, "ENDING", 0.5)
    monkeypatch.setattr(worker, "FLUSH_TIMEOUT", 0.1)
    monkeypatch.setattr(servers, "CLOSING_GRACE", 0.1)


async def test_a_worker_that_is_stopped_ends(jobs: Jobs) -> None:
    async with working(jobs) as (scheduler, line):
        task = asyncio.create_task(scheduler.serve())
        assert await jobs.scheduler.wait(await jobs.enqueue()) == 1
        line.fall_silent(for_newcomers=True)
        await asyncio.sleep(0.1)  # the worker asks, and nobody answers
        scheduler.stop()
        await task
        await scheduler.aclose()


async def test_a_worker_goes_on_over_a_new_one(jobs: Jobs) -> None:
    async with working(jobs) as (scheduler, line), scheduler, scheduler.serving():
        assert await jobs.scheduler.wait(await jobs.enqueue()) == 1
        await until(idle(scheduler))  # or it claims over another connection than the silent one
        line.fall_silent(for_newcomers=False)
        await asyncio.sleep(0.1)
        assert await jobs.scheduler.wait(await jobs.enqueue()) == 1
