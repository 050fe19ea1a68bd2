"""MySQL 8+ and MariaDB 10.6+: InnoDB locks every row that it reads, so what locks reads little.

A claim reads candidates without locks, locks exactly those by primary key, and writes them by
primary key. All under READ COMMITTED, where InnoDB takes no gap locks; every sweep does the same,
which is what keeps concurrent workers free of deadlocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    Table,
    and_,
    false,
    func,
    insert,
    or_,
    select,
    text,
)
from sqlalchemy.dialects.mysql import insert as insert_or

from asyncjobq.backends import lanes
from asyncjobq.backends.base import (
    Backend,
    Lane,
    LaneKind,
    LanePage,
    LaneScan,
    MakeUpdate,
    Take,
    chunked,
    rows_by_id,
)
from asyncjobq.backends.mysql_json import parted, update_from_json
from asyncjobq.backends.mysql_keys import MySQLKeys
from asyncjobq.errors import SchemaError, UnsupportedDatabaseError
from asyncjobq.models import LANE, in_state
from asyncjobq.states import State
from asyncjobq.transactions import Fault

OLDEST_MYSQL: Final = (8, 0, 14)
OLDEST_MARIADB: Final = (10, 6)
SCHEMA_LOCK_TIMEOUT: Final = 60
LONGEST_IDLE: Final = 2_147_483
"""Seconds that the server lets wait_timeout be set to on every platform."""
# Less than what the drivers put into one statement, for a second one would have ids of its own.
BATCH_ROWS: Final = 500
BATCH_BYTES: Final = 1_000_000

_READY: Final = "{}_ready"

# By the numbers of both servers, which agree up to 2999; those from 1000 on that are not in
# here say that the statement is wrong, or not allowed.
_CONFLICT: Final = {1205, 1206, 1213, 1020, 3058, 3101, 3572}
_AWAY: Final = {
    *(1040, 1047, 1053, 1077, 1129, 1203, 1226),  # takes no connections, or not now
    *(1021, 1037, 1041, 1290, 1792, 1836),  # has no room, or is a replica meanwhile
    *(1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031),  # ended the connection
    *(2002, 2003, 2006, 2013, 2014, 2055),  # the driver's own
}
_DATA: Final = {
    *(1048, 1062, 1451, 1452, 3819, 4025),  # refused by a key or a check
    *(1153, 1301, 1406),  # too long
    *(1264, 1265, 1292, 1366, 1367, 1411, 1441, 1690),  # outside the range or form of its type
    *(1300, 3140, 3141, 3988),  # no text, or no JSON
}


class MySQLBackend(MySQLKeys):
    """InnoDB."""

    name: ClassVar[str] = "mysql"
    bind_limit: ClassVar[int] = 60_000

    def _clock(self, plus: float | ColumnElement[float]) -> ColumnElement[Any]:
        if isinstance(plus, float) and plus == 0.0:
            return func.utc_timestamp(6)
        shift = func.round(plus * 1_000_000) if not isinstance(plus, float) else round(plus * 1e6)
        return func.timestampadd(text("MICROSECOND"), shift, func.utc_timestamp(6))

    def locking(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        # Through any other index it would lock rows that we do not take.
        return self.by_key(query, table).with_for_update(skip_locked=True)

    def by_key(self, query: Select[Any], table: Table | None = None) -> Select[Any]:
        of = self.tables.jobs if table is None else table
        return query.with_hint(of, "FORCE INDEX (PRIMARY)")

    def by_lane(self, query: Select[Any]) -> Select[Any]:
        return query.with_hint(self.tables.jobs, f"FORCE INDEX ({self._ready_index})")

    def commits_at_once(self, connection: Connection) -> bool:
        driver: Any = connection.connection.dbapi_connection
        return connection.dialect.detect_autocommit_setting(driver)

    def lanes(self, connection: Connection, scan: LaneScan) -> LanePage:
        slice_ = self._slice(connection, scan)
        if not slice_.cut or len(slice_.lanes) >= scan.bound // 4:
            return slice_
        # A few lanes with many jobs each: jump from lane to lane.
        after = {(lane.queue, lane.type): lane for lane in (*scan.after, *slice_.lanes)}
        rest = replace(scan, after=tuple(after.values()))
        found = lanes.weighted(_loose(self.tables.jobs, rest), self.tables.groups)
        rows = connection.execute(found).all()
        return LanePage(slice_.lanes + lanes.page(rows, rest).lanes, len(rows) >= rest.bound)

    def _slice(self, connection: Connection, scan: LaneScan) -> LanePage:
        """Read ready jobs in the order of their index and keep the first of each lane.

        Bounded whatever the statistics say, which the loose scan is not.
        """
        jobs = self.tables.jobs
        hint = f"FORCE INDEX ({self._ready_index})"
        query = select(*lanes.head_columns(jobs)).where(_in_range(jobs, scan))
        query = query.with_hint(jobs, hint).limit(scan.bound)
        # MariaDB sorts the whole range if a column that has one value in it stands in the order.
        queues, types = zip(*scan.kinds, strict=True)
        fixed = {n for n, v in (("queue", queues), ("type", types)) if len(set(v)) == 1}
        order = [jobs.c[name] for name in (*LANE, "priority", "id") if name not in fixed]
        found = lanes.weighted(query.order_by(*order), self.tables.groups)
        rows = connection.execute(found).all()
        return LanePage(lanes.page(rows, scan).lanes, len(rows) >= scan.bound)

    def first_ready(
        self, connection: Connection, column: ColumnElement[str], *conditions: ColumnElement[bool]
    ) -> str | None:
        # MariaDB sorts whatever the range holds if it is asked for the first row of an order.
        ready = select(func.min(column)).where(in_state(self.tables.jobs, State.READY))
        return connection.scalar(ready.where(*conditions))

    @property
    def _ready_index(self) -> str:
        return _READY.format(self.tables.jobs.name)

    def claim(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
        values: Mapping[str, Any],
        columns: Sequence[ColumnElement[Any]],
    ) -> list[Row[Any]]:
        groups = self.candidates(connection, takes, conditions)
        claimed = [
            job_id
            for take, candidates in zip(takes, groups, strict=True)
            for job_id in self._lock_first(connection, candidates, take.count, conditions)
        ]
        return self.claim_rows(connection, claimed, values, columns) if claimed else []

    def candidates(
        self,
        connection: Connection,
        takes: Sequence[Take],
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[list[int]]:
        hint = f"FORCE INDEX ({self._ready_index})"
        return lanes.first_candidates(connection, self, takes, conditions, spare=3, hint=hint)

    def _lock_first(
        self,
        connection: Connection,
        candidates: Sequence[int],
        count: int,
        conditions: Sequence[ColumnElement[bool]],
    ) -> list[int]:
        """Lock candidates by primary key, chunk by chunk, until enough are ours."""
        query = self.built(_candidates, tuple(conditions))
        locked: list[int] = []
        for chunk in chunked(candidates, count):
            wanted = sorted(chunk[: count - len(locked)])
            rows = self.free_to_end(connection, rows_by_id(connection, query, wanted))
            locked += [row.id for row in rows]
            if len(locked) >= count:
                break
        return locked

    def update_each(
        self, connection: Connection, make: MakeUpdate, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        # MariaDB may read all of a small table first, and wait for rows that others hold.
        mariadb = bool(getattr(connection.dialect, "is_mariadb", False))
        together, one_by_one = ([], list(rows)) if mariadb else parted(rows)
        if together:
            update_from_json(connection, self, make, together)
        if one_by_one:
            super().update_each(connection, make, one_by_one)

    def insert_jobs(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        jobs = self.tables.jobs
        ids: list[int] = []
        for batch in lanes.batches(rows, BATCH_ROWS, BATCH_BYTES):
            connection.execute(insert(jobs), batch)
            ids += _ids_of(connection, len(batch))
        return ids

    def insert_if_absent(
        self, connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        statement = insert_or(table)
        key = next(iter(table.primary_key))
        connection.execute(statement.on_duplicate_key_update({key.name: key}), list(rows))

    def _fault_of_code(self, cause: BaseException) -> Fault:
        code = cause.args[0] if cause.args else None
        if code in _CONFLICT:
            return Fault.CONFLICT
        if code in _AWAY:
            return Fault.UNAVAILABLE
        return Fault.DATA if code in _DATA else Fault.OTHER

    def check(self, connection: Connection) -> None:
        dialect = connection.dialect
        mariadb = bool(getattr(dialect, "is_mariadb", False))
        product, oldest = ("MariaDB", OLDEST_MARIADB) if mariadb else ("MySQL", OLDEST_MYSQL)
        version = tuple(
            part for part in (dialect.server_version_info or ()) if isinstance(part, int)
        )
        if version < oldest:
            raise UnsupportedDatabaseError(
                f"{product} {'.'.join(map(str, version))} is too old: it has no SKIP LOCKED. "
                f"{product} {'.'.join(map(str, oldest))} or newer is needed."
            )
        self._check_engine(connection)
        self._check_charset(connection)

    def _check_engine(self, connection: Connection) -> None:
        query = text(
            "SELECT engine FROM information_schema.tables "
            "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :name"
        )
        name = {"schema": self.tables.schema, "name": self.tables.jobs.name}
        engine = connection.execute(query, name).scalar()
        if engine is not None and str(engine).lower() != "innodb":
            raise UnsupportedDatabaseError(
                f"The table {self.tables.jobs.name!r} uses the storage engine {engine}, which has "
                "no row locks. Convert it: ALTER TABLE … ENGINE=InnoDB."
            )

    def _check_charset(self, connection: Connection) -> None:
        charset = connection.exec_driver_sql("SELECT @@character_set_client").scalar_one()
        if charset != "utf8mb4":
            raise UnsupportedDatabaseError(
                f"The connection's character set is {charset}, in which not every text can be "
                "sent. Leave charset out of the URL, or make it charset=utf8mb4."
            )

    @contextmanager
    def schema_lock(self, connection: Connection) -> Iterator[None]:
        database = connection.exec_driver_sql("SELECT DATABASE()").scalar_one()
        name = f"{self.tables.schema or database}.{self.tables.prefix}"
        lock = f"asyncjobq_{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        taken = connection.execute(select(func.get_lock(lock, SCHEMA_LOCK_TIMEOUT))).scalar()
        if taken != 1:
            raise SchemaError(
                "Another process has been creating the tables for "
                f"{SCHEMA_LOCK_TIMEOUT} s; look at SHOW PROCESSLIST and try again."
            )
        try:
            yield
        finally:
            connection.execute(select(func.release_lock(lock)))


def _candidates(backend: Backend, conditions: Sequence[ColumnElement[bool]]) -> Select[Any]:
    jobs = backend.tables.jobs
    query: Any = select(jobs.c.id, jobs.c.unique_held).where(*conditions)
    return backend.locking_by_id(query)


def _ids_of(connection: Connection, count: int) -> range:
    """Return the ids of the rows that were inserted last.

    One INSERT of a known number of rows is given ids at a constant distance, whatever
    innodb_autoinc_lock_mode says. The drivers make one of an executemany.
    """
    query = "SELECT LAST_INSERT_ID(), ROW_COUNT(), @@auto_increment_increment"
    first, inserted, step = connection.exec_driver_sql(query).one()
    if inserted != count:
        raise UnsupportedDatabaseError(
            f"The driver {connection.dialect.driver!r} splits an INSERT of several rows, so that "
            "the ids of the jobs cannot be known; use aiomysql, asyncmy or pymysql."
        )
    return range(first, first + step * count, step)


def _in_range(jobs: Table, scan: LaneScan) -> ColumnElement[bool]:
    """Return the ranges of the index that the scan covers, in a form which both servers seek."""
    after = {(lane.queue, lane.type): lane for lane in scan.after}
    closed: dict[LaneKind, list[str]] = {}
    for queue, type_, limit_key in sorted(scan.closed):
        closed.setdefault((queue, type_), []).append(limit_key)
    in_part = {kind for kind in scan.kinds if kind in after or kind in closed}
    ranges = _whole(jobs, [kind for kind in scan.kinds if kind not in in_part])
    for kind in sorted(in_part):
        ranges += _rest(jobs, kind, after.get(kind), closed.get(kind, []))
    return and_(in_state(jobs, State.READY), or_(false(), *ranges))


def _whole(jobs: Table, kinds: Sequence[LaneKind]) -> list[ColumnElement[bool]]:
    """Return the ranges of queues and types, those together that have the same types."""
    by_queue = {
        queue: tuple(type_ for _, type_ in same)
        for queue, same in groupby(sorted(kinds), key=lambda kind: kind[0])
    }
    by_types: dict[tuple[str, ...], list[str]] = {}
    for queue, types in by_queue.items():
        by_types.setdefault(types, []).append(queue)
    return [
        and_(jobs.c.queue.in_(queues), jobs.c.type.in_(types)) for types, queues in by_types.items()
    ]


def _rest(
    jobs: Table, kind: LaneKind, after: Lane | None, closed: Sequence[str]
) -> list[ColumnElement[bool]]:
    """Return the ranges of one queue and type after a lane and without keys that are closed."""
    same = and_(jobs.c.queue == kind[0], jobs.c.type == kind[1])
    ranges = []
    if after is not None:
        if after.limit_key not in closed:
            here = and_(same, jobs.c.limit_key == after.limit_key)
            ranges.append(and_(here, jobs.c.group_key > after.group_key))
        closed = [key for key in closed if key > after.limit_key]
        same = and_(same, jobs.c.limit_key > after.limit_key)
    ranges.append(and_(same, jobs.c.limit_key.not_in(closed)) if closed else same)
    return ranges


def _loose(jobs: Table, scan: LaneScan) -> Select[Any]:
    """Select one job of each lane without reading the others: "index for group-by".

    Both optimizers need the constant `state` among the distinct columns for it. The job of a lane
    is looked up without ORDER BY, with which MySQL sorts the lane; it is the first in index order
    all the same, and only a hint.
    """
    keys = ("state", *LANE)
    distinct = select(*(jobs.c[name] for name in keys)).where(_in_range(jobs, scan)).distinct()
    lane = distinct.limit(scan.bound).subquery("lane")
    head = jobs.alias("head")
    first = (
        select(head.c.id)
        .where(in_state(head, State.READY), *(head.c[name] == lane.c[name] for name in LANE))
        .with_hint(head, f"FORCE INDEX ({_READY.format(jobs.name)})")
        .limit(1)
        .scalar_subquery()
        .correlate(lane)
    )
    heads = select(first.label("id")).select_from(lane).limit(scan.bound).subquery("heads")
    columns = lanes.head_columns(jobs)
    found = select(*columns).select_from(heads).join(jobs, jobs.c.id == heads.c.id)
    return found.prefix_with("STRAIGHT_JOIN")


def session_settings(lease_ttl: float) -> list[str]:
    """Return what each of our sessions is told.

    A process that is frozen inside a transaction must not keep its row locks past the lease. The
    only limit that both servers have is the one on idle sessions.
    """
    return [
        "SET SESSION innodb_lock_wait_timeout = 5",
        "SET SESSION sql_safe_updates = 0",  # it refuses what goes by a secondary index
        f"SET SESSION wait_timeout = {idle_limit(lease_ttl)}",
    ]


def idle_limit(lease_ttl: float) -> int:
    """Return after how many idle seconds the server closes a session of ours."""
    return min(max(1, int(lease_ttl * 0.9)), LONGEST_IDLE)
