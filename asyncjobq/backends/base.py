"""What a database must be able to do for the library, in the library's words.

A backend speaks SQL and holds no connection: its methods take the caller's `Connection` and never
begin or commit. `Database` is the other half: the library's own connections and transactions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    URL,
    ColumnElement,
    Connection,
    Executable,
    Row,
    Select,
    Table,
    Text,
    Update,
    bindparam,
    insert,
    select,
    type_coerce,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq.backends.keys import KeysBackend
from asyncjobq.column_types import UtcDateTime
from asyncjobq.errors import DatabaseUnavailableError
from asyncjobq.models import Tables, in_state
from asyncjobq.states import Kind, State
from asyncjobq.transactions import Fault

T = TypeVar("T")
Work = Callable[[Connection], T]


@dataclass(frozen=True, slots=True)
class Lane:
    """The unit of the scan: ready jobs that open and close together, and its first job."""

    queue: str
    type: str
    limit_key: str
    group_key: str
    head_priority: int
    head_weight: float

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Where the lane stands in the order of the index, which is the order of its bytes."""
        return (self.queue, self.type, self.limit_key, self.group_key)


@dataclass(frozen=True, slots=True)
class Take:
    """How many jobs to claim from one group's lanes in one queue, by priority across them."""

    lanes: tuple[Lane, ...]
    count: int


New = Callable[[str, Any], ColumnElement[Any]]
"""Returns one of a row's own values in a statement for many rows, by its name and type."""

MakeUpdate = Callable[["Backend", New], Update]
"""Makes an UPDATE in which rows have values of their own."""

LaneKind = tuple[str, str]
"""A queue and a type."""

LaneKey = tuple[str, str, str]
"""A queue, a type and a `limit_key`."""


@dataclass(frozen=True)
class LaneScan:
    """Which lanes to look for: those of these queues and types, about `bound` of them.

    `after` holds the lanes at which an earlier scan was cut, one for each queue and type. Of the
    keys that are `closed`, one lane at most is found: the others are passed over at once.
    """

    kinds: tuple[LaneKind, ...]
    bound: int
    after: tuple[Lane, ...] = ()
    closed: frozenset[LaneKey] = frozenset()


@dataclass(frozen=True)
class LanePage:
    """Lanes that were found; `cut` says that the scan ended at its bound and not at the last."""

    lanes: list[Lane]
    cut: bool


