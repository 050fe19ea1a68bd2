"""A job of every second, while workers that fire it are killed.

There is no leader to be elected anew: whoever is left finds the schedule due, and each time is met
by one job, whatever the moment at which a worker died. One schedule stands in the workers' code,
one was added to the table.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from asyncjobq import Job, State
from cases.workers import FULL, Case, wait_until

SECONDS = 60 if FULL else 6
SECOND = timedelta(seconds=1)


async def test_every_second_once_while_two_of_four_workers_die(case: Case) -> None:
    recurring = partial(case.start_worker, cron="* * * * * *")
    workers = [recurring(name) for name in ("A", "B", "C", "D")]
    await case.up(*workers)
    await case.scheduler.add_schedule(
        "added", "work", {"label": "added", "seconds": 0.05}, every=1, catch_up="all"
    )
    begun = time.monotonic()
    for number, worker in enumerate(workers[:2], start=1):
        await wait_until(partial(has_fired, case, number * SECONDS // 3), SECONDS, "it fires")
        worker.kill()
    left = begun + SECONDS - time.monotonic()
    await wait_until(partial(has_fired, case, SECONDS), left + 20.0, "all times are met")
    for name in ("declared", "added"):
        await case.scheduler.pause_schedule(name)
    assert set(await case.all_ended(within=20.0)) == {"done"}
    for name in ("declared", "added"):
        jobs = await jobs_of(case, name)
        times = [fired_at(job) for job in jobs]
        assert times == [times[0] + n * SECOND for n in range(len(jobs))]
        assert {job.state for job in jobs} == {State.DONE}
        late = sorted(created_at(job) - time for job, time in zip(jobs, times, strict=True))
        middle, latest = (1000 * late[n].total_seconds() for n in (len(late) // 2, -1))
        print(f"{name}: {len(jobs)} times, each once; late by {middle:.0f} to {latest:.0f} ms")
        assert len(jobs) >= SECONDS - 1
    await case.check_alive(*workers[2:])


async def has_fired(case: Case, times: int) -> bool:
    return sum((await case.states()).values()) >= 2 * times


async def jobs_of(case: Case, name: str) -> list[Job[Any]]:
    """Return the jobs of a schedule, by their time."""
    found = [job for job in await case.scheduler.find(limit=1000) if job.meta]
    return sorted((job for job in found if job.meta and job.meta["schedule"] == name), key=fired_at)


def fired_at(job: Job[Any]) -> datetime:
    assert job.meta is not None
    return datetime.fromisoformat(job.meta["fired_at"])


def created_at(job: Job[Any]) -> datetime:
    assert job.created_at is not None
    return job.created_at
