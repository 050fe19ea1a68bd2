"""What programs hang onto the scheduler: subscribers, middleware, and what travels with jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from asyncjobq.events import Event
from asyncjobq.middleware import M, Middleware, checked_middleware
from asyncjobq.subscribers import Subscribers

F = TypeVar("F", bound=Callable[[Any], Any])
S = TypeVar("S", bound=Callable[[], Mapping[str, Any]])
MetaSource = Callable[[], Mapping[str, Any]]


class Hooks:
    """Registers functions that are called when something happens to jobs."""

    _subscribers: Subscribers
    _around: list[Middleware]
    _meta_sources: list[MetaSource]

    def on(self, *kinds: type[Event]) -> Callable[[F], F]:
        """Tell the decorated function of these kinds of events (see `asyncjobq.events`), or of all.

        It may be asynchronous or not; plain ones are called on the event loop and must not block.
        It is told of one event after the other, after the commit. What it raises is logged; if it
        is so slow that a thousand events wait for it, what comes is dropped with a warning.
        """

        def subscribe(function: F) -> F:
            self.subscribe(function, *kinds)
            return function

        return subscribe

    def subscribe(
        self, function: Callable[[Any], object], /, *kinds: type[Event]
    ) -> Callable[[], None]:
        """Do what `on` does, and return a function that ends it."""
        return self._subscribers.add(function, kinds)

    def around(self, function: M, /) -> M:
        """Wrap each run of each job: `async def around(job, call): return await call()`.

        The first one registered is outermost. What it returns is the job's result, what it raises
        is the job's error, and the context variables that it sets are the handler's.
        """
        self._around.append(checked_middleware(function))
        return function

    def meta_from(self, function: S, /) -> S:
        """Add what the function returns to the `meta` of each job: a trace id, for example.

        It is called in the context of whoever enqueues; the job's own `meta` comes first.
        """
        self._meta_sources.append(function)
        return function
