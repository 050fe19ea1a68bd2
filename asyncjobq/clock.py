"""Durations as users write them, and waiting by the process's monotonic clock.

What is due and what has expired is decided by the database's clock (`Backend.now`); this clock
only says how long this process sleeps and how much of a lease it may still count on.
"""

from __future__ import annotations

import asyncio
import math
import time
from datetime import UTC, datetime, timedelta

from asyncjobq.errors import ConfigurationError, InvalidJobError

monotonic = time.monotonic


def seconds(value: float | timedelta, name: str) -> float:
    """Return a duration in seconds, refusing what is not a finite number."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_finite(number):
        raise ConfigurationError(f"{name} must be seconds or a timedelta, not {value!r}.")
    return float(number)


def is_finite(value: object) -> bool:
    """Tell whether this is a number that has an end, and that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def aware_utc(value: datetime, name: str) -> datetime:
    """Return a time in UTC, refusing one without a time zone: it means another hour elsewhere."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidJobError(
            f"{name}={value!r} has no time zone, so it names a different moment on every machine. "
            "Pass an aware datetime, e.g. datetime.now(UTC) + timedelta(hours=1), or a timedelta."
        )
    return value.astimezone(UTC)


async def wait_for_event(event: asyncio.Event, timeout: float | None) -> bool:
    """Wait until the event is set or the timeout in seconds is over; tell whether it was set."""
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