class Backend(KeysBackend):
    """One database product's way of doing what the path of a job needs."""

    name: ClassVar[str]
    bind_limit: ClassVar[int]
    """Parameters that one statement may carry."""
    listens: ClassVar[bool] = False
    """Whether `notify` reaches other processes."""
    has_schemas: ClassVar[bool] = True
    claims_alone: ClassVar[bool] = False
    """Whether `claim` is a single statement."""
    commits_for_nothing: ClassVar[bool] = False
    """Whether each statement can be its own transaction without a word more to the server."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.clock_offset = 0.0
        """Seconds added to the database's clock; tests move time with it."""
        self._built: dict[Hashable, Any] = {}

    def built(self, make: Callable[..., T], *of: Hashable) -> T:
        """Return what `make(self, *of)` returned when it was asked first.

        For statements: to build one takes longer than to run it. What changes from call to call is
        a bound parameter.
        """
        key = (make, self.clock_offset, of)
        if key not in self._built:
            self._built[key] = make(self, *of)
        made: T = self._built[key]
        return made

    def now(self, plus: float | ColumnElement[float] = 0.0) -> ColumnElement[datetime]:
        """Return the database's clock plus some seconds, as an expression in UTC."""
        return type_coerce(self._clock(plus + self.clock_offset), UtcDateTime())

    @abstractmethod
    def _clock(self, plus: float | ColumnElement[float]) -> ColumnElement[Any]:
        """Return the expression behind `now`."""

    def text_of(self, column: ColumnElement[Any]) -> ColumnElement[str]:
        """Return a JSON column as its text, for rows that may not be decoded on the way."""
        return type_coerce(column, Text())

    @abstractmethod
    def locking(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        """Return the query so that it locks its rows for writing and skips those locked.

        They are jobs unless another table is given, and are found by primary key.
        """

    @contextmanager
    def by_index(self, connection: Connection) -> Iterator[None]:
        """Go by indexes in this block, whatever the statistics make it seem."""
        yield

    def begin_writing(self, connection: Connection) -> None:
        """Keep others from writing what is read from here on, where rows cannot be locked."""

    def by_key(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        """Return a query, of jobs by default, so that it goes by primary key whatever is known."""
        return query

    def by_lane(self, query: Select[Any]) -> Select[Any]:
        """Return a query of ready jobs so that it goes by their lanes whatever is known."""
        return query

    def locking_all(self, query: Select[Any]) -> Select[Any]:
        """Return the query so that it locks its rows for deletion and skips those locked.

        Also those which a foreign key refers to in a transaction that is still open.
        """
        return self.locking(query)

    def lock_rows(
        self,
        connection: Connection,
        ids: Sequence[int],
        columns: Sequence[ColumnElement[Any]],
        *conditions: ColumnElement[bool],
        ending: bool = False,
        to_delete: bool = False,
    ) -> list[Row[Any]]:
        """Lock these jobs by primary key in id order; rows locked elsewhere are left out.

        With `ending`, also rows whose unique key could not be given up now.
        """
        names = [*columns, self.tables.jobs.c.unique_held] if ending else columns
        query = self._by_id(select(*names).where(*conditions))
        query = self.locking_all(query) if to_delete else self.locking(query)
        rows = rows_by_id(connection, query, sorted(ids))
        return self.free_to_end(connection, rows) if ending else rows

    def locking_by_id(self, query: Select[Any]) -> Select[Any]:
        """Return a query of jobs so that it locks those of the parameter `ids`, in id order."""
        return self.locking(self._by_id(query))

    def _by_id(self, query: Select[Any]) -> Select[Any]:
        jobs = self.tables.jobs
        return query.where(self.among(jobs.c.id)).order_by(jobs.c.id)

    def among(self, column: ColumnElement[Any], name: str = "ids") -> ColumnElement[bool]:
        """Return the condition that a column has one of the values of a parameter."""
        return column.in_(bindparam(name, expanding=True))

    def existing(self, connection: Connection, ids: Iterable[int]) -> set[int]:
        """Return which of these jobs there are."""
        jobs = self.tables.jobs
        found: set[int] = set()
        for chunk in chunked(sorted(ids), 1000):
            found.update(connection.scalars(select(jobs.c.id).where(jobs.c.id.in_(chunk))))
        return found

    def keep_existing(self, connection: Connection, ids: Iterable[int]) -> set[int]:
        """Return which of these jobs there are; pruning leaves them until this transaction ends.

        Only where that keeps nobody else from them. Elsewhere one may be gone when the caller
        commits, and settling cancels what waits for it.
        """
        return self.existing(connection, ids)

    def read_parents(self, connection: Connection, ids: Sequence[int]) -> list[Row[Any]]:
        """Read parents of new jobs; containers stay as they are until this transaction ends.

        A job's row is only read: it must stay free for the renewal of its lease.
        """
        jobs = self.tables.jobs
        columns = [jobs.c[name] for name in ("id", "kind", "state", "cancel_requested")]
        rows: list[Row[Any]] = []
        for chunk in chunked(ids, 500):
            read = connection.execute(select(*columns).where(jobs.c.id.in_(chunk))).all()
            rows += [row for row in read if row.kind != Kind.CONTAINER]
            # By their keys alone: InnoDB locks whatever a condition makes it read.
            containers = [row.id for row in read if row.kind == Kind.CONTAINER]
            query = select(*columns).where(jobs.c.id.in_(containers)).order_by(jobs.c.id)
            rows += connection.execute(self.sharing(query)) if containers else []
        return rows

    def sharing(self, query: Select[Any]) -> Select[Any]:
        """Return the query so that others may read its rows, and nobody may change them."""
        return query.with_for_update(read=True)

    def read_current(self, connection: Connection, query: Select[Any]) -> Sequence[Row[Any]]:
        """Return the rows of a query of jobs as they are now, whatever the snapshot shows.

        Raises what `is_stale` knows where that cannot be read.
        """
        return connection.execute(self.sharing(self.by_key(query))).all()

    def wait_for_row(
        self, connection: Connection, job_id: int, columns: Sequence[ColumnElement[Any]]
    ) -> Row[Any] | None:
        """Lock one job by primary key, waiting for whoever holds it; None if there is none."""
        query = select(*columns).where(self.tables.jobs.c.id == job_id)
        return connection.execute(query.with_for_update(key_share=True)).one_or_none()

    def commits_at_once(self, connection: Connection) -> bool:
        """Tell whether the driver was told, past SQLAlchemy, to commit each statement."""
        return False

    def refuse_snapshot(self, connection: Connection, what: str) -> None:
        """Raise ConfigurationError where the transaction's isolation level rules out `what`."""

    def first_ready(
        self, connection: Connection, column: ColumnElement[str], *conditions: ColumnElement[bool]
    ) -> str | None:
        """Return the least value of a column of the lanes among ready jobs, by a seek."""
        ready = select(column).where(in_state(self.tables.jobs, State.READY), *conditions)
        return connection.scalar(ready.order_by(column).limit(1))

    @abstractmethod
    def lanes(self, connection: Connection, scan: LaneScan) -> LanePage:
        """Find lanes that have ready jobs, reading a bounded number of index entries."""

    @abstractmethod
    def claim(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        """Claim jobs: take the first of each group that nobody holds, write `values`.

        Returns `columns` of the claimed rows as they are after the write. What is given has to be
        what `built` keeps, for so is the statement that is made of it.
        """

    @abstractmethod
    def candidates(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[list[int]]:
        """Read, without locks, the ids of the first jobs of each take, and some to spare."""

    def claim_rows(
        self,
        connection: Connection,
        ids: Sequence[int],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        """Write `values` to jobs whose rows are locked; returns `columns` as they are after it."""
        written = self.built(_writing, tuple(values.items()))
        connection.execute(written, {"ids": list(ids)})
        return list(connection.execute(self.built(_reading, tuple(columns)), {"ids": list(ids)}))

    def update_each(
        self, connection: Connection, make: MakeUpdate, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Execute an UPDATE for each of these rows, with its own values."""
        connection.execute(self.built(_one_by_one, make), list(rows))

    @abstractmethod
    def insert_jobs(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        """Insert jobs in bulk and return their ids in the same order."""

    def insert_rows(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Insert rows in bulk, within the limits of one statement."""
        if rows:
            size = self.rows_per_insert(len(rows[0]))
            for chunk in chunked(rows, size):
                connection.execute(insert(table).values(chunk))

    def notify(self, connection: Connection, topic: str) -> None:
        """Wake listeners of other processes when this transaction commits."""

    def notify_ended(self, connection: Connection) -> None:
        """Tell those who wait for the ends of jobs when this transaction commits."""

    def fault_of(self, error: BaseException) -> Fault:
        """Classify a database error by its code."""
        if isinstance(error, DBAPIError):
            if error.connection_invalidated:
                return Fault.UNAVAILABLE
            return self._fault_of_code(error.orig or error)
        if isinstance(error, OSError | TimeoutError | PoolTimeout | DatabaseUnavailableError):
            return Fault.UNAVAILABLE
        return self._fault_of_code(error)

    @abstractmethod
    def _fault_of_code(self, cause: BaseException) -> Fault:
        """Classify a driver's own error."""

    @abstractmethod
    def check(self, connection: Connection) -> None:
        """Raise UnsupportedDatabaseError if this server cannot keep the promises."""

    @contextmanager
    def schema_lock(self, connection: Connection) -> Iterator[None]:
        """Hold the one lock under which the tables are made."""
        yield

    def read_clock(self, connection: Connection) -> datetime:
        """Return the database's time."""
        moment: datetime = connection.execute(select(self.now())).scalar_one()
        return moment

    def rows_per_insert(self, columns: int) -> int:
        """Return how many rows of so many columns fit into one statement."""
        return max(1, min(1000, self.bind_limit // columns))


class Database(ABC):
    """The library's own connections to one database, apart from the caller's."""

    backend: Backend
    url: URL
    """Where it is; with the password."""
    owns_engine: bool
    """Whether the engine for handlers' sessions is the library's, made of a URL."""
    remote: ClassVar[bool] = False
    """Whether it is at the other end of a line, which may fall silent."""

    @property
    def queues(self) -> bool:
        """Whether a transaction of ours waits for the one lock that all writers share."""
        return False

    def waited(self, connection: Connection) -> float:
        """Return how many seconds a transaction had to wait for the lock that all writers share."""
        return 0.0

    @abstractmethod
    async def apart(self) -> Database:
        """Return the database for a second loop, while that of the running one is open.

        Its connections are opened and closed on that loop, or serve both.
        """

    def create(self) -> None:  # noqa: B027  nothing by default
        """Make the file of a database that is one, for tables to be made in it."""

    @abstractmethod
    async def run(self, work: Work[T], *, repeatable: bool = True) -> T:
        """Run `work` in one transaction of its own, repeated on conflicts, and commit it.

        `repeatable` says that running it twice does no harm. If not, a connection that breaks
        during COMMIT raises CommitUnknownError.
        """

    async def run_alone(self, work: Work[T]) -> T:
        """Run `work`, a single statement that may be repeated, and commit it."""
        return await self.run(work)

    @abstractmethod
    async def read(self, work: Work[T]) -> T:
        """Run `work`, which only reads."""

    @abstractmethod
    def session(self) -> AsyncSession:
        """Return a new session for a handler, on the application's connections."""

    @abstractmethod
    async def watch(self, wake: Callable[[], None], poll_interval: float) -> None:
        """Call `wake` whenever another process may have written, until cancelled.

        Never raises for a database that is away. Returns at once where there is no such signal.
        """

    @abstractmethod
    async def watch_ends(self, wake: Callable[[], None], poll_interval: float) -> None:
        """Call `wake` whenever a job may have ended in another process, until cancelled.

        Otherwise like `watch`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that were opened on the running loop."""


def _writing(backend: Backend, values: Sequence[tuple[str, Any]]) -> Update:
    jobs = backend.tables.jobs
    return update(jobs).where(backend.among(jobs.c.id)).values(dict(values))


def _reading(backend: Backend, columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
    return select(*columns).where(backend.among(backend.tables.jobs.c.id))


def _one_by_one(backend: Backend, make: MakeUpdate) -> Update:
    return make(backend, bound)


def bound(name: str, type_: Any) -> ColumnElement[Any]:
    """Return a value of each row as a parameter."""
    return bindparam(name, type_=type_)


def values_of_each(backend: Backend, make: MakeUpdate) -> dict[str, Any]:
    """Return the names and types of the values that each row has of its own."""
    types: dict[str, Any] = {}

    def noted(name: str, type_: Any) -> ColumnElement[Any]:
        types[name] = type_
        return bound(name, type_)

    make(backend, noted)
    return types


def rows_by_id(
    connection: Connection, query: Executable, ids: Sequence[int], **parameters: Any
) -> list[Row[Any]]:
    """Return the rows of a query for the values of its parameter `ids`, however many they are."""
    rows: list[Row[Any]] = []
    for chunk in chunked(ids, 500):
        rows.extend(connection.execute(query, {"ids": chunk, **parameters}))
    return rows


def chunked(items: Sequence[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of at most `size`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def sessions_of(engine: AsyncEngine) -> Callable[[], AsyncSession]:
    """Return a maker of sessions whose objects stay readable after commit."""
    return lambda: AsyncSession(engine, expire_on_commit=False)
