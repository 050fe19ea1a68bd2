"""A scheduler of the application, for as long as a test has it: on another database, and idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, TypeVar, cast
from weakref import WeakSet

from asyncjobq import events
from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend, Database
from asyncjobq.callers import AsyncCaller
from asyncjobq.ends import Cancel, Retry, Snooze
from asyncjobq.enqueue import insert_jobs
from asyncjobq.errors import DatabaseUnavailableError, SchedulerStateError
from asyncjobq.handlers import AnyHandler, Handlers
from asyncjobq.lifetime import block
from asyncjobq.models import Tables, tables_for
from asyncjobq.options import JobSpec
from asyncjobq.scheduler import Scheduler
from asyncjobq.states import State

if TYPE_CHECKING:
    from asyncjobq.context import JobContext
    from asyncjobq.job import Job
    from asyncjobq.services import HandlerServices

T = TypeVar("T")

PATIENCE: Final = 86_400.0
"""Seconds that one job may take when it is run alone."""

IN_A_JOB: Final[ContextVar[bool]] = ContextVar("asyncjobq in a job under test", default=False)


class Observer(Protocol):
    """What the scheduler tells of itself to whoever tests it."""

    @property
    def runs_at_commit(self) -> bool:
        """Whether jobs run as soon as they are committed."""
        ...

    async def committed(self) -> None:
        """Take note of a commit of the library's own."""
        ...

    def raised(self, job: JobContext, error: BaseException) -> None:
        """Take note of what a handler raised."""
        ...

    def failed(self, event: events.Event) -> None:
        """Take note of an attempt that failed without such an error, by its timeout for one."""
        ...


class Only(Handlers):
    """A registry of one of another's handlers."""

    def __init__(self, handler: AnyHandler) -> None:
        super().__init__()
        self._add(handler)


