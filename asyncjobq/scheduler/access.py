"""How the scheduler's methods get at the database: in a transaction of its own, or the caller's."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from sqlalchemy import Connection

from asyncjobq.backends import backend_for
from asyncjobq.backends.base import Backend, Database
from asyncjobq.callers import AsyncCaller, in_transaction_of, refuse_autocommit
from asyncjobq.emitter import Emitter
from asyncjobq.errors import AsyncJobQError, ConfigurationError
from asyncjobq.handlers import Handlers
from asyncjobq.migrations import check_schema, ensure_schema, is_up_to_date
from asyncjobq.transactions import Fault, reason_of, unavailable
from asyncjobq.wake import ring_all

T = TypeVar("T")

_ALONE: Final = (
    "Jobs and schedules cannot be written through an AUTOCOMMIT connection: a job could start "
    "before its edges are written, and change between a look at it and what is done to it."
)


class Access:
    """Opens the transaction in which one function of the path is called."""

    _database: Database
    _handlers: Handlers
    _registries: tuple[Handlers, ...]
    _emitter: Emitter

    @property
    def url(self) -> str:
        """The database's URL, with its password hidden."""
        return self._database.url.render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.url}>"

    async def create_schema(self) -> None:
        """Create or upgrade the tables; does nothing when they are up to date."""
        backend = self._database.backend
        self._database.create()
        async with self._settings_blamed():
            await self._database.read(backend.check)
            if not await self._database.read(lambda c: is_up_to_date(c, backend)):
                await self._database.run(lambda c: ensure_schema(c, backend))

    async def check_database(self) -> None:
        """Raise what is wrong with the database: its version, its tables, or that it is away."""
        backend = self._database.backend
        async with self._settings_blamed():
            await self._database.read(backend.check)
            await self._database.read(lambda c: check_schema(c, backend))

    @asynccontextmanager
    async def _settings_blamed(self) -> AsyncIterator[None]:
        """Raise ConfigurationError for whatever the database has against the first statements."""
        backend = self._database.backend
        try:
            yield
        except AsyncJobQError:
            raise
        except Exception as error:
            if backend.fault_of(error) is Fault.CONFLICT:  # somebody is in the way, again and again
                raise unavailable(error) from error
            raise ConfigurationError(
                f"The database cannot be used: {reason_of(error)}. Check the URL: its user, "
                "password, host and database, and what the user is granted."
            ) from error

    def _registry(self) -> Handlers:
        """Return the handlers, with what was added to their registries meanwhile."""
        self._handlers.include(*self._registries)
        return self._handlers

    async def _write(
        self,
        work: Callable[[Connection, Backend], T],
        session: AsyncCaller | None,
        committed: Callable[[T], None] | None = None,
    ) -> T:
        """Write in the caller's transaction, or in one of ours, and tell the workers here.

        `committed` is called with the result after the commit, if that is ours or a session's.
        """
        if session is not None:
            theirs = self._in_callers_terms(work, writes=True)
            return await in_transaction_of(session, theirs, committed)
        backend = self._database.backend
        async with self._schema_blamed():
            result = await self._database.run(lambda c: work(c, backend), repeatable=False)
        ring_all()
        if committed is not None:
            committed(result)
        return result

    @asynccontextmanager
    async def _schema_blamed(self) -> AsyncIterator[None]:
        """Raise what is wrong with the tables or the settings in place of what it led to."""
        try:
            yield
        except AsyncJobQError:
            raise
        except Exception as error:  # not every driver's errors at its first connection are wrapped
            try:
                await self.check_database()
            except ConfigurationError as wrong:
                raise wrong from error
            raise

    def _in_callers_terms(
        self, work: Callable[[Connection, Backend], T], *, writes: bool = False
    ) -> Callable[[Connection], T]:
        """Bind work to the backend of the caller's connection, which must be of our kind.

        Where it `writes`, it must have transactions too.
        """

        def bound(connection: Connection) -> T:
            ours = self._database.backend
            theirs = backend_for(connection.dialect, ours.tables)
            if theirs.name != ours.name:
                raise ConfigurationError(
                    f"session= is connected to {theirs.name}, this scheduler to {ours.name}; a "
                    "job can only be enqueued in a transaction of the scheduler's own database."
                )
            if writes:
                refuse_autocommit(connection, theirs, _ALONE)
            return work(connection, theirs)

        return bound

    async def _read(
        self, work: Callable[[Connection, Backend], T], session: AsyncCaller | None
    ) -> T:
        if session is not None:
            return await in_transaction_of(session, self._in_callers_terms(work))
        async with self._schema_blamed():
            return await self._database.read(lambda c: work(c, self._database.backend))
