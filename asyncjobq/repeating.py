"""The loops of a worker, which no error ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from asyncjobq.backoff import outage_delays
from asyncjobq.clock import wait_for_event
from asyncjobq.errors import DatabaseUnavailableError

logger = logging.getLogger("asyncjobq.worker")


async def forever(
    name: str,
    step: Callable[[], Awaitable[None]],
    until: asyncio.Event | None = None,
    *,
    longest_pause: float = 10.0,
) -> None:
    """Repeat a step; after an error wait, longer each time, and go on."""
    delays = outage_delays(cap=longest_pause)
    while until is None or not until.is_set():
        try:
            await step()
            delays = outage_delays(cap=longest_pause)
        except Exception as error:
            delay = next(delays)
            report(name, error, delay)
            await wait_for_event(until or asyncio.Event(), delay)


def report(name: str, error: Exception, delay: float) -> None:
    """Log what a step met, and when it is tried again."""
    if isinstance(error, DatabaseUnavailableError):
        logger.warning("%s (%s; trying again in %.1f s)", error, name, delay)
    else:
        logger.error("%s met %r; going on in %.1f s.", name, error, delay, exc_info=error)
