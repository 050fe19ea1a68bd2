"""Takes expired leases back, and lets those go first who could not renew them for our sake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from sqlalchemy import Connection

from asyncjobq.backends.base import Database
from asyncjobq.clock import monotonic
from asyncjobq.emitter import Emitter, Told
from asyncjobq.lease import reclaim_once
from asyncjobq.transition import End, Return

logger = logging.getLogger("asyncjobq.worker")

AT_ONCE: Final = 0.005
"""Seconds within which a transaction begins if nobody else holds the lock that all share."""
LOOKING: Final = 0.25
"""Seconds within which whoever waits for that lock looks several times whether it is free."""


class Reclaiming:
    """Reclaims for one worker.

    Where all writers share a lock, a lease may have run out because somebody held it for long, and
    its owner waits for it as we do. When we had to wait, the owner may go first: as long as we had
    to wait, but not longer than a renewal interval.
    """

    def __init__(self, database: Database, emitter: Emitter, ttl: float) -> None:
        self.on_ends: Callable[[Sequence[End]], None] = lambda ends: None
        self._database = database
        self._emitter = emitter
        self._longest = ttl / 3
        self._tolerated = AT_ONCE
        self._not_before = -inf

    @property
    def pause(self) -> float:
        """In how many seconds to come again, if leases were left to their owners; else infinity."""
        left = self._not_before - monotonic()
        return left if left > 0 else inf

    async def reclaim_once(self) -> bool:
        """Take back expired leases; tell whether there were any."""
        if monotonic() < self._not_before:
            return False
        taken, told = await self._database.run(self._reclaim)
        for item in taken:
            logger.warning("Job %s was reclaimed: its lease had run out.", item.row.id)
        self._emitter.reclaimed(taken, told)
        self.on_ends([item for item in taken if isinstance(item, End)])
        return bool(taken)

    def _reclaim(self, connection: Connection) -> tuple[list[End | Return], Told]:
        if self._leaves_them(self._database.waited(connection)):
            return [], {}
        backend = self._database.backend
        taken = reclaim_once(connection, backend)
        return taken, self._emitter.look_up(connection, backend, [item.row.id for item in taken])

    def _leaves_them(self, waited: float) -> bool:
        """Tell whether the owners go first; once they had their time, only a longer wait counts."""
        leaves = waited > self._tolerated
        pause = min(self._longest, max(LOOKING, waited)) if leaves else AT_ONCE
        self._tolerated = pause
        if leaves:
            self._not_before = monotonic() + pause
        return leaves
