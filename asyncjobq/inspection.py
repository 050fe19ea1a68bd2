"""Reading jobs: plain selects, no locks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import ConfigurationError, JobNotFoundError
from asyncjobq.job import COLUMNS, Job
from asyncjobq.states import OPEN, State


@dataclass(frozen=True)
class Filter:
    """Which jobs `find` returns: those that match all that is given, oldest first."""

    state: State | str | Iterable[State | str] | None = None
    type: str | None = None
    queue: str | None = None
    group_key: str | None = None
    limit: int = 100
    after: int = 0
    """Ids up to this one are left out: the last id of the page before."""

    def __post_init__(self) -> None:
        for name in ("limit", "after"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(f"{name} must be an int of at least 0, not {value!r}.")

    def conditions(self, jobs: FromClause) -> list[ColumnElement[bool]]:
        """Return what a job must be to match."""
        names = [n for n in ("type", "queue", "group_key") if getattr(self, n) is not None]
        found: list[ColumnElement[bool]] = [jobs.c[name] == getattr(self, name) for name in names]
        if self.states is not None:
            found.append(jobs.c.state.in_(self.states))
        return found

    @property
    def states(self) -> list[State] | None:
        """The states asked for; raises ConfigurationError naming the states there are."""
        if self.state is None:
            return None
        given = [self.state] if isinstance(self.state, str) else list(self.state)
        try:
            return [State(state) for state in given]
        except ValueError as error:
            known = ", ".join(State)
            raise ConfigurationError(f"{error}; the states are {known}.") from error


def get_job(connection: Connection, backend: Backend, job_id: int) -> Job[Any]:
    """Return one job; raises JobNotFoundError."""
    jobs = backend.tables.jobs
    row = connection.execute(_columns(backend).where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return Job.from_row(row)


def find_jobs(connection: Connection, backend: Backend, wanted: Filter) -> list[Job[Any]]:
    """Return the jobs that match, in id order."""
    jobs = backend.tables.jobs
    query = _columns(backend).where(jobs.c.id > wanted.after, *wanted.conditions(jobs))
    rows = connection.execute(query.order_by(jobs.c.id).limit(wanted.limit))
    return [Job.from_row(row) for row in rows]


def upstreams_of(connection: Connection, backend: Backend, job_id: int) -> list[Job[Any]]:
    """Return the jobs that a job depends on, in id order."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    query = _columns(backend).join(deps, deps.c.depends_on_id == jobs.c.id)
    rows = connection.execute(query.where(deps.c.job_id == job_id).order_by(jobs.c.id))
    return [Job.from_row(row) for row in rows]


def jobs_of(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[Job[Any]]:
    """Return these jobs in the order given; raises JobNotFoundError for the first missing one."""
    jobs = backend.tables.jobs
    rows = connection.execute(_columns(backend).where(jobs.c.id.in_(job_ids)))
    found: dict[int, Job[Any]] = {row.id: Job.from_row(row) for row in rows}
    for job_id in job_ids:
        if job_id not in found:
            raise JobNotFoundError(job_id)
    return [found[job_id] for job_id in job_ids]


def open_among(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> set[int]:
    """Return which of these jobs are there and have not ended."""
    jobs = backend.tables.jobs
    still_open: set[int] = set()
    for chunk in chunked(job_ids, 10_000):
        query = select(jobs.c.id).where(jobs.c.id.in_(chunk), jobs.c.state.in_(sorted(OPEN)))
        still_open.update(connection.scalars(query))
    return still_open


def _columns(backend: Backend) -> Any:
    return select(*(backend.tables.jobs.c[name] for name in COLUMNS))
