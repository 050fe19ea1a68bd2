"""Waiting for a task that is stopped in order and not cut off, and signals for scripts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


async def ended(task: asyncio.Task[Any], stop: Callable[[], None]) -> None:
    """Wait for a task; a cancellation of the waiter becomes a call of `stop` and is raised later.

    The task is never cancelled. Each further cancellation calls `stop` again.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen; what counts for the caller is the cancellation
        raise cancelled
    await task


@contextmanager
def signals_handled(handle: Callable[[], Any]) -> Iterator[None]:
    """Call `handle` at each SIGINT and SIGTERM, in the running loop."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
