"""Fixtures of the tests of graphs: `graphs` and `session`, on one database a file and backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import Scheduler
from conformance.kit import Kept
from databases import Databases
from graphs.kit import Graphs

Keep = Callable[[str], Awaitable[Kept]]


async def _create_tables(url: str) -> None:
    async with Scheduler(url) as scheduler:
        await scheduler.create_schema()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(databases: Databases) -> AsyncIterator[Keep]:
    """Give what opens a backend's database with the tables, once in this file."""
    opened: dict[str, Kept] = {}
    async with AsyncExitStack() as stack:

        async def get(backend_name: str) -> Kept:
            if backend_name not in opened:
                prepared = databases.prepared(backend_name, _create_tables)
                url = await stack.enter_async_context(prepared)
                opened[backend_name] = Kept(url, backend_name)
                stack.push_async_callback(opened[backend_name].close)
            return opened[backend_name]

        yield get


@pytest_asyncio.fixture(loop_scope="module")
async def graphs(backend_name: str, kept: Keep) -> AsyncIterator[Graphs]:
    """Give empty tables on the test's backend, and a scheduler without handlers."""
    made = Graphs(await kept(backend_name))
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="module")
async def session(graphs: Graphs) -> AsyncIterator[AsyncSession]:
    """Give a session of an application, as SQLAlchemy makes it."""
    async with AsyncSession(graphs.kept.application) as session:
        yield session
