"""Parents and children: what opens, what closes, and what is cancelled or revived with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, case, exists, or_, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.enqueue import TOPIC
from asyncjobq.models import in_state
from asyncjobq.states import NOT_STARTED, TERMINAL, Kind, State
from asyncjobq.transition import End, Locked, open_children


@dataclass
class Promoted:
    """What was let go."""

    jobs: set[int] = field(default_factory=set)
    containers: set[int] = field(default_factory=set)


def promote(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> Promoted:
    """Let blocked jobs go that nothing holds: no unsatisfied edge, and an open parent or none.

    A container opens: it stays unsettled, so that its children are looked at next.
    """
    jobs = backend.tables.jobs
    promoted = Promoted()
    for chunk in chunked(job_ids, 500):
        query = select(jobs.c.id, jobs.c.kind).where(*_unheld(backend), jobs.c.id.in_(chunk))
        free = connection.execute(query).all()
        if not free:
            continue
        is_container = jobs.c.kind == Kind.CONTAINER
        state = case(
            (is_container, State.WAITING),
            (jobs.c.run_after > backend.now(), State.SCHEDULED),
            else_=State.READY,
        )
        settled = and_(jobs.c.settled, ~is_container)
        values = {"state": state, "settled": settled, "updated_at": backend.now()}
        ids = [row.id for row in free]
        connection.execute(update(jobs).where(jobs.c.id.in_(ids)).values(values))
        containers = {row.id for row in free if row.kind == Kind.CONTAINER}
        promoted.containers |= containers
        promoted.jobs |= set(ids) - containers
    return promoted


def _unheld(backend: Backend) -> list[ColumnElement[bool]]:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    parent = backend.tables.jobs_as("parent")
    unsatisfied = exists().where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied)
    # A container opens when its own upstreams are done; a job has children only once it has run.
    opened = or_(in_state(parent, State.WAITING), parent.c.kind == Kind.JOB)
    parent_is_open = exists().where(
        parent.c.id == jobs.c.parent_id,
        parent.c.state.not_in(sorted(TERMINAL)),
        ~parent.c.cancel_requested,
        opened,
    )
    return [
        in_state(jobs, State.BLOCKED),
        ~unsatisfied.correlate(jobs),
        or_(jobs.c.parent_id.is_(None), parent_is_open.correlate(jobs)),
    ]


def without_hope(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[End]:
    """Return ends for blocked children whose parent is over, or is being cancelled."""
    jobs = backend.tables.jobs
    parent = backend.tables.jobs_as("parent")
    ends: list[End] = []
    for chunk in chunked(job_ids, 500):
        query = (
            select(jobs.c.id, jobs.c.lease_owner, jobs.c.lease_token, jobs.c.parent_id)
            .join(parent, parent.c.id == jobs.c.parent_id)
            .where(
                jobs.c.id.in_(chunk),
                in_state(jobs, State.BLOCKED),
                or_(parent.c.state.in_(sorted(TERMINAL)), parent.c.cancel_requested),
            )
        )
        ends += [_cancelled_with_parent(row) for row in connection.execute(query)]
    return ends


def children_to_look_at(
    connection: Connection, backend: Backend, parents: Sequence[Any], limit: int
) -> list[tuple[int, int]]:
    """Return up to `limit` pairs (parent, child) that a parent's state asks something of.

    Of a parent that is open, the blocked children; of one that is being cancelled, all that have
    not been told yet.
    """
    jobs = backend.tables.jobs
    if not parents:
        return []
    opened = [row.id for row in parents if not row.cancel_requested]
    cancelling = [row.id for row in parents if row.cancel_requested]
    untold = and_(~jobs.c.cancel_requested, jobs.c.state.not_in(sorted(TERMINAL)))
    query = (
        select(jobs.c.parent_id, jobs.c.id)
        .where(
            or_(
                and_(jobs.c.parent_id.in_(opened), *_unheld(backend)),
                and_(jobs.c.parent_id.in_(cancelling), untold),
            )
        )
        .order_by(jobs.c.parent_id, jobs.c.id)
        .limit(limit)
    )
    return [(parent, child) for parent, child in connection.execute(query)]


def cancel_children(
    connection: Connection, backend: Backend, children: Sequence[int]
) -> tuple[list[End], int]:
    """Cancel locked children of parents that are being cancelled.

    Returns ends for those that have not started; the others are asked, and their number returned.
    """
    jobs = backend.tables.jobs
    parent = backend.tables.jobs_as("parent")
    ends: list[End] = []
    asked: list[int] = []
    for chunk in chunked(children, 500):
        query = (
            select(
                *(
                    jobs.c[name]
                    for name in ("id", "lease_owner", "lease_token", "parent_id", "state")
                )
            )
            .join(parent, parent.c.id == jobs.c.parent_id)
            .where(
                jobs.c.id.in_(chunk),
                jobs.c.state.not_in(sorted(TERMINAL)),
                ~jobs.c.cancel_requested,
                parent.c.cancel_requested,
            )
        )
        for row in connection.execute(query):
            if row.state in NOT_STARTED:
                ends.append(_cancelled_with_parent(row))
            else:
                asked.append(row.id)
    values = {"cancel_requested": True, "settled": False, "updated_at": backend.now()}
    for chunk in chunked(asked, 500):
        told = update(jobs).where(jobs.c.id.in_(chunk))
        connection.execute(told.values(values | {"cause": jobs.c.parent_id}))
    if asked:  # those that run may do so in another process
        backend.notify(connection, TOPIC)
    return ends, len(asked)


def fail_fast(connection: Connection, backend: Backend, parents: Sequence[int]) -> list[int]:
    """Begin to cancel containers that are to fail with their first failed child."""
    jobs = backend.tables.jobs
    if not parents:
        return []
    found = list(
        connection.scalars(
            select(jobs.c.id).where(
                jobs.c.id.in_(parents),
                in_state(jobs, State.WAITING),
                jobs.c.fail_fast,
                ~jobs.c.cancel_requested,
                _has_child(backend, State.FAILED),
                open_children(backend.tables, jobs),
            )
        )
    )
    if found:
        values = {"cancel_requested": True, "settled": False, "updated_at": backend.now()}
        connection.execute(update(jobs).where(jobs.c.id.in_(found)).values(values))
    return found


def closed(connection: Connection, backend: Backend, parents: Sequence[int]) -> list[End]:
    """Return ends for locked parents that wait and whose last child has ended.

    A container is done if all in it is done, cancelled if that was asked, else failed. A job takes
    its own result or failure.
    """
    jobs = backend.tables.jobs
    ends: list[End] = []
    for chunk in chunked(parents, 500):
        query = select(
            *(jobs.c[name] for name in ("id", "lease_owner", "lease_token", "kind", "error")),
            *(jobs.c[name] for name in ("cause", "cancel_requested", "fail_fast")),
            _first_child(backend, State.FAILED).label("failed"),
            _first_child(backend, State.CANCELLED).label("cancelled"),
        ).where(
            jobs.c.id.in_(chunk),
            in_state(jobs, State.WAITING),
            ~open_children(backend.tables, jobs),
        )
        ends += [_closed(row) for row in connection.execute(query)]
    return ends


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
    locked = Locked(row.id, row.lease_owner, row.lease_token)
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
    locked = Locked(row.id, row.lease_owner, row.lease_token)
    error = f"cancelled with its parent, job {row.parent_id}"
    return End(locked, State.CANCELLED, error=error, cause=row.parent_id)
