"""Fixtures of the tests of graphs: `graphs` and `session`, on one database a file and backend."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncSession

from conformance.keeping import Keep, keeping
from databases import Databases
from graphs.kit import Graphs


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(databases: Databases) -> AsyncIterator[Keep]:
    """Give what opens a backend's database with the tables, once in this file."""
    async with keeping(databases) as opened:
        yield opened


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
