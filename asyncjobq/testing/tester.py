"""What the fixtures are made of: an application's schedulers on a database for one test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from asyncjobq import events
from asyncjobq.callers import AsyncCaller
from asyncjobq.clock import monotonic, seconds
from asyncjobq.context import JobContext
from asyncjobq.errors import ConfigurationError
from asyncjobq.handlers import AnyHandler, Handler, Handlers
from asyncjobq.job import Job
from asyncjobq.options import JobSpec
from asyncjobq.scheduler import Scheduler
from asyncjobq.settings import Duration
from asyncjobq.states import OPEN, State
from asyncjobq.testing.asserting import Expected, missing, nothing_to_run, unexpected
from asyncjobq.testing.clock import JobClock
from asyncjobq.testing.contexts import Contexts
from asyncjobq.testing.inline import AtCommit
from asyncjobq.testing.mistakes import Mistakes
from asyncjobq.testing.places import Place
from asyncjobq.testing.under_test import IN_A_JOB, UnderTest

App = Scheduler | Handlers | Iterable[Scheduler | Handlers]

LOOK_AGAIN: Final = 0.02
MOST_JOBS: Final = 100_000
MOST_MOVES: Final = 1_000
"""Due times that one `drain(scheduled=True)` moves the clock to, lest it never ends."""


class JobTester:
    """An application's jobs in a test: on a database of its own, and run when the test says so.

    `app` is the application's scheduler, or several, or its registries of handlers. While this is
    entered, its schedulers work on `database` (a URL or an engine; a temporary SQLite file if it is
    left out), and `serve()` and `serving()` run nothing. The tables are emptied before and after;
    jobs that are there already are an error, unless the database's name has "test" in it.

    Enter it with `with`, in any test. Where no event loop runs, call what is asynchronous with
    `asyncio.run`.
    """

    clock: JobClock

    def __init__(self, app: App = (), database: str | URL | AsyncEngine | None = None, /) -> None:
        given = [app] if isinstance(app, Scheduler | Handlers) else list(app)
        self._given = [one for one in given if isinstance(one, Scheduler)]
        self._registries = [one for one in given if isinstance(one, Handlers)]
        if len(self._given) + len(self._registries) != len(given):
            raise ConfigurationError(f"{app!r} is neither schedulers nor registries of handlers.")
        self._place = Place(database)
        self._mistakes = Mistakes()
        self._at_commit: AtCommit | None = None
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._schedulers: list[UnderTest] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._place.check(self._given)
        with ExitStack() as stack:
            source = stack.enter_context(self._place.opened())
            schedulers = [*self._given]
            if self._registries or not schedulers:
                schedulers.append(_scheduler_of(self._registries, source))
            for scheduler in schedulers:
                stack.enter_context(self._taken(scheduler))
            backends = {backend for one in self._schedulers for backend in one.backends}
            self.clock = JobClock(self.scheduler.database, tuple(backends))
            stack.callback(self.clock.reset)
            self._contexts = Contexts(self.scheduler)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put the schedulers back; raises what a job raised at a commit and no call has told."""
        self._stack.close()
        if error is None:
            self._mistakes.raise_first()

    @contextmanager
    def _taken(self, scheduler: Scheduler) -> Iterator[None]:
        """Have a scheduler under test while the block lasts."""
        database = self._place.database_for(scheduler)
        with UnderTest.made_of(scheduler, database, self) as taken:
            self._place.prepare(taken)
            self._schedulers.append(taken)
            try:
                yield
            finally:
                self._schedulers.remove(taken)
                taken.leave_loops()
                self._place.clear(taken)

    @property
    def scheduler(self) -> UnderTest:
        """The application's scheduler; the first one, if it has several."""
        return self._schedulers[0]

    # -- running ----------------------------------------------------------------------------------

    async def drain(self, *, scheduled: bool = False, raising: bool = True) -> dict[State, int]:
        """Run all jobs that can run now, and those that they enqueue; count them by their end.

        What a handler raises is raised here, once nothing else can run; with `raising=False` it is
        left to the job, which is retried or fails as ever. Retries and jobs with `run_after` are
        due later: with `scheduled`, the clock is moved to each due time until none is left.
        """
        ended: Counter[State] = Counter(dict.fromkeys(_ENDS, 0))
        for _ in range(MOST_MOVES):
            await self._run_all(ended)
            self._judge(raising=raising)
            due = await self._next_due() if scheduled else None
            if due is None:
                return dict(ended)
            await self.clock.move_to(due)
        raise AssertionError(
            f"After {MOST_MOVES} due times there are still scheduled jobs. If a job enqueues "
            "itself again, use clock.move() and drain() without scheduled."
        )

    async def run_one(
        self, job: str | AnyHandler | None = None, /, *, raising: bool = True
    ) -> Job[Any]:
        """Run the job that is next (of a type, if one is given) for one attempt; return it then.

        What its handler raises is raised here, unless `raising=False`. Raises AssertionError if
        no job can run now.
        """
        only = job.type if isinstance(job, Handler) else job
        leased: list[int] = []
        async with self._turn_of_mine():
            await self._contexts.end()
            for scheduler in self._schedulers:
                if only is not None and scheduler.registry.find(only) is None:
                    continue
                end = scheduler.subscribe(lambda event: leased.append(event.job_id), events.Leased)
                try:
                    await scheduler.run_jobs(alone=True, only=only)
                finally:
                    end()
                if leased:
                    break
        self._judge(raising=raising)
        if not leased:
            left = await self.scheduler.find(state=sorted(OPEN), limit=1000)
            raise AssertionError(nothing_to_run(left, "job" if only is None else f"job {only!r}"))
        return await self.scheduler.get(leased[0])

    def inline(self) -> None:
        """From now on, run jobs as soon as they are committed; see the documentation."""
        if self._at_commit is None:
            self._at_commit = AtCommit(self._run_at_commit)
            self._stack.callback(self._at_commit.close)

    async def _run_all(self, ended: Counter[State]) -> None:
        async with self._turn_of_mine():
            await self._contexts.end()
            while True:
                before = ended.total()
                for scheduler in self._schedulers:
                    ended.update(await scheduler.run_jobs())
                if len(self._schedulers) == 1 or ended.total() == before:
                    return

    def _judge(self, *, raising: bool) -> None:
        if raising:
            self._mistakes.raise_first()
        else:
            self._mistakes.forget()

    async def _run_at_commit(self) -> None:
        """Run jobs now, unless one runs that has brought them: whoever runs that runs them too."""
        if not IN_A_JOB.get():
            await self._run_all(Counter())

    def _turn_of_mine(self) -> asyncio.Lock:
        """Return the lock of those who run jobs on this loop, one after the other."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = (loop, asyncio.Lock())
        return self._turn[1]

    async def _next_due(self) -> datetime | None:
        jobs = await self.scheduler.find(state=State.SCHEDULED, limit=MOST_JOBS)
        types = {name for one in self._schedulers for name in one.registry.types}
        return min((j.run_after for j in jobs if j.run_after and j.type in types), default=None)

    # -- what the schedulers tell -----------------------------------------------------------------

    @property
    def runs_at_commit(self) -> bool:
        """Whether a job that is enqueued now has run when that returns."""
        return self._at_commit is not None and not IN_A_JOB.get()

    async def committed(self) -> None:
        """Run what the library has committed, if that is wanted."""
        if self.runs_at_commit:
            await self._run_at_commit()
            self._mistakes.raise_first()

    def raised(self, job: JobContext, error: BaseException) -> None:
        """Take note of what a handler raised."""
        self._mistakes.raised(job, error)

    def failed(self, event: events.Event) -> None:
        """Take note of a failure that no handler may have raised."""
        self._mistakes.failed(event)

    # -- looking ----------------------------------------------------------------------------------

    async def assert_enqueued(
        self,
        job: str | AnyHandler,
        /,
        args: Mapping[str, Any] | None = None,
        *,
        within: Duration = 0,
        count: int | None = None,
        session: AsyncCaller | None = None,
        **others: Any,
    ) -> Job[Any]:
        """Assert that a job of a type (or handler) was enqueued, and return the newest that fits.

        A job fits that has these `args` among its own, and these `others`: `queue=`, `priority=`,
        `group_key=`, `state=` and whatever else a `Job` has. `count` says how many are to fit.
        `within` so many seconds it may still come; `session` looks into an open transaction.
        """
        expected = Expected.of(job, args, others)
        deadline = monotonic() + seconds(within, "within")
        while True:
            jobs = await self.scheduler.find(limit=MOST_JOBS, session=session)
            found = expected.matching(jobs)
            enough = len(found) == count if count is not None else bool(found)
            if enough or monotonic() >= deadline:
                break
            await asyncio.sleep(LOOK_AGAIN)
        if not found:
            known = [name for one in self._schedulers for name in one.registry.types]
            raise AssertionError(missing(expected, jobs, known))
        if not enough:
            raise AssertionError(unexpected(expected, found, count or 0))
        return found[-1]

    async def assert_not_enqueued(
        self,
        job: str | AnyHandler,
        /,
        args: Mapping[str, Any] | None = None,
        *,
        session: AsyncCaller | None = None,
        **others: Any,
    ) -> None:
        """Assert that no job was enqueued that fits; see `assert_enqueued`."""
        expected = Expected.of(job, args, others)
        found = expected.matching(await self.scheduler.find(limit=MOST_JOBS, session=session))
        if found:
            raise AssertionError(unexpected(expected, found, 0))

    async def context(
        self,
        job: JobSpec[Any] | AnyHandler | str = "test",
        args: Mapping[str, Any] | None = None,
        /,
        *,
        attempt: int = 1,
        checkpointed: Any = None,
        **options: Any,
    ) -> JobContext:
        """Return a context to call a handler with: `await resize(await context(), "a.png")`.

        Its job is really there, enqueued with these `options` and leased to the test, so that all
        its methods do what they do. The next `drain()` or `run_one()` ends it as done.
        """
        named = job.type if isinstance(job, Handler) else job
        enqueued = await self.scheduler.enqueued_alone(named, args, options)
        return await self._contexts.of(enqueued, attempt, checkpointed)


_ENDS: Final = (State.DONE, State.FAILED, State.CANCELLED)


def _scheduler_of(registries: list[Handlers], source: str | URL | AsyncEngine) -> Scheduler:
    """Make a scheduler for an application that has only handlers, for all queues of these."""
    queues = [handler.options.queue for one in registries for handler in one]
    names = dict.fromkeys(["default", *(queue for queue in queues if queue is not None)])
    return Scheduler(source, handlers=registries, queues=tuple(names))
