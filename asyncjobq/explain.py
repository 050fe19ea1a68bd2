"""Why a job is not running: read from the tables, by indexes, at a cost that has a bound.

Nothing is locked, and what is read in one statement may have changed by the next. Only a job's own
edges are read however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, func, select

from asyncjobq.backends.base import Backend, LaneKind, LaneScan
from asyncjobq.errors import JobNotFoundError
from asyncjobq.explanation import (
    Awaited,
    Count,
    Explanation,
    LeaseState,
    Line,
    Related,
    Serving,
)
from asyncjobq.job import COLUMNS, Job, OnFailure
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limit_states import LimitState, limits_of_job
from asyncjobq.models import LANE, in_state
from asyncjobq.options import NO_TIMEOUT
from asyncjobq.pauses import pauses_of
from asyncjobq.presence import WorkerState, list_workers
from asyncjobq.reasons import reasons_of
from asyncjobq.states import NOT_STARTED, OPEN, Kind, State

COUNTED: Final = 1000
"""Rows of a kind that are counted at the most."""
NAMED: Final = 10
"""Jobs of a kind that are named."""
DEEPEST: Final = 50
"""Containers around one another, and causes one after the other, that are followed."""
GROUPS: Final = 256
"""Lanes that are looked at for the groups beside a job's own."""
KINDS: Final = 500
"""Queues and types in which these are looked for."""

_RELATED: Final = ("id", "type", "name", "state", "error", "kind", "parent_id", "cause")


def explain_job(
    connection: Connection, backend: Backend, job_id: int, rules: LimitRules
) -> Explanation:
    """Return where a job stands and what it waits for; raises JobNotFoundError.

    Limits and attempts that its handler alone says are known as far as `rules` know the handler.
    """
    return _Look(connection, backend, job_id, rules).explain()


