"""A caller's transaction is the caller's: rows are added to it, and nothing else happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq import (
    ArgumentsError,
    ConfigurationError,
    InvalidJobError,
    Job,
    State,
    UnknownUpstreamError,
    enqueue,
)
from conformance.kit import ISOLATION_LEVELS, Jobs
from conformance.running import serving
from conformance.steps import spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestAsyncSession:
    async def test_commits_the_job_with_the_rest(self, jobs: Jobs, session: AsyncSession) -> None:
        await session.execute(text("CREATE TABLE business (id INTEGER)"))
        await session.commit()
        await session.execute(text("INSERT INTO business VALUES (1)"))
        job = await jobs.scheduler.enqueue("work", {"a": 1}, session=session)
        assert await jobs.scheduler.find() == []
        assert session.in_transaction()
        await session.commit()
        assert await jobs.scheduler.find() == [job]
        await session.execute(text("DROP TABLE business"))
        await session.commit()

    async def test_rolled_back_was_never_enqueued(self, jobs: Jobs, session: AsyncSession) -> None:
        await jobs.scheduler.enqueue("work", session=session)
        await jobs.scheduler.enqueue_many([spec("work")] * 3, session=session)
        await session.rollback()
        assert await jobs.scheduler.find() == []
        job = await jobs.scheduler.enqueue("work", session=session)
        await session.commit()
        assert await jobs.scheduler.find() == [job]

    async def test_that_is_closed_without_a_word(self, jobs: Jobs, session: AsyncSession) -> None:
        await jobs.scheduler.enqueue("work", session=session)
        await session.close()
        assert await jobs.scheduler.find() == []

    async def test_whose_later_statement_fails(self, jobs: Jobs, session: AsyncSession) -> None:
        await jobs.scheduler.enqueue("work", session=session)
        version = jobs.tables.version
        with pytest.raises(IntegrityError):
            await session.execute(version.insert().values(id=1, version=1))
        await session.rollback()
        assert await jobs.scheduler.find() == []

    async def test_at_every_isolation_level(self, jobs: Jobs, application: AsyncEngine) -> None:
        upstream = await jobs.enqueue()
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            engine = application.execution_options(isolation_level=level)
            async with AsyncSession(engine) as session:
                job = await jobs.scheduler.enqueue("a", session=session, depends_on=[upstream])
                next_one = await jobs.scheduler.enqueue("b", session=session, depends_on=[job])
                connection = await session.connection()
                assert await connection.get_isolation_level() == level
                await session.commit()
            await jobs.settle()
            assert await jobs.states(job, next_one) == [State.BLOCKED, State.BLOCKED]

    async def test_in_a_savepoint(self, jobs: Jobs, session: AsyncSession) -> None:
        first = await jobs.scheduler.enqueue("first", session=session)
        savepoint = await session.begin_nested()
        await jobs.scheduler.enqueue("undone", session=session)
        await savepoint.rollback()
        async with session.begin_nested():
            third = await jobs.scheduler.enqueue("third", session=session, depends_on=[first])
        await session.commit()
        assert await jobs.scheduler.find() == [first, third]

    async def test_gives_plain_values(self, jobs: Jobs, session: AsyncSession) -> None:
        """Readable after commit and close, where objects of the session would be expired."""
        job = await jobs.scheduler.enqueue("work", {"a": 1}, session=session, meta={"b": 2})
        await session.commit()
        await session.close()
        assert (job.args, job.meta, job.state, job.ended) == ({"a": 1}, {"b": 2}, "ready", False)
        assert repr(job)

    async def test_leaves_pending_objects_to_the_session(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        """It adds no object of its own either."""
        await jobs.scheduler.enqueue("work", session=session)
        assert not list(session)
        assert not session.new
        await session.rollback()

    async def test_stays_usable_after_a_refusal(self, jobs: Jobs, session: AsyncSession) -> None:
        first = await jobs.scheduler.enqueue("work", session=session)
        refusals: list[tuple[type[Exception], Callable[[], Any]]] = [
            (ArgumentsError, lambda: jobs.scheduler.enqueue("work", {"a": {1}}, session=session)),
            (InvalidJobError, lambda: jobs.scheduler.enqueue("work", session=session, weight=0)),
            (
                UnknownUpstreamError,
                lambda: jobs.scheduler.enqueue("work", session=session, depends_on=[10**9]),
            ),
        ]
        for error, call in refusals:
            with pytest.raises(error):
                await call()
        last = await jobs.scheduler.enqueue("work", session=session)
        await session.commit()
        assert await jobs.scheduler.find() == [first, last]

    async def test_may_depend_on_jobs_of_the_same_transaction(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        first = await jobs.scheduler.enqueue("work", session=session)
        second = await jobs.scheduler.enqueue("work", session=session, depends_on=[first])
        await session.commit()
        await jobs.settle()
        assert await jobs.states(first, second) == [State.READY, State.BLOCKED]

    @pytest.mark.requires("row_locks")  # without, the second waits for the first
    async def test_an_upstream_that_is_not_committed_is_unknown_elsewhere(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        job = await jobs.scheduler.enqueue("work", session=session)
        with pytest.raises(UnknownUpstreamError):
            async with asyncio.timeout(5), AsyncSession(session.bind) as other:
                await jobs.scheduler.enqueue("work", session=other, depends_on=[job])
        await session.rollback()

    async def test_is_looked_at_too(self, jobs: Jobs, session: AsyncSession) -> None:
        job = await jobs.scheduler.enqueue("work", session=session)
        assert await jobs.scheduler.get(job, session=session) == job
        assert await jobs.scheduler.find(session=session) == [job]
        await session.rollback()

    async def test_many_beyond_one_statement(self, jobs: Jobs, session: AsyncSession) -> None:
        specs = [spec("work").options(priority=n) for n in range(2500)]
        made = await jobs.scheduler.enqueue_many(specs, session=session)
        await session.commit()
        stored = await jobs.scheduler.find(limit=3000)
        assert [(job.id, job.priority) for job in stored] == [(j.id, j.priority) for j in made]

    async def test_wakes_the_workers_of_this_process_at_commit(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        scheduler = jobs.another(poll_interval=30)

        @scheduler.handler
        async def work() -> int:
            return 1

        async with serving(scheduler, seconds=8):
            for _ in range(2):
                await asyncio.sleep(0.05)
                job = await scheduler.enqueue("work", session=session)
                await session.commit()
                assert await scheduler.wait(job) == 1


class TestAsyncConnection:
    async def test_commits_or_rolls_back_with_it(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        async with application.connect() as connection:
            await jobs.scheduler.enqueue("work", session=connection)
            await connection.rollback()
            job = await jobs.scheduler.enqueue("work", session=connection)
            assert connection.in_transaction()
            await connection.commit()
        assert await jobs.scheduler.find() == [job]

    async def test_wakes_the_workers_of_this_process_at_commit(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        scheduler = jobs.another(poll_interval=30)

        @scheduler.handler
        async def work() -> int:
            return 1

        async with serving(scheduler, seconds=8):
            await asyncio.sleep(0.1)
            async with application.begin() as connection:
                job = await scheduler.enqueue("work", session=connection)
            assert await scheduler.wait(job) == 1


class TestSync:
    async def test_session(self, jobs: Jobs, sync_engine: Engine) -> None:
        with Session(sync_engine) as session:
            jobs.scheduler.enqueue_sync(session, "work")
            session.rollback()
            first = jobs.scheduler.enqueue_sync(session, "work", {"a": "ä"}, meta={"b": 1})
            second = jobs.scheduler.enqueue_sync(session, spec("work"), depends_on=[first])
            session.commit()
        assert await jobs.scheduler.find() == [first, second]

    async def test_connection(self, jobs: Jobs, sync_engine: Engine) -> None:
        with sync_engine.connect() as connection:
            jobs.scheduler.enqueue_sync(connection, "work")
            connection.rollback()
            with connection.begin_nested():
                job = jobs.scheduler.enqueue_sync(connection, "work", run_after=60)
            connection.commit()
        assert await jobs.scheduler.find() == [job]

    async def test_checks_arguments_as_enqueue_does(self, jobs: Jobs, sync_engine: Engine) -> None:
        @jobs.scheduler.handler(queue="media")
        async def resize(path: str) -> None: ...

        with Session(sync_engine) as session:
            with pytest.raises(ArgumentsError):
                jobs.scheduler.enqueue_sync(session, "resize", {"width": 1})
            job = jobs.scheduler.enqueue_sync(session, resize.job("a.png"))
            session.commit()
        assert job.queue == "media"

    async def test_wakes_the_workers_of_this_process_at_commit(
        self, jobs: Jobs, sync_engine: Engine
    ) -> None:
        scheduler = jobs.another(poll_interval=30)

        @scheduler.handler
        async def work() -> int:
            return 1

        def in_a_thread() -> Job[Any]:
            with Session(sync_engine) as session, session.begin():
                return scheduler.enqueue_sync(session, "work")

        async with serving(scheduler, seconds=8):
            await asyncio.sleep(0.05)
            job = await asyncio.to_thread(in_a_thread)
            assert await scheduler.wait(job) == 1


class TestWithoutAScheduler:
    async def test_into_the_default_tables(
        self, jobs: Jobs, session: AsyncSession, application: AsyncEngine
    ) -> None:
        first = await enqueue(session, "work", {"a": 1}, group_key="acme")
        second = await enqueue(session, spec("work"), depends_on=[first])
        assert session.in_transaction()
        await session.commit()
        async with application.begin() as connection:
            third = await enqueue(connection, "work")
        assert await jobs.scheduler.find() == [first, second, third]
        assert first.queue == "default"

    async def test_refuses_what_cannot_be_stored(self, jobs: Jobs, session: AsyncSession) -> None:
        with pytest.raises(ArgumentsError):
            await enqueue(session, "work", {"a": float("nan")})
        await session.commit()
        assert await jobs.scheduler.find() == []

    async def test_refuses_a_synchronous_session(self, jobs: Jobs, sync_engine: Engine) -> None:
        with Session(sync_engine) as session:
            wrong: Any = session
            with pytest.raises(ConfigurationError, match="enqueue_sync"):
                await enqueue(wrong, "work")
        assert await jobs.scheduler.find() == []


async def test_nothing_is_committed_or_begun_for_the_caller(
    jobs: Jobs, application: AsyncEngine
) -> None:
    seen: list[str] = []
    for name in ("begin", "commit", "rollback", "savepoint", "release_savepoint"):
        event.listen(application.sync_engine, name, lambda *_, n=name: seen.append(n))
    async with application.connect() as connection:
        await connection.begin()
        await jobs.scheduler.enqueue("work", session=connection, depends_on=[])
        await jobs.scheduler.enqueue_many([spec("work")] * 50, session=connection)
        assert seen == ["begin"]
        await connection.rollback()


async def test_an_open_transaction_of_a_caller_stalls_no_worker(
    jobs: Jobs, application: AsyncEngine
) -> None:
    """On SQLite neither, as long as the caller has only read."""
    claimed = await jobs.leased()
    await jobs.enqueue_many(3)
    async with jobs.limited_time(), AsyncSession(application) as session:
        if jobs.backend_name == "sqlite":
            await jobs.scheduler.find(session=session)
        else:
            upstreams = [claimed.lease.job_id]
            await jobs.scheduler.enqueue("work", session=session, depends_on=upstreams)
        assert len(await jobs.claim(3)) == 3
        assert (await jobs.renew(claimed)).renewed
        assert (await jobs.finish(claimed)).written
        await jobs.settle()
        await session.commit()
    await jobs.settle()
    assert await jobs.unsettled() == []
