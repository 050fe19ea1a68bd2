"""Schedules in a line each, and what they gave."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, update

from asyncjobq import Job, Schedule
from asyncjobq.backends.base import Backend
from asyncjobq.ready import FiredHere
from asyncjobq.recurrence import define
from asyncjobq.schedules import due_schedules, fire_once, save_schedules
from conformance.kit import Jobs
from conformance.steps import Step, spec

HOUR: Final = 3600.0


def saving(name: str = "recurring", /, *, job: Any = None, **how: Any) -> Step[None]:
    """Store a schedule: hourly, unless another timing is given."""
    timing = {} if "cron" in how else {"every": HOUR}
    definition = define(name, job or spec(), **{**timing, **how})
    return lambda connection, backend: save_schedules(connection, backend, [definition])


def firing(*declared: str) -> Step[int]:
    """Fire what is due, as a worker with these schedules in its code."""

    def step(connection: Connection, backend: Backend) -> int:
        names = due_schedules(connection, backend, FiredHere(declared))
        return fire_once(connection, backend, names).moved

    return step


async def fired(jobs: Jobs) -> list[Job[Any]]:
    return await jobs.scheduler.find(limit=5000)


async def names_fired(jobs: Jobs) -> list[str]:
    return [job.meta["schedule"] for job in await fired(jobs) if job.meta]


def fired_at(job: Job[Any]) -> datetime:
    assert job.meta is not None
    return datetime.fromisoformat(job.meta["fired_at"])


async def schedule(jobs: Jobs, name: str = "recurring") -> Schedule:
    return next(s for s in await jobs.scheduler.schedules() if s.name == name)


async def spoil(jobs: Jobs, name: str, **values: Any) -> None:
    """Write what no code of this release would."""
    table = jobs.tables.schedules
    await jobs.do(lambda c, _: c.execute(update(table).where(table.c.name == name).values(values)))
