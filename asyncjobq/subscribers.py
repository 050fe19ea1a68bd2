"""Who wants to know of which events: told one after the other, apart from those who do the work."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final

from asyncjobq.errors import ConfigurationError
from asyncjobq.events import Event

logger = logging.getLogger("asyncjobq.events")

WAITING: Final = 1000
"""Events that may wait for one subscriber; what comes when so many do is dropped."""

FLUSHING: Final = 2.0
"""Seconds for subscribers to be told of what waits, when the scheduler stops."""


class Subscriber:
    """One function that is told of events, in order, by a task that lives while any wait."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self._waiting: deque[Event] = deque()
        self._dropped = 0
        self.task: asyncio.Task[None] | None = None

    def put(self, event: Event) -> None:
        """Tell of an event soon; on the running loop."""
        if len(self._waiting) >= WAITING:
            self._drop()
            return
        self._waiting.append(event)
        loop = asyncio.get_running_loop()
        if self.task is None or self.task.done() or self.task.get_loop() is not loop:
            self.task = loop.create_task(
                self._tell_all(),
                name=f"asyncjobq events {self._name}",
                context=Context(),  # nothing of the job or request that caused the event
            )

    def call(self, event: Event) -> None:
        """Tell of an event now, where no loop runs; only plain functions can be called there."""
        try:
            answer = self._function(event)
        except Exception as error:
            self._log(error, event)
            return
        if inspect.iscoroutine(answer):
            answer.close()
            logger.warning("%s is asynchronous, and no event loop runs here.", self._name)

    async def _tell_all(self) -> None:
        while self._waiting:
            await self._tell(self._waiting.popleft())

    async def _tell(self, event: Event) -> None:
        try:
            answer = self._function(event)
            if inspect.isawaitable(answer):
                await answer
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._log(error, event)

    def _log(self, error: BaseException, event: Event) -> None:
        logger.error("%s failed at %r: %r", self._name, event, error, exc_info=error)

    def _drop(self) -> None:
        self._dropped += 1
        if self._dropped & (self._dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th, … time
            logger.warning(
                "%s is too slow: %s events were dropped, since %s wait for it.",
                self._name,
                self._dropped,
                WAITING,
            )

    @property
    def _name(self) -> str:
        name = getattr(self._function, "__qualname__", repr(self._function))
        return f"The subscriber {name}"


class Subscribers:
    """The subscribers of one scheduler, by the kind of event."""

    def __init__(self) -> None:
        self.home: asyncio.AbstractEventLoop | None = None
        """The loop that serves, for events from threads."""
        self._all: list[tuple[Subscriber, tuple[type[Event], ...]]] = []
        self._by_kind: dict[type[Event], tuple[Subscriber, ...]] = {}

    def add(self, function: Callable[[Any], Any], kinds: tuple[Any, ...]) -> Callable[[], None]:
        """Tell a function of these kinds of events, or of all; returns what ends that."""
        if not callable(function):
            raise ConfigurationError(f"A subscriber is a def or an async def, not {function!r}.")
        for kind in kinds:
            if not isinstance(kind, type) or not issubclass(kind, Event):
                raise ConfigurationError(
                    f"{kind!r} is no kind of event; name those of asyncjobq.events, such as "
                    "events.Failed."
                )
        entry = (Subscriber(function), kinds or (Event,))
        self._all.append(entry)
        self._by_kind.clear()

        def end() -> None:
            if entry in self._all:
                self._all.remove(entry)
                self._by_kind.clear()

        return end

    def wants(self, kind: type[Event]) -> bool:
        """Tell whether anybody is to be told of this kind."""
        return bool(self._all) and bool(self._of(kind))

    def emit(self, event: Event) -> None:
        """Tell of something that is committed; never raises, never waits. From any thread."""
        for subscriber in self._of(type(event)):
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                if self.home is None or self.home.is_closed():
                    subscriber.call(event)
                else:
                    self.home.call_soon_threadsafe(subscriber.put, event)
            else:
                subscriber.put(event)

    async def flush(self, *, last: bool = False) -> None:
        """Wait shortly until all that waits is told; if these are the `last`, give up the rest."""
        loop = asyncio.get_running_loop()
        tasks = {one.task for one, _ in self._all if one.task is not None}
        mine = {task for task in tasks if not task.done() and task.get_loop() is loop}
        mine -= {asyncio.current_task()}  # a subscriber may stop the scheduler
        if not mine:
            return
        _, late = await asyncio.wait(mine, timeout=FLUSHING)
        for task in late:
            logger.warning("%s has not been told of all within %g s.", task.get_name(), FLUSHING)
            if last:
                task.cancel()
        if late and last:
            await asyncio.wait(late, timeout=FLUSHING)

    def _of(self, kind: type[Event]) -> tuple[Subscriber, ...]:
        found = self._by_kind.get(kind)
        if found is None:
            found = tuple(one for one, kinds in self._all if issubclass(kind, kinds))
            self._by_kind[kind] = found
        return found
