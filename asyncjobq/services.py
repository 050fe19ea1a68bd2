"""What the scheduler does for the handlers of its worker, behind `JobContext`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from asyncjobq import codec, inspection
from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Database
from asyncjobq.callers import (
    in_sync_transaction_of,
    in_transaction_of,
    refuse_autocommit,
    when_committed,
)
from asyncjobq.checkpoints import checkpoint_once, store_checkpoint
from asyncjobq.children import add_child
from asyncjobq.clock import monotonic
from asyncjobq.codec import Encoded
from asyncjobq.completion import complete_job
from asyncjobq.context import LastWords, LeaseRef
from asyncjobq.errors import ConfigurationError, SchedulerStateError
from asyncjobq.handlers import Handlers
from asyncjobq.job import Job
from asyncjobq.lease import Lease
from asyncjobq.limit_control import correct_cost_once
from asyncjobq.limit_rules import LimitRules
from asyncjobq.options import JobSpec
from asyncjobq.results import storable
from asyncjobq.wake import ring_all

HELD_PAUSE: Final = 0.02
HELD_TIMEOUT: Final = 5.0
"""Seconds after which a row that is still held is probably held by the handler itself."""

Note = Callable[[str], None]


class HandlerServices:
    """Enqueues, adds children, stores and reads in the name of running jobs."""

    def __init__(
        self,
        database: Database,
        spec: Callable[..., JobSpec[Any]],
        enqueue: Callable[..., Awaitable[Job[Any]]],
        max_result_bytes: int = codec.MAX_BYTES,
        rules: LimitRules | None = None,
        tell_enqueued: Callable[[Iterable[Job[Any]]], None] = lambda jobs: None,
    ) -> None:
        self._database = database
        self._spec = spec
        self._enqueue = enqueue
        self._rules = LimitRules((), Handlers()) if rules is None else rules
        self._max_result_bytes = max_result_bytes
        self._tell_enqueued = tell_enqueued

    def session(self) -> AsyncSession:
        return self._database.session()

    async def enqueue(self, job: Any, *args: Any, **options: Any) -> Job[Any]:
        return await self._enqueue(job, *args, **options)

    async def add_child(
        self, lease: LeaseRef, job: Any, args: Any, key: str | None, session: Any
    ) -> Job[Any]:
        spec, backend, own = self._spec(job, args, {}), self._database.backend, _own(lease)

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

    async def set_cost(self, lease: LeaseRef, cost: float) -> None:
        own, backend = _own(lease), self._database.backend
        await self._once_free(
            own,
            lambda c: correct_cost_once(c, backend, own, cost, self._rules),
            "commit it first",
        )

    async def checkpoint(self, lease: LeaseRef, value: Any, session: Any, note: Note) -> None:
        text = self._checkpoint(lease, value)
        if session is None:
            await self._checkpoint_alone(_own(lease), text)
            note(text)
        else:
            await in_transaction_of(session, self._checkpointing(lease, text), lambda _: note(text))
            if isinstance(session, AsyncConnection) and session.sync_connection is not None:
                when_committed(session.sync_connection, lambda: note(text))

    def checkpoint_in(self, lease: LeaseRef, value: Any, session: Any, note: Note) -> None:
        text = self._checkpoint(lease, value)
        in_sync_transaction_of(session, self._checkpointing(lease, text), lambda _: note(text))
        if isinstance(session, Connection):
            when_committed(session, lambda: note(text))

    async def complete(self, lease: LeaseRef, session: Any, result: Any, last: LastWords) -> None:
        await in_transaction_of(session, self._completing(lease, result, last))

    def complete_in(self, lease: LeaseRef, session: Any, result: Any, last: LastWords) -> None:
        in_sync_transaction_of(session, self._completing(lease, result, last))

    def _checkpoint(self, lease: LeaseRef, value: Any) -> Encoded:
        return storable(value, f"The checkpoint of job {lease.job_id}", self._max_result_bytes)

    async def _checkpoint_alone(self, lease: Lease, text: Encoded) -> None:
        backend = self._database.backend
        await self._once_free(
            lease,
            lambda c: checkpoint_once(c, backend, lease, text),
            "commit it first, or pass it: ctx.checkpoint(value, session)",
        )

    async def _once_free(
        self, lease: Lease, step: Callable[[Connection], bool], advice: str
    ) -> None:
        """Take a step in a transaction of its own, as soon as nobody else holds the job's row."""
        begun = monotonic()
        while not await self._database.run(step):
            if monotonic() - begun > HELD_TIMEOUT:
                raise SchedulerStateError(
                    f"The row of job {lease.job_id} is locked by a transaction that does not end. "
                    "If that is a session in which this handler has stored a checkpoint, "
                    f"{advice}."
                )
            await asyncio.sleep(HELD_PAUSE)

    def _checkpointing(self, lease: LeaseRef, text: Encoded) -> Callable[[Connection], None]:
        def work(connection: Connection) -> None:
            self._check_callers(connection, "ctx.checkpoint()")
            store_checkpoint(connection, self._database.backend, _own(lease), text)

        return work

    def _completing(
        self, lease: LeaseRef, result: Any, last: LastWords
    ) -> Callable[[Connection], None]:
        what = f"The result of job {lease.job_id}"
        text = storable(result, what, self._max_result_bytes)

        def work(connection: Connection) -> None:
            self._check_callers(connection, "ctx.complete()")
            backend = self._database.backend
            complete_job(connection, backend, _own(lease), text, last)

        return work

    def _check_callers(self, connection: Connection, what: str) -> None:
        """Refuse a handler's connection that leads elsewhere, or that has no transaction."""
        ours = self._database.backend
        theirs = backend_for(connection.dialect, ours.tables)
        if theirs.name != ours.name:
            raise ConfigurationError(
                f"{what} takes a session on the scheduler's own database, which is {ours.name}; "
                f"this one is connected to {theirs.name}."
            )
        refuse_autocommit(
            connection, theirs, f"{what} cannot be part of your writes on an AUTOCOMMIT connection."
        )


def _own(lease: LeaseRef) -> Lease:
    return Lease(lease.job_id, lease.owner, lease.token)
