"""Edges between jobs: which are satisfied, who waits for whom, and who waits in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, FromClause, and_, bindparam, or_, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.models import Tables, in_state
from asyncjobq.states import State
from asyncjobq.transition import End, Locked

FAILURES: Final = (State.FAILED, State.CANCELLED)


def unsatisfied_upstreams(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> dict[int, set[int]]:
    """Return the upstreams that each of these jobs still waits for."""
    deps = backend.tables.deps
    found: dict[int, set[int]] = {}
    for chunk in chunked(job_ids, 500):
        query = select(deps.c.job_id, deps.c.depends_on_id)
        for job_id, upstream in connection.execute(
            query.where(deps.c.job_id.in_(chunk), ~deps.c.satisfied)
        ):
            found.setdefault(job_id, set()).add(upstream)
    return found


def blocked_dependants(
    connection: Connection, backend: Backend, job_ids: Sequence[int], limit: int
) -> list[tuple[int, int]]:
    """Return up to `limit` pairs (job, dependant) whose edge is open, in the order of the jobs."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    if not job_ids:
        return []
    query = (
        select(deps.c.depends_on_id, deps.c.job_id)
        .join(jobs, jobs.c.id == deps.c.job_id)
        .where(deps.c.depends_on_id.in_(job_ids), ~deps.c.satisfied, in_state(jobs, State.BLOCKED))
        .order_by(deps.c.depends_on_id, deps.c.job_id)
        .limit(limit)
    )
    return [(upstream, dependant) for upstream, dependant in connection.execute(query)]


def mark_satisfied(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> int:
    """Mark the edges of these jobs whose upstream is done, or has failed and may; count them.

    By primary key, both columns: locking a range of edges would let two settlers deadlock.
    """
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = backend.tables.jobs_as("upstream")
    mark = (
        update(deps)
        .where(
            deps.c.job_id == bindparam("edge_job"),
            deps.c.depends_on_id == bindparam("edge_upstream"),
        )
        .values(satisfied=True)
    )
    marked = 0
    for chunk in chunked(job_ids, 500):
        query = (
            select(deps.c.job_id, deps.c.depends_on_id)
            .join(upstream, upstream.c.id == deps.c.depends_on_id)
            .join(jobs, jobs.c.id == deps.c.job_id)
            .where(
                deps.c.job_id.in_(chunk),
                ~deps.c.satisfied,
                in_state(jobs, State.BLOCKED),  # one that is to be revived waits for them again
                _fulfilled(backend.tables, upstream),
            )
        )
        found = [
            {"edge_job": job_id, "edge_upstream": upstream_id}
            for job_id, upstream_id in connection.execute(query)
        ]
        if found:
            connection.execute(mark, found)
        marked += len(found)
    return marked


def waiting_in_vain(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[End]:
    """Return ends for blocked jobs that have an upstream which failed under the rule `cancel`."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = backend.tables.jobs_as("upstream")
    ends: dict[int, End] = {}
    for chunk in chunked(job_ids, 500):
        query = (
            select(
                *(jobs.c[name] for name in ("id", "lease_owner", "lease_token")),
                deps.c.depends_on_id.label("cause"),
                upstream.c.state.label("cause_state"),
            )
            .join(deps, deps.c.job_id == jobs.c.id)
            .outerjoin(upstream, upstream.c.id == deps.c.depends_on_id)
            .where(
                jobs.c.id.in_(chunk),
                in_state(jobs, State.BLOCKED),
                ~deps.c.satisfied,
                or_(
                    upstream.c.id.is_(None),
                    and_(deps.c.on_failure == "cancel", upstream.c.state.in_(FAILURES)),
                ),
            )
            .order_by(jobs.c.id, deps.c.depends_on_id)
        )
        for row in connection.execute(query):
            ends.setdefault(row.id, _cancelled(row))
    return list(ends.values())


def _fulfilled(tables: Tables, upstream: FromClause) -> ColumnElement[bool]:
    may_fail = and_(upstream.c.state.in_(FAILURES), tables.deps.c.on_failure == "run")
    return or_(in_state(upstream, State.DONE), may_fail)


def _cancelled(row: Any) -> End:
    verbs = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}
    verb = verbs.get(row.cause_state, "does not exist any more")
    locked = Locked(row.id, row.lease_owner, row.lease_token)
    return End(locked, State.CANCELLED, error=f"upstream job {row.cause} {verb}", cause=row.cause)
