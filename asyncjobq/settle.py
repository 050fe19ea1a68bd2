"""The outbox: makes everything around a job that ended, or that is new, agree with its state.

Unsettled rows are the work list. One call takes a bounded number of them, in a transaction of its
own, and may be repeated at will: rows are the truth and no counter is. What cannot be finished now
(a neighbour is locked, or there are more dependants than one call takes) stays unsettled.

The order of locks: in id order and always skipping, first the unsettled rows, then the upstreams
of the new ones among them, then their dependants. Edges and states are read only by statements
after the last lock. Without this, two last upstreams that settle in overlapping transactions each
see the other as open, and the dependant waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, case, exists, or_, select, update

from asyncjobq.backends.base import Backend, chunked
from asyncjobq.models import in_state
from asyncjobq.states import TERMINAL, State
from asyncjobq.transition import End, Locked, end_jobs

ROWS: Final = 200
DEPENDANTS: Final = 2000


@dataclass
class Settled:
    """What one call did."""

    settled: int = 0
    promoted: int = 0
    ended: list[End] = field(default_factory=list)
    cut_at: int | None = None
    """The last id that was looked at, if there may be unsettled rows behind it."""

    @property
    def moved(self) -> bool:
        """Whether calling again at once may find more to do."""
        return bool(self.settled or self.promoted or self.ended)


@dataclass
class Sweep:
    """Where a series of calls stands: rows that are stuck at the front hide none behind them."""

    after: int = 0
    over: bool = False
    _moved: bool = False

    def note(self, settled: Settled) -> None:
        """Say where to go on after this call."""
        self._moved |= settled.moved
        if settled.moved:
            return
        if settled.cut_at is not None:
            self.after = settled.cut_at
        elif self.after and self._moved:
            self.after, self._moved = 0, False
        else:
            self.over = True


def settle_once(
    connection: Connection, backend: Backend, after: int = 0, limit: int = ROWS
) -> Settled:
    """Settle up to `limit` rows with ids above `after`."""
    jobs = backend.tables.jobs
    query = select(jobs.c.id).where(~jobs.c.settled, jobs.c.id > after)
    candidates = list(connection.scalars(query.order_by(jobs.c.id).limit(limit)))
    if not candidates:
        return Settled()
    columns = [jobs.c.id, jobs.c.state]
    rows = backend.lock_rows(connection, candidates, columns, ~jobs.c.settled)
    ended = [row.id for row in rows if row.state in TERMINAL]
    new = [row.id for row in rows if row.state not in TERMINAL]
    new = _with_locked_upstreams(connection, backend, new)
    dependants, complete = _lock_dependants(connection, backend, ended)
    _mark_edges(connection, backend, [*dependants, *new])
    result = _decide(connection, backend, sorted({*dependants, *new}))
    # A job that was cancelled just now has neighbours of its own to be told.
    cancelled = {end.row.id for end in result.ended}
    result.settled = _mark_settled(connection, backend, [*complete, *(set(new) - cancelled)])
    result.cut_at = candidates[-1] if len(candidates) == limit else None
    return result


def _with_locked_upstreams(
    connection: Connection, backend: Backend, new: Sequence[int]
) -> list[int]:
    """Return the new jobs all of whose upstreams could be locked.

    An upstream whose end is being committed at this moment would otherwise be read as running.
    """
    upstreams = _edges(connection, backend, new)
    wanted = {upstream for found in upstreams.values() for upstream in found}
    jobs = backend.tables.jobs
    locked = {row.id for row in backend.lock_rows(connection, sorted(wanted), [jobs.c.id])}
    return [job_id for job_id in new if upstreams.get(job_id, set()) <= locked]


def _edges(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> dict[int, set[int]]:
    """Return the unsatisfied upstreams of jobs."""
    deps = backend.tables.deps
    found: dict[int, set[int]] = {}
    for chunk in chunked(job_ids, 500):
        query = select(deps.c.job_id, deps.c.depends_on_id).where(
            deps.c.job_id.in_(chunk), ~deps.c.satisfied
        )
        for job_id, upstream in connection.execute(query):
            found.setdefault(job_id, set()).add(upstream)
    return found


def _lock_dependants(
    connection: Connection, backend: Backend, ended: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Lock blocked dependants of ended jobs; return them, and the ended jobs that have no more."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    waiting: dict[int, set[int]] = {}
    for chunk in chunked(ended, 500):
        query = (
            select(deps.c.depends_on_id, deps.c.job_id)
            .join(jobs, jobs.c.id == deps.c.job_id)
            .where(
                deps.c.depends_on_id.in_(chunk),
                ~deps.c.satisfied,
                in_state(jobs, State.BLOCKED),
            )
            .order_by(deps.c.depends_on_id, deps.c.job_id)
            .limit(DEPENDANTS)
        )
        for upstream, dependant in connection.execute(query):
            waiting.setdefault(upstream, set()).add(dependant)
    wanted = sorted({dependant for found in waiting.values() for dependant in found})
    rows = backend.lock_rows(connection, wanted, [jobs.c.id], in_state(jobs, State.BLOCKED))
    locked = [row.id for row in rows]
    cut = sum(map(len, waiting.values())) >= DEPENDANTS
    last = max(waiting, default=0)
    complete = [
        job_id
        for job_id in ended
        if waiting.get(job_id, set()) <= set(locked) and not (cut and job_id >= last)
    ]
    return locked, complete


def _mark_edges(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> None:
    """Mark the edges satisfied whose upstream is done, or has failed and may.

    By primary key, both columns: locking a range of edges would let two settlers deadlock.
    """
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = jobs.alias("upstream")
    open_edges = select(deps.c.job_id, deps.c.depends_on_id).join(
        upstream, upstream.c.id == deps.c.depends_on_id
    )
    failed = upstream.c.state.in_([State.FAILED, State.CANCELLED])
    fulfilled = or_(in_state(upstream, State.DONE), and_(failed, deps.c.on_failure == "run"))
    mark = (
        update(deps)
        .where(
            deps.c.job_id == bindparam("edge_job"),
            deps.c.depends_on_id == bindparam("edge_upstream"),
        )
        .values(satisfied=True)
    )
    for chunk in chunked(sorted(set(job_ids)), 500):
        query = open_edges.where(deps.c.job_id.in_(chunk), ~deps.c.satisfied, fulfilled)
        edges = [
            {"edge_job": job_id, "edge_upstream": upstream_id}
            for job_id, upstream_id in connection.execute(query)
        ]
        if edges:
            connection.execute(mark, edges)


def _decide(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> Settled:
    """Promote locked jobs that wait for nothing more; cancel those that wait in vain."""
    result = Settled()
    for chunk in chunked(job_ids, 500):
        doomed = _doomed(connection, backend, chunk)
        end_jobs(connection, backend, doomed)
        result.ended += doomed
        cancelled = {end.row.id for end in doomed}
        result.promoted += _promote(
            connection, backend, [job_id for job_id in chunk if job_id not in cancelled]
        )
    return result


def _doomed(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> list[End]:
    """Return ends for blocked jobs with an upstream that failed under the rule `cancel`."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    upstream = jobs.alias("upstream")
    query = (
        select(
            jobs.c.id,
            jobs.c.lease_owner,
            jobs.c.lease_token,
            upstream.c.id.label("cause"),
            upstream.c.state.label("cause_state"),
        )
        .join(deps, deps.c.job_id == jobs.c.id)
        .join(upstream, upstream.c.id == deps.c.depends_on_id)
        .where(
            jobs.c.id.in_(job_ids),
            in_state(jobs, State.BLOCKED),
            ~deps.c.satisfied,
            deps.c.on_failure == "cancel",
            upstream.c.state.in_([State.FAILED, State.CANCELLED]),
        )
        .order_by(jobs.c.id, upstream.c.id.desc())
    )
    return list({row.id: _cancelled(row) for row in connection.execute(query)}.values())


