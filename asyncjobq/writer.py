"""Group commit of outcomes: while one transaction is under way, the next batch gathers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Final

from asyncjobq.backends.base import Database
from asyncjobq.finalize import Finished, Written, failed_instead, finalize_once
from asyncjobq.states import State
from asyncjobq.transactions import Fault, reason_of

logger = logging.getLogger("asyncjobq.writer")

BATCH_ROWS = 500
BATCH_BYTES = 4_000_000
HELD_PAUSE = 0.05
PASSING: Final = {Fault.CONFLICT, Fault.UNAVAILABLE}
"""Faults that are not the outcome's: writing it again may succeed."""


class OutcomeWriter:
    """Takes outcomes from job tasks and tells each when it is committed."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._queue: deque[tuple[Finished, asyncio.Future[State | None]]] = deque()
        self._filled = asyncio.Event()
        self.unsettled = asyncio.Event()
        """Set when a job ended that has neighbours to be told."""

    async def write(self, item: Finished) -> State | None:
        """Wait until the outcome is committed; returns the new state, None if the lease is lost."""
        written: asyncio.Future[State | None] = asyncio.get_running_loop().create_future()
        self._queue.append((item, written))
        self._filled.set()
        return await written

    async def write_once(self) -> None:
        """Write what has gathered, waiting for the first.

        Raises DatabaseUnavailableError with all outcomes kept, to be written by a later call.
        """
        await self._filled.wait()
        batch = self._batch()
        try:
            written = await self._written([item for item, _ in batch])
        except BaseException:
            self._queue.extendleft(reversed(batch))
            raise
        if not self._queue:
            self._filled.clear()
        self._tell(batch, written)
        if written.held:
            await asyncio.sleep(HELD_PAUSE)

    def _batch(self) -> list[tuple[Finished, asyncio.Future[State | None]]]:
        batch: list[tuple[Finished, asyncio.Future[State | None]]] = []
        size = 0
        while self._queue and len(batch) < BATCH_ROWS and size < BATCH_BYTES:
            item, future = self._queue.popleft()
            batch.append((item, future))
            size += len(item.outcome.result or "") + len(item.outcome.error or "")
        return batch

    def _tell(
        self, batch: Sequence[tuple[Finished, asyncio.Future[State | None]]], written: Written
    ) -> None:
        held = {item.lease for item in written.held}
        lost = {item.lease for item in written.lost}
        for item, future in batch:
            if item.lease in held:
                self._queue.append((item, future))
                self._filled.set()
            elif not future.done():
                waits = item.lease.job_id in written.waiting
                state = State.WAITING if waits else item.outcome.state
                state = written.completed.get(item.lease, state)
                future.set_result(None if item.lease in lost else state)
        if written.unsettled:
            self.unsettled.set()

    async def _written(self, items: Sequence[Finished]) -> Written:
        try:
            return await self._run(items)
        except Exception as error:
            if self._database.backend.fault_of(error) in PASSING:
                raise
            return await self._one_by_one(items)

    async def _one_by_one(self, items: Sequence[Finished]) -> Written:
        """Write each outcome alone, so that one which the database refuses spoils no other."""
        total = Written()
        for item in items:
            try:
                one = await self._run([item])
            except Exception as error:
                if self._database.backend.fault_of(error) in PASSING:
                    raise
                reason = reason_of(error)
                logger.warning("The outcome of job %s is refused: %s", item.lease.job_id, reason)
                one = await self._run([failed_instead(item, reason)])
            total.written += one.written
            total.lost += one.lost
            total.held += one.held
            total.completed |= one.completed
            total.waiting |= one.waiting
            total.unsettled |= one.unsettled
        return total

    async def _run(self, items: Sequence[Finished]) -> Written:
        backend = self._database.backend
        return await self._database.run(lambda c: finalize_once(c, backend, items))
