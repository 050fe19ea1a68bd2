"""The outbox: makes everything around an unsettled row agree with that row's state.

What a row's state asks of its neighbours:

    ended                     dependants wait no longer, or are cancelled; its parent may close
    new, blocked              goes if nothing holds it; is cancelled if something holds it in vain
    open, with children       blocked children go; it closes when there is no open child
    being cancelled           its children are cancelled
    open again after a retry  what its end had cancelled is revived

One call takes a bounded number of rows, in a transaction of its own, and may be repeated at will:
rows are the truth and no counter is. Whatever it changes it leaves unsettled in its turn; a row
whose neighbours could not all be locked, or are too many for one call, stays unsettled.

The order of locks: in id order and always skipping, first the unsettled rows, then the upstreams
of the blocked ones, then dependants and children, then parents that may close. An edge is read
under the lock of the unsettled row at one of its ends, and marked under the locks of both, by the
states that these locks returned: nobody else can mark it or change them meanwhile. Whether an edge
is left, and what siblings do, is read only by statements after the last lock. Without this, two
last upstreams (or children) that settle in overlapping transactions each see the other as open,
and the dependant (or the container) waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, Integer, Row, Select, Update, bindparam, select, update

from asyncjobq import cycles, edges, family, revival
from asyncjobq.backends.base import Backend, chunked, rows_by_id
from asyncjobq.edges import Edge
from asyncjobq.states import TERMINAL, Kind, State
from asyncjobq.transition import End, end_jobs

ROWS: Final = 200
FOLLOWERS: Final = 2000


@dataclass
class Settled:
    """What one call did."""

    cut_at: int | None = None
    """The last id that was looked at, if there may be unsettled rows behind it."""
    settled: int = 0
    satisfied: int = 0
    promoted: int = 0
    changed: int = 0
    """Rows that are left to be settled in their turn."""
    asked: int = 0
    """Running jobs that are to be cancelled; among the changed."""
    ended: list[End] = field(default_factory=list)
    left: bool = False
    """Whether some of the rows are as unsettled as before."""
    scheduled: bool = False
    """Whether the time of a job that was let go has yet to come."""

    @property
    def moved(self) -> bool:
        """Whether calling again at once may find more to do."""
        return bool(self.settled or self.satisfied or self.promoted or self.changed or self.ended)

    @property
    def unfinished(self) -> bool:
        """Whether this call has left, or made, unsettled rows."""
        return bool(self.left or self.changed or self.ended)


@dataclass
class Sweep:
    """Where a series of calls stands: rows that are stuck at the front hide none behind them."""

    after: int = 0
    over: bool = False
    held: bool = False
    """Whether rows were left that could not be settled now."""
    _moved: bool = False

    def note(self, settled: Settled) -> None:
        """Say where to go on after this call."""
        self._moved |= settled.moved
        self.held = settled.left or (self.held and bool(self.after))
        if settled.moved:
            return
        if settled.cut_at is not None:
            self.after = settled.cut_at
        elif self.after and self._moved:
            self.after, self._moved = 0, False
        else:
            self.over = True


@dataclass
class _Locks:
    """What one call holds: unsettled rows, and their neighbours by what they are to them."""

    ended: list[Row[Any]]
    opened: list[Row[Any]]
    edges: list[Edge] = field(default_factory=list)
    """Those by which dependants of ended rows wait, and blocked rows themselves."""
    upstreams: dict[int, State | None] = field(default_factory=dict)
    """States of the upstreams that are locked; None: it does not exist any more."""
    followers: dict[int, Row[Any]] = field(default_factory=dict)
    """Dependants, children, and what is to be revived."""
    parents: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    """Unsettled rows some of whose upstreams are not locked."""
    incomplete: set[int] = field(default_factory=set)
    """Unsettled rows some of whose neighbours are not locked."""

    @property
    def new(self) -> dict[int, Row[Any]]:
        """Blocked jobs that are unsettled themselves."""
        return {row.id: row for row in self.opened if row.state == State.BLOCKED}

    @property
    def blocked(self) -> dict[int, Row[Any]]:
        """Jobs that may go, or wait in vain."""
        rows = {**self.new, **self.followers}
        free = rows.keys() - (self.held - self.followers.keys())
        return {
            job_id: rows[job_id] for job_id in sorted(free) if rows[job_id].state == State.BLOCKED
        }

    @property
    def waiting(self) -> set[int]:
        """Unsettled containers and jobs that may have open children."""
        return {row.id for row in self.opened if row.state == State.WAITING}


def settle_once(
    connection: Connection,
    backend: Backend,
    after: int = 0,
    limit: int = ROWS,
    job_ids: Sequence[int] | None = None,
) -> Settled:
    """Settle up to `limit` rows with ids above `after`, or just these."""
    if job_ids is None:
        parameters = {"after": after, "most": limit}
        candidates = list(connection.scalars(backend.built(_candidates), parameters))
    else:
        candidates = sorted(job_ids)[:limit]
    if not candidates:
        return Settled()
    locks = _lock(connection, backend, candidates)
    result = Settled(cut_at=candidates[-1] if len(candidates) == limit else None)
    seen = {row.id for row in (*locks.ended, *locks.opened)}
    done = sorted(seen - locks.incomplete)
    for chunk in chunked(done, 500):  # before the changes, which may unsettle some of them anew
        connection.execute(backend.built(_settled), {"ids": chunk})
    result.settled = len(done)
    result.left = len(candidates) > len(done)
    _agree(connection, backend, locks, result)
    return result


def _candidates(backend: Backend) -> Select[Any]:
    jobs = backend.tables.jobs
    query = select(jobs.c.id).where(~jobs.c.settled, jobs.c.id > bindparam("after"))
    return query.order_by(jobs.c.id).limit(bindparam("most", type_=Integer))


def _settled(backend: Backend) -> Update:
    jobs = backend.tables.jobs
    return update(jobs).where(backend.among(jobs.c.id)).values(settled=True)


def _agree(connection: Connection, backend: Backend, locks: _Locks, result: Settled) -> None:
    """Make the neighbours agree; whatever is changed is left unsettled."""

    def end(ends: Sequence[End]) -> None:
        end_jobs(connection, backend, ends)
        result.ended += ends

    blocked, states = locks.blocked, locks.upstreams
    open_edges = [edge for edge in locks.edges if edge.job in blocked]
    fulfilled = [edge for edge in open_edges if edges.is_fulfilled(edge, states)]
    result.satisfied = edges.mark_satisfied(connection, backend, fulfilled)
    end(edges.waiting_in_vain(blocked, open_edges, states))
    standing = family.standing(connection, backend, list(blocked))
    end(family.hopeless(standing))
    for one in cycles.waiting_for_themselves(connection, backend, sorted(locks.new)):
        end([one])
    _promote(connection, backend, standing, result)
    if any(row.cancel_requested for row in locks.opened):
        ends, asked = family.cancel_children(connection, backend, sorted(locks.followers))
        end(ends)
        result.changed += asked
        result.asked += asked
    result.changed += revival.revive_caused_by(connection, backend, locks.opened, locks.followers)
    _close(connection, backend, locks, result)


def _promote(
    connection: Connection, backend: Backend, standing: Sequence[Row[Any]], result: Settled
) -> None:
    """Let go what nothing holds; what is below a job that was ended just now waits for its turn."""
    ended = {end.row.id for end in result.ended}
    free = [
        row
        for row in standing
        if not (row.held or row.hopeless or row.enclosed or row.parent_id in ended)
    ]
    family.promote(connection, backend, free)
    jobs = [row for row in free if row.kind != Kind.CONTAINER]
    result.promoted = len(jobs)
    result.scheduled = any(row.later for row in jobs)
    result.changed += len(free) - len(jobs)


def _close(connection: Connection, backend: Backend, locks: _Locks, result: Settled) -> None:
    """Close what waits for no child any more, or hurry what is to fail with its first one."""
    closable = sorted(locks.parents | locks.waiting)
    if locks.waiting or any(row.state == State.FAILED for row in locks.ended):
        result.changed += len(family.fail_fast(connection, backend, closable))
    ends = family.closed(connection, backend, closable)
    end_jobs(connection, backend, ends)
    result.ended += ends


def _lock(connection: Connection, backend: Backend, candidates: Sequence[int]) -> _Locks:
    unsettled = rows_by_id(connection, backend.built(_unsettled), candidates)
    rows = backend.free_to_end(connection, unsettled)
    locks = _Locks(
        ended=[row for row in rows if row.state in TERMINAL],
        opened=[row for row in rows if row.state not in TERMINAL],
    )
    locks.upstreams = {row.id: State(row.state) for row in locks.ended}
    _lock_upstreams(connection, backend, locks)
    _lock_followers(connection, backend, locks)
    _lock_parents(connection, backend, locks)
    return locks


def _lock_upstreams(connection: Connection, backend: Backend, locks: _Locks) -> None:
    """Lock what blocked rows wait for.

    An upstream whose end is being committed at this moment would otherwise be read as running.
    """
    found = edges.upstream_edges(connection, backend, sorted(locks.new))
    wanted = {edge.upstream for edge in found}
    locked = _locked(connection, backend, wanted)
    locks.edges += found
    locks.upstreams.update({job_id: State(row.state) for job_id, row in locked.items()})
    held = backend.existing(connection, wanted - locked.keys())
    locks.upstreams.update(dict.fromkeys(wanted - locked.keys() - held))
    locks.held = {edge.job for edge in found if edge.upstream in held}
    locks.incomplete |= locks.held


def _lock_followers(connection: Connection, backend: Backend, locks: _Locks) -> None:
    """Lock dependants of ended rows, and of open rows the children and what is to be revived."""
    ended = [row.id for row in locks.ended]
    waiting = edges.dependant_edges(connection, backend, ended, FOLLOWERS)
    caused = revival.caused_by(connection, backend, locks.opened, FOLLOWERS)
    looks = [
        (locks.ended, [(edge.upstream, edge.job) for edge in waiting]),
        (locks.opened, family.children_to_look_at(connection, backend, locks.opened, FOLLOWERS)),
        (locks.opened, caused),
    ]
    pairs = [pair for _, found in looks for pair in found]
    locks.edges += waiting
    locks.followers = _locked(connection, backend, {follower for _, follower in pairs})
    revived = sorted(locks.followers.keys() & {job_id for _, job_id in caused})
    busy = _below_held(connection, backend, revived)
    busy |= revival.with_busy_keys(connection, backend, revived)
    for job_id in busy:
        locks.followers.pop(job_id, None)
    locks.incomplete |= {row for row, follower in pairs if follower not in locks.followers}
    locks.incomplete |= revival.causes_of_coming_ends(connection, backend, locks.opened)
    for rows, found in looks:
        if len(found) >= FOLLOWERS:  # cut: from here on, rows may have more
            locks.incomplete |= {row.id for row in rows if row.id >= found[-1][0]}


def _below_held(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> set[int]:
    """Lock what has to be opened again above these jobs; return those where that is held."""
    above = revival.ended_above(connection, backend, job_ids)
    wanted = {job_id for found in above.values() for job_id in found}
    held = wanted - _locked(connection, backend, wanted).keys()
    return {job_id for job_id, found in above.items() if found & held}


def _lock_parents(connection: Connection, backend: Backend, locks: _Locks) -> None:
    above = {row.id: row.parent_id for row in locks.ended if row.parent_id is not None}
    locks.parents = set(_locked(connection, backend, set(above.values())))
    locks.incomplete |= {job_id for job_id, parent in above.items() if parent not in locks.parents}


def _locked(connection: Connection, backend: Backend, wanted: set[int]) -> dict[int, Row[Any]]:
    """Lock jobs; the rows are as they are under the lock."""
    rows = rows_by_id(connection, backend.built(_by_id), sorted(wanted))
    return {row.id: row for row in backend.free_to_end(connection, rows)}


def _unsettled(backend: Backend) -> Select[Any]:
    return backend.locking_by_id(_columns(backend).where(~backend.tables.jobs.c.settled))


def _by_id(backend: Backend) -> Select[Any]:
    return backend.locking_by_id(_columns(backend))


def _columns(backend: Backend) -> Select[Any]:
    names = (
        "id",
        "state",
        "parent_id",
        "cancel_requested",
        "lease_owner",
        "lease_token",
        "unique_held",
    )
    return select(*(backend.tables.jobs.c[name] for name in names))
