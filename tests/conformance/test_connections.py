"""The library's own connections: apart from the application's, whatever that does with its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asyncjobq import Scheduler, State, UnsupportedDatabaseError
from conformance.kit import Jobs
from conformance.steps import settling

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTIONS = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SELECT @@session.transaction_isolation",
    "mariadb": "SELECT @@session.tx_isolation",
}


async def isolation_of(scheduler: Scheduler, backend_name: str) -> str:
    """Ask the database at which level the library's transactions run."""
    question = text(QUESTIONS[backend_name])

    def ask(connection: Connection) -> str:
        return str(connection.execute(question).scalar_one())

    answer = await scheduler._database.run(ask)
    return answer.upper().replace("-", " ")


async def assert_transactions(scheduler: Scheduler) -> None:
    """Assert that what fails half-way leaves nothing behind, and that jobs run."""
    backend = scheduler._database.backend

    def fail_half_way(connection: Connection) -> None:
        values = {"id": 99, "version": 1}
        connection.execute(backend.tables.version.insert().values(values))
        raise LookupError

    with pytest.raises(LookupError):
        await scheduler._database.run(fail_half_way)
    versions = backend.tables.version.select()
    assert len(await scheduler._database.run(lambda c: c.execute(versions).all())) == 1

    @scheduler.handler
    async def work() -> None: ...

    first = await scheduler.enqueue(work.job())
    await scheduler.enqueue(work.job(), depends_on=[first])
    assert (await scheduler.drain())[State.DONE] == 2
    await scheduler._database.run(lambda c: settling(c, backend))


LEVELS = {
    "sqlite": ["AUTOCOMMIT", "READ UNCOMMITTED"],
    "postgresql": ["AUTOCOMMIT", "REPEATABLE READ", "SERIALIZABLE"],
    "mysql": ["AUTOCOMMIT", "READ UNCOMMITTED", "SERIALIZABLE"],
    "mariadb": ["AUTOCOMMIT", "READ UNCOMMITTED", "SERIALIZABLE"],
}


async def test_read_committed_whatever_the_applications_engine_says(jobs: Jobs) -> None:
    for level in LEVELS[jobs.backend_name]:
        engine = create_async_engine(jobs.url, isolation_level=level)
        async with jobs.limited_time(), Scheduler(engine, poll_interval=0.1) as scheduler:
            if jobs.backend_name != "sqlite":
                assert await isolation_of(scheduler, jobs.backend_name) == "READ COMMITTED", level
            await assert_transactions(scheduler)
        await engine.dispose()


@pytest.mark.requires("server")
async def test_read_committed_whatever_the_database_says(jobs: Jobs) -> None:
    if jobs.backend_name != "postgresql":
        return  # the default of all sessions there is REPEATABLE READ
    name = jobs.url.rpartition("/")[2]
    for level in ("repeatable read", "read committed"):
        alter = text(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
        await jobs.do(lambda c, _, alter=alter: c.execute(alter))  # type: ignore[misc]
        async with Scheduler(jobs.url) as scheduler:
            found = await isolation_of(scheduler, jobs.backend_name)
        if level != "read committed":
            first = found
    assert first == "READ COMMITTED"


async def test_a_pool_that_handlers_hold_entirely_changes_nothing(jobs: Jobs) -> None:
    engine = create_async_engine(jobs.url, pool_size=1, max_overflow=0, pool_timeout=0.5)
    async with jobs.limited_time(), Scheduler(engine, poll_interval=0.1) as scheduler:

        @scheduler.handler
        async def work(ctx: Any) -> None: ...

        async with engine.connect() as only_one:
            await only_one.execute(text("SELECT 1"))
            await scheduler.enqueue("work", {"ctx": 1})
            assert (await scheduler.drain())[State.DONE] == 1
    await engine.dispose()


async def test_the_applications_engine_is_not_disposed(
    jobs: Jobs, application: AsyncEngine
) -> None:
    pool = application.pool
    async with Scheduler(application) as scheduler:
        await scheduler.find()
        async with scheduler._database.session() as session:
            await session.execute(text("SELECT 1"))
    assert application.pool is pool
    assert jobs.url


@pytest.mark.requires("server")
async def test_a_frozen_process_keeps_no_locks_beyond_its_lease(jobs: Jobs) -> None:
    question, unit = {
        "postgresql": ("SHOW idle_in_transaction_session_timeout", "s"),
    }.get(jobs.backend_name, ("SELECT @@session.wait_timeout", ""))
    async with Scheduler(jobs.url, lease_ttl=10) as scheduler:
        limit = await scheduler._database.run(lambda c: c.execute(text(question)).scalar_one())
    assert str(limit) == f"9{unit}"


@pytest.mark.requires("server")
async def test_a_session_that_refuses_unsafe_updates_makes_tables_and_runs_jobs(
    backend_name: str, database_url: str
) -> None:
    if backend_name == "postgresql":
        return  # it has no such mode
    command = {"init_command": "SET SESSION sql_safe_updates = 1"}
    engine = create_async_engine(database_url, connect_args=command)
    async with Scheduler(engine, poll_interval=0.1) as scheduler, asyncio.timeout(30):
        await scheduler.create_schema()
        await assert_transactions(scheduler)
    await engine.dispose()


@pytest.mark.requires("server")
async def test_a_character_set_that_lacks_characters_is_named(jobs: Jobs) -> None:
    if jobs.backend_name == "postgresql":
        return  # its driver speaks UTF-8 alone
    async with Scheduler(make_url(jobs.url).set(query={"charset": "latin1"})) as scheduler:
        for call in (scheduler.serve, scheduler.create_schema):
            with pytest.raises(UnsupportedDatabaseError, match=r"latin1.*charset=utf8mb4"):
                await call()
