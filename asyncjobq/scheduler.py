"""The façade: opens a transaction, calls one function of the path, and owns the worker's life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, Unpack, overload

from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import inspection
from asyncjobq.backends import backend_for, open_database
from asyncjobq.backends.base import Backend, Database
from asyncjobq.callers import AsyncCaller, SyncCaller, in_sync_transaction_of, in_transaction_of
from asyncjobq.clock import seconds
from asyncjobq.codec import MAX_BYTES
from asyncjobq.enqueue import as_spec, checked_args, insert_for_caller, insert_jobs
from asyncjobq.errors import (
    AsyncJobQError,
    ConfigurationError,
    DatabaseUnavailableError,
    InvalidJobError,
    SchedulerStateError,
)
from asyncjobq.handlers import Handlers
from asyncjobq.inspection import Filter
from asyncjobq.job import Job, JobOptionArgs, JobRef, JobSpec, id_of
from asyncjobq.lifetime import ended, signals_handled
from asyncjobq.migrations import check_schema, ensure_schema, is_up_to_date
from asyncjobq.models import tables_for
from asyncjobq.settings import Duration, checked_settings
from asyncjobq.states import State
from asyncjobq.transactions import reason_of
from asyncjobq.waiting import Waiters, result_of
from asyncjobq.wake import ring_all
from asyncjobq.worker import Worker

logger = logging.getLogger("asyncjobq.scheduler")

R = TypeVar("R")
T = TypeVar("T")


class Scheduler:
    """Enqueues jobs, runs them, and answers questions about them, on one database.

    `database` is a URL or an AsyncEngine; nothing is connected to before the first call. With
    `handlers`, registries that exist without a scheduler. `concurrency` is the number of slots of
    this worker, `queues` the queues it serves, or a mapping to the slots of each. Durations are
    seconds or timedeltas: a lease that is not renewed for `lease_ttl` is taken back, due work is
    looked for every `poll_interval` at least, jobs have `stop_timeout` to end when the scheduler
    is stopped, and `default_timeout` in all where neither they nor their handler say otherwise
    (None: no end). `listen_url` reaches PostgreSQL directly where `database` goes through a pooler
    that passes no notifications on. `schema` and `table_prefix` say where the tables are.
    """

    def __init__(
        self,
        database: str | URL | AsyncEngine,
        *,
        handlers: Iterable[Handlers] = (),
        concurrency: int = 10,
        queues: Iterable[str] | Mapping[str, int] = ("default",),
        lease_ttl: Duration = 30.0,
        poll_interval: Duration = 1.0,
        stop_timeout: Duration = 20.0,
        default_timeout: Duration | None = 3600.0,
        max_result_bytes: int = MAX_BYTES,
        listen_url: str | URL | None = None,
        worker_id: str | None = None,
        schema: str | None = None,
        table_prefix: str = "",
    ) -> None:
        self.settings = checked_settings(
            worker_id=worker_id,
            concurrency=concurrency,
            queues=queues,
            lease_ttl=lease_ttl,
            poll_interval=poll_interval,
            stop_timeout=stop_timeout,
            default_timeout=default_timeout,
            max_result_bytes=max_result_bytes,
        )
        tables = tables_for(schema, table_prefix)
        self._database = open_database(
            database, tables, lease_ttl=self.settings.lease_ttl, listen_url=listen_url
        )
        self._handlers = Handlers()
        self._registries = tuple(handlers)
        self.handler = self._handlers.handler
        self._worker: Worker | None = None
        self._waiters = Waiters()

    # -- enqueue --------------------------------------------------------------------------------

    @overload
    async def enqueue(
        self,
        job: JobSpec[R],
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[R]: ...
    @overload
    async def enqueue(
        self,
        job: str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]: ...
    async def enqueue(
        self,
        job: JobSpec[Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        session: AsyncCaller | None = None,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]:
        """Enqueue one job: `handler.job(...)`, or a type's name with its arguments as a dict.

        With `session` (an AsyncSession or AsyncConnection) the job is a row of the caller's
        transaction: it exists when that commits, and never if it is rolled back. Without, it is
        committed here. Raises InvalidJobError before anything is written.
        """
        spec = self._spec(job, args, options)
        return (await self._insert([spec], session))[0]

    async def enqueue_many(
        self, jobs: Iterable[JobSpec[R]], /, *, session: AsyncCaller | None = None
    ) -> list[Job[R]]:
        """Enqueue many jobs in one transaction, in order, with few statements."""
        return await self._insert([self._checked(spec) for spec in jobs], session)

    @overload
    def enqueue_sync(
        self, session: SyncCaller, job: JobSpec[R], /, **options: Unpack[JobOptionArgs]
    ) -> Job[R]: ...
    @overload
    def enqueue_sync(
        self,
        session: SyncCaller,
        job: str,
        args: Mapping[str, Any] | None = None,
        /,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]: ...
    def enqueue_sync(
        self,
        session: SyncCaller,
        job: JobSpec[Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        **options: Unpack[JobOptionArgs],
    ) -> Job[Any]:
        """Enqueue one job in the transaction of a synchronous Session or Connection."""
        spec = self._spec(job, args, options)
        work = self._in_callers_terms(lambda c, backend: insert_for_caller(c, backend, [spec]))
        return in_sync_transaction_of(session, work)[0]

    def _spec(
        self, job: JobSpec[Any] | str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> JobSpec[Any]:
        return self._checked(as_spec(job, args, options))

    def _checked(self, spec: JobSpec[Any]) -> JobSpec[Any]:
        if not isinstance(spec, JobSpec):
            raise InvalidJobError(f"{spec!r} is not a job; make one with handler.job(...).")
        handler = self._registry().find(spec.type)
        if handler is None:
            return replace(spec, args=checked_args(spec, None))
        args = checked_args(spec, handler.encode)
        return replace(spec, args=args, default_queue=spec.default_queue or handler.options.queue)

    async def _insert(
        self, specs: Sequence[JobSpec[Any]], session: AsyncCaller | None
    ) -> list[Job[Any]]:
        if session is not None:
            work = self._in_callers_terms(lambda c, b: insert_for_caller(c, b, specs))
            return await in_transaction_of(session, work)
        backend = self._database.backend
        jobs = await self._database.run(lambda c: insert_jobs(c, backend, specs), repeatable=False)
        ring_all()
        return jobs

    def _in_callers_terms(
        self, work: Callable[[Connection, Backend], T]
    ) -> Callable[[Connection], T]:
        """Bind work to the backend of the caller's connection, which must be of our kind."""

        def bound(connection: Connection) -> T:
            ours = self._database.backend
            theirs = backend_for(connection.dialect, ours.tables)
            if theirs.name != ours.name:
                raise ConfigurationError(
                    f"session= is connected to {theirs.name}, this scheduler to {ours.name}; a "
                    "job can only be enqueued in a transaction of the scheduler's own database."
                )
            return work(connection, theirs)

        return bound

    # -- life -----------------------------------------------------------------------------------

    async def create_schema(self) -> None:
        """Create or upgrade the tables; does nothing when they are up to date."""
        backend = self._database.backend
        await self._database.read(backend.check)
        if not await self._database.read(lambda c: is_up_to_date(c, backend)):
            await self._database.run(lambda c: ensure_schema(c, backend))

    async def check_database(self) -> None:
        """Raise what is wrong with the database: its version, its tables, or that it is away."""
        backend = self._database.backend
        try:
            await self._database.read(backend.check)
            await self._database.read(lambda c: check_schema(c, backend))
        except AsyncJobQError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"The database cannot be used: {reason_of(error)}. Check the URL: its user, "
                "password, host and database, and what the user is granted."
            ) from error

    async def serve(self) -> None:
        """Run jobs until `stop()` is called or this call is cancelled.

        Cancelling it stops claiming, lets running jobs end for `stop_timeout`, cancels the rest,
        and then re-raises; a second cancellation cuts the waiting short. Raises
        ConfigurationError and SchemaError at the start; a database that is down is waited for.
        """
        await self._supervise(self._new_worker())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Self]:
        """Run jobs in the background while the block lasts: for lifespans of web applications.

        Configuration and schema errors raise on entry, a database that is down does not.
        """
        with suppress(DatabaseUnavailableError):
            await self.check_database()
        task = asyncio.create_task(self._supervise(self._new_worker()), name="asyncjobq serve")
        try:
            yield self
        finally:
            self.stop()
            await ended(task, self.stop)

    def run(self) -> None:
        """Run jobs until SIGINT or SIGTERM: for scripts, which have no event loop yet."""
        asyncio.run(self.serve_until_signalled())

    async def serve_until_signalled(self) -> None:
        """Serve until SIGINT or SIGTERM, which stops in good order; a second one stops at once."""
        with signals_handled(self.stop):
            await self.serve()

    def stop(self) -> None:
        """Ask `serve()` to end in good order; a second call cuts the waiting short."""
        if self._worker is not None:
            self._worker.stop()

    async def drain(self, *, scheduled: bool = False) -> dict[State, int]:
        """Run jobs until nothing of this scheduler's queues and types is runnable or running.

        Returns how many jobs ended in which state. With `scheduled`, due times are waited for.
        """
        await self.check_database()
        worker = self._new_worker()
        worker.end_when_idle(scheduled=scheduled)
        await self._supervise(worker)
        return {state: worker.ended[state] for state in (State.DONE, State.FAILED, State.CANCELLED)}

    async def aclose(self) -> None:
        """Stop serving and close the connections opened on this loop, an own engine's too."""
        self.stop()
        if self._worker is not None:
            await self._worker.stopped.wait()
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _supervise(self, worker: Worker) -> None:
        task = asyncio.create_task(worker.serve(self.check_database), name="asyncjobq worker")
        try:
            await ended(task, worker.stop)
        finally:
            self._worker = None

    def _new_worker(self) -> Worker:
        if self._worker is not None:
            raise SchedulerStateError("This scheduler serves already; stop() it first.")
        services = _Services(self._database, self.enqueue)
        worker = Worker(self._database, self._registry(), self.settings, services)
        worker.on_end = self._waiters.tell
        self._worker = worker
        return worker

    def _registry(self) -> Handlers:
        """Return the handlers, with what was added to their registries meanwhile."""
        self._handlers.include(*self._registries)
        return self._handlers

    # -- questions ------------------------------------------------------------------------------

    async def get(self, job: JobRef, /, *, session: AsyncCaller | None = None) -> Job[Any]:
        """Return a job as it is now; raises JobNotFoundError."""
        return await self._read(partial(inspection.get_job, job_id=id_of(job)), session)

    async def find(self, *, session: AsyncCaller | None = None, **filters: Any) -> list[Job[Any]]:
        """Return jobs in id order; for the filters see `Filter`."""
        wanted = Filter(**filters)
        return await self._read(lambda c, b: inspection.find_jobs(c, b, wanted), session)

    @overload
    async def wait(self, job: Job[R], /, *, timeout: Duration | None = None) -> R: ...
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

    async def _read(
        self, work: Callable[[Connection, Backend], T], session: AsyncCaller | None
    ) -> T:
        if session is not None:
            return await in_transaction_of(session, self._in_callers_terms(work))
        return await self._database.read(lambda c: work(c, self._database.backend))


class _Services:
    """What the scheduler does for the handlers of its worker."""

    def __init__(self, database: Database, enqueue: Callable[..., Awaitable[Job[Any]]]) -> None:
        self._database = database
        self._enqueue = enqueue

    def session(self) -> AsyncSession:
        return self._database.session()

    async def enqueue(self, job: Any, *args: Any, **options: Any) -> Job[Any]:
        return await self._enqueue(job, *args, **options)

    async def upstreams_of(self, job_id: int) -> list[Job[Any]]:
        backend = self._database.backend
        return await self._database.read(lambda c: inspection.upstreams_of(c, backend, job_id))
