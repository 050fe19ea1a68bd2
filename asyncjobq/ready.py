"""The ready set: which jobs may run now, in which lanes they stand, and what is about to be due."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    and_,
    exists,
    false,
    or_,
    select,
    update,
)

from asyncjobq.backends.base import Backend, Lane, LaneKey, LaneKind, LanePage, LaneScan, chunked
from asyncjobq.models import in_state
from asyncjobq.pauses import NOTHING, Closed, not_paused
from asyncjobq.states import Kind, State


def conditions(backend: Backend) -> list[ColumnElement[bool]]:
    """Return the six conditions under which a job may be leased.

    State keeps the query cheap: one index holds nothing but ready jobs. The others keep it true,
    whatever a wrong write elsewhere has left in `state`.
    """
    jobs, deps = backend.tables.jobs, backend.tables.deps
    unsatisfied = exists().where(deps.c.job_id == jobs.c.id, ~deps.c.satisfied)
    now = backend.now()
    return [
        in_state(jobs, State.READY),
        ~unsatisfied.correlate(jobs),
        jobs.c.kind == Kind.JOB,
        or_(jobs.c.run_after.is_(None), jobs.c.run_after <= now),
        or_(jobs.c.lease_expires.is_(None), jobs.c.lease_expires <= now),
        not_paused(backend),
    ]


@dataclass(frozen=True, slots=True)
class Skipped:
    """What a scan passes over as a whole, because nothing of it can start now."""

    kinds: frozenset[LaneKind] = frozenset()
    keys: frozenset[LaneKey] = frozenset()

    def closes(self, now: Skipped) -> bool:
        """Tell whether nothing of this has opened since."""
        return self.kinds <= now.kinds and all(
            key in now.keys or key[:2] in now.kinds for key in self.keys
        )


SKIPPED_NOTHING: Final = Skipped()


class LaneCursor:
    """Looks at a bounded number of lanes at a time, and at all of them in turn."""

    def __init__(self, queues: tuple[str, ...], types: tuple[str, ...], bound: int = 256) -> None:
        self.kinds: tuple[LaneKind, ...] = tuple(
            (queue, name) for queue in queues for name in types
        )
        """The queues and types whose lanes there may be."""
        self.bound = bound
        self.resumed = False
        """Whether the last scan began in the middle of a round."""
        self._closed = NOTHING
        self._scanned = frozenset(self.kinds)
        self._after: dict[LaneKind, Lane] = {}

    @property
    def cut(self) -> bool:
        """Whether the last scan ended at its bound, so that other lanes wait for the next."""
        return any(kind in self._scanned for kind in self._after)

    def close(self, closed: Closed) -> bool:
        """Leave out what is paused, from now on; tell whether anything was open or closed by it."""
        changed = closed != self._closed
        if changed:
            self._closed, self._after = closed, {}
        return changed

    def scan_once(
        self,
        connection: Connection,
        backend: Backend,
        queues: Collection[str] | None = None,
        skipped: Skipped = SKIPPED_NOTHING,
    ) -> list[Lane]:
        """Return the next lanes of all queues or of these; none at the end of a round.

        After that it begins again: for each queue and type where it was when it was last scanned,
        so that one that opens for a moment at a time shows all of its groups in turn.
        """
        kinds = tuple(
            (queue, name)
            for queue, name in self.kinds
            if (queues is None or queue in queues)
            and queue not in self._closed.queues
            and name not in self._closed.types
            and (queue, name) not in skipped.kinds
        )
        self._scanned = frozenset(kinds)
        self.resumed = self.cut
        if not kinds:
            return []
        after = tuple(lane for kind, lane in self._after.items() if kind in self._scanned)
        closed = frozenset(key for key in skipped.keys if key[:2] in self._scanned)
        page = backend.lanes(connection, LaneScan(kinds, self.bound, after, closed))
        self._move_on(page)
        return page.lanes

    def _move_on(self, page: LanePage) -> None:
        if not page.cut or not page.lanes:
            kept = {kind: lane for kind, lane in self._after.items() if kind not in self._scanned}
            self._after = kept
            return
        for lane in sorted(page.lanes, key=lambda lane: lane.place):
            self._after[lane.queue, lane.type] = lane


@dataclass(frozen=True, slots=True)
class Chores:
    """What the tables hold for the chores beside the scan."""

    expired: bool
    unsettled: bool
    cancelling: bool
    """Whether the end of a job that runs somewhere was asked for."""
    paused: bool
    """Whether a queue or a type is paused."""
    next_due: float | None
    """Seconds until the next scheduled job is due; negative when it is overdue."""
    next_fire: float | None = None
    """Seconds until the next schedule fires; negative when its time has come."""

    @property
    def overdue(self) -> bool:
        """Whether a scheduled job may run."""
        return self.next_due is not None and self.next_due <= 0

    @property
    def fires(self) -> bool:
        """Whether a schedule's time has come."""
        return self.next_fire is not None and self.next_fire <= 0


