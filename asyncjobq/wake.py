"""What ends a sleep: a hint that something may be there, never the truth about it."""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from weakref import WeakSet

from asyncjobq.clock import wait_for_event


class Listener(ABC):
    """Somebody who is rung when jobs may have come, until it is closed."""

    def __init__(self) -> None:
        with _LOCK:
            _LISTENING.add(self)

    @abstractmethod
    def ring(self, delay: float = 0.0) -> None:
        """Tell of news in the tables, which may be there only in so many seconds; any thread."""

    def close(self) -> None:
        """Ring no more."""
        with _LOCK:
            _LISTENING.discard(self)


class Wake(Listener):
    """One worker's alarm; may be rung from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._news = False
        super().__init__()

    def ring(self, delay: float = 0.0) -> None:
        """Tell of news in the tables: end the sleep, or the next one if the worker is awake."""
        with suppress(RuntimeError):  # the loop is closed, and its worker gone with it
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._ring_with_news)

    def _ring_with_news(self) -> None:
        self._news = True
        self._event.set()

    def ring_here(self) -> None:
        """End the sleep because a slot is free; from the worker's own loop."""
        self._event.set()

    def take_news(self) -> bool:
        """Tell whether there was news since the last call."""
        news, self._news = self._news, False
        return news

    async def sleep(self, seconds: float) -> bool:
        """Sleep until rung or for so many seconds; tell whether it was rung."""
        rung = await wait_for_event(self._event, seconds)
        self._event.clear()
        return rung


_LISTENING: WeakSet[Listener] = WeakSet()
_LOCK = threading.Lock()
"""Held while the set is read or changed: workers come and go in other threads meanwhile."""


def ring_all(delay: float = 0.0) -> None:
    """Ring every worker of this process, in so many seconds: somebody here has enqueued."""
    with _LOCK:
        listening = list(_LISTENING)
    for listener in listening:
        listener.ring(delay)
