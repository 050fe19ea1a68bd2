"""A worker as a program of its own, for tests that kill, freeze and stop it.

Run as `python -m cases.worker_program SETTINGS`, the settings being a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asyncjobq import Concurrency, Handlers, JobContext, Limit, RateLimit, Scheduler, constant
from cases.log import Log

TYPES = ("work", "block", "hold", "unplug", "crash", "look_up", "grow")


@dataclass
class Settings:
    """What a worker is told; `seconds`, if given, is how long each of its jobs takes."""

    url: str
    log: str
    worker_id: str = "A"
    lease_ttl: float = 1.5
    poll_interval: float = 0.25
    stop_timeout: float = 5.0
    concurrency: int = 4
    seconds: float | None = None
    clock_offset: float = 0.0
    """Seconds by which the database's clock is put forward for this worker."""
    blocking: bool = False
    """Whether `block` blocks the event loop, and is not the same as `work`."""
    types: list[str] = field(default_factory=lambda: list(TYPES))
    cron: str | None = None
    """When `work` is run over and over, by a schedule that is declared here."""
    connect_args: dict[str, Any] | None = None
    time_zone: str | None = None
    create_schema: bool = False
    limit: tuple[str, float] | None = None
    """A limit of the type `work`: "concurrency" with its number, or "rate" with that per second."""
    start_when: str | None = None
    """A file whose appearance starts the worker, so that several start at one moment."""


def handlers_of(settings: Settings, log: Log) -> Handlers:
    """Return handlers for the types: `work`, and others that are told by their names."""
    handlers = Handlers()

    async def work(ctx: JobContext, label: str, seconds: float = 0.0) -> int:
        log.write(label, ctx.attempt, "start")
        await asyncio.sleep(seconds if settings.seconds is None else settings.seconds)
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    async def block(ctx: JobContext, label: str, seconds: float) -> int:
        log.write(label, ctx.attempt, "start")
        time.sleep(seconds)  # noqa: ASYNC251
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    async def crash(ctx: JobContext, label: str) -> None:
        log.write(label, ctx.attempt, "start")
        os._exit(1)

    async def look_up(ctx: JobContext, label: str, key: int) -> int | None:
        log.write(label, ctx.attempt, "start")
        query = text("SELECT amount FROM orders WHERE id = :id")
        async with ctx.session() as session:
            amount: int | None = (await session.execute(query, {"id": key})).scalar()
        log.write(label, ctx.attempt, "end", f"amount={amount}")
        return amount

    async def grow(ctx: JobContext, label: str, children: int) -> int:
        log.write(label, ctx.attempt, "start")
        for number in range(children):
            await ctx.add_child("work", {"label": f"{label}.{number}"}, key=str(number))
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    special: dict[str, Callable[..., Any]] = {"crash": crash, "look_up": look_up, "grow": grow}
    special |= {"hold": _holding(log), "unplug": _unplugging(log)}
    if settings.blocking:
        special["block"] = block
    for name in settings.types:
        limits = _limits_of(settings) if name == "work" else []
        handlers.handler(name, retry=constant(0.0), limits=limits)(special.get(name, work))
    if settings.cron is not None:
        recurring = handlers.cron(
            settings.cron, name="declared", args={"label": "declared"}, catch_up="all"
        )
        recurring(handlers["work"])
    return handlers


def _holding(log: Log) -> Callable[..., Any]:
    """Return a handler that blocks the event loop in the middle of a transaction."""

    async def hold(ctx: JobContext, label: str, seconds: float) -> int:
        log.write(label, ctx.attempt, "start")
        async with ctx.session() as session, session.begin():
            await session.execute(text("INSERT INTO orders (id, amount) VALUES (1, 1)"))
            time.sleep(seconds)  # noqa: ASYNC251
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    return hold


def _unplugging(log: Log) -> Callable[..., Any]:
    """Return a handler that, at its first attempt, closes every socket of its process."""

    async def unplug(ctx: JobContext, label: str) -> int:
        log.write(label, ctx.attempt, "start")
        if ctx.attempt == 1:
            _close_sockets()
        log.write(label, ctx.attempt, "end")
        return ctx.attempt

    return unplug


def _close_sockets() -> None:
    for file in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(file.name)).st_mode):
                os.close(int(file.name))


def _limits_of(settings: Settings) -> list[Limit]:
    if settings.limit is None:
        return []
    kind, amount = settings.limit
    if kind == "concurrency":
        return [Concurrency("limit", int(amount))]
    return [RateLimit("limit", amount, per=1, burst=10)]


def scheduler_of(settings: Settings, log: Log) -> Scheduler:
    """Return the worker's scheduler; it also serves a queue with its own name."""
    database: str | AsyncEngine = settings.url
    if settings.connect_args is not None:
        database = create_async_engine(settings.url, connect_args=settings.connect_args)
    scheduler = Scheduler(
        database,
        handlers=[handlers_of(settings, log)],
        worker_id=settings.worker_id,
        queues=("default", settings.worker_id),
        concurrency=settings.concurrency,
        lease_ttl=settings.lease_ttl,
        poll_interval=settings.poll_interval,
        stop_timeout=settings.stop_timeout,
    )
    scheduler._database.backend.clock_offset = settings.clock_offset
    return scheduler


async def _serve(scheduler: Scheduler, settings: Settings, log: Log) -> None:
    if settings.create_schema:
        await scheduler.create_schema()
    log.write(settings.worker_id, 0, "up")
    await scheduler.serve_until_signalled()
    log.write(settings.worker_id, 0, "down")


def run(settings: Settings) -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if settings.time_zone is not None:
        os.environ["TZ"] = settings.time_zone
        time.tzset()
    log = Log(settings.log)
    scheduler = scheduler_of(settings, log)
    if settings.start_when is not None:
        log.write(settings.worker_id, 0, "waiting")
        while not Path(settings.start_when).exists():
            time.sleep(0.001)
    # Without the checks of `-X dev`, which cost most of the time where many processes share a core.
    asyncio.run(_serve(scheduler, settings, log), debug=False)


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
