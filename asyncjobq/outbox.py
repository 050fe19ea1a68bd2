"""Who settles in this process: the writer what has just ended, and two loops what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from sqlalchemy import Connection

from asyncjobq.backends.base import Backend, Database
from asyncjobq.emitter import Emitter, Told
from asyncjobq.settle import Settled, Sweep, settle_once
from asyncjobq.subscribers import Subscribers

SWEEP_CALLS: Final = 5


class Outbox:
    """Settles, one call at a time: two of one process would hold their rows against each other."""

    def __init__(self, database: Database, emitter: Emitter | None = None) -> None:
        self.on_settled: Callable[[Settled], None] = lambda settled: None
        self.left = asyncio.Event()
        """Set when there are unsettled rows which nobody else may know of."""
        self._database = database
        self._emitter = emitter or Emitter(Subscribers())
        self._turn = asyncio.Lock()

    async def settle_now(self, job_ids: Collection[int]) -> None:
        """Settle jobs that have just ended, as far as one call goes.

        Never raises: they have ended, whatever becomes of this, and are settled by a sweep then.
        """
        if not job_ids:
            return
        try:
            settle = partial(settle_once, job_ids=sorted(job_ids), limit=len(job_ids))
            settled = await self._settle(settle)
        except Exception:  # the sweep meets it again, and says so
            self.left.set()
            return
        if settled.unfinished:
            self.left.set()

    async def sweep(self, sweep: Sweep) -> bool:
        """Settle some rows, and say in `sweep` where to go on; tell whether jobs became ready.

        Bounded, so that a flood of unsettled rows keeps nobody from doing something else.
        """
        promoted = False
        for _ in range(SWEEP_CALLS):
            settled = await self._settle(partial(settle_once, after=sweep.after))
            promoted |= settled.promoted > 0
            sweep.note(settled)
            if sweep.over:
                break
        return promoted

    async def _settle(self, settle: Callable[[Connection, Backend], Settled]) -> Settled:
        def work(connection: Connection) -> tuple[Settled, Told]:
            backend = self._database.backend
            settled = settle(connection, backend)
            ended = [end.row.id for end in settled.ended]
            return settled, self._emitter.look_up(connection, backend, ended)

        async with self._turn:
            settled, told = await self._database.run(work)
        self._emitter.settled(settled.ended, told)
        # After those are told whose end this was: their slots are free when it wakes somebody.
        asyncio.get_running_loop().call_soon(self.on_settled, settled)
        return settled
