"""Delete jobs that ended long ago, and nothing that something else still needs.

The unit is the family: a job or container without a parent, with all that is below it. It goes as
a whole, judged by the topmost, which ends last: a container that were short of a failed child could
not be run again. What holds a family is said in `families.py`.

A family that is too large for one transaction goes in parts, from below, and what depends on
something before that. Should it be run again in the middle of this, the rest of it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    and_,
    bindparam,
    case,
    delete,
    func,
    or_,
    select,
)

from asyncjobq import families
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.errors import ConfigurationError
from asyncjobq.holders import release
from asyncjobq.models import in_state
from asyncjobq.states import State

WINDOW: Final = 2000
"""Rows that one look goes through."""
ROOTS: Final = 500
MEMBERS: Final = 2000
"""Rows that one transaction deletes at most."""

Ages = Mapping[State, float]
"""After how many seconds jobs of a state may go."""


@dataclass(frozen=True)
class Page:
    """Families that may go, by their topmost, and where to look on."""

    roots: list[int]
    after: int
    over: bool


@dataclass(frozen=True)
class Pruned:
    """What one call did with families, each named by its topmost."""

    deleted: int
    held: Sequence[int] = ()
    """Those that other rows hold; free, perhaps, when these are gone."""
    left: Sequence[int] = ()
    """Those that were too much for this call."""
    too_large: int | None = None
    """One that is too much for any call."""


def find_once(
    connection: Connection, backend: Backend, ages: Ages, after: int = 0, limit: int = ROOTS
) -> Page:
    """Look for families that are old enough, in a bounded number of rows behind an id.

    Ids and times of creation rise together, so that nothing old lies behind what is young.
    """
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in ("id", "parent_id", "state", "created_at", "finished_at")]
    rows = select(*columns).where(jobs.c.id > after).order_by(jobs.c.id)
    # The conditions stand outside of this bound, so that no index on a state can lead past it.
    window = backend.by_key(rows).limit(WINDOW).subquery("looked_at")
    young = case((window.c.created_at > backend.now(-min(ages.values())), 1), else_=0)
    end = connection.execute(
        select(
            func.max(window.c.id).label("last"),
            func.count(window.c.id).label("rows"),
            func.max(young).label("young"),
        )
    ).one()
    query = select(window.c.id).where(window.c.parent_id.is_(None), _old(backend, window, ages))
    found = list(connection.scalars(query.order_by(window.c.id).limit(limit)))
    if len(found) == limit:
        return Page(found, found[-1], over=False)
    return Page(found, end.last or after, over=end.rows < WINDOW or bool(end.young))


def _old(backend: Backend, jobs: FromClause, ages: Ages) -> ColumnElement[bool]:
    old = (
        and_(in_state(jobs, state), jobs.c.finished_at <= backend.now(-age))
        for state, age in sorted(ages.items())
    )
    return or_(*old)


def prune_once(
    connection: Connection, backend: Backend, roots: Sequence[int], ages: Ages
) -> Pruned:
    """Delete those of these families that nothing holds, as many as are not too much for a call."""
    with backend.by_index(connection):
        chosen = list(roots)
        while (judged := _judge(connection, backend, chosen, ages)) is None:
            if len(chosen) == 1:
                return Pruned(0, left=roots[1:], too_large=chosen[0])
            chosen = chosen[: len(chosen) // 2]
        deleted = _delete(connection, backend, judged.free)
        return Pruned(deleted, judged.held, roots[len(chosen) :])


def begin_in_callers(connection: Connection, backend: Backend) -> None:
    """Make sure that what a caller's transaction reads from here on is so until it ends.

    Raises ConfigurationError where it cannot be: an old snapshot lacks edges that were committed
    meanwhile, and what they lead to would be deleted.
    """
    if not backend.reads_committed(connection):
        raise ConfigurationError(
            "prune() works in a transaction at READ COMMITTED only: at another level it may not "
            "see what still needs a job. Use that for this session, first of all by await "
            'session.connection(execution_options={"isolation_level": "READ COMMITTED"}), or '
            "leave session= out."
        )
    backend.begin_writing(connection)


def _judge(
    connection: Connection, backend: Backend, roots: Sequence[int], ages: Ages
) -> families.Judged | None:
    root_of = families.members_of(connection, backend, roots, MEMBERS)
    if root_of is None:
        return None
    return families.judge(connection, backend, root_of, _old(backend, backend.tables.jobs, ages))


def parts_of(connection: Connection, backend: Backend, root: int) -> list[int]:
    """Return a large family in the order in which it may go; nothing if something else holds it."""
    with backend.by_index(connection):
        root_of = families.members_of(connection, backend, [root])
        members = list(reversed(root_of or ()))
        return [] if families.held_from_outside(connection, backend, members) else members


def prune_part_once(
    connection: Connection, backend: Backend, root: int, part: Sequence[int], ages: Ages
) -> list[int] | None:
    """Delete those rows of a large family that nothing holds, and return them.

    None if the family may not go any more: it is open again.
    """
    with backend.by_index(connection):
        old = _old(backend, backend.tables.jobs, ages)
        if not families.lock_fit(connection, backend, [root], old):
            return None
        judged = families.judge(connection, backend, {job_id: job_id for job_id in part}, old)
        if judged is None:
            half = len(part) // 2
            return prune_part_once(connection, backend, root, part[:half], ages) if half else []
        _delete(connection, backend, judged.free)
        return judged.free


def _delete(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> int:
    """Delete locked jobs, given topmost first, with their edges and attempts."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    for chunk in chunked(list(reversed(job_ids)), 500):
        release(connection, backend, chunk)
        _delete_attempts(connection, backend, chunk)
        connection.execute(delete(deps).where(deps.c.job_id.in_(chunk)))
        _delete_edges_to(connection, backend, chunk)
    for chunk in chunked(list(reversed(job_ids)), 500):
        connection.execute(delete(jobs).where(jobs.c.id.in_(chunk)))
    return len(job_ids)


def _delete_attempts(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> None:
    attempts = backend.tables.attempts
    query = select(attempts.c.id).where(attempts.c.job_id.in_(job_ids))
    for chunk in chunked(list(connection.scalars(query)), 1000):
        connection.execute(delete(attempts).where(attempts.c.id.in_(chunk)))


def _delete_edges_to(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> None:
    """Delete the edges that are left of dependants that stay: they are done."""
    deps = backend.tables.deps
    query = select(deps.c.job_id, deps.c.depends_on_id).where(deps.c.depends_on_id.in_(job_ids))
    edges: list[dict[str, Any]] = [
        {"edge_job": job_id, "edge_upstream": upstream}
        for job_id, upstream in connection.execute(query)
    ]
    if edges:
        by_key = and_(
            deps.c.job_id == bindparam("edge_job"),
            deps.c.depends_on_id == bindparam("edge_upstream"),
        )
        connection.execute(delete(deps).where(by_key), edges)
