"""Families of jobs that ended: what belongs together, and what still holds it.

A family is held by

    a row of it         that has not ended, is not settled, or holds a unique key that is not over
    a child             that is not of it yet
    a dependant         outside of it that is not done: it may still run, or be run again, and then
                        asks for its upstreams. One that is done never asks again.
    a coming revival    a cause of one of its rows is open again, and settling has yet to come to it

and by every other family that is held. Rows are locked first, for deletion; the rest is read by
statements after that, so that nothing committed meanwhile is missed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, or_, select

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.states import TERMINAL, State

REFERENCES: Final = 20_000
"""References that are read at most for one judgement."""
CHUNK: Final = 150
"""Values up to which every planner looks into the index itself and not at statistics of it."""


@dataclass(frozen=True)
class Judged:
    """Rows that may go, topmost first, and the units that only other rows hold."""

    free: list[int]
    held: list[int]


def members_of(
    connection: Connection, backend: Backend, roots: Sequence[int], most: int | None = None
) -> dict[int, int] | None:
    """Return the topmost of each row of these families, from above; None if they are too many."""
    jobs = backend.tables.jobs
    root_of = {root: root for root in roots}
    level = list(roots)
    while level:
        below: list[int] = []
        for chunk in chunked(level, CHUNK):
            query = select(jobs.c.id, jobs.c.parent_id).where(jobs.c.parent_id.in_(chunk))
            for job_id, parent_id in connection.execute(query.limit(most)):
                root_of[job_id] = root_of[parent_id]
                below.append(job_id)
            if most is not None and len(root_of) > most:
                return None
        level = sorted(below)
    return root_of


def lock_fit(
    connection: Connection, backend: Backend, job_ids: Sequence[int], old: ColumnElement[bool]
) -> dict[int, Any]:
    """Lock rows for deletion; return those that are over for good, and old if they are topmost."""
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in ("id", "state", "cause")]
    conditions = (
        jobs.c.state.in_(sorted(TERMINAL)),
        jobs.c.settled,
        or_(jobs.c.unique_held.is_(None), jobs.c.unique_until <= backend.now()),
        or_(jobs.c.parent_id.is_not(None), old),
    )
    rows = backend.lock_rows(connection, job_ids, columns, *conditions, to_delete=True)
    return {row.id: row for row in rows}


def judge(
    connection: Connection,
    backend: Backend,
    unit_of: Mapping[int, int],
    old: ColumnElement[bool],
) -> Judged | None:
    """Lock rows, and say which may go: a unit as a whole, or not at all.

    None if too much refers to them for one judgement.
    """
    rows = lock_fit(connection, backend, sorted(unit_of), old)
    if not rows:
        return Judged([], [])
    revived = _to_be_revived(connection, backend, rows)
    unfit = {unit for job_id, unit in unit_of.items() if job_id not in rows or job_id in revived}
    references = _references(connection, backend, list(rows))
    if references is None:
        return None
    held = _held(unit_of, references, unfit)
    free = [job_id for job_id, unit in unit_of.items() if unit not in held]
    return Judged(free, sorted(held - unfit))


def _references(
    connection: Connection, backend: Backend, job_ids: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return what refers to these rows and holds them, as pairs (referring, row)."""
    jobs = backend.tables.jobs
    found: list[tuple[int, int]] = []
    for chunk in chunked(job_ids, CHUNK):
        children = select(jobs.c.id, jobs.c.parent_id).where(jobs.c.parent_id.in_(chunk))
        for query in (children, _dependants(backend, chunk)):
            pairs = connection.execute(query.limit(REFERENCES)).all()
            if len(pairs) == REFERENCES:
                return None
            found += [(referring, job_id) for referring, job_id in pairs]
    return found


def _dependants(backend: Backend, job_ids: Sequence[int]) -> Any:
    """Select the dependants that may still ask for these rows, with them."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    # No join, for which a planner may read the whole table.
    state = select(jobs.c.state).where(jobs.c.id == deps.c.job_id).scalar_subquery()
    query = select(deps.c.job_id, deps.c.depends_on_id).where(deps.c.depends_on_id.in_(job_ids))
    return query.where(state != State.DONE)


def held_from_outside(connection: Connection, backend: Backend, members: Sequence[int]) -> bool:
    """Tell whether a dependant of these rows that is not among them holds one."""
    known = set(members)
    return any(
        dependant not in known
        for chunk in chunked(members, 100)
        for dependant in connection.scalars(_dependants(backend, chunk))
    )


def _held(
    unit_of: Mapping[int, int], references: Iterable[tuple[int, int]], unfit: set[int]
) -> set[int]:
    """Return the units that stay: those that are unfit, and all that what stays refers to."""
    held = set(unfit)
    needed: defaultdict[int, set[int]] = defaultdict(set)
    for referring, job_id in references:
        if referring in unit_of:
            needed[unit_of[referring]].add(unit_of[job_id])
        else:
            held.add(unit_of[job_id])
    unseen = list(held)
    while unseen:
        reached = needed[unseen.pop()] - held
        held |= reached
        unseen += reached
    return held


def _to_be_revived(connection: Connection, backend: Backend, rows: Mapping[int, Any]) -> set[int]:
    """Return the cancelled rows that settling will revive: a cause of theirs is open again.

    Perhaps only the cause of a cause: they are revived one after the other.
    """
    jobs = backend.tables.jobs
    causes = {row.id: row.cause for row in rows.values() if _was_cancelled(row)}
    known, opened = set(rows), set[int]()
    wanted = set(causes.values()) - known
    while wanted:
        known |= wanted
        found: dict[int, int] = {}
        for chunk in chunked(sorted(wanted), 500):
            query = select(jobs.c.id, jobs.c.state, jobs.c.cause).where(jobs.c.id.in_(chunk))
            for row in connection.execute(query):
                if row.state not in TERMINAL:
                    opened.add(row.id)
                elif _was_cancelled(row):
                    found[row.id] = row.cause
        causes |= found
        wanted = set(found.values()) - known
    return _leading_to(opened, causes) & rows.keys() if opened else set()


def _was_cancelled(row: Any) -> bool:
    return row.state == State.CANCELLED and row.cause is not None


def _leading_to(opened: set[int], causes: Mapping[int, int]) -> set[int]:
    """Return the rows whose causes, followed from one to the next, lead to one of these."""
    effects: defaultdict[int, set[int]] = defaultdict(set)
    for job_id, cause in causes.items():
        effects[cause].add(job_id)
    reached, unseen = set(opened), list(opened)
    while unseen:
        more = effects[unseen.pop()] - reached
        reached |= more
        unseen += more
    return reached
