"""Circles of waiting among jobs that exist: through containers, and only through them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, or_, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.models import in_state
from asyncjobq.states import TERMINAL, State
from asyncjobq.transition import End, Locked

Place = tuple[int, bool]
"""The beginning (False) or the end (True) of a job."""


def ancestors(connection: Connection, backend: Backend, job_ids: Iterable[int]) -> set[int]:
    """Return these jobs and all that are above them."""
    jobs = backend.tables.jobs
    found: set[int] = set()
    level = set(job_ids)
    while level:
        found |= level
        above: set[int] = set()
        for chunk in chunked(sorted(level), 500):
            query = select(jobs.c.parent_id).where(
                jobs.c.id.in_(chunk), jobs.c.parent_id.is_not(None)
            )
            above.update(connection.scalars(query))
        level = above - found
    return found


def way_round(
    connection: Connection,
    backend: Backend,
    upstreams: Iterable[int],
    parents: Iterable[int],
    also: Mapping[int, Iterable[int]] = MappingProxyType({}),
) -> list[int] | None:
    """Return how an end of `upstreams` waits for the end of one of `parents` or their ancestors.

    A job below such a parent that depended on such an upstream would wait for itself. `also` says
    what the ends of containers will wait for, when what is about to be written is in them.
    """
    targets = ancestors(connection, backend, parents)
    came_from: dict[Place, Place | None] = {(job_id, True): None for job_id in upstreams}
    level = list(came_from)
    while level:
        hit = next((place for place in level if place[1] and place[0] in targets), None)
        if hit is not None:
            return _path(came_from, hit)
        following: list[Place] = []
        planned = [(up, (down, True)) for up in level if up[1] for down in also.get(up[0], ())]
        for waiting, waited_for in (*_waits(connection, backend, level), *planned):
            if waited_for not in came_from:
                came_from[waited_for] = waiting
                following.append(waited_for)
        level = following
    return None


def waiting_for_themselves(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> Iterator[End]:
    """Yield ends for blocked jobs that close a circle; each is looked for after the last is ended.

    When they were enqueued there was none, but two transactions that do not see each other can
    each write a half of one. Only edges that lead out of a container can be part of it.
    """
    for chunk in chunked(job_ids, 500):
        for job, upstreams in _edges_outward(connection, backend, chunk):
            way = way_round(connection, backend, upstreams, [job.parent_id])
            if way is not None:
                path = " → ".join(map(str, (job.id, *way, job.id)))
                error = f"it would wait for itself: {path}"
                yield End(Locked.of(job), State.CANCELLED, error=error)


def _edges_outward(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> list[tuple[Any, list[int]]]:
    """Return blocked children with those of their upstreams that are not their siblings."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = backend.tables.jobs_as("upstream")
    elsewhere = or_(upstream.c.parent_id.is_(None), upstream.c.parent_id != jobs.c.parent_id)
    query = (
        select(
            *(jobs.c[name] for name in ("id", "parent_id", "lease_owner", "lease_token")),
            deps.c.depends_on_id,
        )
        .join(deps, deps.c.job_id == jobs.c.id)
        .join(upstream, upstream.c.id == deps.c.depends_on_id)
        .where(
            jobs.c.id.in_(job_ids),
            in_state(jobs, State.BLOCKED),
            jobs.c.parent_id.is_not(None),
            ~deps.c.satisfied,
            elsewhere,
        )
        .order_by(jobs.c.id)
    )
    found: dict[int, tuple[Any, list[int]]] = {}
    for row in connection.execute(query):
        found.setdefault(row.id, (row, []))[1].append(row.depends_on_id)
    return list(found.values())


def _waits(
    connection: Connection, backend: Backend, places: Sequence[Place]
) -> list[tuple[Place, Place]]:
    """Return what these places wait for, among jobs that have not ended."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    still_open = jobs.c.state.not_in(sorted(TERMINAL))
    found: list[tuple[Place, Place]] = []
    ends = [job_id for job_id, is_end in places if is_end]
    beginnings = [job_id for job_id, is_end in places if not is_end]
    for chunk in chunked(ends, 500):
        opened = select(jobs.c.id).where(jobs.c.id.in_(chunk), still_open)
        found += [((job_id, True), (job_id, False)) for job_id in connection.scalars(opened)]
        children = select(jobs.c.parent_id, jobs.c.id).where(
            jobs.c.parent_id.in_(chunk), still_open
        )
        found += [((up, True), (down, True)) for up, down in connection.execute(children)]
    for chunk in chunked(beginnings, 500):
        upstreams = (
            select(deps.c.job_id, deps.c.depends_on_id)
            .join(jobs, jobs.c.id == deps.c.job_id)
            .where(deps.c.job_id.in_(chunk), ~deps.c.satisfied, in_state(jobs, State.BLOCKED))
        )
        found += [((down, False), (up, True)) for down, up in connection.execute(upstreams)]
        parents = select(jobs.c.id, jobs.c.parent_id).where(
            jobs.c.id.in_(chunk), jobs.c.parent_id.is_not(None)
        )
        found += [((down, False), (up, False)) for down, up in connection.execute(parents)]
    return found


def _path(came_from: dict[Place, Place | None], end: Place) -> list[int]:
    path: list[int] = []
    place: Place | None = end
    while place is not None:
        if not path or path[-1] != place[0]:
            path.append(place[0])
        place = came_from[place]
    return path[::-1]