@dataclass
class _Look:
    """One look at a job and around it."""

    connection: Connection
    backend: Backend
    job_id: int
    rules: LimitRules

    def explain(self) -> Explanation:
        jobs = self.backend.tables.jobs
        columns = (*COLUMNS, "settled")
        query = select(*(jobs.c[name] for name in columns)).where(jobs.c.id == self.job_id)
        row = self.connection.execute(query).one_or_none()
        if row is None:
            raise JobNotFoundError(self.job_id)
        job, now = Job[Any].from_row(row), self.backend.read_clock(self.connection)
        handler = self.rules.handler_of(job.type)
        most = job.max_attempts
        if most is None and handler is not None:
            most = handler.options.max_attempts
        found = Explanation(
            job,
            now,
            cause=tuple(self._causes(job)),
            settled=bool(row.settled),
            unsettled_for=0.0 if row.settled else _seconds(job.updated_at, now) or 0.0,
            max_attempts=most,
            attempts_left=None if most is None or job.ended else max(0, most - job.attempt),
            limits_known=handler is not None,
        )
        if not job.ended or not row.settled:
            found = self._with_workers(found)
        return replace(found, reasons=tuple(reasons_of(found)))

    def _with_workers(self, found: Explanation) -> Explanation:
        job, now = found.job, found.at
        workers = list_workers(self.connection, self.backend)
        found = replace(found, workers=serving(workers, job))
        if job.state is State.BLOCKED:
            found = self._with_upstreams(found)
        elif job.state is State.WAITING:
            found = self._with_children(found)
        elif job.lease_expires is not None and not job.ended:
            found = replace(found, lease=_lease(job, now, workers))
        if job.state in NOT_STARTED and job.kind is Kind.JOB:
            due_in = _seconds(now, job.run_after)
            late = job.state is State.SCHEDULED or (due_in is not None and due_in > 0)
            paused = tuple(pauses_of(self.connection, self.backend, job.queue, job.type))
            found = replace(found, due_in=due_in if late else None, paused=paused)
        if job.state is State.READY:
            found = replace(found, line=self._line(job, workers), limits=self._limits())
        return found

    # -- what comes first -----------------------------------------------------------------------

    def _with_upstreams(self, found: Explanation) -> Explanation:
        """Look at what the job depends on, and at what each container depends on that it is in."""
        awaited, count, more = self._upstreams(self.job_id)
        above, parent = found.job.parent_id, None
        for _ in range(DEEPEST):
            row = self._row(above)
            if row is None or row.kind == Kind.JOB or row.state == State.WAITING:
                break
            parent = parent or _related(row)
            more_of_them, further, cut = self._upstreams(row.id)
            awaited += more_of_them
            count, more, above = count + further, more or cut, row.parent_id
        return replace(
            found,
            upstreams=tuple(awaited[:NAMED]),
            upstreams_open=Count(count, more),
            parent=parent,
        )

    def _upstreams(self, waiting_id: int) -> tuple[list[Awaited], int, bool]:
        jobs, deps = self.backend.tables.jobs, self.backend.tables.deps
        edges = select(deps.c.depends_on_id, deps.c.on_failure)
        edges = edges.where(deps.c.job_id == waiting_id, ~deps.c.satisfied)
        first = list(self.connection.execute(edges.limit(COUNTED + 1)))
        named = {edge.depends_on_id: edge for edge in sorted(first)[:NAMED]}
        query = select(*(jobs.c[name] for name in _RELATED)).where(jobs.c.id.in_(named))
        there = {row.id: _related(row) for row in self.connection.execute(query)}
        awaited = [
            Awaited(there.get(job_id, Related(job_id)), waiting_id, OnFailure(edge.on_failure))
            for job_id, edge in named.items()
        ]
        return awaited, min(len(first), COUNTED), len(first) > COUNTED

    def _with_children(self, found: Explanation) -> Explanation:
        jobs = self.backend.tables.jobs
        below = and_(jobs.c.parent_id == self.job_id, jobs.c.state.in_(sorted(OPEN)))
        some = select(*(jobs.c[name] for name in _RELATED)).where(below).limit(NAMED)
        children = sorted(map(_related, self.connection.execute(some)), key=lambda one: one.id)
        return replace(found, children=tuple(children), children_open=self._count(below))

    def _causes(self, job: Job[Any]) -> list[Related]:
        """Follow the causes from one to the next, to one that has none or was seen before."""
        found: dict[int, Related] = {}
        cause = job.cause if job.ended or job.cancel_requested else None
        while cause is not None and cause not in {self.job_id, *found} and len(found) < DEEPEST:
            row = self._row(cause)
            found[cause] = Related(cause) if row is None else _related(row)
            cause = None if row is None else row.cause
        return list(found.values())

    def _row(self, job_id: int | None) -> Any:
        if job_id is None:
            return None
        jobs = self.backend.tables.jobs
        query = select(*(jobs.c[name] for name in _RELATED)).where(jobs.c.id == job_id)
        return self.connection.execute(query).one_or_none()

    # -- who comes first ------------------------------------------------------------------------

    def _limits(self) -> tuple[LimitState, ...]:
        return tuple(limits_of_job(self.connection, self.backend, self.job_id, self.rules))

    def _line(self, job: Job[Any], workers: Sequence[WorkerState]) -> Line:
        jobs = self.backend.tables.jobs
        lane = and_(*(jobs.c[name] == getattr(job, name) for name in LANE))
        ready = and_(in_state(jobs, State.READY), lane)
        # One range of the index each; a condition for both would have it read to the lane's end.
        sooner = self._count(ready, jobs.c.priority < job.priority, by_lane=True)
        same = jobs.c.priority == job.priority
        older = self._count(ready, same, jobs.c.id < job.id, by_lane=True)
        before = sooner.number + older.number
        more = sooner.more or older.more or before > COUNTED
        weights, cut = self._weights(job, workers)
        weight = weights.setdefault(job.group_key, job.weight)
        return Line(
            before=Count(min(before, COUNTED), more),
            group_key=job.group_key,
            weight=weight,
            groups=Count(len(weights), cut),
            share=weight / sum(weights.values()),
        )

    def _weights(
        self, job: Job[Any], workers: Sequence[WorkerState]
    ) -> tuple[dict[str, float], bool]:
        """Return the weights of the groups that have ready jobs for the workers that serve it."""
        kinds: dict[LaneKind, None] = {(job.queue, job.type): None}
        for worker in workers:
            if worker.serves(job.queue, job.type):
                kinds |= {(q, name): None for q in worker.queues for name in worker.types or ()}
        some = tuple(sorted(list(kinds)[:KINDS]))
        page = self.backend.lanes(self.connection, LaneScan(some, GROUPS))
        by_priority = sorted(page.lanes, key=lambda lane: -lane.head_priority)
        weights = {lane.group_key: lane.head_weight for lane in by_priority}
        return weights, page.cut or len(kinds) > KINDS

    def _count(self, *conditions: ColumnElement[bool], by_lane: bool = False) -> Count:
        query: Select[Any] = select(self.backend.tables.jobs.c.id).where(*conditions)
        query = (self.backend.by_lane(query) if by_lane else query).limit(COUNTED + 1)
        number = self.connection.scalar(select(func.count()).select_from(query.subquery("some")))
        return Count(min(number or 0, COUNTED), (number or 0) > COUNTED)


def serving(workers: Sequence[WorkerState], job: Job[Any]) -> Serving:
    """Return how the workers that are seen lately stand to a job."""
    there = [worker for worker in workers if worker.takes_jobs]
    ours = [worker for worker in there if worker.serves(job.queue, job.type)]
    stopping = (worker for worker in workers if worker.live and worker.stopping)
    return Serving(
        live=len(there),
        in_queue=sum(job.queue in worker.queues for worker in there),
        with_handler=sum(worker.runs(job.type) for worker in there),
        both=len(ours),
        stopping=sum(job.queue in worker.queues and worker.runs(job.type) for worker in stopping),
        slots=sum(min(worker.concurrency, worker.queues[job.queue]) for worker in ours),
        free=sum(worker.free(job.queue) for worker in ours),
    )


def _lease(job: Job[Any], now: datetime, workers: Sequence[WorkerState]) -> LeaseState:
    live = {worker.worker_id: worker.live for worker in workers}
    runs_for = _seconds(job.started_at, now) or 0.0
    bounded = job.timeout is not None and job.timeout != NO_TIMEOUT
    return LeaseState(
        worker=job.lease_owner,
        expires_in=_seconds(now, job.lease_expires) or 0.0,
        runs_for=runs_for,
        ends_in=(job.timeout or 0.0) - runs_for if bounded else None,
        worker_live=live.get(job.lease_owner or ""),
    )


def _related(row: Any) -> Related:
    return Related(row.id, row.type, row.name, State(row.state), row.error)


def _seconds(begin: datetime | None, end: datetime | None) -> float | None:
    return None if begin is None or end is None else (end - begin).total_seconds()
