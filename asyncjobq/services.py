"""What the scheduler does for the handlers of its worker, behind `JobContext`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
from asyncjobq.limit_control import correct_cost
from asyncjobq.limit_rules import LimitRules
from asyncjobq.options import JobSpec
from asyncjobq.wake import ring_all


class HandlerServices:
    """Enqueues, adds children and reads in the name of running jobs."""

    def __init__(
        self,
        database: Database,
        spec: Callable[..., JobSpec[Any]],
        enqueue: Callable[..., Awaitable[Job[Any]]],
        rules: LimitRules,
    ) -> None:
        self._database = database
        self._spec = spec
        self._enqueue = enqueue
        self._rules = rules

    def session(self) -> AsyncSession:
        return self._database.session()

    async def enqueue(self, job: Any, *args: Any, **options: Any) -> Job[Any]:
        return await self._enqueue(job, *args, **options)

    async def add_child(
        self, lease: LeaseRef, job: Any, args: Any, key: str | None, session: Any
    ) -> Job[Any]:
        spec, backend = self._spec(job, args, {}), self._database.backend
        own = Lease(lease.job_id, lease.owner, lease.token)

        def work(connection: Connection) -> Job[Any]:
            return add_child(connection, backend, own, spec, key)

        if session is not None:
            return await in_transaction_of(session, work)
        try:
            child = await self._database.run(work, repeatable=key is not None)
        except IntegrityError:  # another attempt gave the same key at this moment: it is there now
            child = await self._database.run(work)
        ring_all()
        return child

    async def upstreams_of(self, job_id: int) -> list[Job[Any]]:
        backend = self._database.backend
        return await self._database.read(lambda c: inspection.upstreams_of(c, backend, job_id))

    async def set_cost(self, lease: LeaseRef, cost: float) -> None:
        own, backend = Lease(lease.job_id, lease.owner, lease.token), self._database.backend
        await self._database.run(lambda c: correct_cost(c, backend, own, cost, self._rules))
