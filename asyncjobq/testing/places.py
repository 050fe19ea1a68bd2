"""Where the tables of a test are: in a temporary file, or in a database that is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, delete, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncEngine

from asyncjobq.backends import open_database
from asyncjobq.backends.base import Backend, Database
from asyncjobq.errors import ConfigurationError
from asyncjobq.models import Tables
from asyncjobq.scheduler import Scheduler
from asyncjobq.testing.under_test import UnderTest

T = TypeVar("T")

_FILES: dict[Tables, bytes] = {}
"""A database file with empty tables, for each kind of these that a test of this process has had."""


class Place:
    """One database for one test, open for the schedulers of the application."""

    def __init__(self, given: str | URL | AsyncEngine | None) -> None:
        self._given = given
        self._source: str | URL | AsyncEngine = "" if given is None else given
        self._open: dict[Tables, Database] = {}

    def check(self, schedulers: Iterable[Scheduler]) -> None:
        """Refuse to put jobs elsewhere than the sessions are in whose transactions they come."""
        for scheduler in schedulers:
            if self._given is None and UnderTest.has_engine(scheduler):
                raise ConfigurationError(
                    f"{scheduler!r} was made with an engine, which the application uses for "
                    "sessions of its own; jobs that it enqueues with session= would be in another "
                    "database than the tests look at. Say which database the tests use: the "
                    "fixture job_database (or JobTester's second argument) returns that engine, "
                    "or its URL."
                )

    @contextmanager
    def opened(self) -> Iterator[str | URL | AsyncEngine]:
        """Give the database's URL or engine; a temporary file is deleted afterwards."""
        if self._given is not None:
            yield self._given
            self._open.clear()
            return
        with TemporaryDirectory(prefix="asyncjobq-") as folder:
            self._source = f"sqlite+aiosqlite:///{folder}/jobs.db"
            yield self._source
            self._open.clear()

    def database_for(self, scheduler: Scheduler) -> Database:
        """Open the database with a scheduler's tables; those of the same tables share it."""
        source = self._source
        url = source.url if isinstance(source, AsyncEngine) else make_url(source)
        schemas = url.get_backend_name() != "sqlite"
        tables = UnderTest.tables_of(scheduler, schemas=schemas)
        if tables not in self._open:
            ttl = scheduler.settings.lease_ttl
            self._open[tables] = open_database(source, tables, lease_ttl=ttl)
        return self._open[tables]

    def prepare(self, scheduler: UnderTest) -> None:
        """Make the tables, or empty those that are there."""
        database = scheduler.database
        tables, path = database.backend.tables, Path(database.url.database or "")
        if self._given is not None:
            run_apart(lambda: self._make_empty(scheduler))
        elif tables in _FILES and not path.exists():
            path.write_bytes(_FILES[tables])  # several times as fast as making them
        else:
            run_apart(scheduler.create_schema)
            if len(self._open) == 1:
                _FILES[tables] = path.read_bytes()

    def clear(self, scheduler: UnderTest) -> None:
        """Leave nothing behind in a database that others see."""
        if self._given is not None:
            database = scheduler.database
            run_apart(lambda: database.run(lambda c: _clear(c, database.backend)))

    async def _make_empty(self, scheduler: UnderTest) -> None:
        await scheduler.create_schema()
        await self._empty(scheduler.database)

    async def _empty(self, database: Database) -> None:
        """Empty the tables, unless there are jobs in them that may be no test's."""
        if "test" not in (database.url.database or "").casefold():
            jobs = database.backend.tables.jobs
            count = await database.read(lambda c: c.scalar(select(func.count(jobs.c.id))))
            if count:
                where = database.url.render_as_string(hide_password=True)
                raise ConfigurationError(
                    f"{where} has jobs already, {count:,} of them, and tests empty the tables. "
                    'Give them a database of their own, with "test" in its name; or, if these jobs '
                    "are what tests have left, delete them by hand."
                )
        await database.run(lambda c: _clear(c, database.backend))


def _clear(connection: Connection, backend: Backend) -> None:
    tables = backend.tables
    for table in reversed(tables.all):
        if table is not tables.version:
            connection.execute(delete(table))


def run_apart(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run something to its end on a loop of its own, whatever loops there are in this thread."""
    with ThreadPoolExecutor(1, "asyncjobq-testing") as thread:
        return thread.submit(lambda: asyncio.run(function())).result()
