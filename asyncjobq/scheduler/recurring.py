"""Recurring jobs, through the scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Unpack
from zoneinfo import ZoneInfo

from asyncjobq import schedules
from asyncjobq.callers import AsyncCaller
from asyncjobq.options import JobSpec
from asyncjobq.recurrence import CatchUp, RecurringArgs, define
from asyncjobq.scheduler.enqueuing import Enqueuing
from asyncjobq.schedules import Schedule
from asyncjobq.specs import as_spec


class Recurring(Enqueuing):
    """Adds, pauses and removes schedules that are stored, and lists them all.

    Those that stand in code are declared with `cron` and `every`, of this class or of `Handlers`.
    """

    async def add_schedule(
        self,
        name: str,
        job: JobSpec[Any] | str,
        args: Mapping[str, Any] | None = None,
        /,
        *,
        cron: str | None = None,
        every: float | timedelta | None = None,
        timezone: str | ZoneInfo | None = None,
        catch_up: CatchUp | str = CatchUp.LATEST,
        overlap: bool = True,
        session: AsyncCaller | None = None,
        **options: Unpack[RecurringArgs],
    ) -> Schedule:
        """Enqueue such a job at the times of a cron expression, or every so many seconds.

        A schedule of that name is changed; one that says the same as before goes on as it was.
        With `catch_up`, times at which no worker was there are left out ("none"), made up for by
        one job ("latest"), or by one each, a thousand at most ("all"). Without `overlap`, a time
        passes by while the schedule's last job has not ended. With `session`, it is written in
        the caller's transaction.
        """
        definition = define(
            name,
            self._bound(as_spec(job, args, options)),  # without the meta of this moment
            cron=cron,
            every=every,
            timezone=timezone,
            catch_up=catch_up,
            overlap=overlap,
        )
        return await self._write(lambda c, b: schedules.add_schedule(c, b, definition), session)

    async def remove_schedule(self, name: str, /, *, session: AsyncCaller | None = None) -> None:
        """Remove a schedule; its jobs stay. Raises ScheduleNotFoundError.

        One that is declared in code comes back with the next worker that starts.
        """
        await self._write(partial(schedules.remove_schedule, name=name), session)

    async def pause_schedule(self, name: str, /, *, session: AsyncCaller | None = None) -> None:
        """Have a schedule enqueue nothing until it is resumed. Raises ScheduleNotFoundError."""
        await self._write(partial(schedules.pause_schedule, name=name), session)

    async def resume_schedule(self, name: str, /, *, session: AsyncCaller | None = None) -> None:
        """Have a paused schedule go on at its next time; what it missed is not caught up with."""
        await self._write(partial(schedules.resume_schedule, name=name), session)

    async def schedules(self, *, session: AsyncCaller | None = None) -> list[Schedule]:
        """Return all schedules by name, with their next and last times."""
        return await self._read(schedules.list_schedules, session)
