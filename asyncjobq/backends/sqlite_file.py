"""A SQLite file: one writer, and each transaction one hop into the thread that owns it.

A transaction that spanned awaits of the handlers' loop would hold the file's only write lock while
the loop is busy elsewhere. Here it runs in a thread of its own, from BEGIN IMMEDIATE to COMMIT.
Reads have a second connection, which in WAL mode waits for nobody.
"""

from __future__ import annotations

import asyncio
import copy
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import StaticPool

from asyncjobq.backends.base import Database, T, Work, sessions_of
from asyncjobq.backends.keys import OWN
from asyncjobq.backends.loops import PerLoop
from asyncjobq.backends.sqlite import SQLiteBackend
from asyncjobq.clock import monotonic
from asyncjobq.errors import ConfigurationError, SchemaError, UnsupportedDatabaseError
from asyncjobq.models import Tables
from asyncjobq.transactions import Fault, retrying

BUSY_TIMEOUT: Final = 5.0
WATCH_INTERVAL: Final = 0.02
_WAITED: Final = "asyncjobq waited"


class SQLiteDatabase(Database):
    """A database file: a writer thread, a reader thread, and sessions for handlers."""

    def __init__(self, engine: AsyncEngine, tables: Tables, *, owns_engine: bool) -> None:
        path = _file_of(engine.url)
        if tables.schema is not None:
            raise UnsupportedDatabaseError(
                "SQLite has no schemas; use table_prefix= to keep the tables apart."
            )
        self.backend = SQLiteBackend(tables)
        self.path = path
        self.url = engine.url
        self._user_engine = engine
        self.owns_engine = owns_engine
        self._sessions = sessions_of(engine)
        self._queue = _Queue()
        self._writer: _Source[_Writer] = PerLoop(self._make_writer, _Thread.close)
        self._reader: _Source[_Thread] = PerLoop(self._make_reader, self._close_reader)

    def create(self) -> None:
        try:
            Path(self.path).touch()
        except OSError as error:
            raise ConfigurationError(f"The database file cannot be made: {error}.") from error

    @property
    def queues(self) -> bool:
        return self._queue.since is not None

    def waited(self, connection: Connection) -> float:
        waited: float = connection.info.get(_WAITED, 0.0)
        return waited

    async def apart(self) -> Database:
        other = copy.copy(self)  # with the same one writer
        other._writer = _Same(await self._writer.get())
        other._reader = _Same(await self._reader.get())
        return other

    async def run(self, work: Work[T], *, repeatable: bool = True) -> T:
        writer, asked = await self._writer.get(), monotonic()
        return await retrying(lambda: writer.write(work, asked), self.backend.fault_of)

    async def read(self, work: Work[T]) -> T:
        reader = await self._reader.get()
        return await retrying(lambda: reader.run(work), self.backend.fault_of)

    def session(self) -> AsyncSession:
        return self._sessions()

    async def watch(self, wake: Callable[[], None], poll_interval: float) -> None:
        """Look at SQLite's own count of other connections' commits, many times a second."""
        watcher = _Watcher(self.path)
        try:
            while True:
                if watcher.changed():
                    wake()
                await asyncio.sleep(WATCH_INTERVAL)
        finally:
            watcher.close()

    async def watch_ends(self, wake: Callable[[], None], poll_interval: float) -> None:
        await self.watch(wake, poll_interval)

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    def _make_writer(self) -> _Writer:
        return _Writer(self._user_engine.url, self._queue, self.backend.fault_of)

    def _make_reader(self) -> _Thread:
        return _Thread(self._user_engine.url, "BEGIN")

    async def _close_reader(self, reader: _Thread) -> None:
        await reader.close()
        if self.owns_engine:
            await self._user_engine.dispose()


class _Thread:
    """One connection and the thread in which all its transactions run."""

    def __init__(self, url: URL, begin: str) -> None:
        self._engine = _sync_engine(url, begin)
        self._executor = ThreadPoolExecutor(1, "asyncjobq-sqlite")

    async def run(self, work: Work[T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._transaction, work)

    def _transaction(self, work: Work[T]) -> T:
        with self._engine.begin() as connection:
            return work(connection)

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._engine.dispose)
        self._executor.shutdown()


