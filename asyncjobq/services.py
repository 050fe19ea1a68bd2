"""What the scheduler does for the handlers of its worker, behind `JobContext`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import inspection
from asyncjobq.backends.base import Database
from asyncjobq.callers import in_transaction_of
from asyncjobq.children import add_child
from asyncjobq.context import LeaseRef
from asyncjobq.job import Job
from asyncjobq.lease import Lease
from asyncjobq.options import JobSpec
from asyncjobq.wake import ring_all


class HandlerServices:
    """Enqueues, adds children and reads in the name of running jobs."""

    def __init__(
        self,
        database: Database,
        spec: Callable[..., JobSpec[Any]],
        enqueue: Callable[..., Awaitable[Job[Any]]],
        tell_enqueued: Callable[[Iterable[Job[Any]]], None] = lambda jobs: None,
    ) -> None:
        self._database = database
        self._spec = spec
        self._enqueue = enqueue
        self._tell_enqueued = tell_enqueued

    def session(self) -> AsyncSession:
        return self._database.session()

    async def enqueue(self, job: Any, *args: Any, **options: Any) -> Job[Any]:
        return await self._enqueue(job, *args, **options)

    async def add_child(
        self, lease: LeaseRef, job: Any, args: Any, key: str | None, session: Any
    ) -> Job[Any]:
        spec, backend = self._spec(job, args, {}), self._database.backend
        own = Lease(lease.job_id, lease.owner, lease.token)

        def work(connection: Connection) -> tuple[Job[Any], list[Job[Any]]]:
            new: list[Job[Any]] = []
            return add_child(connection, backend, own, spec, key, new.append), new

        def committed(done: tuple[Job[Any], list[Job[Any]]]) -> None:
            self._tell_enqueued(done[1])

        if session is not None:
            return (await in_transaction_of(session, work, committed))[0]
        try:
            done = await self._database.run(work, repeatable=key is not None)
        except IntegrityError:  # another attempt gave the same key at this moment: it is there now
            done = await self._database.run(work)
        ring_all()
        committed(done)
        return done[0]

    async def upstreams_of(self, job_id: int) -> list[Job[Any]]:
        backend = self._database.backend
        return await self._database.read(lambda c: inspection.upstreams_of(c, backend, job_id))
