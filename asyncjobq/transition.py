"""The writes that take a job out of a state: to its end, or back into the line.

The caller has locked the rows in an earlier statement and read their tokens under that lock, so
each write can carry the whole fence. That the lock is a statement of its own matters: under READ
COMMITTED each statement sees what was committed before *it*, and only a statement after the lock
is sure to see every edge that was committed while the job ran.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Update,
    and_,
    case,
    exists,
    func,
    literal_column,
    or_,
    select,
    update,
)

from asyncjobq.backends.base import Backend, New, bound, rows_by_id
from asyncjobq.codec import Encoded
from asyncjobq.models import Tables
from asyncjobq.states import OPEN, State


class Locked(NamedTuple):
    """A job's row that this transaction has locked, with the lease it carried then."""

    id: int
    owner: str | None
    token: int

    @classmethod
    def of(cls, row: Any) -> Self:
        """Take these from a row that was read under its lock."""
        return cls(row.id, row.lease_owner, row.lease_token)


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


def fence(tables: Tables, new: New = bound) -> ColumnElement[bool]:
    """Return what every write on behalf of a lease must find true of a row."""
    jobs = tables.jobs
    owner = new("row_owner", jobs.c.lease_owner.type)
    return and_(
        jobs.c.id == new("row_id", jobs.c.id.type),
        or_(jobs.c.lease_owner == owner, and_(jobs.c.lease_owner.is_(None), owner.is_(None))),
        jobs.c.lease_token == new("row_token", jobs.c.lease_token.type),
    )


def fence_values(row: Locked) -> dict[str, Any]:
    """Return the parameters of `fence` for one row."""
    return {"row_id": row.id, "row_owner": row.owner, "row_token": row.token}


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of jobs that were to end."""

    waiting: frozenset[int] = frozenset()
    """Those whose own work is over, but that have children still open."""
    unsettled: frozenset[int] = frozenset()
    """Those that have neighbours to be told, by `settle.py`."""


def end_jobs(connection: Connection, backend: Backend, ends: Sequence[End]) -> Ended:
    """End locked jobs, result and state in one write.

    A job that has dependants or a parent is left unsettled. One that has open children keeps its
    result or error and waits for them.
    """
    if not ends:
        return Ended()
    found = neighbours(connection, backend, [end.row.id for end in ends])
    neighboured, parents = found.neighboured, found.parents
    over = [end for end in ends if end.row.id not in parents]
    waiting = [end for end in ends if end.row.id in parents]
    if over:
        backend.update_each(connection, _end, [_end_values(end, neighboured) for end in over])
        backend.notify_ended(connection)
    if held := found.held - parents:
        backend.forget_keys(connection, sorted(held))
    if waiting:
        backend.update_each(connection, _wait, [_wait_values(end) for end in waiting])
    return Ended(frozenset(parents), frozenset(neighboured | parents))


def end_unsettled(
    connection: Connection, backend: Backend, ends: Sequence[End], *, waits: bool
) -> None:
    """End locked jobs, or let them wait for their children, without a look at their neighbours.

    They are left unsettled, so that a settling looks at them.
    """
    if not ends:
        return
    if waits:
        backend.update_each(connection, _wait, [_wait_values(end) for end in ends])
    else:
        ids = {end.row.id for end in ends}
        backend.update_each(connection, _end, [_end_values(end, ids) for end in ends])
        backend.forget_keys(connection, sorted(ids))
        backend.notify_ended(connection)


def return_jobs(connection: Connection, backend: Backend, returns: Sequence[Return]) -> None:
    """Put locked jobs back into the line."""
    if returns:
        backend.update_each(connection, _return, [_return_values(item) for item in returns])


def _guarded(backend: Backend, new: New, values: Mapping[str, Any]) -> Update:
    return update(backend.tables.jobs).where(fence(backend.tables, new)).values(dict(values))


def _return(backend: Backend, new: New) -> Update:
    jobs = backend.tables.jobs
    delay = new("new_delay", jobs.c.weight.type)
    values = {
        "state": new("new_state", jobs.c.state.type),
        "error": new("new_error", jobs.c.error.type),
        "attempt": jobs.c.attempt - new("attempt_back", jobs.c.attempt.type),
        "run_after": case((delay > 0, backend.now(delay)), else_=jobs.c.run_after),
        **_unleased(backend),
    }
    return _guarded(backend, new, values)


@dataclass
class Neighbours:
    """Which jobs have somebody around them, or something to give up."""

    neighboured: set[int] = field(default_factory=set)
    """Those with a parent or dependants."""
    parents: set[int] = field(default_factory=set)
    """Those with open children."""
    held: set[int] = field(default_factory=set)
    """Those that hold a unique key."""


def neighbours(connection: Connection, backend: Backend, ids: list[int]) -> Neighbours:
    """Look around jobs that are to end. Reads after the lock, see above."""
    found = Neighbours()
    for row in rows_by_id(connection, backend.built(_neighboured), ids):
        if row.waits:
            found.parents.add(row.id)
        elif row.told:
            found.neighboured.add(row.id)
        if row.holds:
            found.held.add(row.id)
    return found


def _neighboured(backend: Backend) -> Executable:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    has_dependants = exists().where(deps.c.depends_on_id == jobs.c.id).correlate(jobs)
    has_children = open_children(backend.tables, jobs)
    is_told = or_(jobs.c.parent_id.is_not(None), has_dependants)
    holds = jobs.c.unique_held.is_not(None)
    return select(
        jobs.c.id, has_children.label("waits"), is_told.label("told"), holds.label("holds")
    ).where(backend.among(jobs.c.id), or_(is_told, has_children, holds))


def open_children(tables: Tables, jobs: FromClause) -> ColumnElement[bool]:
    """Return the condition that a job has children which have not ended."""
    child = tables.jobs_as("child")
    still_open = child.c.state.in_([literal_column(f"'{state}'") for state in sorted(OPEN)])
    return exists().where(child.c.parent_id == jobs.c.id, still_open).correlate(jobs)


def _unleased(backend: Backend) -> dict[str, Any]:
    return {
        "in_flight": False,
        "lease_owner": None,
        "lease_expires": None,
        "updated_at": backend.now(),
    }


def _end(backend: Backend, new: New) -> Update:
    jobs = backend.tables.jobs
    state = new("new_state", jobs.c.state.type)
    cause = new("new_cause", jobs.c.cause.type)
    values = {
        "state": state,
        # A job that waited for its children has its own result already.
        "result": func.coalesce(new("new_result", jobs.c.result.type), jobs.c.result),
        "error": new("new_error", jobs.c.error.type),
        # One that was asked to end keeps why it was asked: a retry of that revives it.
        "cause": case((state == State.CANCELLED, func.coalesce(cause, jobs.c.cause)), else_=cause),
        "settled": new("new_settled", jobs.c.settled.type),
        "finished_at": backend.now(),
        # A period outlasts its job.
        "unique_held": case((jobs.c.unique_until > backend.now(), jobs.c.unique_held), else_=None),
        **_unleased(backend),
    }
    return _guarded(backend, new, values)


def _wait(backend: Backend, new: New) -> Update:
    jobs = backend.tables.jobs
    cancelled = new("cancelled", jobs.c.cancel_requested.type)
    values = {
        "state": State.WAITING,
        "result": new("new_result", jobs.c.result.type),
        "error": new("new_error", jobs.c.error.type),
        "cause": func.coalesce(new("new_cause", jobs.c.cause.type), jobs.c.cause),
        "cancel_requested": or_(jobs.c.cancel_requested, cancelled),
        "settled": False,
        **_unleased(backend),
    }
    return _guarded(backend, new, values)


def _wait_values(end: End) -> dict[str, Any]:
    return {
        **fence_values(end.row),
        "new_result": end.result,
        "new_error": end.error,
        "new_cause": end.cause,
        "cancelled": end.state is State.CANCELLED,
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
