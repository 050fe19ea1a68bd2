"""Schedulers that run in the background of a test, and waiting for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from asyncjobq import Scheduler
from conformance.steps import PATIENCE


@asynccontextmanager
async def serving(*schedulers: Scheduler, seconds: float = PATIENCE) -> AsyncIterator[None]:
    """Run jobs in the background; fail what should be over long before."""
    async with asyncio.timeout(seconds), AsyncExitStack() as stack:
        for scheduler in schedulers:
            await stack.enter_async_context(scheduler.serving())
        yield


@asynccontextmanager
async def served(scheduler: Scheduler) -> AsyncIterator[asyncio.Task[None]]:
    """Call `serve()` in a task, which has to be over at the end."""
    task = asyncio.create_task(scheduler.serve())
    async with asyncio.timeout(PATIENCE):
        yield task
        await asyncio.wait({task})


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what only a look at the database tells."""
    async with asyncio.timeout(PATIENCE):
        while not await condition():
            await asyncio.sleep(0.01)


class Latch:
    """A handler that says that it runs, and goes on when it is let."""

    def __init__(self, scheduler: Scheduler, **options: Any) -> None:
        self.running = asyncio.Event()
        self.go_on = asyncio.Event()
        self.cancelled = 0
        self.handler: Any = scheduler.handler("latch", **options)(self._run)

    async def _run(self) -> str:
        self.running.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "gone on"

    async def enqueue(self, scheduler: Scheduler) -> Any:
        """Enqueue a job and wait until it runs."""
        job = await scheduler.enqueue(self.handler.job())
        await self.running.wait()
        return job
