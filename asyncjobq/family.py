"""Parents and children: what opens, what closes, and what is cancelled or revived with what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Executable,
    FromClause,
    Integer,
    Row,
    Select,
    Update,
    and_,
    bindparam,
    case,
    exists,
    false,
    func,
    or_,
    select,
    update,
)

from asyncjobq.backends.base import Backend, chunked, rows_by_id
from asyncjobq.enqueue import TOPIC
from asyncjobq.models import in_state
from asyncjobq.states import NOT_STARTED, TERMINAL, Kind, State
from asyncjobq.transition import End, Locked, open_children


def standing(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[Row[Any]]:
    """Return of these jobs the blocked ones, each with what holds it or says that it is over.

    `held`: an edge is not satisfied. `hopeless`: its parent is over or being cancelled. `enclosed`:
    its parent has not opened. `later`: its time has not come.
    """
    return rows_by_id(connection, backend.built(_standing), job_ids)


def hopeless(rows: Sequence[Row[Any]]) -> list[End]:
    """Return ends for blocked children whose parent is over, or is being cancelled."""
    return [_cancelled_with_parent(row) for row in rows if row.hopeless]


def promote(connection: Connection, backend: Backend, rows: Sequence[Row[Any]]) -> None:
    """Let blocked jobs go.

    A container opens: it stays unsettled, so that its children are looked at next.
    """
    for chunk in chunked([row.id for row in rows], 500):
        connection.execute(backend.built(_promotion), {"ids": chunk})


def _standing(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    parent = backend.tables.jobs_as("parent")
    has_parent = jobs.c.parent_id.is_not(None)
    return (
        select(
            *(jobs.c[name] for name in ("id", "kind", "parent_id", "lease_owner", "lease_token")),
            _unsatisfied(backend).label("held"),
            and_(parent.c.id.is_not(None), _over(parent)).label("hopeless"),
            and_(has_parent, or_(parent.c.id.is_(None), ~_open(parent))).label("enclosed"),
            func.coalesce(jobs.c.run_after > backend.now(), false()).label("later"),
        )
        .outerjoin(parent, parent.c.id == jobs.c.parent_id)
        .where(backend.among(jobs.c.id), in_state(jobs, State.BLOCKED))
    )


def _promotion(backend: Backend) -> Update:
    jobs = backend.tables.jobs
    is_container = jobs.c.kind == Kind.CONTAINER
    state = case(
        (is_container, State.WAITING),
        (jobs.c.run_after > backend.now(), State.SCHEDULED),
        else_=State.READY,
    )
    settled = and_(jobs.c.settled, ~is_container)
    values = {"state": state, "settled": settled, "updated_at": backend.now()}
    return update(jobs).where(backend.among(jobs.c.id)).values(values)


def _unsatisfied(backend: Backend) -> ColumnElement[bool]:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    return exists().where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied).correlate(jobs)


def _open(parent: FromClause) -> ColumnElement[bool]:
    """Return the condition that what is below a parent may go.

    A container opens when its own upstreams are done; a job has children only once it has run.
    """
    opened = or_(in_state(parent, State.WAITING), parent.c.kind == Kind.JOB)
    return and_(opened, ~_over(parent))


def _over(parent: FromClause) -> ColumnElement[bool]:
    return or_(parent.c.state.in_(sorted(TERMINAL)), parent.c.cancel_requested)


def children_to_look_at(
    connection: Connection, backend: Backend, parents: Sequence[Any], limit: int
) -> list[tuple[int, int]]:
    """Return up to `limit` pairs (parent, child) that a parent's state asks something of.

    Of a parent that is open, the blocked children; of one that is being cancelled, all that have
    not been told yet.
    """
    if not parents:
        return []
    parameters = {
        "opened": [row.id for row in parents if not row.cancel_requested],
        "cancelling": [row.id for row in parents if row.cancel_requested],
        "most": limit,
    }
    found = connection.execute(backend.built(_children_to_look_at), parameters)
    return [(row.parent_id, row.id) for row in found]


def _children_to_look_at(backend: Backend) -> Executable:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    parent_is_open = exists().where(parent.c.id == jobs.c.parent_id, _open(parent)).correlate(jobs)
    free = (in_state(jobs, State.BLOCKED), ~_unsatisfied(backend), parent_is_open)
    untold = and_(~jobs.c.cancel_requested, jobs.c.state.not_in(sorted(TERMINAL)))
    return (
        select(jobs.c.parent_id, jobs.c.id)
        .where(
            or_(
                and_(backend.among(jobs.c.parent_id, "opened"), *free),
                and_(backend.among(jobs.c.parent_id, "cancelling"), untold),
            )
        )
        .order_by(jobs.c.parent_id, jobs.c.id)
        .limit(bindparam("most", type_=Integer))
    )


def cancel_children(
    connection: Connection, backend: Backend, children: Sequence[int]
) -> tuple[list[End], int]:
    """Cancel locked children of parents that are being cancelled.

    Returns ends for those that have not started; the others are asked, and their number returned.
    """
    ends: list[End] = []
    asked: list[int] = []
    for row in rows_by_id(connection, backend.built(_untold), children):
        if row.state in NOT_STARTED:
            ends.append(_cancelled_with_parent(row))
        else:
            asked.append(row.id)
    for chunk in chunked(asked, 500):
        connection.execute(backend.built(_told), {"ids": chunk})
    if asked:  # those that run may do so in another process
        backend.notify(connection, TOPIC)
    return ends, len(asked)


def _untold(backend: Backend) -> Select[Any]:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    names = ("id", "lease_owner", "lease_token", "parent_id", "state")
    return (
        select(*(jobs.c[name] for name in names))
        .join(parent, parent.c.id == jobs.c.parent_id)
        .where(
            backend.among(jobs.c.id),
            jobs.c.state.not_in(sorted(TERMINAL)),
            ~jobs.c.cancel_requested,
            parent.c.cancel_requested,
        )
    )


def _told(backend: Backend) -> Update:
    jobs = backend.tables.jobs
    values = {**_asked(backend), "cause": jobs.c.parent_id}
    return update(jobs).where(backend.among(jobs.c.id)).values(values)


def _asked(backend: Backend) -> dict[str, Any]:
    return {"cancel_requested": True, "settled": False, "updated_at": backend.now()}


def fail_fast(connection: Connection, backend: Backend, parents: Sequence[int]) -> list[int]:
    """Begin to cancel containers that are to fail with their first failed child."""
    found = [row.id for row in rows_by_id(connection, backend.built(_failing_fast), parents)]
    for chunk in chunked(found, 500):
        connection.execute(backend.built(_hurried), {"ids": chunk})
    return found


def _failing_fast(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    return select(jobs.c.id).where(
        backend.among(jobs.c.id),
        in_state(jobs, State.WAITING),
        jobs.c.fail_fast,
        ~jobs.c.cancel_requested,
        _has_child(backend, State.FAILED),
        open_children(backend.tables, jobs),
    )


def _hurried(backend: Backend) -> Update:
    jobs = backend.tables.jobs
    return update(jobs).where(backend.among(jobs.c.id)).values(_asked(backend))


def closed(connection: Connection, backend: Backend, parents: Sequence[int]) -> list[End]:
    """Return ends for locked parents that wait and whose last child has ended.

    A container is done if all in it is done, cancelled if that was asked, else failed. A job takes
    its own result or failure.
    """
    return [_closed(row) for row in rows_by_id(connection, backend.built(_without_open), parents)]


def _without_open(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    return select(
        *(jobs.c[name] for name in ("id", "lease_owner", "lease_token", "kind", "error")),
        *(jobs.c[name] for name in ("cause", "cancel_requested", "fail_fast")),
        _first_child(backend, State.FAILED).label("failed"),
        _first_child(backend, State.CANCELLED).label("cancelled"),
    ).where(
        backend.among(jobs.c.id),
        in_state(jobs, State.WAITING),
        ~open_children(backend.tables, jobs),
    )


def _has_child(backend: Backend, state: State) -> ColumnElement[bool]:
    child = backend.tables.jobs_as(f"{state}_child")
    found = exists().where(child.c.parent_id == backend.tables.jobs.c.id, in_state(child, state))
    return found.correlate(backend.tables.jobs)


def _first_child(backend: Backend, state: State) -> ColumnElement[int | None]:
    jobs = backend.tables.jobs
    child = backend.tables.jobs_as(f"{state}_child")
    query = select(child.c.id).where(child.c.parent_id == jobs.c.id, in_state(child, state))
    return query.order_by(child.c.id).limit(1).correlate(jobs).scalar_subquery()


def _closed(row: Any) -> End:
    locked = Locked.of(row)
    if row.kind == Kind.JOB:
        state = State.FAILED if row.error is not None else State.DONE
        state = State.CANCELLED if row.cancel_requested else state
        return End(locked, state, error=row.error, cause=row.cause)
    failed_fast = row.fail_fast and row.failed is not None
    if row.cancel_requested and not failed_fast:
        by_whom = "on request" if row.cause is None else f"with its parent, job {row.cause}"
        error = row.error or f"cancelled {by_whom}"
        return End(locked, State.CANCELLED, error=error, cause=row.cause)
    if row.failed is not None:
        return End(locked, State.FAILED, error=f"job {row.failed} in it failed", cause=row.failed)
    if row.cancelled is not None:
        error = f"job {row.cancelled} in it was cancelled"
        return End(locked, State.FAILED, error=error, cause=row.cancelled)
    return End(locked, State.DONE)


def _cancelled_with_parent(row: Any) -> End:
    error = f"cancelled with its parent, job {row.parent_id}"
    return End(Locked.of(row), State.CANCELLED, error=error, cause=row.parent_id)
