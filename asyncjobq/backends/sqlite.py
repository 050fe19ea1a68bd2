"""SQLite: one writer, and each of our transactions one hop into the thread that owns it.

A transaction that spanned awaits of the handlers' loop would hold the file's only write lock while
the loop is busy elsewhere. Here it runs in a thread of its own, from BEGIN IMMEDIATE to COMMIT.
Reads have a second connection, which in WAL mode waits for nobody.
"""

from __future__ import annotations

import asyncio
import operator
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    Table,
    bindparam,
    create_engine,
    event,
    func,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import insert as insert_or
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import StaticPool

from asyncjobq.backends import lanes
from asyncjobq.backends.base import (
    Backend,
    Database,
    LanePage,
    LaneScan,
    T,
    Take,
    Work,
    sessions_of,
)
from asyncjobq.backends.loops import PerLoop
from asyncjobq.errors import UnsupportedDatabaseError
from asyncjobq.models import LANE, Tables, in_state
from asyncjobq.states import State
from asyncjobq.transactions import Fault, retrying

OLDEST: Final = (3, 35)  # RETURNING
BUSY_TIMEOUT: Final = 5.0
WATCH_INTERVAL: Final = 0.02

_CONFLICT: Final = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_AWAY: Final = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
}
_DATA: Final = {sqlite3.SQLITE_TOOBIG, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_CONSTRAINT}


class SQLiteBackend(Backend):
    """No row locks: the transaction holds the file's only write lock from its beginning."""

    name: ClassVar[str] = "sqlite"
    bind_limit: ClassVar[int] = 32_000

    def _clock(self, plus: float | ColumnElement[float]) -> ColumnElement[Any]:
        shift = func.printf("%+.6f seconds", literal(plus) if isinstance(plus, float) else plus)
        return func.strftime("%Y-%m-%d %H:%M:%f", "now", shift) + "000"

    def locking(self, query: Select[Any]) -> Select[Any]:
        return query

    def lanes(self, connection: Connection, scan: LaneScan) -> LanePage:
        rows = connection.execute(_lanes(self.tables.jobs), lanes.starts_as_json(scan)).all()
        return lanes.page(rows, scan)

    def claim(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        jobs = self.tables.jobs
        ids = lanes.first_candidates(connection, self.tables, takes, conditions, spare=0)
        claimed = [job_id for group in ids for job_id in group]
        statement = update(jobs).where(jobs.c.id.in_(claimed), *conditions).values(values)
        return list(connection.execute(statement.returning(*columns))) if claimed else []

    def insert_jobs(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        connection.execute(insert(self.tables.jobs), list(rows))
        # This transaction is the only writer, so the new ids follow one another.
        last = connection.execute(text("SELECT last_insert_rowid()")).scalar_one()
        return list(range(last - len(rows) + 1, last + 1))

    def insert_if_absent(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        connection.execute(insert_or(table).on_conflict_do_nothing(), list(rows))

    def _fault_of_code(self, cause: BaseException) -> Fault:
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _CONFLICT:
            return Fault.CONFLICT
        if code in _AWAY:
            return Fault.UNAVAILABLE
        data = code in _DATA or isinstance(cause, sqlite3.DataError | sqlite3.InterfaceError)
        return Fault.DATA if data or isinstance(cause, OverflowError) else Fault.OTHER

    def check(self, connection: Connection) -> None:
        if sqlite3.sqlite_version_info < OLDEST:
            raise UnsupportedDatabaseError(
                f"SQLite {sqlite3.sqlite_version} is too old; 3.35 or newer is needed."
            )


def _lanes(jobs: Table) -> Select[Any]:
    """Walk the index of ready jobs from lane to lane, each step two plain look-ups.

    One comparison of (limit_key, group_key) would use its first half alone.
    """
    pair = func.json_each(bindparam("starts")).table_valued("value", name="pair")
    start = select(
        *(func.json_extract(pair.c.value, f"$[{i}]").label(n) for i, n in enumerate(LANE))
    ).subquery("start")
    columns = lanes.head_columns(jobs)

    def step(origin: Any, same: Callable[[Any, Any], Any]) -> Select[Any]:
        first = func.coalesce(_next_group(jobs, origin, same), _next_limit(jobs, origin))
        return select(*columns).select_from(origin).join(jobs, jobs.c.id == first)

    lane = step(start, operator.ge).cte("lane", recursive=True)
    lane = lane.union_all(step(lane, operator.gt))
    return select(lane).limit(bindparam("bound"))


def _next_group(jobs: Table, origin: Any, same: Callable[[Any, Any], Any]) -> Any:
    head = jobs.alias("head")
    return (
        select(head.c.id)
        .where(
            in_state(head, State.READY),
            head.c.queue == origin.c.queue,
            head.c.type == origin.c.type,
            head.c.limit_key == origin.c.limit_key,
            same(head.c.group_key, origin.c.group_key),
        )
        .order_by(head.c.group_key, head.c.priority, head.c.id)
        .limit(1)
        .scalar_subquery()
        .correlate(origin)
    )


def _next_limit(jobs: Table, origin: Any) -> Any:
    head = jobs.alias("head")
    return (
        select(head.c.id)
        .where(
            in_state(head, State.READY),
            head.c.queue == origin.c.queue,
            head.c.type == origin.c.type,
            head.c.limit_key > origin.c.limit_key,
        )
        .order_by(head.c.limit_key, head.c.group_key, head.c.priority, head.c.id)
        .limit(1)
        .scalar_subquery()
        .correlate(origin)
    )


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
        self._user_engine = engine
        self._owns_engine = owns_engine
        self._sessions = sessions_of(engine)
        self._writer = PerLoop(lambda: _Thread(engine.url, "BEGIN IMMEDIATE"), _Thread.close)
        self._reader = PerLoop(lambda: _Thread(engine.url, "BEGIN"), self._close_reader)

    async def run(self, work: Work[T], *, repeatable: bool = True) -> T:
        writer = await self._writer.get()
        return await retrying(lambda: writer.run(work), self.backend.fault_of)

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

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    async def _close_reader(self, reader: _Thread) -> None:
        await reader.close()
        if self._owns_engine:
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
    return str(Path(path.removeprefix("file:").partition("?")[0]))


def _sync_engine(url: URL, begin: str) -> Engine:
    engine = create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=StaticPool,
        connect_args={"timeout": BUSY_TIMEOUT, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: object) -> None:
        connection.isolation_level = None  # this module says when a transaction begins
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}").close()

    @event.listens_for(engine, "begin")
    def start(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine
