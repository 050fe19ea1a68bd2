"""The permits of a claim: what may start under its limits, decided under the locks of their rows.

A count alone would exclude nobody, so whoever claims under a limit holds the lock on its row. A
permit for concurrency belongs to a lease: it counts while that lease stands, so that it cannot be
lost and needs no write when the job ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import inf
from typing import Any

from sqlalchemy import Connection, Select, and_, bindparam, delete, func, or_, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.limit_rules import Place, Use
from asyncjobq.limits import Concurrency, Limit
from asyncjobq.meters import Level, Meter, meter_of


@dataclass
class Permits:
    """The meters of the limits in one claim, by name and value."""

    meters: Mapping[Place, Meter]
    rows: Mapping[Place, int]
    """The ids of the rows that are locked."""
    missing: Collection[Place] = ()
    """Those that have no row yet."""
    started: list[tuple[Use, int, int]] = field(default_factory=list)
    """Uses with the job's id and its new token."""
    touched: set[Place] = field(default_factory=set)

    def room(self, uses: Iterable[Use]) -> float:
        """Return how many jobs may start under all of these limits, at most."""
        return min((self._meter(use).room() for use in uses), default=inf)

    def admit(self, uses: Collection[Use], cost: float, job_id: int, token: int) -> bool:
        """Let a job start under all of its limits, or under none."""
        if not all(self._meter(use).fits(cost) for use in uses):
            return False
        for use in uses:
            self._meter(use).take(cost)
            self.started.append((use, job_id, token))
            self.touched.add(use.place)
        return True

    def waits(self, uses: Iterable[Use]) -> dict[Place, float | None]:
        """Return the limits without room, and the seconds until they may have some.

        None stands for: when a job ends.
        """
        full = [use for use in uses if self._meter(use).room() <= 0]
        return {use.place: self._meter(use).wait() for use in full if use.place not in self.missing}

    def waits_for(self, uses: Iterable[Use], cost: float) -> dict[Place, float | None]:
        """Return the limits that keep a job of this cost from starting."""
        held = [use for use in uses if not self._meter(use).fits(cost)]
        return {use.place: self._meter(use).wait() for use in held}

    def _meter(self, use: Use) -> Meter:
        return self.meters[use.place]


def open_permits(
    connection: Connection, backend: Backend, uses: Collection[Use], *, wait: bool = False
) -> Permits:
    """Lock the rows of these limits and read their levels.

    One that another worker has locked has no room, unless it is to be waited for; nor has one that
    has no row yet.
    """
    kept = {use.place: use.limit for use in uses}
    known = limit_rows(connection, backend, kept)
    ids = {known[place].id: place for place in kept if place in known}
    locked = _locked(connection, backend, sorted(ids), wait=wait)
    now = backend.read_clock(connection)
    counted = [row.id for row in locked if isinstance(kept[ids[row.id]], Concurrency)]
    live = _live(connection, backend, counted)
    meters: dict[Place, Meter] = dict.fromkeys(kept, Meter())
    for row in locked:
        place = ids[row.id]
        limit = as_set(kept[place], known.get((place[0], "")))
        meters[place] = meter_of(limit, Level(row.level, row.moment), live.get(row.id, 0), now)
    return Permits(
        meters, {ids[row.id]: row.id for row in locked}, missing=kept.keys() - known.keys()
    )


def places_without_room(
    connection: Connection, backend: Backend, uses: Collection[Use]
) -> dict[Place, float | None]:
    """Return which of these limits have no room, and the seconds until they may have some.

    Locks nothing, and so is no permit to start a job that it does not name.
    """
    kept = {use.place: use.limit for use in uses}
    known = limit_rows(connection, backend, kept)
    now = backend.read_clock(connection)
    counted = [known[place].id for place, limit in kept.items() if _counts(limit, place, known)]
    live = live_permits(connection, backend, counted) if counted else Counter[int]()
    waits: dict[Place, float | None] = {}
    for place in kept.keys() & known.keys():
        row, limit = known[place], as_set(kept[place], known.get((place[0], "")))
        meter = meter_of(limit, Level(row.level, row.moment), live[row.id], now)
        if meter.room() <= 0:
            waits[place] = meter.wait()
    return waits


def _counts(limit: Limit, place: Place, known: Mapping[Place, Any]) -> bool:
    return isinstance(limit, Concurrency) and place in known


