"""The writes that take a job out of a state: to its end, or back into the line.

The caller has locked the rows in an earlier statement and read their tokens under that lock, so
each write can carry the whole fence. That the lock is a statement of its own matters: under READ
COMMITTED each statement sees what was committed before *it*, and only a statement after the lock
is sure to see every edge that was committed while the job ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, bindparam, case, exists, or_, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.codec import Encoded
from asyncjobq.models import Tables
from asyncjobq.states import State


@dataclass(frozen=True, slots=True)
class Locked:
    """A job's row that this transaction has locked, with the lease it carried then."""

    id: int
    owner: str | None
    token: int


@dataclass(frozen=True, slots=True)
class End:
    """A job that ends now."""

    row: Locked
    state: State
    result: Encoded | None = None
    error: str | None = None
    cause: int | None = None


@dataclass(frozen=True, slots=True)
class Return:
    """A job that goes back into the line, to run again after some seconds."""

    row: Locked
    delay: float = 0.0
    error: str | None = None
    attempt_counts: bool = True


def fence(tables: Tables) -> ColumnElement[bool]:
    """Return what every write on behalf of a lease must find true, with bound parameters."""
    jobs = tables.jobs
    owner = bindparam("row_owner", type_=jobs.c.lease_owner.type)
    return and_(
        jobs.c.id == bindparam("row_id", type_=jobs.c.id.type),
        or_(jobs.c.lease_owner == owner, and_(jobs.c.lease_owner.is_(None), owner.is_(None))),
        jobs.c.lease_token == bindparam("row_token", type_=jobs.c.lease_token.type),
    )


def fence_values(row: Locked) -> dict[str, Any]:
    """Return the parameters of `fence` for one row."""
    return {"row_id": row.id, "row_owner": row.owner, "row_token": row.token}


def end_jobs(connection: Connection, backend: Backend, ends: Sequence[End]) -> bool:
    """End locked jobs, result and state in one write; tell whether any has to be settled.

    A job that has dependants or a parent is left unsettled: the outbox of `settle.py`.
    """
    if not ends:
        return False
    neighboured = _neighboured(connection, backend, [end.row.id for end in ends])
    statement = update(backend.tables.jobs).where(fence(backend.tables)).values(_end(backend))
    connection.execute(statement, [_end_values(end, neighboured) for end in ends])
    return bool(neighboured)


def return_jobs(connection: Connection, backend: Backend, returns: Sequence[Return]) -> None:
    """Put locked jobs back into the line."""
    if not returns:
        return
    jobs = backend.tables.jobs
    delay = bindparam("new_delay", type_=jobs.c.weight.type)
    values = {
        "state": bindparam("new_state"),
        "error": bindparam("new_error"),
        "attempt": jobs.c.attempt - bindparam("attempt_back", type_=jobs.c.attempt.type),
        "run_after": case((delay > 0, backend.now(delay)), else_=jobs.c.run_after),
        **_unleased(backend),
    }
    statement = update(jobs).where(fence(backend.tables)).values(values)
    connection.execute(statement, [_return_values(item) for item in returns])


def _neighboured(connection: Connection, backend: Backend, ids: list[int]) -> set[int]:
    """Return which jobs have a parent or dependants; reads after the lock, see above."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    has_dependants = exists().where(deps.c.depends_on_id == jobs.c.id).correlate(jobs)
    found: set[int] = set()
    for chunk in chunked(ids, 500):
        query = select(jobs.c.id).where(
            jobs.c.id.in_(chunk), or_(jobs.c.parent_id.is_not(None), has_dependants)
        )
        found.update(connection.scalars(query))
    return found


def _unleased(backend: Backend) -> dict[str, Any]:
    return {
        "in_flight": False,
        "lease_owner": None,
        "lease_expires": None,
        "updated_at": backend.now(),
    }


def _end(backend: Backend) -> dict[str, Any]:
    return {
        "state": bindparam("new_state"),
        "result": bindparam("new_result"),
        "error": bindparam("new_error"),
        "cause": bindparam("new_cause"),
        "settled": bindparam("new_settled"),
        "finished_at": backend.now(),
        "unique_held": None,
        **_unleased(backend),
    }


def _end_values(end: End, neighboured: set[int]) -> dict[str, Any]:
    return {
        **fence_values(end.row),
        "new_state": end.state,
        "new_result": end.result,
        "new_error": end.error,
        "new_cause": end.cause,
        "new_settled": end.row.id not in neighboured,
    }


def _return_values(item: Return) -> dict[str, Any]:
    return {
        **fence_values(item.row),
        "new_state": State.SCHEDULED if item.delay > 0 else State.READY,
        "new_error": item.error,
        "new_delay": item.delay,
        "attempt_back": 0 if item.attempt_counts else 1,
    }
