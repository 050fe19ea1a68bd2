"""The demo's own tables, and the states of the jobs in them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rich.progress import Progress
from sqlalchemy import Connection, func, select

from asyncjobq.backends import open_database
from asyncjobq.backends.base import Database
from asyncjobq.cli.drawing import states_in_words
from asyncjobq.models import tables_for
from asyncjobq.states import TERMINAL, State

LOOK_INTERVAL: Final = 0.05

States = Counter[State]


def ended(states: States) -> int:
    """Return how many jobs are done, failed or cancelled."""
    return sum(states[state] for state in TERMINAL)


def in_flight(states: States) -> int:
    """Return how many jobs a worker has leased."""
    return states[State.LEASED] + states[State.RUNNING]


@asynccontextmanager
async def own_tables(url: str, prefix: str) -> AsyncIterator[Database]:
    """Give access to the tables with this prefix, and drop them afterwards if there is one."""
    database = open_database(url, tables_for(None, prefix), lease_ttl=30.0)
    try:
        try:
            yield database
        finally:
            if prefix:
                await database.run(database.backend.tables.metadata.drop_all)
    finally:
        await database.close()


class Watch:
    """Looks again and again how many jobs are in which state, and shows it on a bar."""

    def __init__(self, database: Database, bar: Progress, total: int) -> None:
        self.total = total
        self._database = database
        self._bar = bar
        self._task = bar.add_task("jobs", total=total, states="")

    async def until(
        self, enough: Callable[[States], bool], check: Callable[[], None] = lambda: None
    ) -> States:
        """Return the states as soon as they are enough, calling `check` before each other look."""
        while not enough(states := await self.look()):
            check()
            await asyncio.sleep(LOOK_INTERVAL)
        return states

    async def until_all_ended(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait until all jobs have ended, calling `check` before each other look."""
        await self.until(lambda states: ended(states) == self.total, check)

    async def look(self) -> States:
        """Return how many jobs are in which state, and show it."""
        states = await self._database.read(self._count)
        self._bar.update(self._task, completed=ended(states), states=states_in_words(states))
        return states

    def _count(self, connection: Connection) -> States:
        jobs = self._database.backend.tables.jobs
        query = select(jobs.c.state, func.count()).group_by(jobs.c.state)
        return Counter({State(state): count for state, count in connection.execute(query)})
