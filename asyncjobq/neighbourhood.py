"""What is one step away from a job in its graph, of each kind a bounded number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, select

from asyncjobq.backends.base import Backend
from asyncjobq.errors import JobNotFoundError
from asyncjobq.job import COLUMNS, Job


@dataclass(frozen=True)
class Neighbourhood:
    """The jobs around one, as they are now."""

    parent: Job[Any] | None
    upstreams: tuple[Job[Any], ...]
    """What it depends on, by id."""
    dependants: tuple[Job[Any], ...]
    """What depends on it, by id."""
    children: tuple[Job[Any], ...]
    """What is directly in it; where that is much, any of it."""
    cut: bool
    """Whether there are more of one kind, which the limit has left out."""


def neighbours_of(
    connection: Connection, backend: Backend, job_id: int, limit: int
) -> Neighbourhood:
    """Return what is around a job, at most `limit` of each kind; raises JobNotFoundError."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    own = select(jobs.c.id, jobs.c.parent_id).where(jobs.c.id == job_id)
    row = connection.execute(own).one_or_none()
    if row is None:
        raise JobNotFoundError(job_id)
    above = select(deps.c.depends_on_id.label("id")).where(deps.c.job_id == job_id)
    below = select(deps.c.job_id.label("id")).where(deps.c.depends_on_id == job_id)
    inside = select(jobs.c.id).where(jobs.c.parent_id == job_id)
    found = [_jobs(connection, backend, some, limit) for some in (above, below, inside)]
    upstreams, dependants, children = (tuple(some[:limit]) for some in found)
    parent = [] if row.parent_id is None else _jobs_of(connection, backend, [row.parent_id])
    return Neighbourhood(
        parent=parent[0] if parent else None,
        upstreams=upstreams,
        dependants=dependants,
        children=children,
        cut=any(len(some) > limit for some in found),
    )


def _jobs(
    connection: Connection, backend: Backend, some: Select[Any], limit: int
) -> list[Job[Any]]:
    # Without an order: what has one may be sorted as a whole before its first rows are there.
    ids = list(connection.scalars(some.limit(limit + 1)))
    return _jobs_of(connection, backend, ids)


def _jobs_of(connection: Connection, backend: Backend, ids: list[int]) -> list[Job[Any]]:
    jobs = backend.tables.jobs
    columns: list[ColumnElement[Any]] = [jobs.c[name] for name in COLUMNS]
    query = select(*columns).where(jobs.c.id.in_(ids)).order_by(jobs.c.id)
    return [Job.from_row(row) for row in connection.execute(query)]
