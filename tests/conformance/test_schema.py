"""The tables: made once whatever happens, told from other people's, and the same everywhere."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

import asyncjobq
from asyncjobq import Scheduler, SchemaError
from asyncjobq.backends.base import Backend
from asyncjobq.migrations import create_schema
from asyncjobq.models import SCHEMA_VERSION, tables_for
from asyncjobq.states import IN_FLIGHT, State
from conformance.kit import Jobs
from conformance.steps import id_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

TABLES = {
    "jobs",
    "job_deps",
    "job_attempts",
    "job_schedules",
    "job_pauses",
    "job_keys",
    "job_key_locks",
    "job_limits",
    "job_permits",
    "job_groups",
    "job_workers",
    "asyncjobq_schema",
}


async def execute(url: str, *statements: str) -> None:
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


async def tables_at(url: str) -> set[str]:
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        names = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    await engine.dispose()
    return set(names)


async def test_creating_makes_three_tables(database_url: str) -> None:
    async with Scheduler(database_url) as scheduler:
        await scheduler.create_schema()
        await scheduler.check_database()
    assert await tables_at(database_url) == TABLES


async def test_creating_again_changes_nothing(jobs: Jobs) -> None:
    job = await jobs.enqueue()
    await jobs.scheduler.create_schema()
    assert await jobs.state(job) == State.READY


async def test_creating_again_waits_for_nobody(jobs: Jobs) -> None:
    engine = create_async_engine(jobs.url)
    async with asyncio.timeout(5), engine.begin() as reader:
        await reader.execute(text("SELECT count(*) FROM jobs"))
        await jobs.scheduler.create_schema()
    await engine.dispose()


async def test_eight_may_create_at_once(database_url: str) -> None:
    schedulers = [Scheduler(database_url) for _ in range(8)]
    await asyncio.gather(*(scheduler.create_schema() for scheduler in schedulers))
    await asyncio.gather(*(scheduler.check_database() for scheduler in schedulers))
    for scheduler in schedulers:
        await scheduler.aclose()
    assert await tables_at(database_url) == TABLES


async def test_half_made_tables_are_completed(database_url: str) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(tables_for().version.create)
    await engine.dispose()
    async with Scheduler(database_url) as scheduler:
        with pytest.raises(SchemaError, match="create_schema"):
            await scheduler.check_database()
        await scheduler.create_schema()
        await scheduler.check_database()


@pytest.mark.parametrize("table", ["jobs", "job_deps"])
async def test_a_foreign_table_is_refused(database_url: str, table: str) -> None:
    await execute(database_url, f"CREATE TABLE {table} (id INTEGER)")
    async with Scheduler(database_url) as scheduler:
        for attempt in (scheduler.create_schema, scheduler.serve):
            with pytest.raises(SchemaError, match=r"table_prefix=") as caught:
                await attempt()
            has_schemas = not database_url.startswith("sqlite")
            assert ("schema=" in str(caught.value)) is has_schemas
    assert await tables_at(database_url) == {table}


async def test_missing_tables_are_named(database_url: str) -> None:
    async with Scheduler(database_url) as scheduler:
        with pytest.raises(SchemaError, match="create_schema"):
            await scheduler.serve()
        with pytest.raises(SchemaError, match="create_schema"):
            async with scheduler.serving():
                pass


@pytest.mark.requires("file_database")
async def test_a_file_is_made_by_create_schema_alone(database_url: str) -> None:
    """A misspelt URL must not leave an empty database where nobody looks for it."""
    file = Path(str(make_url(database_url).database))
    async with Scheduler(database_url) as scheduler:
        for call in (
            scheduler.serve,
            scheduler.drain,
            scheduler.find,
            lambda: scheduler.enqueue("work"),
        ):
            with pytest.raises(SchemaError, match=r"no database file .*create_schema"):
                await call()
        assert list(file.parent.iterdir()) == []
        await scheduler.create_schema()
        assert await scheduler.find() == []


async def test_a_newer_version_is_refused(database_url: str) -> None:
    async with Scheduler(database_url) as scheduler:
        await scheduler.create_schema()
        await execute(database_url, "UPDATE asyncjobq_schema SET version = 99")
        for attempt in (scheduler.create_schema, scheduler.check_database):
            with pytest.raises(SchemaError, match="version 99"):
                await attempt()


async def test_a_prefix_keeps_tables_apart(database_url: str) -> None:
    await execute(database_url, "CREATE TABLE jobs (id INTEGER)")
    async with Scheduler(database_url, table_prefix="queue_") as scheduler:
        await scheduler.create_schema()
        ran = await enqueue_and_drain(scheduler)
    assert ran == 1
    assert await tables_at(database_url) == {"jobs"} | {f"queue_{name}" for name in TABLES}


@pytest.mark.requires("server")
async def test_a_schema_keeps_tables_apart(backend_name: str, database_url: str) -> None:
    own = f"{database_url.rpartition('/')[2].partition('?')[0]}_own"
    try:
        async with Scheduler(database_url, schema=own) as scheduler:
            await scheduler.create_schema()
            await scheduler.create_schema()
            assert await enqueue_and_drain(scheduler) == 1
        assert await tables_at(database_url) == set()
    finally:
        cascade = "CASCADE" if backend_name == "postgresql" else ""
        await execute(database_url, f"DROP SCHEMA IF EXISTS {own} {cascade}")


@pytest.mark.requires("file_database")
async def test_a_schema_is_refused_where_there_is_none(database_url: str) -> None:
    with pytest.raises(asyncjobq.UnsupportedDatabaseError, match="table_prefix"):
        Scheduler(database_url, schema="own")


async def enqueue_and_drain(scheduler: Scheduler) -> int:
    @scheduler.handler
    async def work() -> None: ...

    first = await scheduler.enqueue(work.job())
    await scheduler.enqueue(work.job(), depends_on=[first])
    counts = await scheduler.drain()
    return counts[State.DONE] - 1


async def test_a_migration_may_create_them(database_url: str) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        await connection.run_sync(create_schema)
    await engine.dispose()
    async with Scheduler(database_url) as scheduler:
        await scheduler.check_database()


async def test_the_metadata_describes_what_is_there(jobs: Jobs) -> None:
    def described(connection: Connection, _: Backend) -> dict[str, set[str]]:
        inspector = inspect(connection)
        return {name: {c["name"] for c in inspector.get_columns(name)} for name in TABLES}

    tables = asyncjobq.metadata.tables
    assert await jobs.do(described) == {name: set(tables[name].c.keys()) for name in TABLES}


async def test_each_index_is_there_once(jobs: Jobs) -> None:
    def indexes(connection: Connection, _: Backend) -> list[str]:
        return sorted(str(index["name"]) for index in inspect(connection).get_indexes("jobs"))

    described = {str(index.name) for index in jobs.tables.jobs.indexes}
    if jobs.backend_name in ("mysql", "mariadb"):
        described.remove("jobs_unique_held")  # see ddl.py
    assert await jobs.do(indexes) == sorted(described)


async def test_references_only_where_they_block_nobody(jobs: Jobs) -> None:
    """On MySQL and MariaDB a caller's uncommitted edge would block the renewal of its upstream."""

    def references(connection: Connection, _: Backend) -> int:
        inspector = inspect(connection)
        return sum(len(inspector.get_foreign_keys(name)) for name in TABLES)

    without = jobs.backend_name in ("mysql", "mariadb")
    assert await jobs.do(references) == (0 if without else 3)