def _cancelled(row: Any) -> End:
    locked = Locked(row.id, row.lease_owner, row.lease_token)
    verb = "failed" if row.cause_state == State.FAILED else "was cancelled"
    reason = f"upstream job {row.cause} {verb}"
    return End(locked, State.CANCELLED, error=reason, cause=row.cause)


def _promote(connection: Connection, backend: Backend, job_ids: Iterable[int]) -> int:
    """Move blocked jobs without unsatisfied edges to `ready`, or `scheduled` if not yet due."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    unsatisfied = exists().where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied)
    query = select(jobs.c.id).where(
        jobs.c.id.in_(list(job_ids)),
        in_state(jobs, State.BLOCKED),
        ~unsatisfied.correlate(jobs),
    )
    free = list(connection.scalars(query))
    if free:
        later = jobs.c.run_after > backend.now()
        state = case((later, State.SCHEDULED), else_=State.READY)
        connection.execute(
            update(jobs).where(jobs.c.id.in_(free)).values(state=state, updated_at=backend.now())
        )
    return len(free)


def _mark_settled(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> int:
    jobs = backend.tables.jobs
    for chunk in chunked(sorted(job_ids), 500):
        connection.execute(update(jobs).where(jobs.c.id.in_(chunk)).values(settled=True))
    return len(job_ids)
