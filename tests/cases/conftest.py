"""A scenario's database, log and worker processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from asyncjobq import Scheduler
from cases.application import Application
from cases.log import Log
from cases.workers import Case, MakeEngine, prepare_forks
from databases import Databases


async def make_tables(url: str) -> None:
    """Make the library's tables in an empty database, and one of an application."""
    async with Scheduler(url) as scheduler:
        await scheduler.create_schema()
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(Application.metadata.create_all)
    await engine.dispose()


@pytest.fixture(scope="session", autouse=True)
def forks() -> None:
    """Make ready what worker processes are forked from."""
    prepare_forks()


@pytest.fixture
async def prepared_url(backend_name: str, databases: Databases) -> AsyncIterator[str]:
    """Give the URL of a database that has the library's tables and no jobs."""
    async with databases.prepared(backend_name, make_tables) as url:
        yield url


@pytest.fixture
async def case(prepared_url: str, tmp_path: Path) -> AsyncIterator[Case]:
    """Give a scenario whose workers are ended with the test."""
    async with scenario(prepared_url, tmp_path) as made:
        yield made


@pytest.fixture
async def empty_case(database_url: str, tmp_path: Path) -> AsyncIterator[Case]:
    """Give a scenario on a database without tables."""
    async with scenario(database_url, tmp_path) as made:
        yield made


@pytest.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Give what makes engines of an application, which are disposed of with the test."""
    made: list[AsyncEngine] = []

    def make(url: str, **options: Any) -> AsyncEngine:
        made.append(create_async_engine(url, **options))
        return made[-1]

    yield make
    for engine in made:
        await engine.dispose()


@asynccontextmanager
async def scenario(url: str, folder: Path) -> AsyncIterator[Case]:
    """Open what a scenario needs, and end what it started."""
    engine = create_async_engine(url)
    log = Log(folder / "handlers.log")
    async with Scheduler(url, poll_interval=0.1) as scheduler:
        made = Case(url, folder, scheduler, engine, log)
        try:
            yield made
        finally:
            made.end()
            log.close()
            await engine.dispose()
