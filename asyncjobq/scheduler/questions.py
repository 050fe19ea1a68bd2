"""What is asked of the scheduler about its jobs, and waiting for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, TypeVar, overload

from asyncjobq import inspection
from asyncjobq.attempts import Attempt, attempts_of
from asyncjobq.callers import AsyncCaller
from asyncjobq.clock import seconds
from asyncjobq.errors import JobNotFoundError
from asyncjobq.graph import Graph, count_below, graph_of
from asyncjobq.inspection import Filter, States, check_count
from asyncjobq.job import Job, JobRef, Node, id_of
from asyncjobq.neighbourhood import Neighbourhood, neighbours_of
from asyncjobq.results import result_of
from asyncjobq.scheduler.access import Access
from asyncjobq.settings import Duration, Settings
from asyncjobq.states import State
from asyncjobq.waiting import Waiters

R = TypeVar("R")

AT_A_TIME: Final = 100
"""Jobs that are read at once; each may have a large result."""
LAST_LOOK: Final = 1.0
"""Seconds for a last look at jobs whose time is over."""


class Questions(Access):
    """Answers questions about jobs; changes nothing."""

    settings: Settings
    _waiters: Waiters

    async def get(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Job[Any]:
        """Return a job as it is now; raises JobNotFoundError."""
        return await self._read(partial(inspection.get_job, job_id=id_of(job)), session)

    async def find(
        self,
        *,
        state: States | None = None,
        type: str | None = None,  # noqa: A002  the name of the option
        queue: str | None = None,
        group_key: str | None = None,
        parent: JobRef | None = None,
        limit: int = 100,
        after: int = 0,
        newest: bool = False,
        session: AsyncCaller | None = None,
    ) -> list[Job[Any]]:
        """Return the jobs that match all that is given, in id order; with `newest`, the last first.

        `state` is one state or several, `parent` the container or job that they are directly below,
        `after` the last id of the page before. Raises ConfigurationError for what cannot match.
        """
        wanted = Filter(
            state=state,
            type=type,
            queue=queue,
            group_key=group_key,
            parent_id=None if parent is None else id_of(parent),
            limit=limit,
            after=after,
            newest=newest,
        )
        return await self._read(lambda c, b: inspection.find_jobs(c, b, wanted), session)

    async def attempts(
        self, job: JobRef, /, *, limit: int = 1000, session: AsyncCaller | None = None
    ) -> list[Attempt]:
        """Return the attempts of a job that did not succeed, the last `limit`, oldest first."""
        check_count("limit", limit)
        step = partial(attempts_of, job_id=id_of(job), limit=limit)
        return await self._read(step, session)

    async def progress(
        self, job: JobRef, /, *, session: AsyncCaller | None = None
    ) -> dict[State, int]:
        """Count the jobs below a container (or a job with children), by state in their order."""
        job_id = id_of(job)
        return await self._read(lambda c, b: count_below(c, b, job_id), session)

    async def graph(
        self, job: JobRef, /, *, limit: int = 20_000, session: AsyncCaller | None = None
    ) -> Graph:
        """Return the graph that a job or workflow belongs to, with states; it can draw itself.

        Where more than `limit` jobs are linked, those nearest, and `cut` says so.
        """
        job_id = id_of(job)
        return await self._read(lambda c, b: graph_of(c, b, job_id, limit), session)

    async def neighbours(
        self, job: JobRef, /, *, limit: int = 20, session: AsyncCaller | None = None
    ) -> Neighbourhood:
        """Return what is one step away from a job in its graph, at most `limit` of each kind."""
        check_count("limit", limit)
        job_id = id_of(job)
        return await self._read(lambda c, b: neighbours_of(c, b, job_id, limit), session)

    @overload
    async def wait(self, job: Job[R] | Node[R], /, *, timeout: Duration | None = None) -> R: ...
    @overload
    async def wait(self, job: int, /, *, timeout: Duration | None = None) -> Any: ...
    async def wait(self, job: JobRef, /, *, timeout: Duration | None = None) -> Any:
        """Wait until a job has ended, wherever it runs, and return its result.

        Where its handler is known here, models and dataclasses are rebuilt by its return type.
        Raises JobFailed, JobCancelled, JobNotFoundError, StoredResultError if the stored result no
        longer fits, or TimeoutError when `timeout` is over. A database that is away is waited for.
        """
        job_id = id_of(job)
        limit = None if timeout is None else seconds(timeout, "timeout")
        try:
            async with asyncio.timeout(limit):
                ended = await self._ended(job_id)
        except TimeoutError as error:
            ended = await self._ended_after_all(job_id, error)
        handler = self._registry().find(ended.type)
        return result_of(ended, None if handler is None else handler.results)

    async def _ended(self, job_id: int) -> Job[Any]:
        while True:
            with self._waiters.awaiting([job_id]) as awaited:
                await awaited.next()
            job = await self.get(job_id)
            if job.ended:
                return job

    async def _ended_after_all(self, job_id: int, late: TimeoutError) -> Job[Any]:
        """Look a last time; raises TimeoutError saying where the job stands, if that shows soon."""
        try:
            async with asyncio.timeout(LAST_LOOK):
                job = await self.get(job_id)
        except JobNotFoundError:
            raise
        except Exception:
            raise TimeoutError(f"Job {job_id} has not ended in time.") from late
        if job.ended:
            return job
        raise TimeoutError(
            f"Job {job_id} ({job.type}) has not ended in time; it is {job.state} in the queue "
            f"{job.queue!r}."
        ) from late

    @overload
    def as_completed(
        self, jobs: Iterable[Job[R] | Node[R]], /, *, timeout: Duration | None = None
    ) -> AsyncIterator[Job[R]]: ...
    @overload
    def as_completed(
        self, jobs: Iterable[JobRef], /, *, timeout: Duration | None = None
    ) -> AsyncIterator[Job[Any]]: ...
    async def as_completed(
        self, jobs: Iterable[JobRef], /, *, timeout: Duration | None = None
    ) -> AsyncIterator[Job[Any]]:
        """Yield jobs as they end, however they end: `async for job in as_completed(jobs)`.

        Each once, also where it is named twice; those that have ended already come first.
        `handler.result_of(job)` returns a result as the handler did. Raises TimeoutError when
        `timeout` is over before the last has ended, and JobNotFoundError.
        """
        limit = None if timeout is None else seconds(timeout, "timeout")
        deadline = None if limit is None else asyncio.get_running_loop().time() + limit
        left = dict.fromkeys(id_of(job) for job in jobs)
        try:
            async with aclosing(self._as_they_end(list(left), deadline)) as ended:
                async for job in ended:
                    del left[job.id]
                    yield job
        except TimeoutError as late:
            for job in await self._ended_among(list(left)):
                del left[job.id]
                yield job
            if left:
                first = ", ".join(map(str, list(left)[:5]))
                raise TimeoutError(
                    f"{len(left)} jobs have not ended in time, the first of them {first}."
                ) from late

    async def _as_they_end(
        self, missing: list[int], deadline: float | None
    ) -> AsyncGenerator[Job[Any]]:
        while missing:  # more than once, should one that had ended be run again meanwhile
            reopened: list[int] = []
            with self._waiters.awaiting(missing) as awaited:
                while True:
                    async with asyncio.timeout_at(deadline):
                        job_ids = await awaited.next(most=AT_A_TIME)
                        found = await self._jobs_of(job_ids)
                    for job in found:
                        if job.ended:
                            yield job
                    reopened += [job.id for job in found if not job.ended]
                    if not job_ids:
                        break
            missing = reopened

    async def _ended_among(self, job_ids: list[int]) -> list[Job[Any]]:
        """Look a last time for jobs that have ended; none if that takes too long."""
        try:
            async with asyncio.timeout(LAST_LOOK):
                left_open = await self._still_open(job_ids)
                ended = [job_id for job_id in job_ids if job_id not in left_open]
                return [job for job in await self._jobs_of(ended) if job.ended]
        except Exception:
            return []

    async def _jobs_of(self, job_ids: list[int]) -> list[Job[Any]]:
        if not job_ids:
            return []
        return await self._read(lambda c, b: inspection.jobs_of(c, b, job_ids), None)

    async def _still_open(self, job_ids: Sequence[int]) -> set[int]:
        return await self._read(lambda c, b: inspection.open_among(c, b, job_ids), None)

    async def _watch_ends(self, wake: Callable[[], None], poll_interval: float) -> None:
        await self._database.watch_ends(wake, poll_interval)
