"""Reading jobs: plain selects, no locks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, FromClause, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import ConfigurationError, InvalidJobError, JobNotFoundError
from asyncjobq.job import COLUMNS, Job
from asyncjobq.options import check_text
from asyncjobq.states import OPEN, State

States = State | str | Iterable[State | str]


@dataclass(frozen=True)
class Filter:
    """Which jobs `find` returns: those that match all that is given, oldest or newest first."""

    state: States | None = None
    type: str | None = None
    queue: str | None = None
    group_key: str | None = None
    parent_id: int | None = None
    limit: int = 100
    after: int = 0
    """The last id of the page before: the jobs behind it in this order are returned."""
    newest: bool = False

    def __post_init__(self) -> None:
        for name in ("limit", "after"):
            check_count(name, getattr(self, name))
        for name in ("type", "queue", "group_key"):
            try:
                check_text(name, getattr(self, name), 255, optional=True)
            except InvalidJobError as error:
                raise ConfigurationError(str(error)) from error
        if self.state is not None:
            object.__setattr__(self, "state", _states(self.state))

    def conditions(self, jobs: FromClause) -> list[ColumnElement[bool]]:
        """Return what a job must be to match."""
        given = ("type", "queue", "group_key", "parent_id")
        names = [name for name in given if getattr(self, name) is not None]
        found: list[ColumnElement[bool]] = [jobs.c[name] == getattr(self, name) for name in names]
        if self.states is not None:
            found.append(jobs.c.state.in_(self.states))
        return found

    @property
    def states(self) -> tuple[State, ...] | None:
        """The states asked for, if any were."""
        return None if self.state is None else _states(self.state)


def _states(given: Any) -> tuple[State, ...]:
    try:
        return tuple(map(State, [given] if isinstance(given, str) else given))
    except (TypeError, ValueError) as error:
        known = ", ".join(State)
        raise ConfigurationError(f"state: {error}; the states are {known}.") from error


def check_count(name: str, value: object) -> None:
    """Raise ConfigurationError unless this is a number of rows that every database takes."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ConfigurationError(f"{name} must be an int from 0 to 2**63 - 1, not {value!r}.")


def get_job(connection: Connection, backend: Backend, job_id: int) -> Job[Any]:
    """Return one job; raises JobNotFoundError."""
    jobs = backend.tables.jobs
    row = connection.execute(_columns(backend).where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    return Job.from_row(row)


def find_jobs(connection: Connection, backend: Backend, wanted: Filter) -> list[Job[Any]]:
    """Return the jobs that match, in id order, or the other way round."""
    jobs = backend.tables.jobs
    query = _columns(backend).where(*wanted.conditions(jobs))
    if wanted.newest:
        query = query.where(jobs.c.id < wanted.after) if wanted.after else query
        order: ColumnElement[int] = jobs.c.id.desc()
    else:
        query, order = query.where(jobs.c.id > wanted.after), jobs.c.id
    rows = connection.execute(query.order_by(order).limit(wanted.limit))
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
