"""The one retry helper, for the library's own transactions and for none of the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import Enum
from itertools import islice
from typing import Final, TypeVar

from asyncjobq.backoff import outage_delays
from asyncjobq.codec import one_line
from asyncjobq.errors import CommitUnknownError, DatabaseUnavailableError

T = TypeVar("T")


class Fault(Enum):
    """What a database error means for the transaction that met it."""

    CONFLICT = "conflict"  # deadlock, serialization, lock wait: it was rolled back, repeat it
    UNAVAILABLE = "unavailable"  # no connection, or it broke
    DATA = "data"  # this row's values cannot be stored
    OTHER = "other"


ATTEMPTS: Final = 8
"""How often a transaction is tried before its conflict is reported."""


async def retrying(
    transaction: Callable[[], Awaitable[T]], fault_of: Callable[[BaseException], Fault]
) -> T:
    """Run a transaction, repeating it on conflicts, and once at once on a stale connection.

    Raises DatabaseUnavailableError, with the driver's error as its cause, when the database
    cannot be reached; any other error as it is. A break during COMMIT is never repeated.
    """
    stale_connection_seen = False
    delays = islice(outage_delays(base=0.005, cap=0.5), ATTEMPTS - 1)
    while True:
        try:
            return await transaction()
        except CommitUnknownError:
            raise
        except Exception as error:
            fault = fault_of(error)
            if fault is Fault.UNAVAILABLE:
                if stale_connection_seen:
                    raise unavailable(error) from error
                stale_connection_seen = True
                continue
            delay = next(delays, None) if fault is Fault.CONFLICT else None
            if delay is None:
                raise
        await asyncio.sleep(delay)


def unavailable(error: BaseException) -> DatabaseUnavailableError:
    """Return the library's error for a database that cannot be reached."""
    return DatabaseUnavailableError(f"The database cannot be reached: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Return the first line of what the driver says, without SQL or parameters."""
    cause = getattr(error, "orig", None) or error
    return one_line(str(cause)).rstrip(".") or type(cause).__name__
