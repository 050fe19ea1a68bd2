"""What another process does between the statements of a caller's transaction."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from conformance.kit import Jobs
from conformance.steps import Step


@dataclass
class Meanwhile:
    """A step of another process at one moment of a caller's transaction, and what came of it."""

    session: AsyncSession
    over: bool = True
    """Whether the transaction has fewer statements, so that there are no more moments."""
    waits: bool = False
    """Whether the other process has to wait for the transaction, from this moment on."""
    result: Any = None


async def moments_of_a_caller(
    jobs: Jobs, engine: AsyncEngine, meanwhile: Step[Any]
) -> AsyncIterator[Meanwhile]:
    """Give a session for each moment of what is done with it, at which a step is taken elsewhere.

    Until the other process would wait, or there are no more moments.
    """
    for number in itertools.count():
        async with _interrupted(jobs, engine, number, meanwhile) as moment:
            yield moment
        if moment.over or moment.waits:
            return


@asynccontextmanager
async def _interrupted(
    jobs: Jobs, engine: AsyncEngine, number: int, meanwhile: Step[Any]
) -> AsyncIterator[Meanwhile]:
    async with AsyncSession(engine) as session:
        connection = (await session.connection()).sync_connection
        moment, statements = Meanwhile(session), itertools.count()

        def interrupt(*_: object) -> None:
            if next(statements) != number:
                return
            moment.over = False
            try:
                moment.result = jobs.elsewhere(meanwhile)
            except OperationalError:  # it has waited as long as it would
                moment.waits = True

        event.listen(connection, "before_cursor_execute", interrupt)
        yield moment
        event.remove(connection, "before_cursor_execute", interrupt)
