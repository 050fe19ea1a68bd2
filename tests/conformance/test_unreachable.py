"""A database that is away when a scheduler starts, and what is no outage although it looks so."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from asyncjobq import ConfigurationError, DatabaseUnavailableError, Scheduler, SchemaError
from asyncjobq.transactions import ATTEMPTS, Fault
from conformance.kit import Jobs
from conformance.running import served, serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def unreachable(backend_name: str, jobs: Jobs, tmp_path: Path) -> Iterator[str]:
    """Give a URL at which nobody answers."""
    if backend_name == "sqlite":
        (tmp_path / "jobs.db").mkdir()
        yield f"sqlite+aiosqlite:///{tmp_path / 'jobs.db'}"
        return
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refused, and nobody else's
        url = make_url(jobs.url).set(host="127.0.0.1", port=nobody.getsockname()[1])
        yield url.render_as_string(hide_password=False)


class TestUnreachable:
    async def test_calls_say_so(self, unreachable: str) -> None:
        async with Scheduler(unreachable) as scheduler:
            for call in (
                lambda: scheduler.enqueue("work"),
                lambda: scheduler.get(1),
                scheduler.find,
                scheduler.drain,
                scheduler.create_schema,
                scheduler.check_database,
            ):
                with pytest.raises(DatabaseUnavailableError, match="cannot be reached"):
                    await call()

    async def test_serve_keeps_trying_with_a_line_each_time(
        self, unreachable: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        scheduler = Scheduler(unreachable)
        task = asyncio.create_task(scheduler.serve())

        async def enough() -> bool:
            return len(caplog.records) >= 3

        await until(enough)
        assert not task.done()
        for record in caplog.records:
            assert (record.levelno, record.exc_info) == (logging.WARNING, None)
            assert "\n" not in record.getMessage()
            assert "trying again in" in record.getMessage()
        scheduler.stop()
        async with asyncio.timeout(5):
            await task
        await scheduler.aclose()

    async def test_serving_lets_the_application_start_and_stop(self, unreachable: str) -> None:
        async with Scheduler(unreachable) as scheduler, serving(scheduler):
            await asyncio.sleep(0)

    async def test_cancelling_serve_ends_it(self, unreachable: str) -> None:
        async with Scheduler(unreachable) as scheduler:
            task = asyncio.create_task(scheduler.serve())
            await asyncio.sleep(0.05)
            task.cancel()
            async with asyncio.timeout(5):
                await asyncio.wait({task})
            assert task.cancelled()


class TestFoundLate:
    """By a worker in the background, whose block was entered while the database was away."""

    @pytest.fixture
    def late(self, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
        """Give a scheduler on a database without tables, which is away at the first look."""
        scheduler = Scheduler(database_url, poll_interval=0.1)
        read, aways = scheduler._database.read, [1]

        async def away_at_first(*args: Any) -> Any:
            if aways:
                raise DatabaseUnavailableError(f"away {aways.pop()}")
            return await read(*args)

        monkeypatch.setattr(scheduler._database, "read", away_at_first)
        return scheduler

    @staticmethod
    async def said(caplog: pytest.LogCaptureFixture) -> None:
        async def logged() -> bool:
            return any(
                record.levelno == logging.CRITICAL and "create_schema" in record.getMessage()
                for record in caplog.records
            )

        await until(logged)

    async def test_missing_tables_are_waited_for_aloud(
        self, late: Scheduler, caplog: pytest.LogCaptureFixture
    ) -> None:
        @late.handler
        async def work() -> int:
            return 1

        async with late, serving(late):
            await self.said(caplog)
            await late.create_schema()
            assert await late.wait(await late.enqueue(work.job())) == 1

    async def test_missing_tables_are_raised_at_last(
        self, late: Scheduler, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(SchemaError, match="create_schema"):
            async with late, serving(late):
                await self.said(caplog)


async def test_somebody_in_the_way_of_the_first_look_is_waited_for(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A deadlock or a lock that is held says nothing about the settings."""
    scheduler, conflicts = jobs.another(poll_interval=0.1), [1] * (ATTEMPTS + 1)
    backend = scheduler._database.backend
    fault_of, check = backend.fault_of, backend.check

    def in_conflict_at_first(connection: Any) -> None:
        if conflicts:
            conflicts.pop()
            raise LookupError("deadlock")
        check(connection)

    monkeypatch.setattr(backend, "check", in_conflict_at_first)
    monkeypatch.setattr(
        backend,
        "fault_of",
        lambda e: Fault.CONFLICT if isinstance(e, LookupError) else fault_of(e),
    )

    @scheduler.handler
    async def work() -> int:
        return 1

    job = await jobs.enqueue()
    async with served(scheduler):
        assert await jobs.scheduler.wait(job) == 1
        scheduler.stop()
    assert "cannot be reached: deadlock" in caplog.text


@pytest.mark.requires("file_database")
async def test_a_folder_that_is_not_there_is_no_outage(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.backend_name == "sqlite"
    with pytest.raises(ConfigurationError, match="folder"):
        async with Scheduler(f"sqlite+aiosqlite:///{tmp_path / 'missing' / 'jobs.db'}") as made:
            await made.serve()


@pytest.mark.requires("server")
async def test_a_database_that_is_not_there_is_no_outage(jobs: Jobs) -> None:
    """Waiting would not help; the URL is wrong."""
    url = make_url(jobs.url).set(database="asyncjobq_no_such_database")
    async with Scheduler(url) as scheduler:
        for call in (
            scheduler.serve,
            scheduler.create_schema,
            scheduler.find,
            lambda: scheduler.enqueue("work"),
        ):
            with pytest.raises(ConfigurationError, match="no_such_database"):
                await call()


@pytest.mark.requires("server")
async def test_a_server_of_another_make_is_no_outage(jobs: Jobs) -> None:
    if jobs.backend_name != "mysql":
        return
    async with Scheduler(make_url(jobs.url).set(drivername="mariadb+aiomysql")) as scheduler:
        for call in (
            scheduler.create_schema,
            scheduler.serve,
            scheduler.find,
            lambda: scheduler.enqueue("work"),
        ):
            with pytest.raises(ConfigurationError, match="not a MariaDB"):
                await call()