def limit_settings(
    connection: Connection, backend: Backend, names: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """Return what was set at runtime for these limits: their amount, per and burst."""
    limits = backend.tables.limits
    columns = (limits.c.name, limits.c.amount, limits.c.per, limits.c.burst)
    query = select(*columns).where(limits.c.name.in_(names), limits.c.value == "")
    rows = connection.execute(query.where(limits.c.amount.is_not(None)))
    return {row.name: tuple(row)[1:] for row in rows}


def make_rows(connection: Connection, backend: Backend, places: Collection[Place]) -> None:
    """Make the rows of limits that have none.

    In a transaction of its own: whoever makes the same row at the same time waits for its end.
    """
    new = [{"name": name, "value": value} for name, value in sorted(places)]
    backend.insert_if_absent(connection, backend.tables.limits, new)


def save_permits(
    connection: Connection, backend: Backend, permits: Permits, started_at: datetime
) -> None:
    """Write what the jobs have used up that have started until then."""
    tables = backend.tables
    taken = [
        {"limit_id": permits.rows[use.place], "job_id": job_id, "token": token}
        for use, job_id, token in permits.started
        if isinstance(use.limit, Concurrency)
    ]
    backend.insert_rows(connection, tables.permits, taken)
    for place in sorted(permits.touched):
        level = permits.meters[place].level(started_at)
        if level is not None:
            save_level(connection, backend, permits.rows[place], level)


def save_level(connection: Connection, backend: Backend, limit_id: int, level: Level) -> None:
    """Write the level of one limit, whose row is locked."""
    limits = backend.tables.limits
    values = {"level": level.amount, "moment": level.moment}
    connection.execute(update(limits).where(limits.c.id == limit_id).values(values))


def as_set(limit: Limit, row: Any) -> Any:
    """Return a limit with what was set for it at runtime."""
    if row is None or row.amount is None:
        return limit
    if isinstance(limit, Concurrency):
        return replace(limit, most=int(row.amount))
    given = {name: getattr(row, name) for name in ("per", "burst") if hasattr(limit, name)}
    chosen = {name: value for name, value in given.items() if value is not None}
    return replace(limit, amount=row.amount, **chosen)  # type: ignore[call-arg]


def limit_rows(
    connection: Connection, backend: Backend, places: Collection[Place]
) -> dict[Place, Any]:
    """Read the rows of these limits, and those that hold what was set at runtime."""
    values: dict[str, set[str]] = {}
    for name, value in places:
        values.setdefault(name, {""}).add(value)
    if not values:
        return {}
    parameters: dict[str, Any] = {}
    for number, name in enumerate(sorted(values)):
        parameters |= {f"name_{number}": name, f"values_{number}": sorted(values[name])}
    rows = connection.execute(backend.built(_rows_of, len(values)), parameters)
    return {(row.name, row.value): row for row in rows}


def _rows_of(backend: Backend, names: int) -> Select[Any]:
    limits = backend.tables.limits
    of_name = (
        and_(
            limits.c.name == bindparam(f"name_{number}"),
            backend.among(limits.c.value, f"values_{number}"),
        )
        for number in range(names)
    )
    return select(limits).where(or_(*of_name))


def live_permits(
    connection: Connection, backend: Backend, ids: Collection[int] | None = None
) -> Counter[int]:
    """Count the permits whose leases stand, by the id of the limit's row, of all or of these."""
    permits, jobs = backend.tables.permits, backend.tables.jobs
    same_lease = and_(jobs.c.id == permits.c.job_id, jobs.c.lease_token == permits.c.token)
    query = select(permits.c.limit_id, func.count().label("live")).join(jobs, same_lease)
    if ids is not None:
        query = query.where(permits.c.limit_id.in_(ids))
    rows = connection.execute(query.where(jobs.c.in_flight).group_by(permits.c.limit_id))
    return Counter({row.limit_id: row.live for row in rows})


def _locked(
    connection: Connection, backend: Backend, ids: Sequence[int], *, wait: bool
) -> list[Any]:
    limits = backend.tables.limits
    query: Any = select(limits.c.id, limits.c.level, limits.c.moment)
    rows: list[Any] = []
    for chunk in chunked(ids, 200):
        ordered = query.where(limits.c.id.in_(chunk)).order_by(limits.c.id)
        locking = ordered.with_for_update() if wait else backend.locking(ordered, limits)
        rows += connection.execute(locking)
    return rows


def _live(connection: Connection, backend: Backend, ids: Sequence[int]) -> dict[int, int]:
    """Count the permits whose leases stand, and drop the others; the limits' rows are locked."""
    permits, jobs = backend.tables.permits, backend.tables.jobs
    same_lease = and_(jobs.c.id == permits.c.job_id, jobs.c.lease_token == permits.c.token)
    columns: list[Any] = [permits.c.limit_id, permits.c.job_id, jobs.c.in_flight]
    query = select(*columns).outerjoin(jobs, same_lease)
    live: dict[int, int] = {}
    for chunk in chunked(ids, 200):
        over: list[Any] = []
        for row in connection.execute(query.where(permits.c.limit_id.in_(chunk))).all():
            if row.in_flight:
                live[row.limit_id] = live.get(row.limit_id, 0) + 1
            else:
                over.append(row)
        _drop(connection, backend, over)
    return live


def _drop(connection: Connection, backend: Backend, rows: Sequence[Any]) -> None:
    permits = backend.tables.permits
    by_limit: dict[int, list[int]] = {}
    for row in rows:
        by_limit.setdefault(row.limit_id, []).append(row.job_id)
    for limit_id, job_ids in by_limit.items():
        for chunk in chunked(job_ids, 500):
            here = and_(permits.c.limit_id == limit_id, permits.c.job_id.in_(chunk))
            connection.execute(delete(permits).where(here))
