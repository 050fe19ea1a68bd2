"""The library's own connections to a database server: a pool beside the application's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Final

from sqlalchemy import Connection, Engine, Pool, event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.pool.base import ResetStyle

from asyncjobq.backends.base import Backend, Database, T, Work, sessions_of
from asyncjobq.backends.keys import OWN
from asyncjobq.backends.loops import PerLoop
from asyncjobq.clock import monotonic
from asyncjobq.errors import CommitUnknownError
from asyncjobq.transactions import Fault, reason_of, retrying

OPENING_GRACE: Final = 1.0
"""Seconds that a cancelled call waits for a connection which is being opened, to close it."""

CLOSING_GRACE: Final = 5.0
"""Seconds for the connections of a pool to be closed in good order."""

Watch = Callable[["ServerDatabase", Callable[[], None], float], Any]


class ServerDatabase(Database):
    """A server behind an AsyncEngine, which it uses only for sessions of handlers.

    Its own transactions go through a second pool with the engine's settings, at READ COMMITTED:
    handlers that hold all connections of the engine, or a role with another default isolation
    level, change nothing. Connections belong to an event loop and are closed with it.
    """

    remote: ClassVar[bool] = True

    def __init__(
        self,
        engine: AsyncEngine,
        backend: Backend,
        *,
        owns_engine: bool,
        settings: Sequence[str],
        idle_limit: float | None = None,
        watch: Watch | None = None,
        watch_ends: Watch | None = None,
        listen_engine: AsyncEngine | None = None,
    ) -> None:
        self.engine = engine
        self.url = engine.url
        self.backend = backend
        self._settings = settings
        self._idle_limit = idle_limit
        self.owns_engine = owns_engine
        self._watch = watch
        self._watch_ends = watch_ends
        self._listen_engine = listen_engine
        self._sessions = sessions_of(engine)
        self._pool = PerLoop(self._make_engine, self._dispose)

    async def apart(self) -> Database:
        return ServerDatabase(
            self.engine,
            self.backend,
            owns_engine=False,
            settings=self._settings,
            idle_limit=self._idle_limit,
        )

    async def run(self, work: Work[T], *, repeatable: bool = True) -> T:
        async def transaction() -> T:
            async with (await self._pool.get()).connect() as connection:
                result: T = await connection.run_sync(work)
                await self._commit(connection, repeatable)
                return result

        return await retrying(transaction, self.backend.fault_of)

    async def run_alone(self, work: Work[T]) -> T:
        if not self.backend.commits_for_nothing:
            return await self.run(work)

        async def statement() -> T:
            async with (await self._pool.get()).connect() as connection:
                return await connection.run_sync(self._autocommitted, work)

        return await retrying(statement, self.backend.fault_of)

    async def read(self, work: Work[T]) -> T:
        return await self.run_alone(work)

    def session(self) -> AsyncSession:
        return self._sessions()

    async def watch(self, wake: Callable[[], None], poll_interval: float) -> None:
        if self._watch is not None:
            await self._watch(self, wake, poll_interval)

    async def watch_ends(self, wake: Callable[[], None], poll_interval: float) -> None:
        if self._watch_ends is not None:
            await self._watch_ends(self, wake, poll_interval)

    @asynccontextmanager
    async def detached(self) -> AsyncIterator[Any]:
        """Hold a driver's connection that takes no place in the pool, and end it afterwards."""
        engine = self._listen_engine or await self._pool.get()
        opening = asyncio.ensure_future(_detached(engine))
        try:
            connection, driver = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # Cut short in the middle, it would be closed by nobody.
            await asyncio.wait({opening}, timeout=OPENING_GRACE)
            if opening.done() and not opening.cancelled() and opening.exception() is None:
                await _end(*opening.result())
            opening.cancel()
            raise
        try:
            yield driver
        finally:
            await _end(connection, driver)

    async def close(self) -> None:
        await self._pool.close()

    def _autocommitted(self, connection: Connection, work: Work[T]) -> T:
        """Run `work` without BEGIN and COMMIT, which are two of three round trips."""
        driver, set_level = connection.connection, self.engine.dialect.set_isolation_level
        set_level(driver.dbapi_connection, "AUTOCOMMIT")  # type: ignore[arg-type]
        try:
            result = work(connection)
            connection.commit()  # of SQLAlchemy's own state
            set_level(driver.dbapi_connection, "READ COMMITTED")  # type: ignore[arg-type]
        except BaseException:
            connection.invalidate()  # or another transaction would have no beginning
            raise
        return result

    async def _commit(self, connection: Any, repeatable: bool) -> None:
        try:
            await connection.commit()
        except Exception as error:
            if self.backend.fault_of(error) is Fault.UNAVAILABLE and not repeatable:
                raise CommitUnknownError(
                    f"The connection broke during COMMIT ({reason_of(error)}); whether it happened "
                    "is unknown. Look for what was to be written before you repeat the call."
                ) from error
            raise

    async def _dispose(self, engine: AsyncEngine) -> None:
        await _closed(engine)
        if self.owns_engine:
            await _closed(self.engine)

    def _make_engine(self) -> AsyncEngine:
        source = self.engine.sync_engine
        pool = source.pool.recreate()
        # Each transaction here ends itself. One more rollback at the return of its connection would
        # be a round trip that cannot be cancelled, and over a silent line never ends.
        pool._reset_on_return = ResetStyle.reset_none  # pyright: ignore[reportPrivateUsage]
        event.listen(pool, "connect", self._prepare)
        if self._idle_limit is not None:
            _forget_idle(pool, self._idle_limit)
        return AsyncEngine(
            Engine(
                pool,
                source.dialect,
                source.url,
                execution_options={OWN: True},
                hide_parameters=True,  # arguments and results have no place in logs
            )
        )

    def _prepare(self, dbapi_connection: Any, _record: object) -> None:
        # After what the engine's own listeners set, which may be any level, or AUTOCOMMIT.
        self.engine.dialect.set_isolation_level(dbapi_connection, "READ COMMITTED")
        cursor = dbapi_connection.cursor()
        try:
            for statement in self._settings:
                cursor.execute(statement)
        finally:
            cursor.close()
        dbapi_connection.commit()


