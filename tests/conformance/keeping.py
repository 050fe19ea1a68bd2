"""Databases with the library's tables, one a file of tests and backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from asyncjobq import Scheduler
from conformance.kit import Kept
from conformance.moves import watch_moves
from databases import Databases

Keep = Callable[[str], Awaitable[Kept]]


async def create_tables(url: str) -> None:
    """Make the library's tables; what moves jobs in them is watched."""
    async with Scheduler(url) as scheduler:
        await scheduler.create_schema()
        await scheduler._database.run(watch_moves)


@asynccontextmanager
async def keeping(databases: Databases) -> AsyncIterator[Keep]:
    """Give what opens a backend's database with the tables, once in this block."""
    opened: dict[str, Kept] = {}
    async with AsyncExitStack() as stack:

        async def get(backend_name: str) -> Kept:
            if backend_name not in opened:
                prepared = databases.prepared(backend_name, create_tables)
                url = await stack.enter_async_context(prepared)
                opened[backend_name] = Kept(url, backend_name)
                stack.push_async_callback(opened[backend_name].close)
            return opened[backend_name]

        yield get
