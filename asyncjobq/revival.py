"""Jobs that are open again: a retry takes back exactly what the failure had cancelled."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Executable,
    Integer,
    Select,
    and_,
    bindparam,
    case,
    null,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError

from asyncjobq import unique
from asyncjobq.backends.base import Backend, chunked, rows_by_id
from asyncjobq.errors import StaleSnapshotError, UniqueConflictError
from asyncjobq.models import in_state
from asyncjobq.states import TERMINAL, Kind, State, UniqueWhile


def caused_by(
    connection: Connection, backend: Backend, rows: Sequence[Any], limit: int
) -> list[tuple[int, int]]:
    """Return up to `limit` pairs (open job, job that its end had cancelled)."""
    causes = _causes(rows)
    if not causes:
        return []
    parameters = {"causes": causes, "most": limit}
    found = connection.execute(backend.built(_caused), parameters)
    return [(row.cause, row.id) for row in found]


def causes_of_coming_ends(
    connection: Connection, backend: Backend, rows: Sequence[Any]
) -> set[int]:
    """Return which of these open jobs have yet to wait for the end of what they are to revive.

    It was being cancelled because of them when they were retried, and still has open children.
    """
    causes = _causes(rows)
    if not causes:
        return set()
    return set(connection.scalars(backend.built(_ending_because_of), {"causes": causes}))


def ended_above(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> dict[int, set[int]]:
    """Return for jobs which of the containers and jobs above them have ended."""
    found: dict[int, set[int]] = {}
    level = {job_id: {job_id} for job_id in job_ids}
    while level:
        above: dict[int, set[int]] = {}
        for row in rows_by_id(connection, backend.built(_ended_parents), sorted(level)):
            above.setdefault(row.parent_id, set()).update(level[row.id])
        for parent_id, below in above.items():
            for job_id in below:
                found.setdefault(job_id, set()).add(parent_id)
        level = above
    return found


@contextmanager
def seen_as_it_is(connection: Connection, backend: Backend) -> Iterator[None]:
    """Raise StaleSnapshotError, with the transaction still usable, for rows that changed unseen.

    For a block that locks rows and writes nothing.
    """
    if backend.reads_fresh(connection):
        yield
        return
    try:
        with backend.savepoint(connection):
            yield
    except DBAPIError as error:
        if not backend.is_stale(error):
            raise
        raise StaleSnapshotError([], _CHANGED) from error


def refuse_old_snapshot(connection: Connection, backend: Backend, job_ids: Collection[int]) -> None:
    """Raise StaleSnapshotError if jobs or what is above them have changed unseen.

    If they have not, nothing below them has: no job ends or comes below one that is closed without
    that being opened. To be called in `seen_as_it_is`.
    """
    if backend.reads_fresh(connection):
        return
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in ("id", "state", "lease_token", "updated_at")]
    for chunk in chunked(sorted({*job_ids, *_above(connection, backend, job_ids)}), 500):
        query = select(*columns).where(jobs.c.id.in_(chunk)).order_by(jobs.c.id)
        if connection.execute(query).all() != backend.read_current(connection, query):
            raise StaleSnapshotError([], _CHANGED)


_CHANGED: Final = "A job that is meant, or one above it, has changed"


def _above(connection: Connection, backend: Backend, job_ids: Collection[int]) -> set[int]:
    """Return all containers and jobs above jobs, which stay the same for ever."""
    jobs = backend.tables.jobs
    found, level = set[int](), set(job_ids)
    while level:
        above: set[int] = set()
        for chunk in chunked(sorted(level), 500):
            query = select(jobs.c.parent_id).where(jobs.c.id.in_(chunk))
            above.update(connection.scalars(query.where(jobs.c.parent_id.is_not(None))))
        level = above - found
        found |= above
    return found


def revive_caused_by(
    connection: Connection, backend: Backend, rows: Sequence[Any], locked: Collection[int]
) -> int:
    """Revive the locked jobs that were cancelled because of these, which are open again."""
    causes = _causes(rows)
    if not causes:
        return 0
    query = backend.built(_to_revive)
    revived = [row.id for row in rows_by_id(connection, query, sorted(locked), causes=causes)]
    kept = refused(connection, backend, revived)
    revived = [job_id for job_id in revived if job_id not in kept]
    reopen(connection, backend, revived)
    return len(revived)


def refused(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> dict[int, UniqueConflictError]:
    """Return which ended jobs cannot be opened again, and why.

    Another job holds the unique key that they, or what is closed above them, would take back.
    """
    keys, above = _keys_for(connection, backend, job_ids)
    if not keys:
        return {}
    backend.lock_keys(connection, sorted(set(keys.values())))
    conflicts = unique.taken(connection, backend, keys)
    return {
        job_id: conflicts[one]
        for job_id in job_ids
        for one in (job_id, *sorted(above.get(job_id, ())))
        if one in conflicts
    }


def with_busy_keys(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> set[int]:
    """Return which jobs cannot be opened again now: somebody just asks for their unique keys.

    The keys of the others are locked.
    """
    keys, above = _keys_for(connection, backend, job_ids)
    if not keys:
        return set()
    free = backend.lock_keys(connection, sorted(set(keys.values())), wait=False)
    busy = {job_id for job_id, key in keys.items() if key not in free}
    return {job_id for job_id in job_ids if busy & {job_id, *above.get(job_id, ())}}


def _keys_for(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> tuple[dict[int, str], dict[int, set[int]]]:
    """Return the keys to be taken back by jobs and what has ended above them, and the latter."""
    above = ended_above(connection, backend, job_ids)
    ancestors = {one for found in above.values() for one in found} - set(job_ids)
    everything = ancestors | set(job_ids)
    return unique.keys_to_take_back(connection, backend, everything, ancestors), above


def _caused(backend: Backend) -> Executable:
    jobs = backend.tables.jobs
    return (
        select(jobs.c.cause, jobs.c.id)
        .where(backend.among(jobs.c.cause, "causes"), in_state(jobs, State.CANCELLED))
        .order_by(jobs.c.cause, jobs.c.id)
        .limit(bindparam("most", type_=Integer))
    )


def _ending_because_of(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    return select(jobs.c.cause).where(
        backend.among(jobs.c.cause, "causes"),
        in_state(jobs, State.WAITING),
        jobs.c.cancel_requested,
    )


def _ended_parents(backend: Backend) -> Executable:
    jobs, parent = backend.tables.jobs, backend.tables.jobs_as("parent")
    query = select(jobs.c.id, jobs.c.parent_id).join(parent, parent.c.id == jobs.c.parent_id)
    return query.where(backend.among(jobs.c.id), parent.c.state.in_(sorted(TERMINAL)))


def _to_revive(backend: Backend) -> Select[Any]:
    jobs, cause = backend.tables.jobs, backend.tables.jobs_as("cause")
    return (
        select(jobs.c.id)
        .join(cause, cause.c.id == jobs.c.cause)
        .where(
            backend.among(jobs.c.id),
            backend.among(jobs.c.cause, "causes"),
            in_state(jobs, State.CANCELLED),
            cause.c.state.not_in(sorted(TERMINAL)),  # still, after what was settled just now
            ~cause.c.cancel_requested,
        )
    )


def _causes(rows: Sequence[Any]) -> list[int]:
    """Return the jobs that may be open again; one that is being cancelled is not."""
    return [row.id for row in rows if not row.cancel_requested]


def reopen(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> None:
    """Put ended jobs back to `blocked`, and open the containers again that had closed over them.

    All are left unsettled: settling finds out whether they may go.
    """
    jobs = backend.tables.jobs
    keys, _ = _keys_for(connection, backend, job_ids)
    for chunk in chunked(job_ids, 500):
        connection.execute(
            update(jobs)
            .where(jobs.c.id.in_(chunk), jobs.c.state.in_(sorted(TERMINAL)))
            .values(state=State.BLOCKED, **_as_new(backend))
        )
    _reopen_ancestors(connection, backend, job_ids)
    backend.note_keys(connection, keys)


def _reopen_ancestors(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> None:
    jobs = backend.tables.jobs
    below = list(job_ids)
    while below:
        child = backend.tables.jobs_as("child")
        closed: list[int] = []
        for chunk in chunked(below, 500):
            query = (
                select(jobs.c.id)
                .distinct()
                .join(child, child.c.parent_id == jobs.c.id)
                .where(child.c.id.in_(chunk), jobs.c.state.in_(sorted(TERMINAL)))
            )
            closed += connection.scalars(query)
        for chunk in chunked(sorted(set(closed)), 500):
            connection.execute(
                update(jobs)
                .where(jobs.c.id.in_(chunk), jobs.c.state.in_(sorted(TERMINAL)))
                .values({**_as_new(backend), **_own_end_kept(backend)})
            )
        below = sorted(set(closed))


def _own_end_kept(backend: Backend) -> dict[str, Any]:
    """Return what a job keeps that waits for its children again: its own result or failure.

    A container is blocked until settling finds it open, for it may never have been.
    """
    jobs = backend.tables.jobs
    is_job = jobs.c.kind == Kind.JOB
    while_live = and_(jobs.c.unique_until.is_(None), jobs.c.unique_while == UniqueWhile.LIVE)
    return {
        "unique_held": case((while_live, jobs.c.unique_key), else_=jobs.c.unique_held),
        "state": case((is_job, State.WAITING), else_=State.BLOCKED),
        "result": jobs.c.result,
        "attempt": jobs.c.attempt,
        "error": case((is_job, jobs.c.error), else_=null()),
    }


def _as_new(backend: Backend) -> dict[str, Any]:
    jobs = backend.tables.jobs
    return {
        # Nobody else holds it: see `refused`. A period goes on or is past, whatever happens here.
        "unique_held": case(
            (jobs.c.unique_until.is_(None), jobs.c.unique_key), else_=jobs.c.unique_held
        ),
        "result": None,
        "error": None,
        "cause": None,
        "attempt": 0,
        "cancel_requested": False,
        "finished_at": None,
        "settled": False,
        "updated_at": backend.now(),
    }
