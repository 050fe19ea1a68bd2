"""Pauses: queues and types of which no job is started until they are resumed.

A pause is a condition of the claim itself, so that it counts from its commit on, for every worker.
That workers also know of it, from their chores, only spares them looking at lanes that are closed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, and_, delete, exists, or_, select

from asyncjobq.backends.base import Backend
from asyncjobq.errors import InvalidJobError
from asyncjobq.models import Tables
from asyncjobq.options import check_text

QUEUE: Final = "queue"
TYPE: Final = "type"
_LENGTHS: Final = {QUEUE: 64, TYPE: 128}


@dataclass(frozen=True)
class Pause:
    """A queue or a type that is paused; the other is None."""

    queue: str | None
    type: str | None
    paused_at: datetime


@dataclass(frozen=True)
class Closed:
    """The names of what is paused."""

    queues: frozenset[str] = frozenset()
    types: frozenset[str] = frozenset()


NOTHING: Final = Closed()


def pause_lanes(connection: Connection, backend: Backend, kind: str, name: str) -> None:
    """Pause a queue or a type; one that is paused stays so since when it was."""
    pause = {"kind": kind, "name": name, "paused_at": backend.read_clock(connection)}
    backend.insert_if_absent(connection, backend.tables.pauses, [pause])


def resume_lanes(connection: Connection, backend: Backend, kind: str, name: str) -> bool:
    """End a pause; tell whether there was one."""
    pauses = backend.tables.pauses
    ended = delete(pauses).where(pauses.c.kind == kind, pauses.c.name == name)
    return connection.execute(ended).rowcount > 0


def named(queue: Any, type_: Any) -> tuple[str, str]:
    """Return which kind of lanes is meant, and its name; raises InvalidJobError."""
    given = [(kind, name) for kind, name in ((QUEUE, queue), (TYPE, type_)) if name is not None]
    if len(given) != 1:
        raise InvalidJobError("Name one queue or one type: queue='media', or type='resize'.")
    ((kind, name),) = given
    check_text(kind, name, _LENGTHS[kind])
    return kind, name


def list_pauses(connection: Connection, backend: Backend) -> list[Pause]:
    """Return what is paused, queues first, in the order of their names."""
    pauses = backend.tables.pauses
    rows = connection.execute(select(pauses).order_by(pauses.c.kind, pauses.c.name))
    return [_pause(row) for row in rows]


def pauses_of(connection: Connection, backend: Backend, queue: str, type_: str) -> list[Pause]:
    """Return the pauses that hold the jobs of this type in this queue."""
    pauses = backend.tables.pauses
    of_queue = and_(pauses.c.kind == QUEUE, pauses.c.name == queue)
    of_type = and_(pauses.c.kind == TYPE, pauses.c.name == type_)
    rows = connection.execute(select(pauses).where(or_(of_queue, of_type)).order_by(pauses.c.kind))
    return [_pause(row) for row in rows]


def _pause(row: Any) -> Pause:
    return Pause(
        queue=row.name if row.kind == QUEUE else None,
        type=row.name if row.kind == TYPE else None,
        paused_at=row.paused_at,
    )


def closed_lanes(connection: Connection, backend: Backend) -> Closed:
    """Return the names of what is paused."""
    found = list_pauses(connection, backend)
    return Closed(
        frozenset(pause.queue for pause in found if pause.queue is not None),
        frozenset(pause.type for pause in found if pause.type is not None),
    )


def not_paused(backend: Backend) -> ColumnElement[bool]:
    """Return the condition that a job is of no queue and no type that is paused.

    Its first half costs one look at an empty table for a whole statement, which is all while
    nothing is paused.
    """
    return _not_paused(backend.tables)


@lru_cache
def _not_paused(tables: Tables) -> ColumnElement[bool]:
    jobs, pauses = tables.jobs, tables.pauses
    same = or_(
        and_(pauses.c.kind == QUEUE, pauses.c.name == jobs.c.queue),
        and_(pauses.c.kind == TYPE, pauses.c.name == jobs.c.type),
    )
    anything = select(tables.pauses.alias("paused").c.kind).exists()
    return or_(~anything, ~exists().where(same).correlate(jobs))
