"""Waiting for the end of jobs: at once when they end in this process, else by looking again."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from asyncjobq.clock import wait_for_event
from asyncjobq.errors import JobCancelled, JobFailed
from asyncjobq.job import Job
from asyncjobq.states import State

FIRST_PAUSE: Final = 0.02


class Waiters:
    """Who waits for the end of which job in this process."""

    def __init__(self) -> None:
        self._events: defaultdict[int, set[asyncio.Event]] = defaultdict(set)

    def tell(self, job_id: int) -> None:
        """Wake those who wait for this job, which has ended."""
        for event in self._events.get(job_id, ()):
            event.set()

    async def until_ended(
        self, job_id: int, look: Callable[[], Awaitable[Job[Any]]], longest_pause: float
    ) -> Job[Any]:
        """Look again and again, with pauses up to `longest_pause`, until the job has ended."""
        pause = FIRST_PAUSE
        with self._waiting(job_id) as ended:
            while not (job := await look()).ended:
                if await wait_for_event(ended, pause):
                    ended.clear()
                pause = min(pause * 1.5, longest_pause)
        return job

    @contextmanager
    def _waiting(self, job_id: int) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._events[job_id].add(event)
        try:
            yield event
        finally:
            self._events[job_id].discard(event)
            if not self._events[job_id]:
                del self._events[job_id]


def result_of(job: Job[Any]) -> Any:
    """Return the result of a job that has ended; raises JobFailed or JobCancelled."""
    if job.state == State.FAILED:
        raise JobFailed(job.id, job.error)
    if job.state == State.CANCELLED:
        raise JobCancelled(job.id, job.error, job.cause)
    return job.result
