"""The history of attempts: those that did not succeed, kept beside the job as long as it lives.

An attempt is written in the transaction that takes the job out of it, so that neither can be
without the other. One that succeeded, snoozed, or was interrupted by shutdown leaves no trace: the
job's row says all there is to say, and the latter two cost the job nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, insert, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import JobNotFoundError
from asyncjobq.outcomes import Ending, Failure


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job that did not succeed."""

    job_id: int
    attempt: int
    """Its number; a retry by hand counts from 1 again."""
    ending: Ending
    """`failed`, `timed_out`, `cancelled`, or `lease_lost`: its worker died or hung."""
    error_type: str | None
    """The name of the error's class."""
    message: str | None
    traceback: str | None
    worker: str | None
    started_at: datetime | None
    finished_at: datetime


_COLUMNS: Final = tuple(field.name for field in fields(Attempt))


@dataclass(frozen=True, slots=True)
class Unsuccessful:
    """The attempt that ends with a lease, and what it ended with."""

    job_id: int
    worker: str | None
    ending: Ending
    failure: Failure


def keep_attempts(
    connection: Connection, backend: Backend, attempts: Sequence[Unsuccessful]
) -> None:
    """Write attempts of locked jobs down; to be called before their jobs are changed."""
    jobs = backend.tables.jobs
    rows: list[dict[str, Any]] = []
    for chunk in chunked(attempts, 500):
        by_id = {attempt.job_id: attempt for attempt in chunk}
        columns = (jobs.c.id, jobs.c.attempt, jobs.c.started_at, backend.now().label("now"))
        query = select(*columns).where(jobs.c.id.in_(list(by_id)))
        rows += [_row(by_id[row.id], row) for row in connection.execute(query)]
    if rows:
        connection.execute(insert(backend.tables.attempts), rows)


def _row(ended: Unsuccessful, job: Any) -> dict[str, Any]:
    return {
        "job_id": ended.job_id,
        "attempt": job.attempt,
        "ending": ended.ending,
        "error_type": ended.failure.type,
        "message": ended.failure.message,
        "traceback": ended.failure.traceback,
        "worker": ended.worker,
        "started_at": job.started_at,
        "finished_at": job.now,
    }


def attempts_of(
    connection: Connection, backend: Backend, job_id: int, limit: int = 1000
) -> list[Attempt]:
    """Return the last `limit` attempts of a job that did not succeed, oldest first.

    Raises JobNotFoundError.
    """
    jobs, attempts = backend.tables.jobs, backend.tables.attempts
    query = select(*(attempts.c[name] for name in _COLUMNS)).where(attempts.c.job_id == job_id)
    rows = connection.execute(query.order_by(attempts.c.id.desc()).limit(limit)).all()
    if not rows and connection.scalar(select(jobs.c.id).where(jobs.c.id == job_id)) is None:
        raise JobNotFoundError(job_id)
    return [_attempt(row) for row in reversed(rows)]


def _attempt(row: Any) -> Attempt:
    values = {name: getattr(row, name) for name in _COLUMNS}
    return Attempt(**{**values, "ending": Ending(row.ending)})