@dataclass(frozen=True, slots=True)
class FiredHere:
    """Which schedules a worker fires: those that all do, and those that stand in its code.

    One that is deleted from the code is fired no more when the last such worker is gone.
    """

    declared: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    """Those that it cannot fire, and leaves to others."""

    def parts(self, schedules: Table) -> list[ColumnElement[bool]]:
        """Return the condition in parts, each of which has an index."""
        names = schedules.c.name
        parts = [and_(~schedules.c.declared, schedules.c.next_fire.is_not(None))]
        if self.declared:
            parts.append(and_(names.in_(self.declared), schedules.c.next_fire.is_not(None)))
        return [and_(part, names.not_in(self.unfit)) for part in parts] if self.unfit else parts


def look_once(connection: Connection, backend: Backend, fired: FiredHere | None = None) -> Chores:
    """Say in one statement which chore has work, and when the next job is due.

    With `fired`, also when the next schedule fires.
    """
    row = connection.execute(backend.built(_look, fired)).one()
    fires = [moment for moment in row[6:] if moment is not None]
    return Chores(
        expired=bool(row.expired),
        unsettled=bool(row.unsettled),
        cancelling=bool(row.cancelling),
        paused=bool(row.paused),
        next_due=_seconds_until(row.due, row.now),
        next_fire=_seconds_until(min(fires, default=None), row.now),
    )


def _look(backend: Backend, fired: FiredHere | None) -> Select[Any]:
    jobs = backend.tables.jobs
    expired = exists().where(jobs.c.in_flight, jobs.c.lease_expires < backend.now())
    unsettled = exists().where(~jobs.c.settled)
    cancelling = exists().where(jobs.c.in_flight, jobs.c.cancel_requested)
    paused = select(backend.tables.pauses.c.kind).exists()
    first = select(jobs.c.run_after).where(in_state(jobs, State.SCHEDULED))
    return select(
        expired.label("expired"),
        unsettled.label("unsettled"),
        cancelling.label("cancelling"),
        paused.label("paused"),
        first.order_by(jobs.c.run_after).limit(1).scalar_subquery().label("due"),
        backend.now().label("now"),
        *_first_fires(backend.tables.schedules, fired),
    )


def _first_fires(schedules: Table, fired: FiredHere | None) -> list[ColumnElement[Any]]:
    return [
        select(schedules.c.next_fire)
        .where(part)
        .order_by(schedules.c.next_fire)
        .limit(1)
        .scalar_subquery()
        for part in (fired.parts(schedules) if fired else [])
    ]


def promote_once(connection: Connection, backend: Backend, limit: int = 1000) -> int:
    """Make scheduled jobs ready whose time has come, oldest first; returns how many."""
    jobs = backend.tables.jobs
    due = (in_state(jobs, State.SCHEDULED), jobs.c.run_after <= backend.now())
    first = select(jobs.c.id).where(*due).order_by(jobs.c.run_after, jobs.c.id).limit(limit)
    ids = list(connection.scalars(first))
    rows = backend.lock_rows(connection, ids, [jobs.c.id], *due) if ids else []
    for chunk in chunked([row.id for row in rows], 500):
        connection.execute(
            update(jobs)
            .where(jobs.c.id.in_(chunk))
            .values(state=State.READY, updated_at=backend.now())
        )
    return len(rows)


def any_open(
    connection: Connection,
    backend: Backend,
    queues: tuple[str, ...],
    types: tuple[str, ...],
    *,
    scheduled: bool = False,
    closed: Collection[LaneKind] = (),
) -> bool:
    """Tell whether jobs of these queues and types run or could.

    None that is paused, or waits and is of a queue and type that are `closed`. With `scheduled`,
    those whose time is to come count too.
    """
    jobs = backend.tables.jobs
    here = and_(jobs.c.queue.in_(queues), jobs.c.type.in_(types))
    waiting = [State.READY, State.SCHEDULED] if scheduled else [State.READY]
    open_ = _but(jobs, queues, types, closed) if closed else here
    # One question for each state, since its index holds nothing else.
    questions = [exists().where(jobs.c.in_flight, here)]
    questions += [
        exists().where(in_state(jobs, state), open_, not_paused(backend)) for state in waiting
    ]
    return any(connection.scalar(select(question)) for question in questions)


def any_ready(
    connection: Connection, backend: Backend, kinds: Collection[LaneKind]
) -> list[LaneKind]:
    """Return of which of these queues and types jobs are ready."""
    jobs = backend.tables.jobs
    return [
        (queue, name)
        for queue, name in kinds
        if backend.first_ready(connection, jobs.c.type, jobs.c.queue == queue, jobs.c.type == name)
        is not None
    ]


def _but(
    jobs: Table, queues: tuple[str, ...], types: tuple[str, ...], closed: Collection[LaneKind]
) -> ColumnElement[bool]:
    """Return the condition of these queues and types but some, so that the index is not walked."""
    by_queue = (
        (queue, [name for name in types if (queue, name) not in closed]) for queue in queues
    )
    here = (and_(jobs.c.queue == queue, jobs.c.type.in_(names)) for queue, names in by_queue)
    return or_(false(), *here)


def _seconds_until(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else (moment - now).total_seconds()