async def test_the_version_is_stored(jobs: Jobs) -> None:
    query = jobs.tables.version.select()
    row = await jobs.do(lambda connection, _: connection.execute(query).one())
    assert row.version == SCHEMA_VERSION


@pytest.mark.parametrize("state", State)
async def test_in_flight_is_true_exactly_while_leased(jobs: Jobs, state: State) -> None:
    job = await jobs.enqueue()
    right = state in IN_FLIGHT
    await jobs.spoil(job, state=state, in_flight=right)
    with pytest.raises(DBAPIError):
        await jobs.spoil(job, in_flight=not right)


@pytest.mark.parametrize(
    "values", [{"state": "lost"}, {"kind": "thing"}, {"weight": 0.0}, {"weight": -1.0}]
)
async def test_nonsense_is_refused_by_the_table(jobs: Jobs, values: dict[str, Any]) -> None:
    job = await jobs.enqueue()
    with pytest.raises(DBAPIError):
        await jobs.spoil(job, **values)


async def test_keys_are_compared_byte_for_byte(jobs: Jobs) -> None:
    keys = ["Acme", "acme", "acme ", "äcme", "acme\u0301", "ACME", "🙂"]
    for key in keys:
        await jobs.enqueue(group_key=key)
    for key in keys:
        assert [job.group_key for job in await jobs.scheduler.find(group_key=key)] == [key]
    assert len(await jobs.claim(1)) == len(keys)


async def test_times_keep_their_microseconds_and_come_back_in_utc(jobs: Jobs) -> None:
    east = timezone(timedelta(hours=5, minutes=30))
    moment = datetime(2031, 12, 31, 23, 59, 59, 999_999, tzinfo=east)
    job = await jobs.enqueue(run_after=moment)
    stored = (await jobs.scheduler.get(job)).run_after
    assert stored == moment
    assert stored is not None
    assert stored.tzinfo is UTC


async def test_json_comes_back_as_it_was_given(jobs: Jobs) -> None:
    args = {
        "z": 1, "a": [True, None, 1.5, -0.0, 1e-300],
        "large": 2**63 + 1, "huge": 10**400, "text": "ä🙂\u0000\u2028%s%(x)s'\"\\ ') VALUES (",
        "": {}, "deep": {"b": 1, "a": 2},
    }  # fmt: skip
    job = await jobs.enqueue(args=args)
    stored = (await jobs.scheduler.get(job)).args
    assert stored == args
    assert list(stored) == list(args)
    assert list(stored["deep"]) == ["b", "a"]


async def test_ids_are_never_used_again(jobs: Jobs) -> None:
    first = await jobs.enqueue()
    delete = jobs.tables.jobs.delete()
    await jobs.do(lambda connection, _: connection.execute(delete))
    assert (await jobs.enqueue()).id > first.id


async def test_ids_have_64_bits(jobs: Jobs) -> None:
    large = 2**40
    await jobs.spoil(await jobs.enqueue(), id=large)
    job = await jobs.enqueue(depends_on=[large])
    assert id_of(job) > 0
    claimed = await jobs.claim_one()
    await jobs.finish(claimed)
    await jobs.settle()
    assert claimed.lease.job_id == large
    assert await jobs.state(job) == State.READY


async def test_tables_under_one_name_are_made_once() -> None:
    assert tables_for("a", "b") is tables_for("a", "b")
    assert tables_for() is not tables_for(None, "b")
    assert tables_for().jobs is asyncjobq.JobRow.__table__
