"""Group commit of outcomes: while one transaction is under way, the next batch gathers."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from asyncjobq.backends.base import Database
from asyncjobq.finalize import Finished, Written, failed_instead, finalize_once
from asyncjobq.lease import Lease
from asyncjobq.outbox import Outbox
from asyncjobq.states import State
from asyncjobq.transactions import Fault, reason_of

logger = logging.getLogger("asyncjobq.writer")

BATCH_ROWS = 500
BATCH_BYTES = 4_000_000
HELD_PAUSE = 0.05
BREAKS: Final = 5
"""How often an outcome may break its connection or meet an error that is not about its values,
alone and while the database answers on others, before it is taken to be why."""


Told = Callable[[State | None], None]
Gathered = tuple[Finished, Told]


class OutcomeWriter:
    """Takes outcomes from jobs and tells each when it is committed."""

    def __init__(self, database: Database, outbox: Outbox) -> None:
        self._database = database
        self._outbox = outbox
        self._queue: deque[Gathered] = deque()
        self._filled = asyncio.Event()
        self._breaks: Counter[Lease] = Counter()

    def write(self, item: Finished, told: Told) -> None:
        """Take an outcome; once it is committed, tell the job's new state, None if it was lost."""
        self._queue.append((item, told))
        self._filled.set()

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
        try:  # before their slots are free, so that the next look finds what they have let go
            await self._outbox.settle_now(written.unsettled)
        finally:
            self._tell(batch, written)
        if written.held:
            await asyncio.sleep(HELD_PAUSE)

    def _batch(self) -> list[Gathered]:
        batch: list[Gathered] = []
        size = 0
        while self._queue and len(batch) < BATCH_ROWS and size < BATCH_BYTES:
            item, told = self._queue.popleft()
            batch.append((item, told))
            size += len(item.outcome.result or "") + len(item.outcome.error or "")
        return batch

    def _tell(self, batch: Sequence[Gathered], written: Written) -> None:
        held = {item.lease for item in written.held}
        outcomes = {item.lease: item.outcome for item in written.written}
        lost = {item.lease for item in written.lost}
        for item, told in batch:
            if item.lease in held:
                self._queue.append((item, told))
                self._filled.set()
                continue
            self._breaks.pop(item.lease, None)
            waits = item.lease.job_id in written.waiting
            outcome = outcomes.get(item.lease, item.outcome)  # or what was written instead
            state = written.states.get(item.lease.job_id, outcome.state)
            state = State.WAITING if waits else state
            state = written.completed.get(item.lease, state)
            try:
                told(None if item.lease in lost else state)
            except Exception:  # the others of the batch are to be told all the same
                logger.exception("Job %s cannot be told of its end.", item.lease.job_id)

    async def _written(self, items: Sequence[Finished]) -> Written:
        try:
            return await self._run(items)
        except Exception as error:
            if await self._passes(error):
                raise
            return await self._one_by_one(items)

    async def _one_by_one(self, items: Sequence[Finished]) -> Written:
        """Write each outcome alone, so that one which the database refuses spoils no other.

        What cannot be written now is held; raises why if that is all.
        """
        total, kept = Written(), None
        for number, item in enumerate(items):
            try:
                total.add(await self._alone(item))
            except Exception as error:
                kept, away = error, await self._passes(error)
                total.held += items[number:] if away else [item]
                if away:
                    break
        if kept is not None and not total.written and not total.lost:
            raise kept
        return total

    async def _alone(self, item: Finished) -> Written:
        """Write one outcome, or in its place that the database refuses it."""
        try:
            return await self._run([item])
        except Exception as error:
            if not await self._is_refused(item, error):
                raise
            reason = reason_of(error.__cause__ or error)
        logger.warning("The outcome of job %s is refused: %s", item.lease.job_id, reason)
        return await self._run([failed_instead(item, reason)])

    async def _is_refused(self, item: Finished, error: Exception) -> bool:
        if await self._passes(error):
            return False
        if self._database.backend.fault_of(error) is Fault.DATA:
            return True
        self._breaks[item.lease] += 1
        return self._breaks[item.lease] >= BREAKS

    async def _passes(self, error: Exception) -> bool:
        """Tell whether the error has nothing to do with what was to be written.

        A connection that breaks while the database answers on others may do so because of it, for
        example because it is longer than the server takes. One that is told that the disk is full
        or the server read-only has not broken, and there it passes, though others may be read.
        """
        match self._database.backend.fault_of(error):
            case Fault.CONFLICT:
                return True
            case Fault.UNAVAILABLE:
                cause = error.__cause__ or error
                if isinstance(cause, DBAPIError) and not cause.connection_invalidated:
                    return True
                return not await self._answers()
            case _:
                return False

    async def _answers(self) -> bool:
        try:
            await self._database.read(lambda c: c.scalar(select(1)))
        except Exception:
            return False
        return True

    async def _run(self, items: Sequence[Finished]) -> Written:
        backend = self._database.backend
        return await self._database.run(lambda c: finalize_once(c, backend, items))
