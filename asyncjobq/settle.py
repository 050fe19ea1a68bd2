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
of the blocked ones, then dependants and children, then parents that may close. Edges, states and
siblings are read only by statements after the last lock. Without this, two last upstreams (or
children) that settle in overlapping transactions each see the other as open, and the dependant
(or the container) waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, Row, select, update

from asyncjobq import cycles, edges, family, revival
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.states import TERMINAL, State
from asyncjobq.transition import End, end_jobs

ROWS: Final = 200
FOLLOWERS: Final = 2000


@dataclass
class Settled:
    """What one call did."""

    cut_at: int | None = None
    """The last id that was looked at, if there may be unsettled rows behind it."""
    settled: int = 0
    promoted: int = 0
    changed: int = 0
    asked: int = 0
    """Running jobs that are to be cancelled; among the changed."""
    ended: list[End] = field(default_factory=list)

    @property
    def moved(self) -> bool:
        """Whether calling again at once may find more to do."""
        return bool(self.settled or self.promoted or self.changed or self.ended)


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


@dataclass
class _Locks:
    """What one call holds: unsettled rows, and their neighbours by what they are to them."""

    ended: list[Row[Any]]
    opened: list[Row[Any]]
    followers: set[int] = field(default_factory=set)
    parents: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    """Unsettled rows some of whose upstreams are not locked."""
    incomplete: set[int] = field(default_factory=set)
    """Unsettled rows some of whose neighbours are not locked."""

    @property
    def blocked(self) -> list[int]:
        """Jobs that may go, or wait in vain, in id order."""
        own = {row.id for row in self.opened if row.state == State.BLOCKED}
        return sorted(self.followers | (own - self.held))

    @property
    def new(self) -> list[int]:
        """Blocked jobs that are unsettled themselves, in id order."""
        return sorted(row.id for row in self.opened if row.state == State.BLOCKED)

    @property
    def closable(self) -> list[int]:
        """Jobs and containers that may have seen their last child end, in id order."""
        return sorted(self.parents | {row.id for row in self.opened if row.state == State.WAITING})


def settle_once(
    connection: Connection, backend: Backend, after: int = 0, limit: int = ROWS
) -> Settled:
    """Settle up to `limit` rows with ids above `after`."""
    jobs = backend.tables.jobs
    query = select(jobs.c.id).where(~jobs.c.settled, jobs.c.id > after).order_by(jobs.c.id)
    candidates = list(connection.scalars(query.limit(limit)))
    if not candidates:
        return Settled()
    locks = _lock(connection, backend, candidates)
    result = Settled(cut_at=candidates[-1] if len(candidates) == limit else None)
    seen = {row.id for row in (*locks.ended, *locks.opened)}
    done = sorted(seen - locks.incomplete)
    for chunk in chunked(done, 500):  # before the changes, which may unsettle some of them anew
        connection.execute(update(jobs).where(jobs.c.id.in_(chunk)).values(settled=True))
    result.settled = len(done)
    _agree(connection, backend, locks, result)
    return result


def _agree(connection: Connection, backend: Backend, locks: _Locks, result: Settled) -> None:
    """Make the neighbours agree; whatever is changed is left unsettled."""

    def end(ends: Sequence[End]) -> None:
        end_jobs(connection, backend, ends)
        result.ended += ends

    result.changed += edges.mark_satisfied(connection, backend, locks.blocked)
    end(edges.waiting_in_vain(connection, backend, locks.blocked))
    end(family.without_hope(connection, backend, locks.blocked))
    for one in cycles.waiting_for_themselves(connection, backend, locks.new):
        end([one])
    promoted = family.promote(connection, backend, locks.blocked)
    result.promoted = len(promoted.jobs)
    result.changed += len(promoted.containers)
    ends, asked = family.cancel_children(connection, backend, sorted(locks.followers))
    end(ends)
    result.changed += asked
    result.asked += asked
    result.changed += revival.revive_caused_by(connection, backend, locks.opened, locks.followers)
    result.changed += len(family.fail_fast(connection, backend, locks.closable))
    end(family.closed(connection, backend, locks.closable))


def _lock(connection: Connection, backend: Backend, candidates: Sequence[int]) -> _Locks:
    jobs = backend.tables.jobs
    columns = [jobs.c[name] for name in ("id", "state", "parent_id", "cancel_requested")]
    rows = backend.lock_rows(connection, candidates, columns, ~jobs.c.settled)
    locks = _Locks(
        ended=[row for row in rows if row.state in TERMINAL],
        opened=[row for row in rows if row.state not in TERMINAL],
    )
    _lock_upstreams(connection, backend, locks)
    _lock_followers(connection, backend, locks)
    _lock_parents(connection, backend, locks)
    return locks


def _lock_upstreams(connection: Connection, backend: Backend, locks: _Locks) -> None:
    """Lock what blocked rows wait for.

    An upstream whose end is being committed at this moment would otherwise be read as running.
    """
    blocked = [row.id for row in locks.opened if row.state == State.BLOCKED]
    upstreams = edges.unsatisfied_upstreams(connection, backend, blocked)
    wanted = {upstream for found in upstreams.values() for upstream in found}
    locked = _locked(connection, backend, wanted)
    held = edges.existing(connection, backend, sorted(wanted - locked))
    locks.held = {job_id for job_id, found in upstreams.items() if found & held}
    locks.incomplete |= locks.held


def _lock_followers(connection: Connection, backend: Backend, locks: _Locks) -> None:
    """Lock dependants of ended rows, and of open rows the children and what is to be revived."""
    ended = [row.id for row in locks.ended]
    caused = revival.caused_by(connection, backend, locks.opened, FOLLOWERS)
    looks = [
        (locks.ended, edges.blocked_dependants(connection, backend, ended, FOLLOWERS)),
        (locks.opened, family.children_to_look_at(connection, backend, locks.opened, FOLLOWERS)),
        (locks.opened, caused),
    ]
    pairs = [pair for _, found in looks for pair in found]
    locks.followers = _locked(connection, backend, {follower for _, follower in pairs})
    locks.followers -= _below_held(connection, backend, [job_id for _, job_id in caused])
    locks.incomplete |= {row for row, follower in pairs if follower not in locks.followers}
    locks.incomplete |= revival.causes_of_coming_ends(connection, backend, locks.opened)
    for rows, found in looks:
        if len(found) >= FOLLOWERS:  # cut: from here on, rows may have more
            locks.incomplete |= {row.id for row in rows if row.id >= found[-1][0]}


def _below_held(connection: Connection, backend: Backend, job_ids: Sequence[int]) -> set[int]:
    """Lock what has to be opened again above these jobs; return those where that is held."""
    above = revival.ended_above(connection, backend, job_ids)
    wanted = {job_id for found in above.values() for job_id in found}
    held = wanted - _locked(connection, backend, wanted)
    return {job_id for job_id, found in above.items() if found & held}


def _lock_parents(connection: Connection, backend: Backend, locks: _Locks) -> None:
    wanted = {row.parent_id for row in locks.ended if row.parent_id is not None}
    locks.parents = _locked(connection, backend, wanted)
    locks.incomplete |= {
        row.id
        for row in locks.ended
        if row.parent_id is not None and row.parent_id not in locks.parents
    }


def _locked(connection: Connection, backend: Backend, wanted: set[int]) -> set[int]:
    jobs = backend.tables.jobs
    return {row.id for row in backend.lock_rows(connection, sorted(wanted), [jobs.c.id])}
