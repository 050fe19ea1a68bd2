"""Contexts to call handlers with: each of a job that is really there, and leased to the test."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from sqlalchemy import Connection, update

from asyncjobq import codec
from asyncjobq.backends.base import Backend
from asyncjobq.context import JobContext
from asyncjobq.finalize import Finished, finalize_once
from asyncjobq.handler_options import HandlerOptions
from asyncjobq.job import Job
from asyncjobq.lease import Claimed, Defaults, Lease, claim_columns, claim_values, claimed_from
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.slots import context_of
from asyncjobq.states import State
from asyncjobq.testing.under_test import UnderTest
from asyncjobq.tick import defaults_of

OWNER: Final = "test"
LASTING: Final = 86_400.0
"""Seconds for which the test has the lease: nobody renews it, and a debugger takes its time."""

_SUCCEEDED: Final = Outcome(Ending.SUCCEEDED, result=codec.encode(None))


class Contexts:
    """The contexts that a test has made, until their jobs are ended."""

    def __init__(self, scheduler: UnderTest) -> None:
        self._scheduler = scheduler
        self._open: list[JobContext] = []

    async def of(self, job: Job[Any], attempt: int, checkpointed: Any) -> JobContext:
        """Lease a job to the test, whatever it waits for, and return its context."""
        checkpoint = None if checkpointed is None else codec.encode(checkpointed)
        defaults = self._defaults(job.type)

        def lease(connection: Connection) -> Claimed:
            backend = self._scheduler.database.backend
            _prepare(
                connection, backend, job.id, {"attempt": attempt - 1, "checkpoint": checkpoint}
            )
            values = claim_values(backend, OWNER, LASTING, defaults)
            rows = backend.claim_rows(connection, [job.id], values, claim_columns(backend))
            return claimed_from(rows[0], OWNER)

        claimed = await self._scheduler.database.run(lease)
        self._open.append(context := context_of(claimed, self._scheduler.services))
        return context

    def _defaults(self, type_name: str) -> Defaults:
        """Return what the claim fills in, as for any handler where the type has none here."""
        handlers, settings = self._scheduler.registry, self._scheduler.settings
        defaults, options = defaults_of(handlers, settings), HandlerOptions()
        return Defaults(
            max_attempts={type_name: options.max_attempts, **defaults.max_attempts},
            timeout={type_name: settings.default_timeout, **defaults.timeout},
            cost={type_name: options.cost, **defaults.cost},
        )

    async def end(self) -> None:
        """End the jobs as done, where a worker would now: what waits for them may run."""
        batch = [_finished(context) for context in self._open]
        self._open.clear()
        if batch:
            end = partial(_end, batch=batch)
            await self._scheduler.database.run(lambda c: end(c, self._scheduler.database.backend))


def _end(connection: Connection, backend: Backend, batch: list[Finished]) -> None:
    finalize_once(connection, backend, batch)


def _finished(context: JobContext) -> Finished:
    lease = Lease(context.lease.job_id, context.lease.owner, context.lease.token)
    return Finished(lease, _SUCCEEDED, context.reported.pending, context.completing)


def _prepare(
    connection: Connection, backend: Backend, job_id: int, values: Mapping[str, Any]
) -> None:
    """Make a job ready for its attempt, satisfied whatever it waits for."""
    jobs, deps = backend.tables.jobs, backend.tables.deps
    connection.execute(update(deps).where(deps.c.job_id == job_id).values(satisfied=True))
    ready = {"state": State.READY, "run_after": None, **values}
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(ready))
