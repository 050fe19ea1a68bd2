"""Makes events of what was committed, and none that nobody wants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Row, select

from asyncjobq import events
from asyncjobq.backends.base import Backend, chunked
from asyncjobq.events import Event
from asyncjobq.job import Job
from asyncjobq.lease import Claimed
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.states import State
from asyncjobq.subscribers import Subscribers
from asyncjobq.transition import End, Return

Told = dict[int, Row[Any]]
"""What events say of jobs that nobody here has claimed, by id."""


class Emitter:
    """Tells the subscribers of one worker's jobs, or of those that a scheduler's callers change."""

    def __init__(self, subscribers: Subscribers, worker_id: str | None = None) -> None:
        self._subscribers = subscribers
        self._worker_id = worker_id

    def enqueued(self, jobs: Iterable[Job[Any]]) -> None:
        """Tell of new jobs; of those that were there before, under their key, nothing is new."""
        if self._subscribers.wants(events.Enqueued):
            for job in jobs:
                if not getattr(job, "existing", False):
                    self._emit(events.Enqueued, job, job.id)

    def leased(self, job: Claimed) -> None:
        """Tell of a claim."""
        if self._subscribers.wants(events.Leased):
            age = (job.started_at - job.created_at).total_seconds()
            self._emit(events.Leased, job, job.lease.job_id, age=age)

    def started(self, job: Claimed) -> None:
        """Tell that a handler is called."""
        self._emit(events.Started, job, job.lease.job_id)

    def loop_blocked(self, job: Claimed, duration: float, stack: str) -> None:
        """Tell that a handler has blocked the loop, after it has let it go."""
        self._emit(events.LoopBlocked, job, job.lease.job_id, duration=duration, stack=stack)

    def left_behind(self, job: Claimed, reason: str) -> None:
        """Tell of a handler that goes on although its attempt has ended."""
        self._emit(events.LeftBehind, job, job.lease.job_id, reason=reason)

    def finished(
        self, job: Claimed, outcome: Outcome, state: State | None, duration: float
    ) -> None:
        """Tell how an attempt ended; `state` is what became of the job, None if it was lost."""
        if outcome.ending is Ending.TIMED_OUT and state is not None:
            self._emit(events.TimedOut, job, job.lease.job_id, duration=duration)
        kind, values = _end_of(outcome, state)
        if kind is not None:
            self._emit(kind, job, job.lease.job_id, duration=duration, **values)

    def reclaimed(self, taken: Sequence[End | Return], told: Told) -> None:
        """Tell of leases that were taken back, and of the jobs that this ended."""
        for item in taken:
            self._emit(events.Reclaimed, told.get(item.row.id), item.row.id)
            if isinstance(item, End):
                self._ended(item, told)

    def settled(self, ends: Sequence[End], told: Told) -> None:
        """Tell of jobs that others' ends have ended."""
        for end in ends:
            self._emit(events.Settled, told.get(end.row.id), end.row.id, state=str(end.state))
            self._ended(end, told)

    def cancelled(self, told: Told, reason: str) -> None:
        """Tell of jobs that a call has cancelled."""
        for job_id, row in told.items():
            self._emit(events.Cancelled, row, job_id, error=reason)

    def look_up(self, connection: Connection, backend: Backend, ids: Iterable[int]) -> Told:
        """Read what events say of these jobs, if anybody wants to know."""
        jobs, found = backend.tables.jobs, Told()
        if not any(map(self._subscribers.wants, _ENDS)):
            return found
        columns = [jobs.c[name] for name in ("id", "type", "queue", "group_key", "attempt")]
        for chunk in chunked(list(ids), 500):
            rows = connection.execute(select(*columns).where(jobs.c.id.in_(chunk)))
            found.update((row.id, row) for row in rows)
        return found

    def _ended(self, end: End, told: Told) -> None:
        row, job_id = told.get(end.row.id), end.row.id
        if end.state is State.FAILED:
            self._emit(events.Failed, row, job_id, error=end.error or "")
        elif end.state is State.CANCELLED:
            self._emit(events.Cancelled, row, job_id, error=end.error)
        else:
            self._emit(events.Succeeded, row, job_id)

    def _emit(self, kind: type[Event], job: Any, job_id: int, **values: Any) -> None:
        if job is not None and self._subscribers.wants(kind):
            event = kind(
                job_id=job_id,
                type=job.type,
                queue=job.queue,
                group_key=job.group_key,
                attempt=job.attempt,
                worker_id=self._worker_id,
                **values,
            )
            self._subscribers.emit(event)


_ENDS = (events.Reclaimed, events.Settled, events.Succeeded, events.Failed, events.Cancelled)


def _end_of(outcome: Outcome, state: State | None) -> tuple[type[Event] | None, dict[str, Any]]:
    """Return the event that tells of an attempt's end, and its own values."""
    if state is None:
        return events.LeaseLost, {}
    if state is State.DONE:
        return events.Succeeded, {}
    if state is State.FAILED:
        return events.Failed, {"error": outcome.error or "Its outcome could not be stored."}
    if state is State.CANCELLED:
        return events.Cancelled, {"error": outcome.error or "cancelled on request"}
    if state is State.WAITING:  # for its children: its end will be told by settling
        return None, {}
    return _return_of(outcome)


def _return_of(outcome: Outcome) -> tuple[type[Event], dict[str, Any]]:
    if outcome.ending is Ending.INTERRUPTED:
        return events.Interrupted, {}
    delay = outcome.retry_after or 0.0
    if outcome.ending is Ending.SNOOZED:
        return events.Snoozed, {"delay": delay}
    return events.Retried, {"delay": delay, "error": outcome.error or ""}