@dataclass
class _Queue:
    """Since when transactions of this process have waited for the file's write lock, if any."""

    since: float | None = None


class _Writer(_Thread):
    """The connection that writes, and how long it has to wait for the file."""

    def __init__(self, url: URL, queue: _Queue, fault_of: Callable[[BaseException], Fault]) -> None:
        super().__init__(url, "BEGIN IMMEDIATE")
        self._queue = queue
        self._fault_of = fault_of

    async def write(self, work: Work[T], asked: float) -> T:
        """Run `work` in a transaction that was asked for at a moment of the monotonic clock."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._queueing, work, asked)

    def _queueing(self, work: Work[T], asked: float) -> T:
        """Take a transaction, and note since when we wait; one that gave up still does."""
        since = self._queue.since = min(asked, self._queue.since or asked)

        def begun(connection: Connection) -> T:
            self._queue.since = None
            connection.info[_WAITED] = monotonic() - since
            return work(connection)

        try:
            return self._transaction(begun)
        except Exception as error:
            if self._fault_of(error) is not Fault.CONFLICT:
                self._queue.since = None
            raise


T_co = TypeVar("T_co", covariant=True)


class _Source(Protocol[T_co]):
    """Where the running loop gets a thread with its connection from."""

    async def get(self) -> T_co: ...

    async def close(self) -> None: ...


class _Same(Generic[T]):
    """A thread that another loop has opened, and will close."""

    def __init__(self, thread: T) -> None:
        self._thread = thread

    async def get(self) -> T:
        return self._thread

    async def close(self) -> None:
        pass


class _Watcher:
    """A connection that only asks whether others have committed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._version: int | None = None

    def changed(self) -> bool:
        """Tell whether another connection committed since the last call."""
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(self._path, timeout=0)
            version = self._connection.execute("PRAGMA data_version").fetchone()[0]
        except sqlite3.Error:  # a hint is not worth an error; the poll goes on behind it
            return False
        changed = self._version is not None and version != self._version
        self._version = version
        return changed

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def open_database(engine: AsyncEngine, tables: Tables, *, owns_engine: bool) -> SQLiteDatabase:
    """Open a SQLite file."""
    return SQLiteDatabase(engine, tables, owns_engine=owns_engine)


def make_engine(url: URL) -> AsyncEngine:
    """Make the engine for handlers' sessions on a URL, waiting for locks as long as ours."""
    _file_of(url)
    return create_async_engine(url, connect_args={"timeout": BUSY_TIMEOUT})


def _file_of(url: URL) -> str:
    """Return the path of the database file, refusing databases in memory."""
    path = url.database or ""
    if path in ("", ":memory:") or "mode=memory" in str(url) or ":memory:" in path:
        raise UnsupportedDatabaseError(
            "SQLite in memory cannot be used: all sessions would share one connection, so that "
            "one task's rollback undoes another's writes, and no other process could see the jobs. "
            "Use a file, e.g. sqlite+aiosqlite:///jobs.db, or in tests one in a temporary folder."
        )
    file = Path(path.removeprefix("file:").partition("?")[0])
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(
            f"The folder of the database file does not exist: {file.absolute().parent}. Create it, "
            "or correct the URL (an absolute path has four slashes: sqlite+aiosqlite:////srv/…)."
        )
    return str(file)


def _sync_engine(url: URL, begin: str) -> Engine:
    engine = create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=StaticPool,
        execution_options={OWN: True},
        hide_parameters=True,  # arguments and results have no place in logs
        connect_args={"timeout": BUSY_TIMEOUT, "check_same_thread": False},
    )

    @event.listens_for(engine, "do_connect")
    def refuse_to_create(*_: object) -> None:
        if not Path(file := _file_of(url)).exists():
            raise SchemaError(
                f"There is no database file {file}. Correct the URL, or create it with its tables: "
                "`await scheduler.create_schema()`, or `asyncjobq init` on the command line."
            )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: object) -> None:
        connection.isolation_level = None  # this module says when a transaction begins
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
