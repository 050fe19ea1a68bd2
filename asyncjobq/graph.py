"""A graph of jobs as it is now: nodes with states, edges, and drawings of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    cut: bool = False
    """Whether there are more jobs, which the limit has left out."""

    def to_mermaid(self) -> str:
        """Return the graph in Mermaid's language, containers as boxes around what is in them."""
        lines = ["flowchart LR"]
        for job, depth, ends in self._places():
            indent = "  " * (depth + 1)
            if ends:
                lines.append(f"{indent}end")
            elif job.kind is Kind.CONTAINER:
                lines.append(f'{indent}subgraph j{job.id} ["{_label(job)}"]')
            else:
                lines.append(f'{indent}j{job.id}["{_label(job)}"]')
        for edge in self.edges:
            arrow = "-.->" if edge.on_failure == "run" else "-->"
            lines.append(f"  j{edge.depends_on_id} {arrow} j{edge.job_id}")
        colored = [job for job in self.jobs if job.state in COLORS]
        lines += [f"  style j{job.id} fill:{COLORS[job.state]}" for job in colored]
        return "\n".join(lines) + "\n"

    def to_dot(self) -> str:
        """Return the graph in Graphviz' language."""
        lines = ["digraph jobs {", "  rankdir=LR; compound=true; node [shape=box, style=filled];"]
        for job, depth, ends in self._places():
            indent = "  " * (depth + 1)
            label = _label(job).replace("\\", "\\\\")
            color = COLORS.get(job.state, "#ffffff")
            if ends:
                lines.append(f"{indent}}}")
            elif job.kind is Kind.CONTAINER:
                lines.append(f'{indent}subgraph cluster_{job.id} {{ label="{label}";')
                lines.append(f"{indent}  j{job.id} [shape=point, style=invis];")
            else:
                lines.append(f'{indent}j{job.id} [label="{label}", fillcolor="{color}"];')
        for edge in self.edges:
            style = " [style=dashed]" if edge.on_failure == "run" else ""
            lines.append(f"  j{edge.depends_on_id} -> j{edge.job_id}{style};")
        return "\n".join([*lines, "}"]) + "\n"

    def _places(self) -> Iterator[tuple[Job[Any], int, bool]]:
        """Yield each job with the number of containers around it; one of these twice.

        The second time, True says that its box ends.
        """
        known = {job.id for job in self.jobs}
        inside: dict[int | None, list[Job[Any]]] = {}
        for job in self.jobs:
            above = job.parent_id if job.parent_id in known else None
            inside.setdefault(above, []).append(job)
        left = [(job, 0, False) for job in reversed(inside.get(None, ()))]
        while left:
            job, depth, ends = left.pop()
            yield job, depth, ends
            if ends:
                continue
            is_box = job.kind is Kind.CONTAINER
            left += [(job, depth, True)] if is_box else []
            left += [(one, depth + is_box, False) for one in reversed(inside.get(job.id, ()))]


def _label(job: Job[Any]) -> str:
    """Return what a box says, without what would end its quotes."""
    name = (job.name or job.type).translate({ord('"'): "'", ord("\n"): " ", ord("<"): "("})
    return f"{name} · {job.state}"


def graph_of(connection: Connection, backend: Backend, job_id: int, limit: int) -> Graph:
    """Return the graph around a job: all that edges, parents and children lead to from it.

    Raises JobNotFoundError. What is nearest comes first, should there be more than `limit` jobs.
    """
    jobs = backend.tables.jobs
    if connection.scalar(select(jobs.c.id).where(jobs.c.id == job_id)) is None:
        raise JobNotFoundError(job_id)
    found: set[int] = {job_id}
    level, cut = found, False
    while level and not cut:
        around = sorted(_neighbours(connection, backend, sorted(level)) - found)
        room = max(0, limit - len(found))
        level, cut = set(around[:room]), len(around) > room
        found |= level
    ids = sorted(found)
    edges = _edges(connection, backend, ids)
    known = tuple(edge for edge in edges if edge.depends_on_id in found)
    return Graph(tuple(_jobs(connection, backend, ids)), known, cut)


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
    found = {row[0]: row[1] for row in connection.execute(query)}
    return {state: found[state] for state in State if state in found}  # in the order of its life


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
