"""SQL that several backends share: the scan of lanes, candidates of a claim, batches of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Integer,
    Row,
    Select,
    Table,
    bindparam,
    func,
    select,
    union_all,
)

from asyncjobq.backends.base import Backend, Lane, LanePage, LaneScan, Take, chunked
from asyncjobq.models import LANE, Tables

LAST: Final = "\U0010ffff"
"""Stands behind all group keys: a walk that goes on from there is at the next `limit_key`."""

_BETWEEN: Final = "\x01"

BATCH_ROWS: Final = 1000
BATCH_BYTES: Final = 8_000_000


def head_columns(jobs: FromClause) -> list[ColumnElement[Any]]:
    """Return what a scan reads of a lane's first job."""
    return [jobs.c[name] for name in (*LANE, "priority", "weight")]


def weighted(scan: Select[Any], groups: Table) -> Select[Any]:
    """Return a scan, bounded already, with the weights that were set for its groups."""
    lane = scan.subquery("scanned")
    weight = func.coalesce(groups.c.weight, lane.c.weight).label("weight")
    joined = lane.outerjoin(groups, groups.c.group_key == lane.c.group_key)
    return select(*(lane.c[name] for name in (*LANE, "priority")), weight).select_from(joined)


def page(rows: Sequence[Row[Any]], scan: LaneScan) -> LanePage:
    """Return the lanes of these rows in order, each by its first, but none scanned before."""
    found: dict[tuple[str, ...], Lane] = {}
    for row in rows:
        place = (row.queue, row.type, row.limit_key, row.group_key)
        lane = Lane(*place, row.priority, row.weight)
        known = found.setdefault(lane.place, lane)
        if lane.head_priority < known.head_priority:
            found[lane.place] = lane
    for lane in scan.after:
        found.pop(lane.place, None)
    return LanePage(sorted(found.values(), key=lambda lane: lane.place), len(rows) >= scan.bound)


def _starts(scan: LaneScan) -> list[tuple[str, str, str, str]]:
    """Return where the walk begins, for each queue and type: at its first lane, or after one.

    Keys have no NUL, so that nothing lies between a key and the same with "\\x01" behind it.
    """
    after = {
        (lane.queue, lane.type): (
            *lane.place[:3],
            LAST if lane.place[:3] in scan.closed else lane.group_key + "\x01",
        )
        for lane in scan.after
    }
    return [after.get(kind, (*kind, "", "")) for kind in scan.kinds]


def starts_as_arrays(scan: LaneScan) -> dict[str, Any]:
    """Return the starts as one array for each column, the bound, and the marks of closed keys."""
    columns = zip(*_starts(scan), strict=True)
    arrays = {f"{name}_array": list(column) for name, column in zip(LANE, columns, strict=True)}
    return {**arrays, "bound": scan.bound, **({"closed": _marks(scan)} if scan.closed else {})}


def starts_as_json(scan: LaneScan) -> dict[str, Any]:
    """Return the starts as JSON text, the bound, and the marks of closed keys as JSON text."""
    closed = {"closed": json.dumps(_marks(scan))} if scan.closed else {}
    return {"starts": json.dumps(_starts(scan)), "bound": scan.bound, **closed}


def mark_of(lane: FromClause) -> ColumnElement[str]:
    """Return an expression that names a lane's queue, type and key in one text."""
    mark: ColumnElement[str] = lane.c.queue + _BETWEEN + lane.c.type + _BETWEEN
    return mark + lane.c.limit_key


def _marks(scan: LaneScan) -> list[str]:
    """Return the texts of the closed keys, but those whose text might be another's too."""
    named = (key for key in sorted(scan.closed) if _BETWEEN not in "".join(key))
    return [_BETWEEN.join(key) for key in named]


def first_candidates(
    connection: Connection,
    backend: Backend,
    takes: Sequence[Take],
    conditions: Sequence[ColumnElement[bool]],
    *,
    spare: int,
    hint: str = "",
) -> list[list[int]]:
    """Return for each take the ids of its first jobs by priority, read without locks.

    With `spare` n, n times as many again as asked for, for a claim that may lose some of them.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in takes]
    looks = [(number, lane, take.count) for number, take in enumerate(takes) for lane in take.lanes]
    for chunk in chunked(looks, 16):
        parameters: dict[str, Any] = {}
        for place, (number, lane, count) in enumerate(chunk):
            parameters |= {f"{name}_{place}": getattr(lane, name) for name in LANE}
            parameters |= {f"take_{place}": number, f"count_{place}": count * (1 + spare)}
        query = backend.built(_heads, len(chunk), tuple(conditions), hint)
        for row in connection.execute(query, parameters):
            found[row.take].append((row.priority, row.id))
    return [
        [job_id for _, job_id in sorted(rows)[: take.count * (1 + spare)]]
        for take, rows in zip(takes, found, strict=True)
    ]


def _heads(
    backend: Backend, count: int, conditions: Sequence[ColumnElement[bool]], hint: str
) -> Executable:
    heads = [
        select(_head(backend.tables, place, conditions, hint).subquery()) for place in range(count)
    ]
    return heads[0] if count == 1 else union_all(*heads)


def _head(tables: Tables, place: int, conditions: Sequence[ColumnElement[bool]], hint: str) -> Any:
    jobs = tables.jobs
    same_lane = (jobs.c[name] == bindparam(f"{name}_{place}") for name in LANE)
    take = bindparam(f"take_{place}", type_=Integer).label("take")
    query = select(take, jobs.c.id, jobs.c.priority).where(*same_lane, *conditions)
    query = query.order_by(jobs.c.priority, jobs.c.id)
    query = query.limit(bindparam(f"count_{place}", type_=Integer))
    return query.with_hint(jobs, hint, "mysql").with_hint(jobs, hint, "mariadb") if hint else query


def batches(
    rows: Sequence[Mapping[str, Any]], most: int = BATCH_ROWS, most_bytes: int = BATCH_BYTES
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield rows in lists that one statement carries, bounded in number and in bytes."""
    batch: list[Mapping[str, Any]] = []
    size = 0
    for row in rows:
        added = _bytes_of(row)
        if batch and (len(batch) >= most or size + added > most_bytes):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += added
    if batch:
        yield batch


def _bytes_of(row: Mapping[str, Any]) -> int:
    """Return how long a row may be in a statement: escaping can double its texts."""
    texts = (value for value in row.values() if isinstance(value, str))
    return 500 + 2 * sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
