"""SQLite's SQL. There are no row locks: a transaction that writes is the only one that does."""

from __future__ import annotations

import operator
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    bindparam,
    case,
    false,
    func,
    insert,
    literal,
    null,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import insert as insert_or
from sqlalchemy.sql.dml import ReturningUpdate

from asyncjobq.backends import lanes
from asyncjobq.backends.base import (
    Backend,
    LanePage,
    LaneScan,
    Take,
)
from asyncjobq.errors import UnsupportedDatabaseError
from asyncjobq.models import LANE, Tables, in_state
from asyncjobq.states import State
from asyncjobq.transactions import Fault

OLDEST: Final = (3, 35)  # RETURNING

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
    one_writer: ClassVar[bool] = True
    has_schemas: ClassVar[bool] = False

    def _clock(self, plus: float | ColumnElement[float]) -> ColumnElement[Any]:
        shift = func.printf("%+.6f seconds", literal(plus) if isinstance(plus, float) else plus)
        return func.strftime("%Y-%m-%d %H:%M:%f", "now", shift) + "000"

    def reads_fresh(self, connection: Connection) -> bool:
        return True  # in a transaction that may write, or it could not

    def locking(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        return query

    def read_parents(self, connection: Connection, ids: Sequence[int]) -> list[Row[Any]]:
        if ids:
            self.begin_writing(connection)
        return super().read_parents(connection, ids)

    def keep_existing(self, connection: Connection, ids: Iterable[int]) -> set[int]:
        if wanted := list(ids):
            self.begin_writing(connection)
        return super().keep_existing(connection, wanted)

    def wait_for_row(
        self, connection: Connection, job_id: int, columns: Sequence[ColumnElement[Any]]
    ) -> Row[Any] | None:
        self.begin_writing(connection)
        return super().wait_for_row(connection, job_id, columns)

    def begin_writing(self, connection: Connection) -> None:
        # The file's only lock: what a caller's transaction reads before it may be out of date.
        connection.execute(update(self.tables.jobs).where(false()).values(settled=True))

    def lock_keys(
        self, connection: Connection, keys: Sequence[str], *, wait: bool = True
    ) -> set[str]:
        self.begin_writing(connection)
        return set(keys)

    def reads_committed(self, connection: Connection) -> bool:
        return True

    def keep_holders(
        self, connection: Connection, holders: Mapping[int, str], *, wait: bool
    ) -> set[int]:
        return set(holders)

    def still_holders(self, connection: Connection, holders: Mapping[int, str]) -> set[int]:
        return set(holders)

    def sharing(self, query: Select[Any]) -> Select[Any]:
        return query

    def lanes(self, connection: Connection, scan: LaneScan) -> LanePage:
        walk = _lanes(self.tables, skipping=bool(scan.closed))
        rows = connection.execute(walk, lanes.starts_as_json(scan)).all()
        return lanes.page(rows, scan)

    def claim(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        ids = self.candidates(connection, takes, conditions)
        claimed = [job_id for group in ids for job_id in group]
        if not claimed:
            return []
        kept = (tuple(conditions), tuple(values.items()), tuple(columns))
        return list(connection.execute(self.built(_claim, *kept), {"ids": claimed}))

    def candidates(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[list[int]]:
        return lanes.first_candidates(connection, self, takes, conditions, spare=0)

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


def _claim(
    backend: Backend,
    conditions: Sequence[ColumnElement[bool]],
    values: Sequence[tuple[str, Any]],
    columns: Sequence[ColumnElement[Any]],
) -> ReturningUpdate[Any]:
    jobs = backend.tables.jobs
    claim = update(jobs).where(backend.among(jobs.c.id), *conditions).values(dict(values))
    return claim.returning(*columns)


@lru_cache
def _lanes(tables: Tables, *, skipping: bool) -> Select[Any]:
    """Walk the index of ready jobs from lane to lane, each step two plain look-ups.

    One comparison of (limit_key, group_key) would use its first half alone. With `skipping`, the
    step from a lane of a closed key is the second alone.
    """
    pair = func.json_each(bindparam("starts")).table_valued("value", name="pair")
    start = select(
        *(func.json_extract(pair.c.value, f"$[{i}]").label(n) for i, n in enumerate(LANE))
    ).subquery("start")
    closed = select(func.json_each(bindparam("closed")).table_valued("value", name="shut").c.value)
    jobs = tables.jobs
    columns = lanes.head_columns(jobs)

    def step(origin: Any, same: Callable[[Any, Any], Any]) -> Select[Any]:
        group = _next_group(tables, origin, same)
        if skipping:
            group = case((lanes.mark_of(origin).in_(closed), null()), else_=group)
        first = func.coalesce(group, _next_limit(tables, origin))
        return select(*columns).select_from(origin).join(jobs, jobs.c.id == first)

    lane = step(start, operator.ge).cte("lane", recursive=True)
    lane = lane.union_all(step(lane, operator.gt))
    return lanes.weighted(select(lane).limit(bindparam("bound")), tables.groups)


def _next_group(tables: Tables, origin: Any, same: Callable[[Any, Any], Any]) -> Any:
    head = tables.jobs_as("head")
    return _first(
        head,
        origin,
        head.c.limit_key == origin.c.limit_key,
        same(head.c.group_key, origin.c.group_key),
    )


def _next_limit(tables: Tables, origin: Any) -> Any:
    head = tables.jobs_as("head")
    return _first(head, origin, head.c.limit_key > origin.c.limit_key)


def _first(head: Any, origin: Any, *further: ColumnElement[bool]) -> Any:
    """Return the first ready job of the origin's queue and type, in the order of the index."""
    return (
        select(head.c.id)
        .where(
            in_state(head, State.READY),
            head.c.queue == origin.c.queue,
            head.c.type == origin.c.type,
            *further,
        )
        .order_by(head.c.limit_key, head.c.group_key, head.c.priority, head.c.id)
        .limit(1)
        .scalar_subquery()
        .correlate(origin)
    )
