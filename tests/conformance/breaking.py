"""Connections of the library that break: at a moment, or whenever they carry some text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from conformance.kit import Jobs


def kill(jobs: Jobs, connection: Connection) -> int:
    """Have the server end this connection; returns its number there."""
    own_id, command = {
        "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({}, 5000)"),
    }.get(jobs.backend_name, ("SELECT CONNECTION_ID()", "KILL {}"))
    number = int(connection.execute(text(own_id)).scalar_one())
    jobs.elsewhere(lambda c, _: c.execute(text(command.format(number))))
    return number


async def own_engine(jobs: Jobs) -> Engine:
    """Return the engine through which the library writes."""
    database: Any = jobs.database
    if jobs.backend_name == "sqlite":
        return (await database._writer.get())._engine  # type: ignore[no-any-return]
    return (await database._pool.get()).sync_engine  # type: ignore[no-any-return]


@asynccontextmanager
async def breaking(jobs: Jobs, carried: str) -> AsyncIterator[list[int]]:
    """Break the library's connection whenever a statement carries this text; list the breaks."""
    engine, breaks = await own_engine(jobs), []

    def break_it(
        connection: Connection, _cursor: Any, _statement: str, parameters: Any, *_: Any
    ) -> None:
        if carried not in str(parameters):
            return
        breaks.append(1)
        if jobs.backend_name == "sqlite":
            raise OSError("the disk is gone")
        kill(jobs, connection)

    event.listen(engine, "before_cursor_execute", break_it)
    try:
        yield breaks
    finally:
        event.remove(engine, "before_cursor_execute", break_it)
