"""What is asked of the scheduler about its jobs, and waiting for them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar, overload

from asyncjobq import inspection
from asyncjobq.attempts import Attempt, attempts_of
from asyncjobq.callers import AsyncCaller
from asyncjobq.clock import seconds
from asyncjobq.graph import Graph, count_below, graph_of
from asyncjobq.inspection import Filter
from asyncjobq.job import Job, JobRef, Node, id_of
from asyncjobq.scheduler.access import Access
from asyncjobq.settings import Duration, Settings
from asyncjobq.states import State
from asyncjobq.waiting import Waiters, result_of

R = TypeVar("R")


class Questions(Access):
    """Answers questions about jobs; changes nothing."""

    settings: Settings
    _waiters: Waiters

    async def get(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Job[Any]:
        """Return a job as it is now; raises JobNotFoundError."""
        return await self._read(partial(inspection.get_job, job_id=id_of(job)), session)

    async def find(self, *, session: AsyncCaller | None = None, **filters: Any) -> list[Job[Any]]:
        """Return jobs in id order; for the filters see `Filter`."""
        wanted = Filter(**filters)
        return await self._read(lambda c, b: inspection.find_jobs(c, b, wanted), session)

    async def attempts(
        self, job: JobRef, /, *, limit: int = 1000, session: AsyncCaller | None = None
    ) -> list[Attempt]:
        """Return the attempts of a job that did not succeed, the last `limit`, oldest first."""
        step = partial(attempts_of, job_id=id_of(job), limit=limit)
        return await self._read(step, session)

    async def progress(
        self, job: JobRef, /, *, session: AsyncCaller | None = None
    ) -> dict[State, int]:
        """Count the jobs below a container (or a job with children) by state."""
        job_id = id_of(job)
        return await self._read(lambda c, b: count_below(c, b, job_id), session)

    async def graph(
        self, job: JobRef, /, *, limit: int = 10_000, session: AsyncCaller | None = None
    ) -> Graph:
        """Return the graph that a job or workflow belongs to, with states; it can draw itself."""
        job_id = id_of(job)
        return await self._read(lambda c, b: graph_of(c, b, job_id, limit), session)

    @overload
    async def wait(self, job: Job[R] | Node[R], /, *, timeout: Duration | None = None) -> R: ...
    @overload
    async def wait(self, job: int, /, *, timeout: Duration | None = None) -> Any: ...
    async def wait(self, job: JobRef, /, *, timeout: Duration | None = None) -> Any:
        """Wait until a job has ended and return its result.

        Raises JobFailed, JobCancelled, JobNotFoundError, or TimeoutError when `timeout` is over.
        """
        job_id = id_of(job)
        look = partial(self.get, job_id)
        async with asyncio.timeout(None if timeout is None else seconds(timeout, "timeout")):
            ended = await self._waiters.until_ended(job_id, look, self.settings.poll_interval)
        return result_of(ended)
