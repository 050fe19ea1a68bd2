"""Notices that a handler blocks the event loop, so that nothing else can run on it."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from traceback import StackSummary, extract_stack, format_list
from typing import Final

from asyncjobq.clock import monotonic, wait_for_event
from asyncjobq.emitter import Emitter
from asyncjobq.error_texts import innermost_frames
from asyncjobq.run import JobRun

logger = logging.getLogger("asyncjobq.worker")

NOTICED_AFTER: Final = 1.0
"""Seconds without a sign of life after which a loop counts as blocked."""


class LoopWatch:
    """Watches the loop that it is made on, from another thread's."""

    def __init__(self, runs: Callable[[], Collection[JobRun]], emitter: Emitter) -> None:
        self.noticed_after = NOTICED_AFTER
        self._runs = runs
        self._emitter = emitter
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    async def watch_once(self) -> None:
        """Ask for a sign of life; if none comes in time, say once who blocks the loop, and where.

        Raises RuntimeError when the loop is closed.
        """
        answered, asked = asyncio.Event(), monotonic()
        self._ask(answered)
        if await wait_for_event(answered, self.noticed_after):
            return
        if monotonic() - asked > 2 * self.noticed_after:  # this thread stood still too
            await wait_for_event(answered, self.noticed_after)
        if answered.is_set():
            return
        run, stack = self._culprit(), self._stack()
        logger.warning(
            "%s has blocked the event loop for %.1f s: nothing else runs on it. A handler that "
            "computes, or waits without `await`, is to be a `def`, which runs in a thread. It is "
            "here:\n%s",
            _named(run),
            monotonic() - asked,
            stack,
        )
        await answered.wait()
        duration = monotonic() - asked
        logger.warning("%s blocked the event loop for %.1f s in all.", _named(run), duration)
        if run is not None:  # from the loop, where its subscribers are told
            told = self._emitter.loop_blocked
            self._loop.call_soon_threadsafe(told, run.claimed, duration, stack)

    def _ask(self, answered: asyncio.Event) -> None:
        here = asyncio.get_running_loop()

        def answer() -> None:
            with suppress(RuntimeError):  # nobody waits for it any more
                here.call_soon_threadsafe(answered.set)

        self._loop.call_soon_threadsafe(answer)

    def _culprit(self) -> JobRun | None:
        task = asyncio.current_task(self._loop)
        at_work = (run for run in self._runs() if task is not None and run.is_at_work_in(task))
        return next(at_work, None)

    def _stack(self) -> str:
        """Return where the loop's thread is, from the handler on."""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        frames = StackSummary() if frame is None else extract_stack(frame)
        return "".join(format_list(innermost_frames(frames))).rstrip()


def _named(run: JobRun | None) -> str:
    if run is None:
        return "Something that is no handler"
    return f"The handler of job {run.claimed.lease.job_id} ({run.claimed.type})"
