"""Recurring jobs: schedules in and out, and firing those whose time has come.

Any worker fires; there is no leader. Firing is one short transaction: lock the schedule's row,
insert its jobs, move it on to its next time. Whoever comes second finds the row locked, or moved
on. The clock is the database's throughout.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final, Self

from sqlalchemy import Connection, Row, delete, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.cron import times_between
from asyncjobq.enqueue import TOPIC, insert_jobs
from asyncjobq.errors import ConfigurationError, ScheduleNotFoundError
from asyncjobq.job import Job
from asyncjobq.options import JobSpec
from asyncjobq.ready import FiredHere
from asyncjobq.recurrence import FIELDS, CatchUp, Definition
from asyncjobq.states import TERMINAL

MOST_MISSED: Final = 1000
"""Jobs at most for the times that one schedule has missed."""
GRACE: Final = timedelta(minutes=1)
"""By how much a time may be missed that is not to be caught up with."""

REMOVALS: Final = 10
"""How often a schedule may be removed while it is being stored."""

logger = logging.getLogger("asyncjobq.schedules")


@dataclass(frozen=True)
class Schedule(Definition):
    """A schedule as it was when it was read: what recurs and when, its next time and its last.

    `next_fire` is None while it is paused; `last_fire` and `last_job_id` until it first fired.
    """

    paused: bool
    next_fire: datetime | None
    last_fire: datetime | None
    last_job_id: int | None
    created_at: datetime
    updated_at: datetime

    @classmethod
    def from_row(cls, row: Row[Any]) -> Self:
        """Make a schedule of its row."""
        values = {field.name: getattr(row, field.name) for field in fields(cls)}
        return cls(**{**values, "catch_up": CatchUp(row.catch_up)})


def list_schedules(connection: Connection, backend: Backend) -> list[Schedule]:
    """Return all schedules by name."""
    table = backend.tables.schedules
    rows = connection.execute(select(*table.c).order_by(table.c.name))
    return [Schedule.from_row(row) for row in rows]


def add_schedule(connection: Connection, backend: Backend, definition: Definition) -> Schedule:
    """Store one definition as `save_schedules` does; returns the schedule."""
    save_schedules(connection, backend, [definition])
    return Schedule.from_row(_found(connection, backend, definition.name))


def save_schedules(connection: Connection, backend: Backend, wanted: Iterable[Definition]) -> None:
    """Store definitions, each in place of what its name meant before.

    One that says the same as before changes nothing; another timing starts anew from now. Raises
    ConfigurationError for a name that stands in code if the definition does not.
    """
    definitions = {definition.name: definition for definition in wanted}
    now = backend.read_clock(connection)
    for row in _there(connection, backend, definitions, now):
        definition = definitions[row.name]
        if row.declared and not definition.declared:
            raise ConfigurationError(
                f"The schedule {row.name!r} is declared in code: change it there, or remove it "
                "there and then with remove_schedule()."
            )
        if _stored(row) != definition:
            _write(connection, backend, row.name, _changes(row, definition, now))
    backend.notify(connection, TOPIC)


def _there(
    connection: Connection, backend: Backend, definitions: Mapping[str, Definition], now: datetime
) -> Sequence[Row[Any]]:
    """Insert the schedules that are not there, and lock all; one may be removed in between."""
    new = [_new_row(definitions[name], now) for name in sorted(definitions)]
    rows: Sequence[Row[Any]] = []
    for _ in range(REMOVALS):
        backend.insert_if_absent(connection, backend.tables.schedules, new)
        rows = _waited_for(connection, backend, definitions)
        if len(rows) == len(new):
            break
    return rows


def unsaved(
    connection: Connection, backend: Backend, wanted: Iterable[Definition]
) -> list[Definition]:
    """Return the definitions that are not stored as they are; waits for nobody."""
    definitions = {definition.name: definition for definition in wanted}
    table = backend.tables.schedules
    for chunk in chunked(list(definitions), 500):
        for row in connection.execute(select(*table.c).where(table.c.name.in_(chunk))):
            if _stored(row) == definitions[row.name]:
                del definitions[row.name]
    return list(definitions.values())


def remove_schedule(connection: Connection, backend: Backend, name: str) -> None:
    """Delete a schedule, whose jobs stay; raises ScheduleNotFoundError."""
    table = backend.tables.schedules
    if not connection.execute(delete(table).where(table.c.name == name)).rowcount:
        raise ScheduleNotFoundError(name)


def pause_schedule(connection: Connection, backend: Backend, name: str) -> None:
    """Have a schedule not fire until it is resumed; raises ScheduleNotFoundError."""
    _found(connection, backend, name)
    _write(connection, backend, name, {"paused": True, "next_fire": None})


def resume_schedule(connection: Connection, backend: Backend, name: str) -> None:
    """Have a paused schedule fire again, from its next time on; raises ScheduleNotFoundError."""
    row = _found(connection, backend, name)
    if row.paused:
        now = backend.read_clock(connection)
        next_fire = _stored(row).recurrence(row.anchor).after(now)
        _write(connection, backend, name, {"paused": False, "next_fire": next_fire})
        backend.notify(connection, TOPIC)


def due_schedules(
    connection: Connection, backend: Backend, fired: FiredHere, limit: int = 100
) -> list[str]:
    """Return the names of schedules whose time has come, the most overdue first."""
    table = backend.tables.schedules
    return [
        name
        for part in fired.parts(table)
        for name in connection.scalars(
            select(table.c.name)
            .where(part, table.c.next_fire <= backend.now())
            .order_by(table.c.next_fire)
            .limit(limit)
        )
    ]


@dataclass(frozen=True)
class Fired:
    """How many schedules moved on, which were left to workers that know more, and the new jobs."""

    moved: int
    unfit: list[str]
    jobs: Sequence[Job[Any]]


def fire_once(
    connection: Connection,
    backend: Backend,
    names: Sequence[str],
    added: Mapping[str, Any] = MappingProxyType({}),
) -> Fired:
    """Enqueue the jobs of these schedules, if they are due still and nobody else fires them.

    Their `meta` has what is `added`.
    """
    table = backend.tables.schedules
    by_key = select(*table.c).where(table.c.name.in_(names)).order_by(table.c.name)
    due = by_key.where(table.c.next_fire <= backend.now())
    rows = connection.execute(backend.locking(due, table)).all()
    now = backend.read_clock(connection)
    open_jobs = _open_jobs(connection, backend, rows)
    firings, unfit = [], []
    for row in rows:
        try:
            firings.append(_firing(row, now, added, busy=row.last_job_id in open_jobs))
        except ValueError as error:  # of another release, or this machine knows fewer time zones
            logger.warning("The schedule %r cannot be fired here: %s", row.name, error)
            unfit.append(row.name)
    jobs = _enqueue(connection, backend, firings)
    for firing in firings:
        firing.move_on(connection, backend)
    return Fired(len(firings), unfit, jobs)


@dataclass
class _Firing:
    """One schedule that is due, the jobs that it gives, and when it is due again."""

    row: Row[Any]
    next_fire: datetime | None
    last_fire: datetime | None
    jobs: list[JobSpec[Any]]
    last_job_id: int | None = None

    def move_on(self, connection: Connection, backend: Backend) -> None:
        values: dict[str, Any] = {"next_fire": self.next_fire}
        if self.jobs:
            values |= {"last_fire": self.last_fire, "last_job_id": self.last_job_id}
        table = backend.tables.schedules
        same = (table.c.name == self.row.name, table.c.next_fire == self.row.next_fire)
        if connection.execute(update(table).where(*same).values(values)).rowcount != 1:
            # Behind the lock: whatever it is that let another worker in, nothing fires twice.
            raise RuntimeError(f"The schedule {self.row.name!r} was fired while it was locked.")


def _firing(row: Row[Any], now: datetime, added: Mapping[str, Any], *, busy: bool) -> _Firing:
    """Return what a schedule gives now; raises ValueError for what is not understood here."""
    definition = _stored(row)
    recurrence = definition.recurrence(row.anchor)
    most = MOST_MISSED if definition.catch_up is CatchUp.ALL else 1
    times = times_between(recurrence, row.next_fire, now, most)
    if definition.catch_up is CatchUp.NONE:
        times = [time for time in times if now - time <= GRACE]
    if not definition.overlap:
        times = [] if busy else times[-1:]
    jobs = [definition.job(_meta(row.name, time), added) for time in times]
    return _Firing(row, recurrence.after(now), times[-1] if times else None, jobs)


def _meta(name: str, time: datetime) -> dict[str, str]:
    return {"schedule": name, "fired_at": time.isoformat()}


def _enqueue(
    connection: Connection, backend: Backend, firings: Sequence[_Firing]
) -> Sequence[Job[Any]]:
    inserted = insert_jobs(connection, backend, [job for firing in firings for job in firing.jobs])
    ids = iter(job.id for job in inserted)
    for firing in firings:
        for _ in firing.jobs:
            firing.last_job_id = next(ids)
    return inserted


def _open_jobs(connection: Connection, backend: Backend, rows: Sequence[Row[Any]]) -> set[int]:
    """Return the last jobs, where they must not overlap with the next, that have not ended."""
    jobs = backend.tables.jobs
    last = [row.last_job_id for row in rows if not row.overlap and row.last_job_id is not None]
    query = select(jobs.c.id).where(jobs.c.id.in_(last), jobs.c.state.not_in(TERMINAL))
    return set(connection.scalars(query)) if last else set()


def _new_row(definition: Definition, now: datetime) -> dict[str, Any]:
    return {
        **{name: getattr(definition, name) for name in FIELDS},
        "paused": False,
        "anchor": now,
        "next_fire": definition.recurrence(now).after(now),
        "created_at": now,
        "updated_at": now,
    }


def _changes(row: Row[Any], definition: Definition, now: datetime) -> dict[str, Any]:
    values = {name: getattr(definition, name) for name in FIELDS}
    if definition.timing != _stored(row).timing:
        next_fire = None if row.paused else definition.recurrence(now).after(now)
        values |= {"anchor": now, "next_fire": next_fire}
    return values


def _stored(row: Row[Any]) -> Definition:
    """Return the definition in a row; raises ValueError for what this release does not know."""
    values = {name: getattr(row, name) for name in FIELDS}
    return Definition(**{**values, "catch_up": CatchUp(row.catch_up)})


def _write(connection: Connection, backend: Backend, name: str, values: dict[str, Any]) -> None:
    table = backend.tables.schedules
    changed = update(table).where(table.c.name == name)
    connection.execute(changed.values({**values, "updated_at": backend.now()}))


def _found(connection: Connection, backend: Backend, name: str) -> Row[Any]:
    backend.begin_writing(connection)
    rows = _waited_for(connection, backend, [name])
    if not rows:
        raise ScheduleNotFoundError(name)
    return rows[0]


def _waited_for(
    connection: Connection, backend: Backend, names: Iterable[str]
) -> Sequence[Row[Any]]:
    """Lock schedules by name, waiting for whoever holds them."""
    table = backend.tables.schedules
    found: list[Row[Any]] = []
    for chunk in chunked(sorted(names), 500):
        query = select(*table.c).where(table.c.name.in_(chunk)).order_by(table.c.name)
        found += connection.execute(query.with_for_update(key_share=True))
    return found