def _forget_idle(pool: Pool, limit: float) -> None:
    """Treat connections as dead that were idle for `limit` seconds: the server closes them.

    Using one would fail, and taking leave of it in the usual way would log an error.
    """

    def returned(_connection: Any, record: Any) -> None:
        record.info["returned_at"] = monotonic()

    def idle_too_long(record: Any) -> bool:
        returned_at: float = record.info.get("returned_at", monotonic())
        return monotonic() - returned_at >= limit

    def taken(_connection: Any, record: Any, _proxy: object) -> None:
        if idle_too_long(record):
            raise DisconnectionError("closed by the server meanwhile")
        record.info.pop("returned_at", None)

    def closed(connection: Any, record: Any) -> None:
        if idle_too_long(record):
            connection.driver_connection.close()

    event.listen(pool, "checkin", returned)
    event.listen(pool, "checkout", taken)
    event.listen(pool, "close", closed)


async def _closed(engine: AsyncEngine) -> None:
    """Close the connections of a pool; over a line that is silent, saying goodbye never ends."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CLOSING_GRACE):
            await engine.dispose()


async def _detached(engine: AsyncEngine) -> tuple[AsyncConnection, Any]:
    connection = await engine.connect()
    raw = await connection.get_raw_connection()
    driver: Any = raw.driver_connection
    raw.detach()
    return connection, driver


async def _end(connection: AsyncConnection, driver: Any) -> None:
    driver.terminate()  # at once: saying goodbye over a dead line can take minutes
    await connection.close()
