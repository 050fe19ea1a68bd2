"""A database that is not waited for without end, for loops that have other things to do.

A line that falls silent (a lost route, a server that is frozen) raises nothing for a quarter of an
hour, or ever; who waits on it does not even hear that it should stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sqlalchemy import URL, Connection
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq.backends.base import Backend, Database, T, Work
from asyncjobq.errors import DatabaseUnavailableError

PATIENCE: Final = 30.0
"""Seconds for a transaction of a worker; the longest lock that one waits for is far shorter."""

RENEWAL_PATIENCE: Final = 5.0
"""At least so many seconds, or a third of the lease, for a renewal: there is time for another."""


class BoundedDatabase(Database):
    """Another database, whose transactions are given up after `limit` seconds.

    Only for what may be repeated: whether a transaction has happened is not known then.
    """

    def __init__(self, database: Database, limit: float, limit_apart: float) -> None:
        """`limit_apart` is for the second loop, in which leases are renewed."""
        self._database = database
        self._limit = limit
        self._limit_apart = limit_apart

    @property
    def backend(self) -> Backend:  # type: ignore[override]
        return self._database.backend

    @property
    def url(self) -> URL:  # type: ignore[override]
        return self._database.url

    @property
    def queues(self) -> bool:
        return self._database.queues

    def waited(self, connection: Connection) -> float:
        return self._database.waited(connection)

    async def apart(self) -> Database:
        limit = self._limit_apart
        return BoundedDatabase(await self._database.apart(), limit, limit)

    async def run(self, work: Work[T], *, repeatable: bool = True) -> T:
        return await self._bounded(self._database.run(work, repeatable=repeatable))

    async def run_alone(self, work: Work[T]) -> T:
        return await self._bounded(self._database.run_alone(work))

    async def read(self, work: Work[T]) -> T:
        return await self._bounded(self._database.read(work))

    def session(self) -> AsyncSession:
        return self._database.session()

    async def watch(self, wake: Callable[[], None], poll_interval: float) -> None:
        await self._database.watch(wake, poll_interval)

    async def watch_ends(self, wake: Callable[[], None], poll_interval: float) -> None:
        await self._database.watch_ends(wake, poll_interval)

    async def close(self) -> None:
        await self._database.close()

    async def _bounded(self, transaction: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._limit):
                return await transaction
        except TimeoutError as error:
            raise DatabaseUnavailableError(
                f"The database cannot be reached: it has not answered for {self._limit:g} s"
            ) from error


def bounded(database: Database, lease_ttl: float) -> Database:
    """Return the database for the loops of a worker with such leases."""
    if not database.remote:
        return database
    return BoundedDatabase(database, max(PATIENCE, lease_ttl), max(RENEWAL_PATIENCE, lease_ttl / 3))
