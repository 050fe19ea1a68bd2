"""A handler that blocks the event loop: it costs nobody a lease, and is named."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, select, update

from asyncjobq import JobContext, Scheduler, State, blocking, events
from asyncjobq.backends.base import Backend
from asyncjobq.lease import reclaim_once
from conformance.kit import Jobs
from conformance.running import Latch, serving, until
from conformance.steps import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE = 1.0


@pytest.fixture
def scheduler(jobs: Jobs) -> Scheduler:
    return jobs.another(lease_ttl=LEASE, concurrency=2)


def renewals(jobs: Jobs, job_id: int, number: int) -> list[Any]:
    """Block until a lease was renewed so often; return what another worker has taken meanwhile."""
    table, seen, taken = jobs.tables.jobs, set(), []
    given_up = threading.Event()
    threading.Timer(PATIENCE, given_up.set).start()

    def look(connection: Connection, backend: Backend) -> None:
        query = select(table.c.lease_expires).where(table.c.id == job_id)
        seen.add(connection.execute(query).scalar_one())
        taken.extend(reclaim_once(connection, backend))

    while len(seen) <= number and not taken and not given_up.wait(0.02):
        jobs.elsewhere(look)
    return taken


async def test_costs_nobody_a_lease(jobs: Jobs, scheduler: Scheduler) -> None:
    latch = Latch(scheduler)

    @scheduler.handler
    async def block(neighbour: int) -> int:
        return len(renewals(jobs, neighbour, 4))

    async with serving(scheduler):
        neighbour = await latch.enqueue(scheduler)
        blocker = await scheduler.enqueue(block.job(neighbour.id))
        assert await scheduler.wait(blocker) == 0
        assert (latch.cancelled, await jobs.state(neighbour)) == (0, State.RUNNING)
        latch.go_on.set()
        assert await scheduler.wait(neighbour) == "gone on"
    assert [(await jobs.row(job)).attempt for job in (neighbour, blocker)] == [1, 1]


async def test_keeps_no_lease_past_its_deadline(jobs: Jobs, scheduler: Scheduler) -> None:
    taken: list[Any] = []

    @scheduler.handler(timeout=0.1)
    async def block(ctx: JobContext) -> None:
        taken.extend(renewals(jobs, ctx.job_id, 1000))

    async with serving(scheduler):
        job = await scheduler.enqueue(block.job(), max_attempts=1)
        await until(lambda: jobs_ended(jobs, job))
    assert [item.row.id for item in taken] == [job.id]


async def jobs_ended(jobs: Jobs, job: Any) -> bool:
    return await jobs.state(job) is State.FAILED


class TestNeighbourInAThread:
    """A `def` handler goes on while the loop is blocked, and can be told."""

    @pytest.mark.parametrize("what", ["cancelled", "stolen"])
    async def test_is_told_meanwhile(self, jobs: Jobs, scheduler: Scheduler, what: str) -> None:
        running, told, table = threading.Event(), threading.Event(), jobs.tables.jobs
        values: dict[str, Any] = {"cancel_requested": True}
        if what == "stolen":
            values = {"lease_owner": "thief", "lease_token": table.c.lease_token + 1}

        @scheduler.handler
        def neighbour(ctx: JobContext) -> None:
            running.set()
            while not ctx.cancel_requested:
                threading.Event().wait(0.01)
            told.set()

        @scheduler.handler
        async def block(neighbour: int) -> bool:
            statement = update(table).where(table.c.id == neighbour).values(values)
            jobs.elsewhere(lambda connection, _: connection.execute(statement))
            return told.wait(PATIENCE)

        async with serving(scheduler):
            job = await scheduler.enqueue(neighbour.job())
            assert await asyncio.to_thread(running.wait, PATIENCE)
            assert await scheduler.wait(await scheduler.enqueue(block.job(job.id)))
        assert (await jobs.row(job)).lease_owner != scheduler.settings.worker_id or (
            await jobs.state(job) == State.DONE  # it returned, in spite of the request
        )


class Noticed(logging.Handler):
    """Sets an event when the log says that the loop is blocked, and keeps what it says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "blocked the event loop" in record.getMessage():
            self.said.append(record.getMessage())
            self.event.set()


@pytest.fixture
def noticed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noticed]:
    monkeypatch.setattr(blocking, "NOTICED_AFTER", 0.2)
    handler, logger = Noticed(), logging.getLogger("asyncjobq.worker")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def test_is_said_once_with_the_place(scheduler: Scheduler, noticed: Noticed) -> None:
    told: list[events.LoopBlocked] = []
    scheduler.subscribe(told.append, events.LoopBlocked)

    def read_a_large_file() -> None:
        assert noticed.event.wait(PATIENCE)

    @scheduler.handler
    async def block() -> None:
        read_a_large_file()

    async with serving(scheduler):
        job = await scheduler.enqueue(block.job())
        await scheduler.wait(job)
        await until(lambda: asyncio.sleep(0, bool(told)))
    first, last = noticed.said
    assert first.startswith(f"The handler of job {job.id} (block) has blocked the event loop for ")
    assert "in read_a_large_file" in first
    assert "run.py" not in first
    assert last.startswith(f"The handler of job {job.id} (block) blocked the event loop for ")
    (event,) = told
    assert (event.job_id, event.type) == (job.id, "block")
    assert event.duration >= 0.2
    assert "in read_a_large_file" in event.stack


async def test_of_other_code_is_said_too(scheduler: Scheduler, noticed: Noticed) -> None:
    @scheduler.handler
    async def work() -> None: ...

    async with serving(scheduler):
        await scheduler.wait(await scheduler.enqueue(work.job()))  # its worker has begun
        assert noticed.event.wait(PATIENCE)
    assert noticed.said[0].startswith("Something that is no handler has blocked the event loop")
    assert "in test_of_other_code_is_said_too" in noticed.said[0]


async def test_renews_on_the_loop_where_no_other_connection_can_be_had(
    jobs: Jobs, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    latch, database = Latch(scheduler), scheduler._database

    class Apart:
        backend = database.backend
        queues = False

        async def run(self, _work: Any) -> None:
            raise RuntimeError("attached to a different loop")

    async def apart() -> Any:
        return Apart()

    monkeypatch.setattr(database, "apart", apart)
    async with serving(scheduler):
        job = await latch.enqueue(scheduler)

        async def is_renewed() -> bool:
            return await jobs.state(job) is State.RUNNING

        await until(is_renewed)
        latch.go_on.set()
        await scheduler.wait(job)
