"""A graph of jobs as it is now: nodes with states, edges, and drawings of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, func, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import JobNotFoundError
from asyncjobq.job import COLUMNS, Job
from asyncjobq.states import Kind, State

COLORS: Final = {
    State.DONE: "#b7e1cd",
    State.FAILED: "#f4b6b6",
    State.CANCELLED: "#dddddd",
    State.LEASED: "#cfe2ff",
    State.RUNNING: "#cfe2ff",
}


@dataclass(frozen=True)
class Edge:
    """`job_id` waits, or waited, for `depends_on_id`."""

    job_id: int
    depends_on_id: int
    satisfied: bool
    on_failure: str


@dataclass(frozen=True)
class Graph:
    """Jobs, in id order, and the edges among them."""

    jobs: tuple[Job[Any], ...]
    edges: tuple[Edge, ...]

    def to_mermaid(self) -> str:
        """Return the graph in Mermaid's language, containers as boxes around what is in them."""
        lines = ["flowchart LR", *self._mermaid_boxes(None, "  ")]
        for edge in self.edges:
            arrow = "-.->" if edge.on_failure == "run" else "-->"
            lines.append(f"  j{edge.depends_on_id} {arrow} j{edge.job_id}")
        colored = [job for job in self.jobs if job.state in COLORS]
        lines += [f"  style j{job.id} fill:{COLORS[job.state]}" for job in colored]
        return "\n".join(lines) + "\n"

    def to_dot(self) -> str:
        """Return the graph in Graphviz' language."""
        lines = ["digraph jobs {", "  rankdir=LR; compound=true; node [shape=box, style=filled];"]
        lines += self._dot_boxes(None, "  ")
        for edge in self.edges:
            style = " [style=dashed]" if edge.on_failure == "run" else ""
            lines.append(f"  j{edge.depends_on_id} -> j{edge.job_id}{style};")
        return "\n".join([*lines, "}"]) + "\n"

    def _inside(self, parent_id: int | None) -> Iterable[Job[Any]]:
        known = {job.id for job in self.jobs}
        for job in self.jobs:
            above = job.parent_id if job.parent_id in known else None
            if above == parent_id:
                yield job

    def _mermaid_boxes(self, parent_id: int | None, indent: str) -> list[str]:
        lines: list[str] = []
        for job in self._inside(parent_id):
            if job.kind is Kind.CONTAINER:
                inner = self._mermaid_boxes(job.id, indent + "  ")
                lines += [f'{indent}subgraph j{job.id} ["{_label(job)}"]', *inner, f"{indent}end"]
            else:
                lines.append(f'{indent}j{job.id}["{_label(job)}"]')
                lines += self._mermaid_boxes(job.id, indent)
        return lines

    def _dot_boxes(self, parent_id: int | None, indent: str) -> list[str]:
        lines: list[str] = []
        for job in self._inside(parent_id):
            color = COLORS.get(job.state, "#ffffff")
            label = _label(job).replace("\\", "\\\\")
            if job.kind is Kind.CONTAINER:
                lines.append(f'{indent}subgraph cluster_{job.id} {{ label="{label}";')
                lines.append(f"{indent}  j{job.id} [shape=point, style=invis];")
                lines += [*self._dot_boxes(job.id, indent + "  "), f"{indent}}}"]
            else:
                lines.append(f'{indent}j{job.id} [label="{label}", fillcolor="{color}"];')
                lines += self._dot_boxes(job.id, indent)
        return lines


def _label(job: Job[Any]) -> str:
    """Return what a box says, without what would end its quotes."""
    name = (job.name or job.type).translate({ord('"'): "'", ord("\n"): " ", ord("<"): "("})
    return f"{name} · {job.state}"


def graph_of(connection: Connection, backend: Backend, job_id: int, limit: int) -> Graph:
    """Return the graph around a job: all that is in its outermost container, else what is linked.

    Raises JobNotFoundError. At most about `limit` jobs are read.
    """
    jobs = backend.tables.jobs
    if connection.scalar(select(jobs.c.id).where(jobs.c.id == job_id)) is None:
        raise JobNotFoundError(job_id)
    found: set[int] = set()
    level = {job_id}
    while level and len(found) < limit:
        found |= level
        level = _neighbours(connection, backend, sorted(level)) - found
    ids = sorted(found)
    return Graph(tuple(_jobs(connection, backend, ids)), tuple(_edges(connection, backend, ids)))


def count_below(connection: Connection, backend: Backend, job_id: int) -> dict[State, int]:
    """Count the jobs below a container or job by state, whatever containers are between."""
    jobs = backend.tables.jobs
    below = select(jobs.c.id).where(jobs.c.parent_id == job_id).cte("below", recursive=True)
    below = below.union_all(select(jobs.c.id).join(below, jobs.c.parent_id == below.c.id))
    query = (
        select(jobs.c.state, func.count())
        .join(below, below.c.id == jobs.c.id)
        .where(jobs.c.kind == Kind.JOB)
        .group_by(jobs.c.state)
    )
    return {State(state): count for state, count in connection.execute(query)}


def _neighbours(connection: Connection, backend: Backend, ids: Sequence[int]) -> set[int]:
    """Return what is one step away: over an edge, to the parent, or to a child."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    found: set[int] = set()
    for chunk in chunked(ids, 500):
        found.update(
            connection.scalars(select(deps.c.job_id).where(deps.c.depends_on_id.in_(chunk)))
        )
        found.update(
            connection.scalars(select(deps.c.depends_on_id).where(deps.c.job_id.in_(chunk)))
        )
        found.update(connection.scalars(select(jobs.c.id).where(jobs.c.parent_id.in_(chunk))))
        parents = select(jobs.c.parent_id).where(
            jobs.c.id.in_(chunk), jobs.c.parent_id.is_not(None)
        )
        found.update(job_id for job_id in connection.scalars(parents) if job_id is not None)
    return found


def _jobs(connection: Connection, backend: Backend, ids: Sequence[int]) -> Iterable[Job[Any]]:
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in COLUMNS]
    for chunk in chunked(ids, 500):
        query = select(*columns).where(jobs.c.id.in_(chunk)).order_by(jobs.c.id)
        yield from map(Job.from_row, connection.execute(query))


def _edges(connection: Connection, backend: Backend, ids: Sequence[int]) -> Iterable[Edge]:
    deps = backend.tables.deps
    columns = [deps.c[name] for name in ("job_id", "depends_on_id", "satisfied", "on_failure")]
    for chunk in chunked(ids, 500):
        query = select(*columns).where(deps.c.job_id.in_(chunk))
        for row in connection.execute(query.order_by(deps.c.job_id, deps.c.depends_on_id)):
            yield Edge(row.job_id, row.depends_on_id, bool(row.satisfied), row.on_failure)
