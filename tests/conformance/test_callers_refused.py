"""Connections through which jobs cannot be enqueued; the tables and drivers for which they can."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from asyncjobq import (
    ConfigurationError,
    Scheduler,
    State,
    enqueue,
)
from conformance.kit import ISOLATION_LEVELS, Jobs

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def autocommit(url: str, how: str) -> AsyncIterator[AsyncConnection]:
    """Give a connection without transactions, made so by its engine or by its options."""
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}
    engine = create_async_engine(url, **(options if how == "engine" else {}))
    if how == "engine options":
        engine = engine.execution_options(**options)
    async with engine.connect() as connection:
        if how == "connection":
            await connection.execution_options(**options)
        yield connection
    await engine.dispose()


class TestRefused:
    @pytest.mark.parametrize("how", ["engine", "engine options", "connection"])
    async def test_a_connection_without_transactions(self, jobs: Jobs, how: str) -> None:
        async with autocommit(jobs.url, how) as connection:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await jobs.scheduler.enqueue("work", session=connection)
            async with AsyncSession(connection) as session:
                with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                    await enqueue(session, "work")
        assert await jobs.scheduler.find() == []

    @pytest.mark.requires("server")
    async def test_a_connection_whose_driver_was_told_to_commit(self, jobs: Jobs) -> None:
        if jobs.backend_name == "postgresql":
            return  # its driver has no such setting
        engine = create_async_engine(jobs.url, connect_args={"autocommit": True})
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await jobs.scheduler.enqueue("work", session=session)
        await engine.dispose()
        assert await jobs.scheduler.find() == []

    async def test_but_not_one_that_its_engine_gives_another_level(self, jobs: Jobs) -> None:
        engine = create_async_engine(jobs.url, isolation_level="AUTOCOMMIT")
        level = ISOLATION_LEVELS[jobs.backend_name][0]
        async with engine.connect() as connection:
            await connection.execution_options(isolation_level=level)
            await jobs.scheduler.enqueue("work", session=connection)
            await connection.rollback()
        await engine.dispose()
        assert await jobs.scheduler.find() == []

    @pytest.mark.requires("file_database")
    async def test_but_not_one_whose_begin_is_an_events(self, jobs: Jobs) -> None:
        """As SQLAlchemy's documentation advises for SQLite."""
        engine = create_async_engine(jobs.url)

        @event.listens_for(engine.sync_engine, "connect")
        def connect(connection: Any, _: object) -> None:
            connection.isolation_level = None

        @event.listens_for(engine.sync_engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN IMMEDIATE")

        async with AsyncSession(engine) as session:
            await jobs.scheduler.enqueue("work", session=session)
            await session.rollback()
            job = await jobs.scheduler.enqueue("work", session=session)
            await session.commit()
        await engine.dispose()
        assert await jobs.scheduler.find() == [job]

    async def test_another_kind_of_database(
        self, jobs: Jobs, make_database: Callable[[str], str]
    ) -> None:
        other = make_database("postgresql" if jobs.backend_name == "sqlite" else "sqlite")
        engine = create_async_engine(other)
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="connected to"):
                await jobs.scheduler.enqueue("work", session=session)
        await engine.dispose()

    async def test_another_kind_of_database_without_a_scheduler(self) -> None:
        from sqlalchemy.dialects.oracle.base import OracleDialect

        from asyncjobq.backends import backend_for
        from asyncjobq.models import tables_for

        with pytest.raises(ConfigurationError, match="oracle"):
            backend_for(OracleDialect(), tables_for())

    async def test_a_session_of_the_other_kind(
        self, jobs: Jobs, sync_engine: Engine, session: AsyncSession
    ) -> None:
        with Session(sync_engine) as plain:
            wrong: Any = plain
            with pytest.raises(ConfigurationError, match="enqueue_sync"):
                await jobs.scheduler.enqueue("work", session=wrong)
            wrong = session
            with pytest.raises(ConfigurationError, match="Session or Connection"):
                jobs.scheduler.enqueue_sync(wrong, "work")
            wrong = object()
            with pytest.raises(ConfigurationError, match="AsyncSession"):
                await jobs.scheduler.enqueue("work", session=wrong)


class TestOtherTables:
    async def test_under_a_prefix(self, database_url: str) -> None:
        async with Scheduler(database_url, table_prefix="queue_") as scheduler:
            await scheduler.create_schema()
            await assert_enqueues_in_a_session(scheduler, database_url)

    @pytest.mark.requires("server")
    async def test_under_a_schema(self, backend_name: str, database_url: str) -> None:
        own = f"{database_url.rpartition('/')[2].partition('?')[0]}_own"
        async with Scheduler(database_url, schema=own) as scheduler:
            await scheduler.create_schema()
            try:
                await assert_enqueues_in_a_session(scheduler, database_url)
            finally:
                cascade = "CASCADE" if backend_name == "postgresql" else ""
                drop = text(f"DROP SCHEMA {own} {cascade}")
                await scheduler._database.run(lambda c: c.execute(drop))


async def assert_enqueues_in_a_session(scheduler: Scheduler, url: str) -> None:
    engine = create_async_engine(url)
    async with AsyncSession(engine) as session:
        await scheduler.enqueue("work", session=session)
        await session.rollback()
        job = await scheduler.enqueue("work", session=session)
        await session.commit()
        names = await session.run_sync(lambda s: inspect(s.connection()).get_table_names())
        assert "jobs" not in names
    assert await scheduler.find() == [job]
    await engine.dispose()


ASYNC_DRIVERS = {
    "sqlite": ["sqlite+aiosqlite"],
    "postgresql": ["postgresql+asyncpg"],
    "mysql": ["mysql+aiomysql", "mysql+asyncmy"],
    "mariadb": ["mysql+aiomysql", "mariadb+aiomysql", "mysql+asyncmy", "mariadb+asyncmy"],
}


async def test_every_driver_runs_jobs(jobs: Jobs) -> None:
    for driver in ASYNC_DRIVERS[jobs.backend_name]:
        url = driver + jobs.url[jobs.url.index("://") :]
        async with Scheduler(url, poll_interval=0.1) as scheduler:

            @scheduler.handler
            async def work(value: Any) -> Any:
                return value

            value = {"text": "ä🙂'\"\\%s", "number": 2**60, "none": None}
            async with jobs.limited_time():
                first, *_ = await scheduler.enqueue_many([work.job(value)] * 3)
                last = await scheduler.enqueue(work.job(1), depends_on=[first])
                assert (await scheduler.drain())[State.DONE] == 4
                assert (await scheduler.get(first)).result == value
                assert (await scheduler.get(last)).result == 1
                async with scheduler._database.session() as session, session.begin():
                    await scheduler.enqueue("work", {"value": 1}, session=session, queue="q")
