"""The clock of the database under test: only forward or back by hand, on top of the real time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial

from asyncjobq.backends.base import Backend, Database
from asyncjobq.clock import aware_utc, seconds


class JobClock:
    """Moves the time by which jobs are due, limits open and leases run out.

    The clock of Python, and so `datetime.now()` in handlers, goes on as it does.
    """

    def __init__(self, database: Database, backends: Sequence[Backend]) -> None:
        self._database = database
        self._backends = backends

    def move(self, by: float | timedelta) -> None:
        """Move the clock by so many seconds, or a timedelta.

        Runs nothing: `drain()` runs what is due then. Leases of jobs that run meanwhile run out.
        """
        offset = self._database.backend.clock_offset + seconds(by, "by")
        for backend in self._backends:
            backend.clock_offset = offset

    async def move_to(self, moment: datetime) -> None:
        """Move the clock to a moment, which has a time zone."""
        self.move(aware_utc(moment, "moment") - await self.now())

    async def now(self) -> datetime:
        """Return the time that the clock shows, in UTC."""
        read = partial(self._database.backend.read_clock)
        now: datetime = await self._database.read(read)
        return now

    def reset(self) -> None:
        """Show the real time again."""
        self.move(-self._database.backend.clock_offset)
