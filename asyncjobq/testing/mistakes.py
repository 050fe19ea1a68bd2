"""What went wrong in jobs that ran, to be raised where the test looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncjobq import events
from asyncjobq.errors import JobFailed

if TYPE_CHECKING:
    from asyncjobq.context import JobContext


class Mistakes:
    """The errors of handlers, and failures that have none, since the last look."""

    def __init__(self) -> None:
        self._raised: list[tuple[BaseException, str]] = []
        self._failed: list[Exception] = []

    def raised(self, job: JobContext, error: BaseException) -> None:
        """Note what a handler raised."""
        where = f"Raised by the handler of job {job.job_id} ({job.type}), attempt {job.attempt}."
        self._raised.append((error, where))

    def failed(self, event: events.Event) -> None:
        """Note a failure; it counts if no handler has raised anything."""
        if isinstance(event, events.Failed):
            self._failed.append(JobFailed(event.job_id, event.error))
        else:
            late = f"Job {event.job_id} ({event.type}) timed out in attempt {event.attempt}."
            self._failed.append(TimeoutError(late))

    def forget(self) -> None:
        """Leave it to the jobs' states and to `Scheduler.attempts`."""
        self._raised.clear()
        self._failed.clear()

    def raise_first(self) -> None:
        """Raise what came first: a handler's own error before what followed from it."""
        raised, failed = list(self._raised), list(self._failed)
        self.forget()
        if raised:
            error, where = raised[0]
            # Only now: an earlier note would be stored with the job's error.
            error.add_note(where)
            if others := len(raised) - 1:
                error.add_note(f"Handlers have raised {others} more.")
            raise error
        if failed:
            raise failed[0]
