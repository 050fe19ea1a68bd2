"""A worker of the fault suite, as a program of its own: python -m faults.program SETTINGS."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from asyncjobq import Concurrency, Handlers, JobContext, Scheduler, constant, events
from cases.log import Log

CRASHED: Final = 77
"""The exit code of a worker whose job has crashed it."""
OFTEN: Final[dict[str, Any]] = {"max_attempts": 10_000, "retry": constant(0.1)}
"""Of a job that is to succeed, whatever happens to its workers."""
CRANES: Final = 3
"""Jobs of the type `lift` that may run at a time."""


class Application(DeclarativeBase):
    """Registry of the application's tables."""


class Effect(Application):
    """What a job has done in the same transaction in which it ended."""

    __tablename__ = "effects"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int]


class Ended(Application):
    """One move of a job from an open state to a terminal one, written by the database itself."""

    __tablename__ = "ended"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int]


@dataclass
class Settings:
    """What a worker is told."""

    url: str
    log: str
    worker_id: str
    lease_ttl: float = 3.0
    poll_interval: float = 0.25
    concurrency: int = 8


def handlers_of(log: Log) -> Handlers:
    """Return handlers that write a line at their start and one at their end."""
    handlers = Handlers()
    _add_simple(handlers, log)
    _add_failing(handlers, log)
    _add_writing(handlers, log)
    return handlers


def _add_simple(handlers: Handlers, log: Log) -> None:
    @handlers.handler(**OFTEN)
    async def work(ctx: JobContext, label: str, seconds: float = 0.0) -> int:
        log.write(label, ctx.attempt, "start")
        await asyncio.sleep(seconds)
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    @handlers.handler(limits=[Concurrency("cranes", CRANES)], **OFTEN)
    async def lift(ctx: JobContext, label: str, seconds: float) -> int:
        return await work(ctx, label, seconds)

    @handlers.handler(**OFTEN)
    def think(ctx: JobContext, label: str) -> int:
        log.write(label, ctx.attempt, "start")
        time.sleep(0.2)
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    @handlers.handler(**OFTEN)
    async def block(ctx: JobContext, label: str, seconds: float) -> int:
        log.write(label, ctx.attempt, "start")
        time.sleep(seconds)  # noqa: ASYNC251
        log.write(label, ctx.attempt, "end")
        return ctx.attempt


def _add_failing(handlers: Handlers, log: Log) -> None:
    @handlers.handler(**OFTEN)
    async def flaky(ctx: JobContext, label: str, fails: int) -> int:
        log.write(label, ctx.attempt, "start")
        if ctx.attempt <= fails:
            raise ConnectionError("not yet")
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    @handlers.handler(max_attempts=2, retry=constant(0.1))
    async def hopeless(ctx: JobContext, label: str) -> None:
        log.write(label, ctx.attempt, "start")
        raise ValueError("never")

    @handlers.handler(max_attempts=2, retry=constant(0.1))
    async def crash(ctx: JobContext, label: str) -> None:
        log.write(label, ctx.attempt, "start")
        os._exit(CRASHED)


def _add_writing(handlers: Handlers, log: Log) -> None:
    @handlers.handler(**OFTEN)
    async def grow(ctx: JobContext, label: str, children: int) -> int:
        log.write(label, ctx.attempt, "start")
        for number in range(children):
            child = {"label": f"{label}.{number}", "seconds": 0.05}
            await ctx.add_child("work", child, key=str(number))
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    @handlers.handler(**OFTEN)
    async def complete(ctx: JobContext, label: str) -> None:
        log.write(label, ctx.attempt, "start")
        async with ctx.session() as session, session.begin():
            await session.execute(insert(Effect).values(job_id=ctx.job_id))
            await ctx.complete(session, ctx.attempt)
        log.write(label, ctx.attempt, "end")


def scheduler_of(settings: Settings, log: Log) -> Scheduler:
    """Return the worker's scheduler, which writes a line for each end that it tells of."""
    scheduler = Scheduler(
        settings.url,
        handlers=[handlers_of(log)],
        worker_id=settings.worker_id,
        concurrency=settings.concurrency,
        lease_ttl=settings.lease_ttl,
        poll_interval=settings.poll_interval,
        stop_timeout=2.0,
    )

    @scheduler.on(events.Succeeded, events.Failed, events.Cancelled)
    def note(event: Any) -> None:
        log.write(str(event.job_id), event.attempt, "told", type(event).__name__)

    return scheduler


async def _serve(scheduler: Scheduler, settings: Settings, log: Log) -> None:
    log.write(settings.worker_id, 0, "up")
    await scheduler.serve_until_signalled()
    log.write(settings.worker_id, 0, "down")


def run(settings: Settings) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    log = Log(settings.log)
    asyncio.run(_serve(scheduler_of(settings, log), settings, log), debug=False)


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
