"""PostgreSQL: a claim is one statement with FOR NO KEY UPDATE SKIP LOCKED; LISTEN wakes workers."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import inf
from typing import Any, ClassVar, Final

from sqlalchemy import (
    ARRAY,
    JSON,
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    Table,
    Text,
    Update,
    any_,
    bindparam,
    case,
    cast,
    func,
    insert,
    select,
    text,
    true,
    tuple_,
    type_coerce,
    update,
)
from sqlalchemy.dialects.postgresql import insert as insert_or
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.dml import ReturningUpdate

from asyncjobq.backends import lanes
from asyncjobq.backends.base import (
    Backend,
    LanePage,
    LaneScan,
    MakeUpdate,
    Take,
    rows_by_id,
    values_of_each,
)
from asyncjobq.clock import monotonic
from asyncjobq.column_types import JsonText
from asyncjobq.errors import ConfigurationError, StaleSnapshotError, UnsupportedDatabaseError
from asyncjobq.models import LANE, Tables, in_state
from asyncjobq.states import State
from asyncjobq.transactions import Fault

OLDEST: Final = 120_000
LONGEST_TIMEOUT: Final = 2**31 - 1
"""Milliseconds that the server lets a session's timeout be set to."""


class PostgreSQLBackend(Backend):
    """Row locks that a caller's foreign keys do not block, arrays instead of many parameters."""

    name: ClassVar[str] = "postgresql"
    bind_limit: ClassVar[int] = 32_000
    listens: ClassVar[bool] = True
    claims_alone: ClassVar[bool] = True
    commits_for_nothing: ClassVar[bool] = True

    def _clock(self, plus: float | ColumnElement[float]) -> ColumnElement[Any]:
        if isinstance(plus, float) and plus == 0.0:
            return func.clock_timestamp()
        return func.clock_timestamp() + func.make_interval(0, 0, 0, 0, 0, 0, plus)

    def text_of(self, column: ColumnElement[Any]) -> ColumnElement[str]:
        return cast(column, Text)

    def locking(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        of = self.tables.jobs if table is None else table
        return query.with_for_update(key_share=True, skip_locked=True, of=of)

    def among(self, column: ColumnElement[Any], name: str = "ids") -> ColumnElement[bool]:
        # One text, and so one prepared statement, however many values there are.
        return column == any_(bindparam(name, type_=ARRAY(column.type)))

    @contextmanager
    def by_index(self, connection: Connection) -> Iterator[None]:
        # Without statistics of a column, a list of 500 values is taken for most of the table.
        before = connection.exec_driver_sql("SHOW enable_seqscan").scalar_one()
        connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
        yield
        # The rest of the transaction may be a caller's. An error has undone it, or will.
        connection.exec_driver_sql(f"SET LOCAL enable_seqscan = {before}")

    def locking_all(self, query: Select[Any]) -> Select[Any]:
        return query.with_for_update(skip_locked=True, of=self.tables.jobs)

    def keep_existing(self, connection: Connection, ids: Iterable[int]) -> set[int]:
        # What the foreign keys would lock, but before anything is written.
        query = self._by_id(select(self.tables.jobs.c.id))
        query = query.with_for_update(read=True, key_share=True)
        wanted = sorted(ids)
        if not wanted or self.reads_fresh(connection):
            return {row.id for row in rows_by_id(connection, query, wanted)}
        try:
            with self.savepoint(connection):
                return {row.id for row in rows_by_id(connection, query, wanted)}
        except DBAPIError as error:
            if not self.is_stale(error):
                raise
            raise StaleSnapshotError([], "A job that depends_on names was deleted") from error

    def refuse_snapshot(self, connection: Connection, what: str) -> None:
        level = connection.get_isolation_level()
        if level in ("REPEATABLE READ", "SERIALIZABLE"):
            raise ConfigurationError(
                f"{what} does not work in a transaction at {level}: the renewals of the job's "
                "lease meanwhile make PostgreSQL refuse it. Use READ COMMITTED for this session, "
                'first of all by await session.connection(execution_options={"isolation_level": '
                '"READ COMMITTED"}).'
            )

    def lanes(self, connection: Connection, scan: LaneScan) -> LanePage:
        walk = _lanes(self.tables, skipping=bool(scan.closed))
        rows = connection.execute(walk, lanes.starts_as_arrays(scan)).all()
        return lanes.page(rows, scan)

    def claim(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        if not takes:
            return []
        kept = (tuple(conditions), tuple(values.items()), tuple(columns))
        return list(connection.execute(self.built(_claim, *kept), _arrays(takes)))

    def candidates(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[list[int]]:
        return lanes.first_candidates(connection, self, takes, conditions, spare=3)

    def update_each(
        self, connection: Connection, make: MakeUpdate, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        names, statement = self.built(_update_from_arrays, make)
        arrays = {f"{name}_array": [row[name] for row in rows] for name in names}
        connection.execute(statement, arrays)

    def insert_jobs(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        jobs = self.tables.jobs
        names = list(rows[0])
        source = _unnested(jobs, names)
        order = source.c["ordinality"]
        picked = select(*(_typed(source.c[name], jobs.c[name].type) for name in names)).order_by(
            order
        )
        statement = insert(jobs).from_select(names, picked).returning(jobs.c.id)
        ids: list[int] = []
        for batch in lanes.batches(rows):
            arrays = {f"{name}_array": [row[name] for row in batch] for name in names}
            ids += sorted(connection.scalars(statement, arrays))
        return ids

    def insert_if_absent(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        connection.execute(insert_or(table).on_conflict_do_nothing(), list(rows))

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables)
        self.awaited_until = inf
        """Until when somebody may wait for ends, by the monotonic clock; see `listening.py`."""

    def keep_holders(
        self, connection: Connection, holders: Mapping[int, str], *, wait: bool
    ) -> set[int]:
        jobs = self.tables.jobs
        holds = jobs.c.unique_held.is_not(None)
        query = select(jobs.c.id).where(jobs.c.id.in_(holders), holds).order_by(jobs.c.id)
        query = query.with_for_update(read=True, skip_locked=True)
        kept = set(connection.scalars(query))
        for job_id in sorted(holders.keys() - kept if wait else ()):
            if self.wait_to_lock(connection, job_id, holds):
                kept.add(job_id)
        return kept

    def still_holders(self, connection: Connection, holders: Mapping[int, str]) -> set[int]:
        # A lock fails for a row that has changed since the snapshot; it is given up at once.
        jobs = self.tables.jobs
        query = select(jobs.c.id).where(jobs.c.id.in_(holders), jobs.c.unique_held.is_not(None))
        connection.execute(text("SAVEPOINT asyncjobq_lock"))
        still = set(connection.scalars(query.order_by(jobs.c.id).with_for_update(read=True)))
        connection.execute(text("ROLLBACK TO SAVEPOINT asyncjobq_lock"))
        connection.execute(text("RELEASE SAVEPOINT asyncjobq_lock"))
        return still

    def read_current(self, connection: Connection, query: Select[Any]) -> Sequence[Row[Any]]:
        # As below: it fails for a row that has changed, and is given up at once.
        connection.execute(text("SAVEPOINT asyncjobq_lock"))
        rows = super().read_current(connection, query)
        connection.execute(text("ROLLBACK TO SAVEPOINT asyncjobq_lock"))
        connection.execute(text("RELEASE SAVEPOINT asyncjobq_lock"))
        return rows

    def wait_to_lock(
        self, connection: Connection, job_id: int, *conditions: ColumnElement[bool]
    ) -> bool:
        # A row that changed while we waited stays locked, though it meets the conditions no more.
        connection.execute(text("SAVEPOINT asyncjobq_lock"))
        locked = super().wait_to_lock(connection, job_id, *conditions)
        if not locked:
            connection.execute(text("ROLLBACK TO SAVEPOINT asyncjobq_lock"))
        connection.execute(text("RELEASE SAVEPOINT asyncjobq_lock"))
        return locked

    def is_stale(self, error: BaseException) -> bool:
        return _code_of(getattr(error, "orig", error)) in ("23505", "40001")

    def notify(self, connection: Connection, topic: str) -> None:
        connection.execute(select(func.pg_notify(channel(self.tables), topic)))

    def notify_ended(self, connection: Connection) -> None:
        if monotonic() < self.awaited_until:
            connection.execute(select(func.pg_notify(channel_of_ends(self.tables), "")))

    def _fault_of_code(self, cause: BaseException) -> Fault:
        code = _code_of(cause)
        if code.startswith("40") or code == "55P03":
            return Fault.CONFLICT
        # 25006: it is a replica meanwhile. 53: no connection left, no memory, no disk.
        if code.startswith(("08", "53", "57P")) or code in ("25006", "25P03", "25P04"):
            return Fault.UNAVAILABLE
        # The connection ended in the middle of a message, and the driver lost its place in it.
        if type(cause.__cause__).__name__ == "InternalClientError":
            return Fault.UNAVAILABLE
        return Fault.DATA if code.startswith(("22", "23", "54")) else Fault.OTHER

    def check(self, connection: Connection) -> None:
        version = int(connection.exec_driver_sql("SHOW server_version_num").scalar_one())
        if version < OLDEST:
            raise UnsupportedDatabaseError(
                f"PostgreSQL {version // 10_000} is too old; 12 or newer is needed."
            )

    @contextmanager
    def schema_lock(self, connection: Connection) -> Iterator[None]:
        key = int.from_bytes(hashlib.sha256(channel(self.tables).encode()).digest()[:7])
        connection.execute(select(func.pg_advisory_xact_lock(key)))
        yield


def _code_of(cause: Any) -> str:
    return str(getattr(cause, "sqlstate", "") or getattr(cause, "pgcode", "") or "")


def channel(tables: Tables) -> str:
    """Return the LISTEN channel of these tables, within PostgreSQL's 63 bytes."""
    if tables.schema is None and not tables.prefix:
        return "asyncjobq"
    name = f"{tables.schema or ''}.{tables.prefix}"
    return f"asyncjobq_{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def channel_of_ends(tables: Tables) -> str:
    """Return the LISTEN channel that tells of the ends of jobs."""
    return f"{channel(tables)}_ended"


@lru_cache
def _lanes(tables: Tables, *, skipping: bool) -> Select[Any]:
    """Walk the index of ready jobs from lane to lane, one look-up each; LIMIT ends the walk.

    With `skipping`, from a lane of a closed key to the next key.
    """
    jobs = tables.jobs
    closed = bindparam("closed", type_=ARRAY(Text))
    start = (
        func.unnest(*(cast(bindparam(f"{name}_array"), ARRAY(Text)) for name in LANE))
        .table_valued(*LANE)
        .render_derived("start")
    )

    def step(origin: Any, compare: Callable[[Any, Any], Any]) -> Select[Any]:
        here = tuple_(jobs.c.limit_key, jobs.c.group_key)
        group = origin.c.group_key
        if skipping:
            group = case((lanes.mark_of(origin) == any_(closed), lanes.LAST), else_=group)
        head = (
            select(*lanes.head_columns(jobs))
            .where(
                in_state(jobs, State.READY),
                jobs.c.queue == origin.c.queue,
                jobs.c.type == origin.c.type,
                compare(here, tuple_(origin.c.limit_key, group)),
            )
            .order_by(jobs.c.limit_key, jobs.c.group_key, jobs.c.priority, jobs.c.id)
            .limit(1)
            .lateral("head")
        )
        return select(head).select_from(origin).join(head, true())

    lane = step(start, operator.ge).cte("lane", recursive=True)
    lane = lane.union_all(step(lane, operator.gt))
    return lanes.weighted(select(lane).limit(bindparam("bound", type_=Integer)), tables.groups)


def _claim(
    backend: Backend,
    conditions: Sequence[ColumnElement[bool]],
    values: Sequence[tuple[str, Any]],
    columns: Sequence[ColumnElement[Any]],
) -> ReturningUpdate[Any]:
    jobs = backend.tables.jobs
    # As an array, so that the planner goes by primary key whatever it expects of the lanes.
    first = func.array(_first_of_each(jobs, conditions).scalar_subquery())
    return update(jobs).where(jobs.c.id == any_(first)).values(dict(values)).returning(*columns)


def _first_of_each(jobs: Table, conditions: Sequence[ColumnElement[bool]]) -> Select[Any]:
    """Select the first ids of each take across its lanes, locked, skipping what is locked.

    One static text however many lanes there are: they come as arrays, one LATERAL look each.
    """
    lane = (
        func.unnest(
            *(cast(bindparam(f"{name}_array"), ARRAY(Text)) for name in LANE),
            cast(bindparam("take_array"), ARRAY(jobs.c.id.type)),
            cast(bindparam("count_array"), ARRAY(jobs.c.id.type)),
        )
        .table_valued(*LANE, "take", "count")
        .render_derived("lane")
    )
    head = (
        select(jobs.c.id, jobs.c.priority)
        .where(*(jobs.c[name] == lane.c[name] for name in LANE), *conditions)
        .order_by(jobs.c.priority, jobs.c.id)
        .limit(lane.c["count"])
        .with_for_update(key_share=True, skip_locked=True, of=jobs)
        .lateral("head")
    )
    place = func.row_number().over(partition_by=lane.c.take, order_by=(head.c.priority, head.c.id))
    merged = (
        select(head.c.id, lane.c["count"].label("wanted"), place.label("place"))
        .select_from(lane)
        .join(head, true())
        .cte("merged")
    )
    return select(merged.c.id).where(merged.c.place <= merged.c.wanted)


def _arrays(takes: Sequence[Take]) -> dict[str, list[Any]]:
    rows = [(lane, number, take.count) for number, take in enumerate(takes) for lane in take.lanes]
    arrays: dict[str, list[Any]] = {
        f"{name}_array": [getattr(lane, name) for lane, _, _ in rows] for name in LANE
    }
    arrays["take_array"] = [number for _, number, _ in rows]
    arrays["count_array"] = [count for _, _, count in rows]
    return arrays


def _update_from_arrays(backend: Backend, make: MakeUpdate) -> tuple[list[str], Update]:
    types = values_of_each(backend, make)
    arrays = (
        cast(bindparam(f"{name}_array"), ARRAY(_element_type(type_)))
        for name, type_ in types.items()
    )
    each = func.unnest(*arrays).table_valued(*types).render_derived("each")
    return list(types), make(backend, lambda name, type_: _typed(each.c[name], type_))


def _unnested(jobs: Table, names: Sequence[str]) -> Any:
    arrays = (
        cast(bindparam(f"{name}_array"), ARRAY(_element_type(jobs.c[name].type))) for name in names
    )
    return (
        func.unnest(*arrays)
        .table_valued(*names, with_ordinality="ordinality")
        .render_derived("source")
    )


def _element_type(type_: Any) -> Any:
    return Text() if isinstance(type_, JsonText) else type_


def _typed(value: ColumnElement[Any], type_: Any) -> ColumnElement[Any]:
    return cast(value, JSON) if isinstance(type_, JsonText) else type_coerce(value, type_)


def session_settings(lease_ttl: float) -> list[str]:
    """Return what each of our sessions is told.

    A process that is frozen inside a transaction must not keep its row locks past the lease.
    """
    idle = min(max(1000, int(lease_ttl * 900)), LONGEST_TIMEOUT)
    return [
        f"SET idle_in_transaction_session_timeout = {idle}",
        "SET jit = off",  # it would cost more than our short statements do
    ]
