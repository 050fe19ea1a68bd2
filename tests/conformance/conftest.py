"""Fixtures of the conformance suite: `jobs`, and `application`, whose engine is not the library's.

The tests of a file share an event loop and, on each backend, a database and its connections: most
of a test's time would otherwise go into compiling the same statements again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from conformance.keeping import Keep, keeping
from conformance.kit import Jobs
from databases import Databases


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(databases: Databases) -> AsyncIterator[Keep]:
    """Give what opens a backend's database with the tables, once in this file."""
    async with keeping(databases) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def jobs(backend_name: str, kept: Keep) -> AsyncIterator[Jobs]:
    """Give empty tables on the test's backend, and a scheduler without handlers."""
    made = Jobs(await kept(backend_name))
    yield made
    await made.close()


@pytest.fixture
def application(jobs: Jobs) -> AsyncEngine:
    """Give the engine of an application that uses the same database for its own things."""
    return jobs.kept.application


@pytest_asyncio.fixture(loop_scope="module")
async def session(application: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """Give a session as SQLAlchemy makes it: its objects expire at commit."""
    async with AsyncSession(application) as session:
        yield session


@pytest.fixture
def sync_engine(jobs: Jobs) -> Iterator[Engine]:
    """Give an engine with the synchronous driver."""
    engine = jobs.kept.sync_engine()
    yield engine
    engine.dispose()
