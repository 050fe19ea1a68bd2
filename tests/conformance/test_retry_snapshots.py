"""Running jobs again in a caller's transaction that reads from an old snapshot.

It does not show how they ended, nor who took their unique keys: either it is known that nothing
has changed, or the caller is told. REPEATABLE READ is the default of MySQL and MariaDB.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import Cancelled, StaleSnapshotError, State, UniqueConflictError
from conformance.kit import Jobs
from conformance.steps import failed, spec

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.requires("server")]

Call = Callable[[Any], Awaitable[Any]]


@asynccontextmanager
async def snapshot(jobs: Jobs, application: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Give a session that sees what is there now, whatever comes, and stays usable."""
    engine = application.execution_options(isolation_level="REPEATABLE READ")
    async with jobs.limited_time(), AsyncSession(engine) as session:
        await session.execute(select(jobs.tables.jobs.c.id))
        yield session
        await session.execute(select(jobs.tables.jobs.c.id))
        await session.commit()


async def test_of_a_job_that_has_ended_meanwhile(jobs: Jobs, application: AsyncEngine) -> None:
    """Another has its key by now, and no key may be held by two."""
    await jobs.enqueue(unique_key="key")
    claimed = await jobs.claim_one()
    async with snapshot(jobs, application) as session:
        await jobs.finish(claimed, outcome=failed())
        other = await jobs.enqueue(unique_key="key")
        with pytest.raises(StaleSnapshotError, match="Nothing was written"):
            await jobs.scheduler.retry(claimed.lease.job_id, session=session)
        assert await jobs.scheduler.retry_many(session=session) == 0  # it sees none
    assert await jobs.states(claimed, other) == [State.FAILED, State.READY]
    with pytest.raises(UniqueConflictError):
        await jobs.scheduler.retry(claimed.lease.job_id)


async def test_of_a_job_whose_key_was_taken_meanwhile(jobs: Jobs, application: AsyncEngine) -> None:
    await jobs.enqueue(unique_key="key")
    claimed = await jobs.claim_one()
    await jobs.finish(claimed, outcome=failed())
    async with snapshot(jobs, application) as session:
        other = await jobs.enqueue(unique_key="key")
        with pytest.raises((StaleSnapshotError, UniqueConflictError)):
            await jobs.scheduler.retry(claimed.lease.job_id, session=session)
    assert await jobs.states(claimed, other) == [State.FAILED, State.READY]


async def test_of_what_nothing_has_happened_to(jobs: Jobs, application: AsyncEngine) -> None:
    async with jobs.scheduler.workflow("nightly") as nightly:
        inside = [nightly.add(spec()) for _ in range(2)]
    alone = await jobs.enqueue(unique_key="key")
    await jobs.run_all(failed())
    async with snapshot(jobs, application) as session:
        await jobs.enqueue()
        await jobs.scheduler.retry(nightly, session=session)
        await jobs.scheduler.retry(alone, session=session)
    await jobs.settle()
    assert await jobs.states(nightly.id, *(node.id for node in inside), alone) == [
        State.WAITING,
        *[State.READY] * 3,
    ]
    assert (await jobs.enqueue(unique_key="key")).id == alone.id


@pytest.mark.parametrize("which", ["the container", "a job in it", "all that failed"])
async def test_of_a_container_that_has_closed_meanwhile(
    jobs: Jobs, application: AsyncEngine, which: str
) -> None:
    """What failed in it was not to be seen, and neither that it has to be opened again."""
    async with jobs.scheduler.workflow("nightly") as nightly:
        first, last = [nightly.add(spec()) for _ in range(2)]
    claimed = await jobs.claim(2)
    await jobs.finish(claimed[0], outcome=failed())
    call: Call = {
        "the container": lambda session: jobs.scheduler.retry(nightly, session=session),
        "a job in it": lambda session: jobs.scheduler.retry(first, session=session),
        "all that failed": lambda session: jobs.scheduler.retry_many(session=session),
    }[which]
    async with snapshot(jobs, application) as session:
        await jobs.finish(claimed[1], outcome=failed())
        await jobs.settle()
        with pytest.raises(StaleSnapshotError):
            await call(session)
    assert await jobs.states(nightly.id, first.id, last.id) == [State.FAILED] * 3
    await jobs.scheduler.retry(nightly)
    await jobs.settle()
    assert await jobs.states(nightly.id, first.id, last.id) == [
        State.WAITING,
        State.READY,
        State.READY,
    ]


async def test_of_a_job_that_is_cancelled(jobs: Jobs, application: AsyncEngine) -> None:
    """Which is told where its row cannot be locked any more, and done where it can."""
    job = await jobs.enqueue()
    async with snapshot(jobs, application) as session:
        await jobs.claim_one()
        if jobs.backend_name == "postgresql":
            with pytest.raises(StaleSnapshotError):
                await jobs.scheduler.cancel(job, session=session)
            with pytest.raises(StaleSnapshotError):
                await jobs.scheduler.cancel_many(type="work", session=session)
        else:
            assert await jobs.scheduler.cancel(job, session=session) is Cancelled.REQUESTED
    assert (await jobs.row(job)).cancel_requested == (jobs.backend_name != "postgresql")
