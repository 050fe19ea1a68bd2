"""A job scheduler for asyncio programs on the relational database that they already have.

The path of a job, one file a step:

    enqueue → ready → fairshare → lease → run → finalize → settle        (lease: also reclaim)

`Scheduler` is the front door; `Handlers` collects handlers where no scheduler exists yet.
"""

from asyncjobq.attempts import Attempt
from asyncjobq.backoff import RetryPolicy, constant, exponential, none
from asyncjobq.check import CheckReport, Finding
from asyncjobq.check_repair import Mended, RepairReport
from asyncjobq.context import JobContext
from asyncjobq.control import Cancelled
from asyncjobq.ends import Cancel, Fail, Retry, Snooze
from asyncjobq.enqueue import enqueue
from asyncjobq.errors import (
    ArgumentsError,
    AsyncJobQError,
    CommitUnknownError,
    ConfigurationError,
    CycleError,
    DatabaseUnavailableError,
    HandlerError,
    HandlerProcessError,
    InvalidJobError,
    JobCancelled,
    JobEndedError,
    JobFailed,
    JobNotFoundError,
    LeaseLostError,
    ParentError,
    ResultError,
    ScheduleNotFoundError,
    SchedulerStateError,
    SchemaError,
    StaleSnapshotError,
    StoredResultError,
    UniqueConflictError,
    UnknownUpstreamError,
    UnsupportedDatabaseError,
)
from asyncjobq.explanation import Explanation, Reason, Why
from asyncjobq.graph import Edge, Graph
from asyncjobq.handlers import Handler, Handlers
from asyncjobq.injection import inject
from asyncjobq.job import Job, Node, Upstream, after
from asyncjobq.limit_states import LimitState
from asyncjobq.limits import Budget, Capacity, Concurrency, Limit, RateLimit
from asyncjobq.models import JobDepRow, JobRow
from asyncjobq.neighbourhood import Neighbourhood
from asyncjobq.options import JobOptions, JobSpec
from asyncjobq.outcomes import Ending
from asyncjobq.pauses import Pause
from asyncjobq.presence import WorkerState
from asyncjobq.recurrence import CatchUp
from asyncjobq.scheduler import Scheduler
from asyncjobq.schedules import Schedule
from asyncjobq.states import Kind, State
from asyncjobq.statistics import KindStats, Stats
from asyncjobq.workflow import Container, Workflow

metadata = JobRow.metadata
"""The tables under their default names, for Alembic's `target_metadata`."""

__version__ = "0.1.0"

__all__ = [
    "ArgumentsError",
    "AsyncJobQError",
    "Attempt",
    "Budget",
    "Cancel",
    "Cancelled",
    "Capacity",
    "CatchUp",
    "CheckReport",
    "CommitUnknownError",
    "Concurrency",
    "ConfigurationError",
    "Container",
    "CycleError",
    "DatabaseUnavailableError",
    "Edge",
    "Ending",
    "Explanation",
    "Fail",
    "Finding",
    "Graph",
    "Handler",
    "HandlerError",
    "HandlerProcessError",
    "Handlers",
    "InvalidJobError",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobDepRow",
    "JobEndedError",
    "JobFailed",
    "JobNotFoundError",
    "JobOptions",
    "JobRow",
    "JobSpec",
    "Kind",
    "KindStats",
    "LeaseLostError",
    "Limit",
    "LimitState",
    "Mended",
    "Neighbourhood",
    "Node",
    "ParentError",
    "Pause",
    "RateLimit",
    "Reason",
    "RepairReport",
    "ResultError",
    "Retry",
    "RetryPolicy",
    "Schedule",
    "ScheduleNotFoundError",
    "Scheduler",
    "SchedulerStateError",
    "SchemaError",
    "Snooze",
    "StaleSnapshotError",
    "State",
    "Stats",
    "StoredResultError",
    "UniqueConflictError",
    "UnknownUpstreamError",
    "UnsupportedDatabaseError",
    "Upstream",
    "Why",
    "WorkerState",
    "Workflow",
    "after",
    "constant",
    "enqueue",
    "exponential",
    "inject",
    "metadata",
    "none",
]
