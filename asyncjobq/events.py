"""What happened to jobs, as plain values: what `Scheduler.on` and `Scheduler.subscribe` tell of.

Each is told after it was committed, in the process that committed it, and to nobody else: for
metrics, logs and notifications, not for work that must be done. Of every end of a job, whoever
ended it, exactly one of `Succeeded`, `Failed` and `Cancelled` tells; the others say how it came.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened to a job or container; durations are in seconds."""

    job_id: int
    type: str
    queue: str
    group_key: str
    attempt: int = 0
    """The number of the attempt, from 1; 0 before the first."""
    worker_id: str | None = None
    """The worker that did it; None where a call of the scheduler did."""
    at: datetime = field(default_factory=_now)
    """When this process learned of it, in UTC by its own clock."""


@dataclass(frozen=True, kw_only=True)
class Enqueued(Event):
    """The job is in the tables, committed."""


@dataclass(frozen=True, kw_only=True)
class Leased(Event):
    """A worker has claimed the job."""

    age: float
    """From the job's creation to the claim, by the database's clock."""


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The job's handler is about to be called."""


@dataclass(frozen=True, kw_only=True)
class Succeeded(Event):
    """The job is done, or the container with all that is in it."""

    duration: float | None = None
    """How long the last attempt took; None for what did not end with an attempt."""


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The job has failed for good."""

    error: str
    duration: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cancelled(Event):
    """The job is cancelled: on request, by its handler, or because of another's end."""

    error: str | None = None
    """Why, where that is known."""
    duration: float | None = None


@dataclass(frozen=True, kw_only=True)
class Retried(Event):
    """An attempt has failed, and the job will run again after a delay."""

    error: str
    delay: float
    duration: float


@dataclass(frozen=True, kw_only=True)
class Snoozed(Event):
    """The handler put the job off by a delay, which costs no attempt."""

    delay: float
    duration: float


@dataclass(frozen=True, kw_only=True)
class TimedOut(Event):
    """An attempt ran out of time; what becomes of the job is told by the event that follows."""

    duration: float


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """The worker's shutdown cut the attempt off; the job is ready again, unburned."""

    duration: float


@dataclass(frozen=True, kw_only=True)
class LeaseLost(Event):
    """The worker lost the job to another, or had to leave its lease to lapse."""

    duration: float


@dataclass(frozen=True, kw_only=True)
class LoopBlocked(Event):
    """The job's handler has blocked the event loop, so that nothing else could run on it."""

    duration: float
    stack: str
    """Where it was when that was noticed."""


@dataclass(frozen=True, kw_only=True)
class LeftBehind(Event):
    """The job's handler does not end when it is stopped; it goes on, without its slot."""

    reason: str
    """Why it was stopped."""


@dataclass(frozen=True, kw_only=True)
class Reclaimed(Event):
    """A lease ran out, and was taken back; the job is ready again, or its end is told next."""


@dataclass(frozen=True, kw_only=True)
class Settled(Event):
    """The end of other jobs ended this one: its last child's, or that of what it depended on."""

    state: str
    """The state that it ended in."""
