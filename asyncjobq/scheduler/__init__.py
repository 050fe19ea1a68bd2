"""The façade: opens a transaction, calls one function of the path, and owns the worker's life."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Self

from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from asyncjobq.backends import open_database
from asyncjobq.codec import MAX_BYTES
from asyncjobq.emitter import Emitter
from asyncjobq.errors import DatabaseUnavailableError, SchedulerStateError
from asyncjobq.handlers import Handlers
from asyncjobq.lifetime import block, ended, signals_handled
from asyncjobq.limits import Limit
from asyncjobq.middleware import Middleware
from asyncjobq.models import tables_for
from asyncjobq.scheduler.controls import Controls
from asyncjobq.scheduler.explaining import Explaining
from asyncjobq.scheduler.health import Health
from asyncjobq.scheduler.hooks import Hooks, MetaSource
from asyncjobq.scheduler.limiting import Limiting
from asyncjobq.scheduler.questions import Questions
from asyncjobq.scheduler.recurring import Recurring
from asyncjobq.services import HandlerServices
from asyncjobq.settings import Duration, Settings, checked_registries, checked_settings
from asyncjobq.slots import Surroundings
from asyncjobq.states import State
from asyncjobq.subscribers import Subscribers
from asyncjobq.waiting import Waiters
from asyncjobq.worker import Worker

logger = logging.getLogger("asyncjobq.scheduler")


class Scheduler(Hooks, Limiting, Recurring, Explaining, Health, Questions, Controls):
    """Enqueues jobs, runs them, and answers questions about them, on one database.

    `database` is a URL or an AsyncEngine; nothing is connected to before the first call. With
    `handlers`, registries that exist without a scheduler. `concurrency` is the number of slots of
    this worker, `queues` the queues it serves, or a mapping to the slots of each; `limits` cap all
    jobs, wherever they run, or those of one queue. Durations are
    seconds or timedeltas: a lease that is not renewed for `lease_ttl` is taken back, due work is
    looked for every `poll_interval` at least, jobs have `stop_timeout` to end when the scheduler
    is stopped, and `default_timeout` in all where neither they nor their handler say otherwise
    (None: no end). With `retention`, workers delete jobs that ended longer ago than it says for
    their state, as `prune` does; without, all are kept. `listen_url` reaches PostgreSQL directly
    where `database` goes through a pooler that passes no notifications on. `schema` and
    `table_prefix` say where the tables are.
    """

    def __init__(
        self,
        database: str | URL | AsyncEngine,
        *,
        handlers: Iterable[Handlers] = (),
        concurrency: int = 10,
        queues: Iterable[str] | Mapping[str, int] = ("default",),
        limits: Iterable[Limit] = (),
        lease_ttl: Duration = 30.0,
        poll_interval: Duration = 1.0,
        stop_timeout: Duration = 20.0,
        default_timeout: Duration | None = 3600.0,
        max_result_bytes: int = MAX_BYTES,
        retention: Mapping[str, Duration] | None = None,
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
            retention=retention,
        )
        tables = tables_for(schema, table_prefix)
        self._database = open_database(
            database, tables, lease_ttl=self.settings.lease_ttl, listen_url=listen_url
        )
        self._handlers = Handlers()
        self._registries = checked_registries(handlers)
        self._limits = tuple(limits)
        self._limit_rules()
        self.handler = self._handlers.handler
        self.cron = self._handlers.cron
        self.every = self._handlers.every
        self._worker: Worker | None = None
        self._waiters = Waiters(self._still_open, self._watch_ends, self.settings.poll_interval)
        self._subscribers = Subscribers()
        self._emitter = Emitter(self._subscribers)
        self._around: list[Middleware] = []
        self._meta_sources: list[MetaSource] = []

    async def serve(self) -> None:
        """Run jobs until `stop()` is called or this call is cancelled.

        Cancelling it stops claiming, lets running jobs end for `stop_timeout`, cancels the rest,
        and then re-raises; a second cancellation cuts the waiting short. Raises
        ConfigurationError and SchemaError at the start; a database that is down is waited for.
        """
        await self._supervise(self._new_worker())

    @block
    async def serving(self) -> AsyncIterator[Self]:
        """Run jobs in the background while the block lasts: for lifespans of web applications.

        Configuration and schema errors raise on entry, a database that is down does not. If such
        an error shows once it is up, it is logged as critical until it is put right.
        """
        with suppress(DatabaseUnavailableError):
            await self.check_database()
        work = self._supervise(self._new_worker(), in_background=True)
        task = asyncio.create_task(work, name="asyncjobq serve")
        task.add_done_callback(_log_failure)
        try:
            yield self
        finally:
            self.stop()
            await ended(task, self._hurry, self._hurry)

    def run(self) -> None:
        """Run jobs until SIGINT or SIGTERM: for scripts, which have no event loop yet."""
        asyncio.run(self.serve_until_signalled())

    async def serve_until_signalled(self) -> None:
        """Serve until SIGINT or SIGTERM, which stops in good order; a second one stops at once."""
        with signals_handled(self.stop, self._hurry):
            await self.serve()

    def stop(self, *, now: bool = False) -> None:
        """Ask `serve()` to end in good order: jobs may go on for `stop_timeout`.

        With `now`, they are interrupted at once, which costs them no attempt. From any task of the
        loop that serves; without a worker it does nothing.
        """
        if self._worker is not None:
            self._worker.stop(now=now)

    def _hurry(self) -> None:
        self.stop(now=True)

    async def drain(self, *, scheduled: bool = False) -> dict[State, int]:
        """Run jobs until nothing of this scheduler's queues and types is runnable or running.

        Returns how many jobs ended in which state. With `scheduled`, due times are waited for.
        Schedules are not fired.
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
        await self._waiters.close()
        await self._subscribers.flush(last=True)
        await self._database.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def _supervise(self, worker: Worker, *, in_background: bool = False) -> None:
        self._subscribers.home = asyncio.get_running_loop()
        work = self._serve(worker, in_background)
        task = asyncio.create_task(work, name="asyncjobq worker")
        try:
            await ended(task, worker.stop, partial(worker.stop, now=True))
        finally:
            self._worker = None
            self._subscribers.home = None

    async def _serve(self, worker: Worker, in_background: bool) -> None:
        try:
            await worker.serve(self.check_database, in_background=in_background)
        finally:
            await self._subscribers.flush()

    def _new_worker(
        self, settings: Settings | None = None, handlers: Handlers | None = None
    ) -> Worker:
        if self._worker is not None:
            raise SchedulerStateError("This scheduler serves already; stop() it first.")
        around = Surroundings(self._subscribers, self._around, self._added_meta)
        worker = Worker(
            self._database,
            self._registry() if handlers is None else handlers,
            settings or self.settings,
            self._services(),
            self._limit_rules(),
            around,
        )
        worker.on_end = self._waiters.tell
        self._worker = worker
        return worker

    def _services(self) -> HandlerServices:
        most, rules = self.settings.max_result_bytes, self._limit_rules()
        return HandlerServices(
            self._database, self._spec, self.enqueue, most, rules, self._tell_enqueued
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    """Say at once what ended a worker in the background; its block may go on for long."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("The worker has ended: %s", error, exc_info=error)
