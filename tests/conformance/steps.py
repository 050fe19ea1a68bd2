"""The steps of a job's path, as values: to be taken in a transaction, whosever it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Connection,
    select,
)

from asyncjobq import Job, JobOptions, JobSpec
from asyncjobq.backends.base import Backend, Lane, Take
from asyncjobq.codec import encode
from asyncjobq.enqueue import insert_jobs
from asyncjobq.finalize import Finished, Written, finalize_once
from asyncjobq.lease import Claimed, Defaults, Lease, Renewal, claim_once, renew_once
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.ready import LaneCursor
from asyncjobq.settle import settle_once

T = TypeVar("T")


Step = Callable[[Connection, Backend], T]


TTL: Final = 30.0
PATIENCE: Final = float(os.environ.get("ASYNCJOBQ_TEST_PATIENCE", "10"))
"""Seconds after which a test gives up what should be over in a moment."""


DEFAULTS: Final = Defaults(max_attempts={"work": 5}, timeout={"work": 3600.0})


def spec(type_name: str = "work", /, args: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a job to be enqueued; of a type that no handler here runs, unless one is named."""
    return JobSpec[Any](type_name, args or {}, JobOptions.of(options))


def enqueuing(*specs: JobSpec[Any]) -> Step[list[Job[Any]]]:
    """Insert jobs, without ringing anybody in this process."""
    return lambda connection, backend: insert_jobs(connection, backend, specs)


def scanning(
    bound: int = 256, *, queues: Sequence[str] = ("default",), types: Sequence[str] = ("work",)
) -> Step[list[Lane]]:
    """Look for lanes from the beginning."""
    return LaneCursor(tuple(queues), tuple(types), bound).scan_once


def claiming(
    count: int = 1,
    owner: str = "worker",
    *,
    ttl: float = TTL,
    defaults: Defaults = DEFAULTS,
    **where: Any,
) -> Step[list[Claimed]]:
    """Lease up to `count` jobs of each group, in its order."""

    def step(connection: Connection, backend: Backend) -> list[Claimed]:
        lanes = scanning(**where)(connection, backend)
        return claim_once(connection, backend, owner, takes_of(lanes, count), ttl, defaults)

    return step


def takes_of(lanes: Sequence[Lane], count: int) -> list[Take]:
    """Return the wish for `count` jobs from each group in each queue."""
    groups: dict[tuple[str, str], list[Lane]] = {}
    for lane in lanes:
        groups.setdefault((lane.queue, lane.group_key), []).append(lane)
    return [Take(tuple(group), count) for group in groups.values()]


def renewing(*leases: Claimed | Lease, ttl: float = TTL) -> Step[Renewal]:
    """Renew leases by `ttl` seconds."""
    ours = [lease_of(lease) for lease in leases]
    return lambda connection, backend: renew_once(connection, backend, ours, ttl)


def finishing(*leases: Claimed | Lease, outcome: Outcome | None = None) -> Step[Written]:
    """Write the end of attempts: success with the result 1, unless an outcome is given."""
    end = outcome or succeeded(1)
    batch = [Finished(lease_of(lease), end) for lease in leases]
    return lambda connection, backend: finalize_once(connection, backend, batch)


def settling(connection: Connection, backend: Backend) -> None:
    """Settle all that can be, in one transaction."""
    while settle_once(connection, backend).moved:
        pass


def both(*steps: Step[Any]) -> Step[list[Any]]:
    return lambda connection, backend: [step(connection, backend) for step in steps]


def holding(claimed: Claimed) -> Step[None]:
    """Lock a row, as an operator at a prompt might."""

    def step(connection: Connection, backend: Backend) -> None:
        jobs = backend.tables.jobs
        row = select(jobs.c.id).where(jobs.c.id == claimed.lease.job_id)
        connection.execute(row.with_for_update())

    return step


def lease_of(held: Claimed | Lease) -> Lease:
    """Return the lease of what was claimed."""
    return held if isinstance(held, Lease) else held.lease


def impostor(lease: Lease, wrong: str) -> Lease:
    """Return a lease that is not quite this one."""
    return {
        "owner": Lease(lease.job_id, lease.owner + " ", lease.token),
        "token": Lease(lease.job_id, lease.owner, lease.token + 1),
        "id": Lease(lease.job_id + 1, lease.owner, lease.token),
    }[wrong]


def id_of(job: Job[Any] | Claimed | int) -> int:
    """Return the id of a job, however it is at hand."""
    if isinstance(job, Claimed):
        return job.lease.job_id
    return job.id if isinstance(job, Job) else job


def ids_of(jobs: Sequence[Job[Any] | Claimed]) -> list[int]:
    return [id_of(job) for job in jobs]


def succeeded(result: Any = None) -> Outcome:
    return Outcome(Ending.SUCCEEDED, result=encode(result))


def failed(error: str = "broken", retry_after: float | None = None) -> Outcome:
    return Outcome(Ending.FAILED, error=error, retry_after=retry_after)


def assert_one_of_them(ours: Any, theirs: Any) -> None:
    """Assert that exactly one side had the lease."""
    assert (len(ours), len(theirs)) in ((1, 0), (0, 1))
