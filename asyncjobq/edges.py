"""Edges between jobs: who waits for whom, which edges are satisfied, and who waits in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    Connection,
    Executable,
    Integer,
    Row,
    Select,
    Update,
    bindparam,
    select,
    update,
)

from asyncjobq.backends.base import Backend, rows_by_id
from asyncjobq.models import in_state
from asyncjobq.states import State
from asyncjobq.transition import End, Locked

FAILURES: Final = frozenset({State.FAILED, State.CANCELLED})


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """An edge that is not satisfied: `job` waits for `upstream`."""

    job: int
    upstream: int
    on_failure: str


def upstream_edges(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[Edge]:
    """Return the edges by which these jobs still wait."""
    return _edges(rows_by_id(connection, backend.built(_of_jobs), job_ids))


def dependant_edges(
    connection: Connection, backend: Backend, job_ids: Sequence[int], limit: int
) -> list[Edge]:
    """Return up to `limit` edges by which blocked jobs wait for these, in the order of these."""
    if not job_ids:
        return []
    parameters = {"ids": list(job_ids), "most": limit}
    return _edges(connection.execute(backend.built(_of_upstreams), parameters))


def mark_satisfied(connection: Connection, backend: Backend, edges: Iterable[Edge]) -> int:
    """Mark edges as satisfied, and count them.

    By primary key, both columns: locking a range of edges would let two settlers deadlock.
    """
    found = [{"edge_job": edge.job, "edge_upstream": edge.upstream} for edge in edges]
    if found:
        connection.execute(backend.built(_mark), found)
    return len(found)


def is_fulfilled(edge: Edge, states: Mapping[int, State | None]) -> bool:
    """Tell whether an edge's upstream is done, or has failed and may.

    `states` are those of locked upstreams; None is that of one which does not exist any more.
    """
    state = states.get(edge.upstream)
    return state == State.DONE or (state in FAILURES and edge.on_failure == "run")


def waiting_in_vain(
    jobs: Mapping[int, Row[Any]], edges: Iterable[Edge], states: Mapping[int, State | None]
) -> list[End]:
    """Return ends for locked jobs an upstream of which failed under the rule `cancel`.

    `states` as above.
    """
    ends: dict[int, End] = {}
    for edge in sorted(edges):
        if edge.job in jobs and _is_vain(edge, states):
            locked = Locked.of(jobs[edge.job])
            error = f"upstream job {edge.upstream} {_became(states[edge.upstream])}"
            end = End(locked, State.CANCELLED, error=error, cause=edge.upstream)
            ends.setdefault(edge.job, end)
    return list(ends.values())


def _edges(rows: Iterable[Row[Any]]) -> list[Edge]:
    return [Edge(row.job_id, row.depends_on_id, row.on_failure) for row in rows]


def _is_vain(edge: Edge, states: Mapping[int, State | None]) -> bool:
    if edge.upstream not in states:
        return False
    state = states[edge.upstream]
    return state is None or (state in FAILURES and edge.on_failure == "cancel")


def _became(state: State | None) -> str:
    verbs = {State.FAILED: "failed", State.CANCELLED: "was cancelled"}
    return "does not exist any more" if state is None else verbs[state]


def _of_jobs(backend: Backend) -> Executable:
    deps = backend.tables.deps
    return _columns(backend).where(backend.among(deps.c.job_id), ~deps.c.satisfied)


def _of_upstreams(backend: Backend) -> Executable:
    jobs, deps = backend.tables.jobs, backend.tables.deps
    return (
        _columns(backend)
        .join(jobs, jobs.c.id == deps.c.job_id)
        .where(
            backend.among(deps.c.depends_on_id),
            ~deps.c.satisfied,
            in_state(jobs, State.BLOCKED),  # one that is to be revived waits for it again then
        )
        .order_by(deps.c.depends_on_id, deps.c.job_id)
        .limit(bindparam("most", type_=Integer))
    )


def _columns(backend: Backend) -> Select[Any, Any, Any]:
    deps = backend.tables.deps
    return select(deps.c.job_id, deps.c.depends_on_id, deps.c.on_failure)


def _mark(backend: Backend) -> Update:
    deps = backend.tables.deps
    key = (
        deps.c.job_id == bindparam("edge_job"),
        deps.c.depends_on_id == bindparam("edge_upstream"),
    )
    return update(deps).where(*key).values(satisfied=True)
