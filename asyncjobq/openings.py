"""What one worker knows of its limits between two claims, so that it need not ask for nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import Final

from asyncjobq.clock import monotonic
from asyncjobq.limit_rules import Place, Use
from asyncjobq.limits import Capacity

logger = logging.getLogger("asyncjobq.limits")

FIRST_PAUSE: Final = 0.025
"""Seconds after which a limit is asked again for a permit that was given back elsewhere."""

REMEMBERED: Final = 10_000

PATIENCE: Final = 0.1
"""Seconds that a claim waits for the answer of a capacity."""


class Openings:
    """The limits that had no room, and until when there is no use in asking again."""

    def __init__(self, pause: float) -> None:
        """Ask again after `pause` seconds at the latest where only the end of a job makes room.

        Sooner at first, and each time after twice as long: a permit that is given back elsewhere
        waits no longer than it was waited for, and one that others always have is not asked for
        all the time.
        """
        self._pause = pause
        self._pauses: dict[Place, float] = {}
        self._until: dict[Place, float] = {}
        self._untold: set[Place] = set()
        self._reopened: list[Place] = []

    def take_reopened(self) -> list[Place]:
        """Return the limits that may have room again, since the last call."""
        self._reopen_past()
        reopened, self._reopened = self._reopened, []
        return reopened

    def note(self, waits: Mapping[Place, float | None]) -> None:
        """Take over what a claim has found."""
        now = monotonic()
        for place, wait in waits.items():
            if wait is None:
                self._untold.add(place)
            self._until[place] = now + (self._next_pause(place) if wait is None else wait)

    def started(self, uses: Iterable[Use]) -> None:
        """Note that a job has started under these limits."""
        for use in uses:
            self._pauses.pop(use.place, None)

    def _next_pause(self, place: Place) -> float:
        if len(self._pauses) > REMEMBERED:
            self._pauses.clear()
        pause = self._pauses.get(place, FIRST_PAUSE)
        self._pauses[place] = min(2 * pause, self._pause)
        return min(pause, self._pause)

    def closed(self, uses: Iterable[Use]) -> bool:
        """Tell whether one of these limits has no room, as far as this worker knows."""
        return any(self._is_closed(use.place) for use in uses)

    def ended(self, uses: Iterable[Use]) -> None:
        """Open what the end of a job here may have made room in."""
        for use in uses:
            self._reopen(use.place)

    def told(self) -> None:
        """Open what the end of a job elsewhere may have made room in."""
        for place in list(self._untold):
            self._reopen(place)

    def changed(self, names: Collection[str]) -> None:
        """Open the limits of these names: other numbers hold for them."""
        for place in [place for place in self._until if place[0] in names]:
            self._reopen(place)

    @property
    def next(self) -> float:
        """Seconds until the first of them may open by itself."""
        self._reopen_past()
        return max(0.0, min(self._until.values(), default=inf) - monotonic())

    def _reopen_past(self) -> None:
        now = monotonic()
        for place in [place for place, until in self._until.items() if until <= now]:
            self._reopen(place)

    def _is_closed(self, place: Place) -> bool:
        until = self._until.get(place)
        return until is not None and until > monotonic()

    def _reopen(self, place: Place) -> None:
        self._untold.discard(place)
        if self._until.pop(place, None) is not None:
            self._reopened.append(place)


class Capacities:
    """What the capacities of this process have answered last."""

    def __init__(self, capacities: Iterable[Capacity], ring: Callable[[], None]) -> None:
        self._asked = {capacity.name: capacity for capacity in capacities}
        self._ring = ring
        self._tasks: dict[str, asyncio.Task[float]] = {}
        self._free: dict[str, float] = {}
        self._silent: set[str] = set()

    async def ask(self) -> None:
        """Ask all of them at once; one that does not answer soon has no room until it does."""
        if not self._asked:
            return
        for name, capacity in self._asked.items():
            if name not in self._tasks:
                self._tasks[name] = asyncio.create_task(_answer(capacity))
        await asyncio.wait(self._tasks.values(), timeout=PATIENCE)
        for name, task in list(self._tasks.items()):
            self._free[name] = 0.0
            if task.done():
                del self._tasks[name]
                self._take(name, task)
            elif name not in self._silent:
                self._silent.add(name)
                task.add_done_callback(lambda _: self._ring())
                logger.warning("The capacity %r does not answer; its jobs wait.", name)

    def room(self, uses: Iterable[Use]) -> float:
        """Return how many more jobs the capacities among these limits let start."""
        names = (use.limit.name for use in uses if isinstance(use.limit, Capacity))
        return min((self._free.get(name, 0.0) for name in names), default=inf)

    def reserve(self, uses: Iterable[Use], count: int) -> None:
        """Note that so many jobs are to start, until the next answer."""
        for use in uses:
            if use.limit.name in self._free:
                self._free[use.limit.name] -= count

    def close(self) -> None:
        """Wait for no answer any more."""
        for task in self._tasks.values():
            task.cancel()

    def _take(self, name: str, task: asyncio.Task[float]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            if name not in self._silent:
                logger.warning("The capacity %r raised %r; its jobs wait.", name, error)
            self._silent.add(name)
            return
        self._silent.discard(name)
        self._free[name] = task.result()


async def _answer(capacity: Capacity) -> float:
    free = await capacity.free()
    if isinstance(free, bool) or not isinstance(free, int | float) or free != free:  # noqa: PLR0124
        raise TypeError(f"it answered {free!r}, not how many more jobs may start")
    return float(free)
