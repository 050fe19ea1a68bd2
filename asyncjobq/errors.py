"""Every error that the library raises, grouped by what the caller does next.

    AsyncJobQError
    ├── ConfigurationError            fix the program or its settings
    │   ├── UnsupportedDatabaseError  choose another database, driver or version
    │   ├── SchemaError               create or upgrade the tables, or name them differently
    │   └── HandlerError              correct a handler's registration
    ├── InvalidJobError               fix the call; nothing was written
    │   ├── ArgumentsError            the job's arguments
    │   ├── UnknownUpstreamError      ids in depends_on that do not exist
    │   ├── ParentError               the parent takes no child, or is over
    │   ├── CycleError                the job would wait for itself
    │   ├── UniqueConflictError       another job holds its unique key
    │   └── ResultError               a handler's result or checkpoint cannot be stored
    ├── JobNotFoundError              no job has this id
    ├── ScheduleNotFoundError         no schedule has this name
    ├── JobEndedError                 wait() has no result to return
    │   ├── JobFailed
    │   ├── JobCancelled
    │   └── StoredResultError         its result no longer fits the handler's return type
    ├── HandlerProcessError           a handler's process died under it
    ├── LeaseLostError                end the handler; the job is another's, or over
    ├── DatabaseUnavailableError      nothing was written; try again later
    ├── StaleSnapshotError            nothing was written; try again in a new transaction
    ├── CommitUnknownError            look whether it was written before trying again
    └── SchedulerStateError           e.g. serve() while it serves already

What handlers raise to say how their attempt ends is in `ends.py`.
"""

from __future__ import annotations


class AsyncJobQError(Exception):
    """Root of the library's errors."""


class ConfigurationError(AsyncJobQError, ValueError):
    """The program or its settings are wrong."""


class UnsupportedDatabaseError(ConfigurationError):
    """This database, driver, version or storage engine cannot keep the library's promises."""


class SchemaError(ConfigurationError):
    """The library's tables are missing, foreign, or of another version."""


class HandlerError(ConfigurationError):
    """A handler cannot be registered as it stands."""


class InvalidJobError(AsyncJobQError, ValueError):
    """A job cannot be enqueued as described; nothing was written."""


class ArgumentsError(InvalidJobError):
    """The arguments do not fit the handler or cannot be stored as JSON."""


class UnknownUpstreamError(InvalidJobError):
    """`depends_on` names jobs that do not exist or are not visible to this transaction."""

    def __init__(self, job_ids: list[int]) -> None:
        self.job_ids = job_ids
        listed = ", ".join(map(str, job_ids[:10])) + (", …" if len(job_ids) > 10 else "")
        super().__init__(
            f"depends_on names jobs that do not exist: {listed}. Enqueue upstreams first, in this "
            "transaction or in one that is already committed."
        )


class ParentError(InvalidJobError):
    """`parent` is no container, or it is over, or the running job that adds lost its lease."""


class CycleError(InvalidJobError):
    """The job would wait for itself; `path` is the way round, as ids or names."""

    def __init__(self, path: list[str]) -> None:
        self.path = path
        super().__init__(
            f"The job would wait for itself: {' → '.join(path)}. A container waits for its "
            "children, and what is in a container waits for what the container depends on."
        )


class UniqueConflictError(InvalidJobError):
    """Another job holds this unique key: `job_id`, or None for one of the same batch."""

    def __init__(self, key: str, job_id: int | None, what: str | None = None) -> None:
        self.key = key
        self.job_id = job_id
        holder = "another job of this batch" if job_id is None else f"job {job_id}"
        refused = what or "Nothing was enqueued"
        super().__init__(f"{refused}: unique_key={key!r} is held by {holder}.")


class ResultError(InvalidJobError):
    """A handler's result or checkpoint cannot be stored as JSON."""


class JobNotFoundError(AsyncJobQError, LookupError):
    """No job has this id."""

    def __init__(self, job_id: int) -> None:
        self.job_id = job_id
        super().__init__(
            f"There is no job {job_id}: it was never committed, was pruned, or lives in other "
            "tables (check the URL, schema and table_prefix)."
        )


class ScheduleNotFoundError(AsyncJobQError, LookupError):
    """No schedule has this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"There is no schedule {name!r}: it was never committed, was removed, or lives in "
            "other tables; `await scheduler.schedules()` lists those that there are."
        )


class JobEndedError(AsyncJobQError):
    """A job that was waited for ended without a result."""

    def __init__(self, job_id: int, message: str) -> None:
        self.job_id = job_id
        super().__init__(message)


class JobFailed(JobEndedError):
    """The job ended `failed`; `error` is its stored reason."""

    def __init__(self, job_id: int, error: str | None) -> None:
        self.error = error
        super().__init__(job_id, f"Job {job_id} failed: {error or 'no reason was recorded'}")


class JobCancelled(JobEndedError):
    """The job ended `cancelled`; `cause` is the id of the job whose end cancelled it, if any."""

    def __init__(self, job_id: int, error: str | None, cause: int | None) -> None:
        self.error = error
        self.cause = cause
        super().__init__(job_id, f"Job {job_id} was cancelled: {error or 'on request'}")


class StoredResultError(JobEndedError, ValueError):
    """The job is done, but its stored `result` does not fit its handler's return type here."""

    def __init__(self, job_id: int, type_name: str, hint: str, reason: str, result: object) -> None:
        self.result = result
        super().__init__(
            job_id,
            f"Job {job_id} is done, but its stored result does not fit the return type {hint} of "
            f"{type_name!r} here: {reason}. Its JSON is in this error's `result` and in "
            "`(await scheduler.get(job)).result`.",
        )


class HandlerProcessError(AsyncJobQError, RuntimeError):
    """The process of a handler has ended, and the handler with it."""

    def __init__(self, how: str) -> None:
        self.how = how
        super().__init__(f"The handler's process {how} before the handler had returned.")


class LeaseLostError(AsyncJobQError):
    """The job is no longer this handler's, which should end; nothing was written."""

    def __init__(self, job_id: int, *, over: bool = False) -> None:
        self.job_id = job_id
        reason = (
            "is over: it was completed already, and nothing more can be written in its name."
            if over
            else "is no longer this worker's: its lease was lost, and another worker may run it. "
            "Nothing was written; its handler should end."
        )
        super().__init__(f"Job {job_id} {reason}")


class DatabaseUnavailableError(AsyncJobQError):
    """The database could not be reached; nothing was written and the call may be repeated."""


class StaleSnapshotError(AsyncJobQError):
    """The caller's transaction cannot see what is there now; nothing was written.

    Who holds one of the unique `keys`, that an upstream was deleted, or how a job ended that is to
    be run again. Only where one snapshot serves the whole transaction, as at REPEATABLE READ.
    """

    def __init__(self, keys: list[str], changed: str | None = None) -> None:
        self.keys = keys
        listed = ", ".join(map(repr, keys[:3])) + (", …" if len(keys) > 3 else "")
        changed = changed or f"Who holds unique_key {listed} has changed"
        super().__init__(
            f"{changed} since this transaction took its snapshot. "
            "Nothing was written. Do it in a new transaction, before its first query, or in one "
            "at READ COMMITTED."
        )


class CommitUnknownError(AsyncJobQError):
    """The connection broke during COMMIT: the call may have taken effect, or not.

    It is no DatabaseUnavailableError, for a caller that repeats on those would do it twice.
    """


class SchedulerStateError(AsyncJobQError, RuntimeError):
    """The scheduler is not in a state in which this call makes sense."""
