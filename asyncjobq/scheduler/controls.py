"""What people do to jobs that are there, through the scheduler."""

from __future__ import annotations

from sqlalchemy import Connection

from asyncjobq.backends.base import Backend
from asyncjobq.callers import AsyncCaller
from asyncjobq.control import Cancelled, cancel_job, retry_job
from asyncjobq.emitter import Told
from asyncjobq.job import JobRef, id_of
from asyncjobq.scheduler.access import Access
from asyncjobq.waiting import Waiters


class Controls(Access):
    """Cancels jobs and runs them again."""

    _waiters: Waiters

    async def cancel(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Cancelled:
        """Cancel a job, or a container with all that is in it, also what is added meanwhile.

        Answers what happened: see `Cancelled`. One that runs is told with its next renewal.
        """
        job_id = id_of(job)

        def work(connection: Connection, backend: Backend) -> tuple[Cancelled, Told]:
            answer = cancel_job(connection, backend, job_id)
            ended = [job_id] if answer is Cancelled.CANCELLED else []
            return answer, self._emitter.look_up(connection, backend, ended)

        answer, _ = await self._write(work, session, lambda done: self._tell_cancelled(done[1]))
        if answer is Cancelled.CANCELLED:
            self._waiters.tell(job_id)
        return answer

    def _tell_cancelled(self, told: Told) -> None:
        self._emitter.cancelled(told, "cancelled on request")

    async def retry(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> None:
        """Run a failed or cancelled job again, and what its end had cancelled.

        A container is opened again, and what did not succeed in it is run again.
        """
        job_id = id_of(job)
        await self._write(lambda c, b: retry_job(c, b, job_id), session)
