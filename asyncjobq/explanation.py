"""Why a job is not running, or where it stands: what `explain` answers."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from asyncjobq.job import Job, OnFailure
from asyncjobq.limit_states import LimitState
from asyncjobq.pauses import Pause
from asyncjobq.states import State, Word


@dataclass(frozen=True)
class Count:
    """A number of rows that were counted up to a bound."""

    number: int = 0
    more: bool = False
    """Whether there may be more than that."""

    def __bool__(self) -> bool:
        return self.number > 0

    def __str__(self) -> str:
        return f"{self.number:,} or more" if self.more else f"{self.number:,}"


@dataclass(frozen=True)
class Related:
    """Another job that has to do with the one explained; pruned, it has an id and nothing else."""

    id: int
    type: str | None = None
    name: str | None = None
    state: State | None = None
    error: str | None = None


@dataclass(frozen=True)
class Awaited:
    """A job that has to end first."""

    upstream: Related
    waiting_id: int
    """Which job or container waits for it: the one explained, or one that this is in."""
    on_failure: OnFailure
    """What becomes of that one should the upstream fail."""


@dataclass(frozen=True)
class LeaseState:
    """The lease of a job that a worker has."""

    worker: str | None
    expires_in: float
    """Seconds; negative: it ran out so long ago, and any worker takes the job back."""
    runs_for: float
    """Seconds since its start."""
    ends_in: float | None
    """Seconds until its timeout; None: it has none."""
    worker_live: bool | None
    """Whether that worker was seen lately; None: it has no row in the table of workers."""


@dataclass(frozen=True)
class Line:
    """Where a ready job stands among others."""

    before: Count
    """Ready jobs of its queue, type, group and limits that are started before it."""
    group_key: str
    weight: float
    """The weight of its group."""
    groups: Count
    """Groups with ready jobs that the workers which serve it may start, its own included."""
    share: float
    """Its group's part of the slots, as long as all of these have ready jobs: weight by sum."""


@dataclass(frozen=True)
class Serving:
    """The live workers, as far as they matter to a job."""

    live: int
    """Those that take jobs, whichever."""
    in_queue: int
    """Those of them that serve its queue."""
    with_handler: int
    """Those of them that have a handler for its type."""
    both: int
    stopping: int
    """Further ones that would serve it, but are stopping."""
    slots: int
    """The slots of these for its queue."""
    free: int
    """Those of them in which no job runs."""


class Why(Word):
    """What keeps a job from running, or what became of it; the code of a `Reason`."""

    UPSTREAMS = "upstreams"
    """It depends on jobs that have not ended."""
    PARENT = "parent"
    """What it is in depends on such jobs, or has not been opened."""
    TIME = "time"
    """Its time has not come, or has and no worker has seen it yet."""
    RETRY = "retry"
    """Its last attempt did not succeed, and it is to run again."""
    PAUSED = "paused"
    NO_WORKER = "no_worker"
    """No live worker serves its queue and has its handler."""
    LIMIT = "limit"
    """A limit has no room for it."""
    LIMITS_UNKNOWN = "limits_unknown"
    """Its handler, and so what limits that has, is not known to whoever asks."""
    CAPACITY = "capacity"
    """A capacity guards it, of which only workers know whether it has room."""
    BEHIND = "behind"
    """Others of its group, queue and type are started first."""
    SLOTS = "slots"
    """All slots of the workers that serve it are taken."""
    NEXT = "next"
    """Nothing of all this: it is started as soon as a slot is its group's."""
    LEASED = "leased"
    """A worker has it."""
    LEASE_OVER = "lease_over"
    """A worker had it, and did not renew its lease."""
    CANCELLING = "cancelling"
    """Its end was asked for."""
    CHILDREN = "children"
    """It waits for jobs in it."""
    UNSETTLED = "unsettled"
    """A worker has yet to tell its neighbours of it, or it of them."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CAUSE = "cause"
    """Another job was the reason for its end."""


@dataclass(frozen=True)
class Reason:
    """One thing that is to be said of a job, for programs and in words."""

    why: Why
    text: str


@dataclass(frozen=True)
class Explanation:
    """Where a job stands and what it waits for; `str()` says it in words.

    What a state makes impossible is empty, or None. Not more than 10 of a kind are named, and not
    more than 1,000 counted.
    """

    job: Job[Any]
    at: datetime
    """The database's time."""
    reasons: tuple[Reason, ...] = ()
    """The most important first."""
    upstreams: tuple[Awaited, ...] = ()
    upstreams_open: Count = Count()
    """How many have not ended, of its own and of what it is in."""
    parent: Related | None = None
    """What it is in, if that keeps it from running."""
    due_in: float | None = None
    """Seconds until its time; negative: it has been due for so long."""
    paused: tuple[Pause, ...] = ()
    line: Line | None = None
    limits: tuple[LimitState, ...] = ()
    """Its limits, those that its handler has only where `limits_known`; `full` ones hold it."""
    limits_known: bool = False
    lease: LeaseState | None = None
    max_attempts: int | None = None
    """None: its handler's, which is not known here."""
    attempts_left: int | None = None
    children: tuple[Related, ...] = ()
    children_open: Count = Count()
    cause: tuple[Related, ...] = ()
    """What its end was due to, what that one's was due to, and so on."""
    settled: bool = True
    unsettled_for: float = 0.0
    """Seconds."""
    workers: Serving | None = None
    """None for what has ended and needs no worker any more."""

    def __str__(self) -> str:
        """Return what there is to say, a sentence or two a line."""
        job = self.job
        what = "Container" if job.kind == "container" else "Job"
        name = job.name or job.type
        return "\n".join(
            [
                f"{what} {job.id} ({name!r}, queue {job.queue!r}) is {job.state}.",
                *(reason.text for reason in self.reasons),
            ]
        )
