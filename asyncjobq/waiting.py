"""Waiting for the end of jobs, wherever they run: one look at a time for all who wait here.

Those that end in this process are told at once. For the others the states of all awaited jobs are
read by one statement, again and again: when the database says that a job may have ended, and else
after pauses that grow.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from asyncjobq.clock import monotonic, wait_for_event
from asyncjobq.errors import DatabaseUnavailableError, SchedulerStateError

logger = logging.getLogger("asyncjobq.waiting")

FIRST_PAUSE: Final = 0.02
LISTEN_AFTER: Final = 0.1
"""Seconds of waiting after which it is worth a connection that is told of ends."""
LOOK_SHARE: Final = 0.2
"""The part of the time that may be spent on looking."""

Look = Callable[[Sequence[int]], Awaitable[set[int]]]
Watch = Callable[[Callable[[], None], float], Awaitable[None]]


class Awaited:
    """Jobs that somebody waits for, and those of them that are known to have ended."""

    def __init__(self, job_ids: Iterable[int]) -> None:
        self.open = set(job_ids)
        self._ended: deque[int] = deque()
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    def end(self, job_id: int) -> None:
        """Note that a job has ended, or is not there any more."""
        if job_id in self.open:
            self.open.discard(job_id)
            self._ended.append(job_id)
            self._news.set()

    def fail(self, error: BaseException) -> None:
        """Note that nothing more will be known."""
        self._error = error
        self._news.set()

    async def next(self, most: int = 1) -> list[int]:
        """Wait for jobs that have ended and take up to so many; none when there are no more."""
        while not self._ended and self.open:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return [self._ended.popleft() for _ in range(min(most, len(self._ended)))]


class EndWatch:
    """What is awaited on one event loop, and the task that looks for it while somebody waits."""

    def __init__(self, look: Look, watch: Watch, longest_pause: float) -> None:
        self._look = look
        self._watch = watch
        self._longest_pause = longest_pause
        self._awaited: defaultdict[int, set[Awaited]] = defaultdict(set)
        self._news = asyncio.Event()
        self._pause = FIRST_PAUSE
        self._looking = False
        self._tasks: set[asyncio.Task[None]] = set()
        """The one that looks, and earlier ones that are ending."""

    @contextmanager
    def awaiting(self, job_ids: Iterable[int]) -> Iterator[Awaited]:
        """Look for the end of these jobs while the block lasts."""
        awaited = Awaited(job_ids)
        for job_id in awaited.open:
            self._awaited[job_id].add(awaited)
        self._start()
        try:
            yield awaited
        finally:
            for job_id in awaited.open:
                self._forget(job_id, awaited)
            self._news.set()

    def tell(self, job_ids: Iterable[int]) -> None:
        """Tell who waits for these jobs that they have ended."""
        for job_id in job_ids:
            for awaited in self._awaited.pop(job_id, ()):
                awaited.end(job_id)

    async def close(self) -> None:
        """Look no more; whoever still waits is told so by an error."""
        self._fail(SchedulerStateError("The scheduler was closed while somebody waited."))
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self) -> None:
        self._pause = FIRST_PAUSE
        self._news.set()
        if not self._looking:
            self._looking = True
            loop, nobodys = asyncio.get_running_loop(), contextvars.Context()
            task = loop.create_task(self._run(), name="asyncjobq waiting", context=nobodys)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _forget(self, job_id: int, awaited: Awaited) -> None:
        who = self._awaited.get(job_id, set())
        who.discard(awaited)
        if not who:
            self._awaited.pop(job_id, None)

    def _fail(self, error: BaseException) -> None:
        for who in self._awaited.values():
            for awaited in who:
                awaited.fail(error)
        self._awaited.clear()

    async def _run(self) -> None:
        """Look until nobody waits any more."""
        listener: asyncio.Task[None] | None = None
        begun, failed = monotonic(), False
        try:
            while self._awaited:
                if listener is None and monotonic() - begun >= LISTEN_AFTER:
                    listener = asyncio.create_task(self._listen(), name="asyncjobq listening")
                self._news.clear()
                asked_at = monotonic()
                failed = not await self._look_once(warn=not failed)
                await self._rest(monotonic() - asked_at)
        except Exception as error:
            self._fail(error)
        finally:
            self._looking = False
            if listener is not None:
                listener.cancel()
                await asyncio.wait({listener})

    async def _look_once(self, *, warn: bool) -> bool:
        """Tell of what has ended; False if the database is away."""
        asked = list(self._awaited)
        try:
            self.tell(set(asked) - await self._look(asked))
        except DatabaseUnavailableError as error:
            if warn:
                logger.warning("%s (waiting for %s jobs; trying again)", error, len(asked))
            return False
        return True

    async def _rest(self, took: float) -> None:
        """Sleep until there is news, or for a pause that grows."""
        if not self._awaited:
            return
        least = min(took / LOOK_SHARE, self._longest_pause)
        pause = max(least, self._pause)
        self._pause = min(self._pause * 1.5, self._longest_pause)
        rested_from = monotonic()
        if await wait_for_event(self._news, pause) and self._awaited:
            await asyncio.sleep(max(0.0, least - (monotonic() - rested_from)))

    async def _listen(self) -> None:
        with suppress(Exception):  # a hint is not worth an error; the looks go on
            await self._watch(self._news.set, self._longest_pause)


class Waiters:
    """Who waits for the end of jobs in this process, on whatever event loop."""

    def __init__(self, look: Look, watch: Watch, longest_pause: float) -> None:
        self._look = look
        self._watch = watch
        self._longest_pause = longest_pause
        self._watches: dict[asyncio.AbstractEventLoop, EndWatch] = {}

    def tell(self, job_id: int) -> None:
        """Wake those who wait for this job, which has ended; from the loop of any worker."""
        for loop, watch in list(self._watches.items()):
            if loop is asyncio.get_running_loop():
                watch.tell([job_id])
            elif not loop.is_closed():
                loop.call_soon_threadsafe(watch.tell, [job_id])

    @contextmanager
    def awaiting(self, job_ids: Iterable[int]) -> Iterator[Awaited]:
        """Look for the end of these jobs while the block lasts."""
        loop = asyncio.get_running_loop()
        if loop not in self._watches:
            self._watches = {one: w for one, w in self._watches.items() if not one.is_closed()}
            self._watches[loop] = EndWatch(self._look, self._watch, self._longest_pause)
        with self._watches[loop].awaiting(job_ids) as awaited:
            yield awaited

    async def close(self) -> None:
        """Stop looking on the running loop."""
        watch = self._watches.pop(asyncio.get_running_loop(), None)
        if watch is not None:
            await watch.close()
