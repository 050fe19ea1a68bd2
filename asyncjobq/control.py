"""What people do to jobs that are there: cancel, run again, and hold back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, select, update

from asyncjobq import pauses, unique
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.enqueue import TOPIC
from asyncjobq.errors import InvalidJobError, JobNotFoundError, UniqueConflictError
from asyncjobq.revival import (
    ended_above,
    refuse_old_snapshot,
    refused,
    reopen,
    seen_as_it_is,
)
from asyncjobq.states import NOT_STARTED, TERMINAL, Kind, State, Word
from asyncjobq.transition import End, Locked, end_jobs, end_unsettled, neighbours


class Cancelled(Word):
    """What a call of `cancel` has done."""

    CANCELLED = "cancelled"  # it had not started, and will not
    REQUESTED = "requested"  # it runs, or has children: it is told, and ends soon
    ENDED = "ended"  # it had ended before; nothing was changed


RETRIED: Final = frozenset({State.FAILED, State.CANCELLED})
ON_REQUEST: Final = "cancelled on request"


def cancel_job(connection: Connection, backend: Backend, job_id: int) -> Cancelled:
    """Cancel a job, or a container with all that is in it.

    One that has not started ends at once. One that runs is told soon, see `Heartbeat.cancel_once`.
    What is below it is cancelled by settling, what is added meanwhile too.
    """
    row = _locked(connection, backend, job_id)
    if row.state in TERMINAL:
        return Cancelled.ENDED
    answers = cancel_locked(connection, backend, [row])
    backend.notify(connection, TOPIC)
    return answers[job_id]


def cancel_locked(
    connection: Connection, backend: Backend, rows: Sequence[Any]
) -> dict[int, Cancelled]:
    """Cancel locked jobs that have not ended; answers for each by its id."""
    jobs = backend.tables.jobs
    asked = sorted(row.id for row in rows if row.state not in NOT_STARTED)
    values = {"cancel_requested": True, "settled": False, "updated_at": backend.now()}
    for chunk in chunked(asked, 500):
        connection.execute(update(jobs).where(jobs.c.id.in_(chunk)).values(values))
    unstarted = [row for row in rows if row.state in NOT_STARTED]
    waiting = _end_unstarted(connection, backend, unstarted)
    ended = {row.id: Cancelled.CANCELLED for row in unstarted if row.id not in waiting}
    return dict.fromkeys([*asked, *waiting], Cancelled.REQUESTED) | ended


def _end_unstarted(connection: Connection, backend: Backend, rows: Sequence[Any]) -> frozenset[int]:
    """End locked jobs that have not started; return those that wait for children to end first."""
    ends = [End(Locked.of(row), State.CANCELLED, error=ON_REQUEST) for row in rows]
    if backend.reads_fresh(connection):
        return end_jobs(connection, backend, ends).waiting
    # A caller's old snapshot may lack neighbours: settling is to look for them, and containers
    # are to wait for what is seen nowhere yet.
    parents = neighbours(connection, backend, [row.id for row in rows]).parents
    waiting = parents.union(row.id for row in rows if row.kind == Kind.CONTAINER)
    for waits in (True, False):
        chosen = [end for end in ends if (end.row.id in waiting) == waits]
        end_unsettled(connection, backend, chosen, waits=waits)
    return frozenset(waiting)


def retry_job(connection: Connection, backend: Backend, job_id: int) -> None:
    """Run a failed or cancelled job again, and revive what its end had cancelled.

    Its attempts count from 0. A container is opened again: what failed in it, or was cancelled, is
    run again. Raises InvalidJobError for a job that is done or has not ended, UniqueConflictError
    if another holds its unique key, and StaleSnapshotError; what is below it and lost its key to
    another stays as it is.
    """
    backend.begin_writing(connection)
    # From above, like those who run again what is there: two who met would deadlock.
    with seen_as_it_is(connection, backend):
        for closed in sorted(ended_above(connection, backend, [job_id]).get(job_id, ())):
            backend.wait_for_row(connection, closed, [backend.tables.jobs.c.id])
    row = _locked(connection, backend, job_id)
    if row.state not in RETRIED:
        raise InvalidJobError(
            f"Job {job_id} is {row.state}; only failed and cancelled jobs are run again."
        )
    with seen_as_it_is(connection, backend):
        refuse_old_snapshot(connection, backend, [job_id])
    ids = [job_id]
    if row.kind == Kind.CONTAINER:
        ids += _unsuccessful_below(connection, backend, job_id)
    conflicts = reopen_locked(connection, backend, ids, job_id)
    if job_id in conflicts:
        raise conflicts[job_id]


def reopen_locked(
    connection: Connection, backend: Backend, job_ids: Sequence[int], first: int | None = None
) -> dict[int, UniqueConflictError]:
    """Run locked jobs again that failed or were cancelled; the attempts count from 0.

    Returns why some are not: another holds their unique key. If it is the `first`, none is.
    """
    if not job_ids:
        return {}
    keys = unique.keys_to_take_back(connection, backend, job_ids)
    with unique.guarded(connection, backend, sorted(set(keys.values()))):
        conflicts = refused(connection, backend, job_ids)
        if first not in conflicts:
            reopen(connection, backend, [one for one in job_ids if one not in conflicts])
    backend.notify(connection, TOPIC)
    return conflicts


def _unsuccessful_below(connection: Connection, backend: Backend, job_id: int) -> list[int]:
    jobs = backend.tables.jobs
    found: list[int] = []
    level: Sequence[int] = [job_id]
    while level:
        below: list[int] = []
        for chunk in chunked(level, 500):
            query = select(jobs.c.id).where(
                jobs.c.parent_id.in_(chunk), jobs.c.state.in_(sorted(RETRIED))
            )
            below += connection.scalars(query)
        level = below
        found += level
    return found


def _locked(connection: Connection, backend: Backend, job_id: int) -> Any:
    """Lock one job's row, waiting for whoever holds it; raises JobNotFoundError."""
    with seen_as_it_is(connection, backend):
        row = backend.wait_for_row(connection, job_id, columns_of(backend))
    if row is None:
        raise JobNotFoundError(job_id)
    return row


def columns_of(backend: Backend) -> list[ColumnElement[Any]]:
    """Return the columns that are read of a job under its lock."""
    names = ("id", "kind", "state", "lease_owner", "lease_token")
    return [backend.tables.jobs.c[name] for name in names]


def pause(connection: Connection, backend: Backend, kind: str, name: str) -> None:
    """Start no more jobs of a queue or type; one that is paused stays so since when it was."""
    pauses.pause_lanes(connection, backend, kind, name)
    backend.notify(connection, TOPIC)


def resume(connection: Connection, backend: Backend, kind: str, name: str) -> bool:
    """Start jobs of a queue or type again; tell whether it was paused."""
    was_paused = pauses.resume_lanes(connection, backend, kind, name)
    backend.notify(connection, TOPIC)
    return was_paused
