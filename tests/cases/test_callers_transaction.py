"""Jobs that are enqueued in the caller's transaction live and die with it.

They must not start before the data that they need is committed, must not survive a rollback, and
what enqueue returns must be plain values. The library never commits or rolls back for the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import ArgumentsError, UnknownUpstreamError, enqueue
from cases.application import Order
from cases.workers import POLL, SLACK, Case, WorkerProcess

pytestmark = pytest.mark.usefixtures("worker")

OPEN = 3 * POLL
"""Seconds for which a transaction stays open: several chances to start a job too early."""


@pytest.fixture
async def worker(case: Case) -> AsyncIterator[WorkerProcess]:
    """Give a worker that runs, and check at the end that it still does."""
    worker = case.start_worker()
    await case.up(worker)
    yield worker
    await case.check_alive(worker)


async def test_starts_after_commit_and_sees_the_data(case: Case) -> None:
    async with AsyncSession(case.engine) as session:
        order = Order(id=1, amount=12)
        session.add(order)
        job = await look_up(case, session, "order 1", key=1)
        await asyncio.sleep(OPEN)
        assert case.log.starts() == []
        committed_at = time.monotonic()
        await session.commit()
        values = asdict(job)
        assert await case.scheduler.wait(job, timeout=2 * POLL + SLACK) == 12
    assert asdict(job) == values
    assert (job.type, job.args, job.attempt) == ("look_up", {"label": "order 1", "key": 1}, 0)
    (start,) = case.log.starts("order 1")
    assert committed_at <= start.at < committed_at + 2 * POLL + SLACK


async def look_up(case: Case, session: AsyncSession, label: str, key: int) -> Any:
    return await case.scheduler.enqueue("look_up", {"label": label, "key": key}, session=session)


async def test_never_existed_after_rollback(case: Case) -> None:
    async with AsyncSession(case.engine) as session:
        session.add(Order(id=1, amount=12))
        job = await look_up(case, session, "order 1", key=1)
        await asyncio.sleep(OPEN)
        await session.rollback()
    assert job.args["key"] == 1
    await asyncio.sleep(2 * POLL)
    assert case.log.starts() == []
    assert await case.states() == {}


async def test_a_constraint_takes_the_job_with_it(case: Case) -> None:
    async with AsyncSession(case.engine) as session:
        session.add(Order(id=1, amount=12))
        await session.commit()
        session.expunge_all()
        await look_up(case, session, "order 1 again", key=1)
        session.add(Order(id=1, amount=13))
        with pytest.raises(IntegrityError):
            await session.flush()
        await session.rollback()
        await look_up(case, session, "order 1", key=1)
        await session.commit()
    await case.all_ended(within=2 * POLL + SLACK)
    assert {start.label for start in case.log.starts()} == {"order 1"}


async def test_a_refused_job_leaves_the_transaction_usable(case: Case) -> None:
    async with AsyncSession(case.engine) as session:
        session.add(Order(id=1, amount=12))
        await session.flush()
        with pytest.raises(ArgumentsError):
            await case.scheduler.enqueue("work", {"label": float("nan")}, session=session)
        with pytest.raises(UnknownUpstreamError):
            await enqueue(session, "work", {"label": "x"}, depends_on=[10**9])
        await enqueue(session, "look_up", {"label": "order 1", "key": 1})
        await session.commit()
    assert await case.all_ended(within=2 * POLL + SLACK) == {"done": 1}
    assert case.log.ends()[0].detail == "amount=12"


async def test_nothing_is_committed_or_rolled_back_for_the_caller(case: Case) -> None:
    seen = []
    async with AsyncSession(case.engine) as session:
        for name in ("after_commit", "after_rollback", "after_soft_rollback"):
            event.listen(session.sync_session, name, lambda *_, name=name: seen.append(name))
        connection = await session.connection()
        level = await connection.get_isolation_level()
        await case.scheduler.enqueue("work", {"label": "one"}, session=session)
        async with session.begin_nested() as savepoint:
            await enqueue(session, "work", {"label": "two"})
            await savepoint.rollback()
        seen.clear()
        await enqueue(session, "work", {"label": "three"})
        assert seen == []
        assert session.in_transaction()
        assert await session.connection() is connection
        assert await connection.get_isolation_level() == level
        await session.commit()
    assert await case.all_ended(within=2 * POLL + SLACK) == {"done": 2}
    assert {start.label for start in case.log.starts()} == {"one", "three"}


@pytest.mark.requires("row_locks")
async def test_an_open_transaction_stalls_no_worker(case: Case) -> None:
    """Neither its new jobs nor its edges to jobs of others hold up anything."""
    running = await case.add("running", seconds=2 * POLL)
    async with AsyncSession(case.engine) as session:
        await session.execute(select(Order))
        first = await enqueue(session, "work", {"label": "first"})
        await enqueue(session, "work", {"label": "second"}, depends_on=[first, running])
        other = await case.add("other")
        assert await case.scheduler.wait(other, timeout=2 * POLL + SLACK) == 1
        assert await case.scheduler.wait(running, timeout=2 * POLL + SLACK) == 1
        await session.commit()
    assert await case.all_ended(within=2 * POLL + SLACK) == {"done": 4}
