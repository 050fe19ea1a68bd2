"""How the scheduler's methods get at the database: in a transaction of its own, or the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend, Database
from asyncjobq.callers import AsyncCaller, in_transaction_of
from asyncjobq.errors import AsyncJobQError, ConfigurationError, SchemaError
from asyncjobq.handlers import Handlers
from asyncjobq.migrations import check_schema, ensure_schema, is_up_to_date
from asyncjobq.transactions import reason_of
from asyncjobq.wake import ring_all

T = TypeVar("T")


class Access:
    """Opens the transaction in which one function of the path is called."""

    _database: Database
    _handlers: Handlers
    _registries: tuple[Handlers, ...]

    async def create_schema(self) -> None:
        """Create or upgrade the tables; does nothing when they are up to date."""
        backend = self._database.backend
        await self._database.read(backend.check)
        if not await self._database.read(lambda c: is_up_to_date(c, backend)):
            await self._database.run(lambda c: ensure_schema(c, backend))

    async def check_database(self) -> None:
        """Raise what is wrong with the database: its version, its tables, or that it is away."""
        backend = self._database.backend
        try:
            await self._database.read(backend.check)
            await self._database.read(lambda c: check_schema(c, backend))
        except AsyncJobQError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"The database cannot be used: {reason_of(error)}. Check the URL: its user, "
                "password, host and database, and what the user is granted."
            ) from error

    def _registry(self) -> Handlers:
        """Return the handlers, with what was added to their registries meanwhile."""
        self._handlers.include(*self._registries)
        return self._handlers

    async def _write(
        self, work: Callable[[Connection, Backend], T], session: AsyncCaller | None
    ) -> T:
        """Write in the caller's transaction, or in one of ours, and tell the workers here."""
        if session is not None:
            return await in_transaction_of(session, self._in_callers_terms(work))
        backend = self._database.backend
        async with self._schema_blamed():
            result = await self._database.run(lambda c: work(c, backend), repeatable=False)
        ring_all()
        return result

    @asynccontextmanager
    async def _schema_blamed(self) -> AsyncIterator[None]:
        """Raise SchemaError for an error of the database if the tables are missing."""
        try:
            yield
        except DBAPIError as error:
            try:
                await self.check_database()
            except SchemaError as missing:
                raise missing from error
            raise

    def _in_callers_terms(
        self, work: Callable[[Connection, Backend], T]
    ) -> Callable[[Connection], T]:
        """Bind work to the backend of the caller's connection, which must be of our kind."""

        def bound(connection: Connection) -> T:
            ours = self._database.backend
            theirs = backend_for(connection.dialect, ours.tables)
            if theirs.name != ours.name:
                raise ConfigurationError(
                    f"session= is connected to {theirs.name}, this scheduler to {ours.name}; a "
                    "job can only be enqueued in a transaction of the scheduler's own database."
                )
            return work(connection, theirs)

        return bound

    async def _read(
        self, work: Callable[[Connection, Backend], T], session: AsyncCaller | None
    ) -> T:
        if session is not None:
            return await in_transaction_of(session, self._in_callers_terms(work))
        async with self._schema_blamed():
            return await self._database.read(lambda c: work(c, self._database.backend))
