"""Things that belong to an event loop and are closed with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from asyncjobq.errors import SchedulerStateError

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One thing for each running loop: made at first use, closed when the loop shuts down.

    A program that never closes its scheduler, or that calls `asyncio.run` several times with the
    same one, leaves no connection of a dead loop behind. `asyncio.run` closes the asynchronous
    generators that were started on its loop (`loop.shutdown_asyncgens`); one of them holds the
    thing.
    """

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[None]]) -> None:
        self._make = make
        self._close = close
        self._held: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[T, AsyncGenerator[None]]]
        self._held = WeakKeyDictionary()
        self._pids: WeakKeyDictionary[asyncio.AbstractEventLoop, int] = WeakKeyDictionary()

    async def get(self) -> T:
        """Return the running loop's own."""
        loop = asyncio.get_running_loop()
        if self._pids.setdefault(loop, os.getpid()) != os.getpid():
            raise SchedulerStateError(
                "This process was forked while an event loop ran, and has copies of another's "
                "connections, which it must not use. Start a loop of its own, or another program."
            )
        if loop not in self._held:
            thing = self._make()
            ending = self._until_shutdown(thing)
            self._held[loop] = (thing, ending)
            await anext(ending)
        return self._held[loop][0]

    async def close(self) -> None:
        """Close the running loop's own; the next `get` makes a new one."""
        held = self._held.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held[1].aclose()

    async def _until_shutdown(self, thing: T) -> AsyncGenerator[None]:
        loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._held.pop(loop, None)
            with suppress(Exception):  # the loop is ending; there is nobody to tell
                await self._close(thing)
