"""Circles of waiting among jobs that exist: through containers, and only through them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


class Waits:
    """What beginnings and ends wait for, each read once: a search costs no more than its reach."""

    def __init__(self, connection: Connection, backend: Backend) -> None:
        self._connection = connection
        self._backend = backend
        self._known: dict[Place, list[Place]] = {}

    def of(self, places: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
        """Yield what these wait for, as pairs."""
        unknown = [place for place in places if place not in self._known]
        self._known.update((place, []) for place in unknown)
        for waiting, waited_for in _waits(self._connection, self._backend, unknown):
            self._known[waiting].append(waited_for)
        return ((place, waited_for) for place in places for waited_for in self._known[place])

    def forget(self, job_id: int) -> None:
        """Read again what this job waits for: it has changed."""
        for is_end in (False, True):
            self._known.pop((job_id, is_end), None)


def _way(
    waits: Waits,
    upstreams: Iterable[int],
    targets: Collection[int],
    also: Mapping[int, Iterable[int]] = MappingProxyType({}),
) -> list[int] | None:
    """Return how an end of `upstreams` waits for the end of one of `targets`.

    A job that depended on such an upstream, and that such a target waits for, would wait for
    itself. `also` says what the ends of containers will wait for, when what is about to be
    written is in them.
    """
    came_from: dict[Place, Place | None] = {(job_id, True): None for job_id in upstreams}
    level = list(came_from)
    while level:
        hit = next((place for place in level if place[1] and place[0] in targets), None)
        if hit is not None:
            return _path(came_from, hit)
        following: list[Place] = []
        planned = [(up, (down, True)) for up in level if up[1] for down in also.get(up[0], ())]
        for waiting, waited_for in (*waits.of(level), *planned):
            if waited_for not in came_from:
                came_from[waited_for] = waiting
                following.append(waited_for)
        level = following
    return None


def way_round(
    connection: Connection, backend: Backend, upstreams: Mapping[int, Collection[int]]
) -> list[int] | None:
    """Return how what is about to be written would wait for itself.

    `upstreams` are, by parent, those of all that will be below it.
    """
    everything = {job_id for found in upstreams.values() for job_id in found}
    waits = _suspected(connection, backend, everything, upstreams, upstreams)
    if waits is None:
        return None
    ways = (
        _way(waits, found, ancestors(connection, backend, [parent]), upstreams)
        for parent, found in upstreams.items()
    )
    return next((way for way in ways if way is not None), None)


def waiting_for_themselves(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> Iterator[End]:
    """Yield ends for blocked jobs that close a circle; each is looked for after the last is ended.

    When they were enqueued there was none, but two transactions that do not see each other can
    each write a half of one. Only edges that lead out of a container can be part of it.
    """
    for chunk in chunked(job_ids, 500):
        jobs = _edges_outward(connection, backend, chunk)
        everything = {upstream for _, upstreams in jobs for upstream in upstreams}
        parents = {job.parent_id for job, _ in jobs}
        waits = _suspected(connection, backend, everything, parents)
        if waits is not None:
            yield from _in_circles(connection, backend, jobs, waits)


def _suspected(
    connection: Connection,
    backend: Backend,
    upstreams: Collection[int],
    parents: Iterable[int],
    also: Mapping[int, Iterable[int]] = MappingProxyType({}),
) -> Waits | None:
    """Return what was read on the way if something below these parents may wait for itself.

    Asked of all at once, for hardly ever one does: what many wait for is gone through only once.
    """
    if not upstreams:
        return None
    above = ancestors(connection, backend, parents)
    if above.isdisjoint(upstreams) and not _awaited(connection, backend, above):
        return None
    waits = Waits(connection, backend)
    return None if _way(waits, upstreams, above, also) is None else waits


def _in_circles(
    connection: Connection,
    backend: Backend,
    jobs: Sequence[tuple[Any, list[int]]],
    waits: Waits,
) -> Iterator[End]:
    above: dict[int, set[int]] = {}
    innocent: set[tuple[int, frozenset[int]]] = set()
    for job, upstreams in jobs:
        kind = (job.parent_id, frozenset(upstreams))
        if kind in innocent:
            continue
        if job.parent_id not in above:
            above[job.parent_id] = ancestors(connection, backend, [job.parent_id])
        way = _way(waits, upstreams, above[job.parent_id])
        if way is None:
            innocent.add(kind)
            continue
        path = " → ".join(map(str, (job.id, *way, job.id)))
        error = f"it would wait for itself: {path}"
        yield End(Locked.of(job), State.CANCELLED, error=error)
        waits.forget(job.id)


def _awaited(connection: Connection, backend: Backend, job_ids: Iterable[int]) -> bool:
    """Tell whether a blocked job depends on one of these; without, none is part of a circle."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    query = select(deps.c.job_id).join(jobs, jobs.c.id == deps.c.job_id)
    waiting = (~deps.c.satisfied, in_state(jobs, State.BLOCKED))
    return any(
        connection.scalar(query.where(deps.c.depends_on_id.in_(chunk), *waiting).limit(1))
        for chunk in chunked(sorted(job_ids), 500)
    )


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
