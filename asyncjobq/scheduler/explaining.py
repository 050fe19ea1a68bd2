"""Why a job is not running, and which workers there are."""

from __future__ import annotations

from asyncjobq import presence
from asyncjobq.callers import AsyncCaller
from asyncjobq.explain import explain_job
from asyncjobq.explanation import Explanation
from asyncjobq.job import JobRef, id_of
from asyncjobq.presence import WorkerState
from asyncjobq.scheduler.enqueuing import Enqueuing


class Explaining(Enqueuing):
    """Says what holds a job."""

    async def explain(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Explanation:
        """Say where a job stands and why it is not running; `str()` of it is in words.

        Costs a few look-ups by index, however many jobs there are. Limits and attempts that its
        handler says are known where this scheduler has that handler: see `limits_known`. Raises
        JobNotFoundError.
        """
        job_id, rules = id_of(job), self._limit_rules()
        return await self._read(lambda c, b: explain_job(c, b, job_id, rules), session)

    async def workers(self, *, session: AsyncCaller | None = None) -> list[WorkerState]:
        """Return the workers that there are, and those gone a short time ago, oldest first.

        Each writes its row when it begins to serve, about every third of its lease, and when it
        stops; one that falls silent is `live` no more. Of more than a thousand, those seen last.
        """
        return await self._read(presence.list_workers, session)
