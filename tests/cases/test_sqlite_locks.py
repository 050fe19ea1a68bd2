"""Many writers on one SQLite file, which has one write lock, and databases that live in memory.

A transaction that reads first and writes later fails at once when somebody else has committed in
between, whatever the busy timeout says. No such error may come out of the library.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest
from sqlalchemy import event, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import StaticPool

from asyncjobq import Scheduler, UnsupportedDatabaseError
from cases.application import Order
from cases.log import by_label
from cases.workers import SLACK, Case, MakeEngine, wait_until

pytestmark = pytest.mark.requires("file_database")

TASKS, LONGEST = 20, 20.0


@pytest.mark.parametrize(
    ("jobs", "begin", "reads"),
    [
        pytest.param(1000, None, True, id="as_it_comes"),
        pytest.param(200, "BEGIN IMMEDIATE", True, id="begin_immediate"),
        # Reading first and then writing is what SQLite itself refuses in such a transaction.
        pytest.param(200, "BEGIN", False, id="begin_deferred"),
    ],
)
async def test_web_process_and_two_workers_on_one_file(
    case: Case, make_engine: MakeEngine, jobs: int, begin: str | None, reads: bool
) -> None:
    # SQLite's writers do not queue: on a busy machine one of many may wait for seconds.
    engine = make_engine(case.url, connect_args={"timeout": LONGEST})
    if begin is not None:
        begin_with(engine, begin)
    workers = [case.start_worker(name, concurrency=5, lease_ttl=LONGEST) for name in "AB"]
    await case.up(*workers)
    names = [f"job {number}" for number in range(jobs)]
    latencies: list[float] = []
    requests = (web_task(case, engine, names[n::TASKS], reads, latencies) for n in range(TASKS))
    await asyncio.gather(*requests)
    await wait_until(partial(all_done, case, jobs), 60.0, "all jobs are done")

    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    assert starts.keys() == ends.keys() == set(names)
    assert {len(found) for found in (*starts.values(), *ends.values())} == {1}
    assert {start.pid for found in starts.values() for start in found} == {w.pid for w in workers}
    latencies.sort()
    assert len(latencies) == jobs
    assert latencies[-1] < LONGEST
    assert latencies[int(jobs * 0.95)] < SLACK
    for worker in workers:
        assert "locked" not in worker.output()
    await case.check_alive(*workers)


def begin_with(engine: AsyncEngine, statement: str) -> None:
    """Let every transaction take the write lock at its beginning, as SQLAlchemy's manual says."""

    @event.listens_for(engine.sync_engine, "connect")
    def connect(connection: object, _record: object) -> None:
        connection.isolation_level = None  # type: ignore[attr-defined]

    @event.listens_for(engine.sync_engine, "begin")
    def start(connection: object) -> None:
        connection.exec_driver_sql(statement)  # type: ignore[attr-defined]


async def web_task(
    case: Case, engine: AsyncEngine, names: list[str], reads: bool, latencies: list[float]
) -> None:
    """Enqueue as requests do: half in a transaction of theirs, half in the library's own."""
    for index, name in enumerate(names):
        begun = time.monotonic()
        if index % 2:
            await case.add(name)
        else:
            await request(case, engine, name, reads)
        latencies.append(time.monotonic() - begun)


async def request(case: Case, engine: AsyncEngine, name: str, reads: bool) -> None:
    async with AsyncSession(engine) as session:
        known = await session.scalar(select(func.count()).select_from(Order)) if reads else 0
        session.add(Order(id=int(name.removeprefix("job ")), amount=known))
        await case.scheduler.enqueue("work", {"label": name}, session=session)
        await session.commit()


async def all_done(case: Case, jobs: int) -> bool:
    return await case.states() == {"done": jobs}


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///:memory:",
        "sqlite+aiosqlite:///file:shared?mode=memory&cache=shared&uri=true",
        "sqlite+aiosqlite:///file::memory:?cache=shared&uri=true",
    ],
)
def test_databases_in_memory_are_refused(url: str) -> None:
    for database in (url, create_async_engine(url, poolclass=StaticPool)):
        with pytest.raises(UnsupportedDatabaseError, match="Use a file"):
            Scheduler(database)
