"""LISTEN on PostgreSQL: connections of their own that hear of new jobs, and of the ends of jobs.

Ends are many, and mostly nobody waits for them. So whoever listens for them says so, again and
again, on the channel of new jobs, and only a worker that has heard it lately (or cannot hear)
sends a notification with its ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final, cast

from asyncjobq.backends.postgresql import PostgreSQLBackend, channel, channel_of_ends
from asyncjobq.backends.servers import ServerDatabase
from asyncjobq.backoff import outage_delays
from asyncjobq.clock import monotonic

logger = logging.getLogger("asyncjobq.wake")

PROBE_INTERVAL: Final = 10.0
PROBE_TIMEOUT: Final = 5.0
AWAITED: Final = "awaited"
"""What is said on the channel of new jobs by those who wait for ends."""
AWAITED_FOR: Final = 3 * PROBE_INTERVAL

Once = Callable[[ServerDatabase, Callable[[], None]], Awaitable[None]]


async def listen(database: ServerDatabase, wake: Callable[[], None], poll_interval: float) -> None:
    """Call `wake` for new jobs, for ever."""
    await _forever(_listen_once, database, wake, "Jobs start", poll_interval)


async def listen_for_ends(
    database: ServerDatabase, wake: Callable[[], None], poll_interval: float
) -> None:
    """Call `wake` when jobs have ended, for ever."""
    await _forever(_listen_for_ends_once, database, wake, "Ends are seen", poll_interval)


async def _forever(
    once: Once,
    database: ServerDatabase,
    wake: Callable[[], None],
    what: str,
    poll_interval: float,
) -> None:
    """Listen on a connection of its own: reconnect, probe, and wake after each gap."""
    delays = outage_delays()
    while True:
        begun = monotonic()
        try:
            await once(database, wake)
        except Exception as error:
            if monotonic() - begun > PROBE_INTERVAL:  # it worked for a while
                delays = outage_delays()
            delay = next(delays)
            logger.warning(
                "LISTEN is interrupted (%s); trying again in %.1f s. %s by polling every %g s "
                "meanwhile.",
                error or type(error).__name__,
                delay,
                what,
                poll_interval,
            )
            await asyncio.sleep(delay)


async def _listen_once(database: ServerDatabase, wake: Callable[[], None]) -> None:
    """Listen until the connection ends; raises what ended it."""
    backend = cast(PostgreSQLBackend, database.backend)

    def hear(*message: Any) -> None:
        if message[-1] == AWAITED:
            backend.awaited_until = monotonic() + AWAITED_FOR
        else:
            wake()

    async def probe(connection: Any) -> None:
        await connection.execute("SELECT 1")

    try:
        async with database.detached() as connection:
            await connection.add_listener(channel(backend.tables), hear)
            backend.awaited_until = monotonic() + AWAITED_FOR  # it may have been said before
            wake()  # whatever was committed before this moment sent its notification to nobody
            await _until_closed(connection, probe)
    finally:
        backend.awaited_until = inf


async def _listen_for_ends_once(database: ServerDatabase, wake: Callable[[], None]) -> None:
    """Listen until the connection ends, and say so; raises what ended it."""
    tables = database.backend.tables

    async def announce(connection: Any) -> None:
        await connection.execute("SELECT pg_notify($1, $2)", channel(tables), AWAITED)

    async with database.detached() as connection:
        await connection.add_listener(channel_of_ends(tables), lambda *_: wake())
        await announce(connection)
        wake()  # what has ended before this moment was said to nobody
        await _until_closed(connection, announce)


async def _until_closed(connection: Any, probe: Callable[[Any], Awaitable[None]]) -> None:
    """Wait until the connection ends, probing it meanwhile: a cut line is silent."""
    ended = asyncio.Event()
    connection.add_termination_listener(lambda _: ended.set())
    while not connection.is_closed():
        try:
            async with asyncio.timeout(PROBE_INTERVAL):
                await ended.wait()
        except TimeoutError:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await probe(connection)
    raise ConnectionError("the connection was closed")
