"""What people do to jobs that are there: cancel, and run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, select, update

from asyncjobq import unique
from asyncjobq.backends.base import Backend
from asyncjobq.enqueue import TOPIC
from asyncjobq.errors import InvalidJobError, JobNotFoundError
from asyncjobq.revival import refused, reopen
from asyncjobq.states import NOT_STARTED, TERMINAL, Kind, State, Word
from asyncjobq.transition import End, Locked, end_jobs


class Cancelled(Word):
    """What a call of `cancel` has done."""

    CANCELLED = "cancelled"  # it had not started, and will not
    REQUESTED = "requested"  # it runs, or has children: it is told, and ends soon
    ENDED = "ended"  # it had ended before; nothing was changed


def cancel_job(connection: Connection, backend: Backend, job_id: int) -> Cancelled:
    """Cancel a job, or a container with all that is in it.

    One that has not started ends at once. One that runs is told by its next renewal. What is below
    it is cancelled by settling, what is added meanwhile too.
    """
    jobs = backend.tables.jobs
    row = _locked(connection, backend, job_id)
    if row.state in TERMINAL:
        return Cancelled.ENDED
    if row.state in NOT_STARTED:
        locked = Locked(row.id, row.lease_owner, row.lease_token)
        end = End(locked, State.CANCELLED, error="cancelled on request")
        ended = end_jobs(connection, backend, [end])
        answer = Cancelled.REQUESTED if ended.waiting else Cancelled.CANCELLED
    else:
        values = {"cancel_requested": True, "settled": False, "updated_at": backend.now()}
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(values))
        answer = Cancelled.REQUESTED
    backend.notify(connection, TOPIC)
    return answer


def retry_job(connection: Connection, backend: Backend, job_id: int) -> None:
    """Run a failed or cancelled job again, and revive what its end had cancelled.

    Its attempts count from 0. A container is opened again: what failed in it, or was cancelled, is
    run again. Raises InvalidJobError for a job that is done or has not ended, and
    UniqueConflictError if another holds its unique key; what is below it and lost its key to
    another stays as it is.
    """
    row = _locked(connection, backend, job_id)
    if row.state not in (State.FAILED, State.CANCELLED):
        raise InvalidJobError(
            f"Job {job_id} is {row.state}; only failed and cancelled jobs are run again."
        )
    ids = [job_id]
    if row.kind == Kind.CONTAINER:
        ids += _unsuccessful_below(connection, backend, job_id)
    keys = unique.keys_to_take_back(connection, backend, ids)
    with unique.guarded(connection, backend, sorted(set(keys.values()))):
        conflicts = refused(connection, backend, ids)
        if job_id in conflicts:
            raise conflicts[job_id]
        reopen(connection, backend, [one for one in ids if one not in conflicts])
    backend.notify(connection, TOPIC)


def _unsuccessful_below(connection: Connection, backend: Backend, job_id: int) -> list[int]:
    jobs = backend.tables.jobs
    found: list[int] = []
    level: Sequence[int] = [job_id]
    while level:
        query = select(jobs.c.id).where(
            jobs.c.parent_id.in_(level), jobs.c.state.in_([State.FAILED, State.CANCELLED])
        )
        level = list(connection.scalars(query))
        found += level
    return found


def _locked(connection: Connection, backend: Backend, job_id: int) -> Any:
    """Lock one job's row, waiting for whoever holds it; raises JobNotFoundError."""
    jobs = backend.tables.jobs
    names = ("id", "kind", "state", "lease_owner", "lease_token")
    row = backend.wait_for_row(connection, job_id, [jobs.c[name] for name in names])
    if row is None:
        raise JobNotFoundError(job_id)
    return row