class UnderTest(Scheduler):
    """The application's own scheduler, changed for a while: whoever has it uses this one."""

    _test: Observer
    _theirs: tuple[type[Scheduler], Database]
    _loops: WeakSet[asyncio.AbstractEventLoop]
    _alone: bool
    _idle: asyncio.Event | None

    @staticmethod
    def tables_of(scheduler: Scheduler, *, schemas: bool) -> Tables:
        """Return the tables that a scheduler has, where the database under test has schemas."""
        tables = scheduler._database.backend.tables
        return tables if schemas else tables_for(None, tables.prefix)

    @staticmethod
    def has_engine(scheduler: Scheduler) -> bool:
        """Tell whether the application uses the scheduler's connections for other things too."""
        return not scheduler._database.owns_engine

    @classmethod
    @contextmanager
    def made_of(cls, scheduler: Scheduler, database: Database, test: Observer) -> Iterator[Self]:
        """Put a scheduler on another database while the block lasts, and have it run nothing."""
        if isinstance(scheduler, UnderTest) or scheduler._worker is not None:
            raise SchedulerStateError(f"{scheduler!r} serves, or another test has it.")
        kind: Any = type(scheduler)
        own = cast(Self, scheduler)
        own.__dict__.update(
            _test=test,
            _theirs=(kind, scheduler._database),
            _loops=WeakSet(),
            _alone=False,
            _idle=None,
            _database=database,
        )
        scheduler.__class__ = type(kind.__name__, (cls, kind), {"__module__": kind.__module__})
        own._around.insert(0, watch := own._watched)
        end = own._subscribers.add(test.failed, (events.Failed, events.TimedOut))
        try:
            yield own
        finally:
            end()
            own._around.remove(watch)
            scheduler.__class__, scheduler._database = own._theirs
            for name in ("_test", "_theirs", "_loops", "_alone", "_idle"):
                own.__dict__.pop(name)

    # -- what the application calls ---------------------------------------------------------------

    async def serve(self) -> None:
        """Run nothing until stopped: in a test, jobs run when it says so."""
        self._idle = asyncio.Event()
        await self._idle.wait()

    @block
    async def serving(self) -> AsyncIterator[Self]:
        """Run nothing in the background: in a test, jobs run when it says so."""
        with suppress(DatabaseUnavailableError):
            await self.check_database()
        yield self

    def stop(self, *, now: bool = False) -> None:
        """Ask `serve()` to end."""
        if self._idle is not None:
            self._idle.set()
        super().stop(now=now)

    async def _write(
        self,
        work: Callable[[Any, Backend], T],
        session: AsyncCaller | None,
        committed: Callable[[T], None] | None = None,
    ) -> T:
        self._loops.add(asyncio.get_running_loop())
        result = await super()._write(work, session, committed)
        if session is None:
            await self._test.committed()
        return result

    async def _insert(
        self, specs: Sequence[JobSpec[Any]], session: AsyncCaller | None
    ) -> list[Job[Any]]:
        jobs = await super()._insert(specs, session)
        if session is not None or not self._test.runs_at_commit:
            return jobs
        now = await self._jobs_of([job.id for job in jobs])  # they may have ended meanwhile
        return [replace(new, existing=old.existing) for new, old in zip(now, jobs, strict=True)]

    async def _read(self, work: Callable[[Any, Backend], T], session: AsyncCaller | None) -> T:
        self._loops.add(asyncio.get_running_loop())
        return await super()._read(work, session)

    # -- what the test calls ----------------------------------------------------------------------

    @property
    def database(self) -> Database:
        """The database under test."""
        return self._database

    @property
    def backends(self) -> Iterable[Backend]:
        """All that know the time here: ours, and those of the application's sessions."""
        own = self._database.backend
        dialect = self._database.url.get_dialect()()
        return {own, backend_for(dialect, own.tables), backend_for(dialect, tables_for(None, ""))}

    @property
    def registry(self) -> Handlers:
        """The handlers that there are now."""
        return self._registry()

    @property
    def services(self) -> HandlerServices:
        """What stands behind the context of a job."""
        return self._services()

    async def run_jobs(self, *, alone: bool = False, only: str | None = None) -> dict[State, int]:
        """Run what is runnable, or one job `alone`; `only` those of one type."""
        await self.check_database()
        self._loops.add(asyncio.get_running_loop())
        registry, settings = self._registry(), self.settings
        if alone:
            queues = dict.fromkeys(settings.queues, 1)
            settings = replace(settings, concurrency=1, queues=queues, stop_timeout=PATIENCE)
        worker = self._new_worker(settings, registry if only is None else Only(registry[only]))
        worker.end_when_idle(scheduled=False)
        self._alone = alone
        if alone:
            tell = worker.on_end

            def ended(job_id: int) -> None:  # one that never came to its handler, too
                worker.stop()
                tell(job_id)

            worker.on_end = ended
        await self._supervise(worker)
        return {state: worker.ended[state] for state in (State.DONE, State.FAILED, State.CANCELLED)}

    async def enqueued_alone(
        self, job: JobSpec[Any] | str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
    ) -> Job[Any]:
        """Enqueue a job that is not run at its commit."""
        spec = self._spec(job, args, options)
        return (await self._database.run(lambda c: insert_jobs(c, self._database.backend, [spec])))[
            0
        ]

    async def leave(self) -> None:
        """Close what is open on this loop."""
        await self._waiters.close()
        await self._database.close()

    def leave_loops(self) -> None:
        """Close what is open on loops that rest now; what is left ends with its loop."""
        for loop in list(self._loops):
            if not loop.is_running() and not loop.is_closed():
                loop.run_until_complete(self.leave())

    async def _watched(self, job: JobContext, call: Callable[[], Any]) -> Any:
        if self._alone and self._worker is not None:
            self._worker.stop()
        IN_A_JOB.set(True)
        try:
            return await call()
        except (asyncio.CancelledError, Retry, Snooze, Cancel):
            raise  # what a handler decides is no mistake
        except BaseException as error:
            self._test.raised(job, error)
            raise
