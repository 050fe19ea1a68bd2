"""Many processes under one limit, some of them killed: it is never exceeded, and nothing leaks."""

from __future__ import annotations

import asyncio
import random
from datetime import timedelta
from typing import Final

from sqlalchemy import func, select

from asyncjobq import JobRow
from cases.workers import FULL, SLACK, Case, wait_until

PROCESSES: Final = 8 if FULL else 3
JOBS: Final = 5000 if FULL else 60
KILLS: Final = 20 if FULL else 2
SECONDS: Final = 20 if FULL else 2
RATE: Final = 100
BURST: Final = 10
LIVE = select(func.count()).where(JobRow.in_flight)


async def test_concurrency_while_workers_are_killed(case: Case) -> None:
    labels = [f"job {n}" for n in range(JOBS)]
    await case.add_many(labels, seconds=0.002, max_attempts=50)
    how = {"limit": ("concurrency", 3.0), "concurrency": 10}
    workers = [case.start_worker(f"W{n}", **how) for n in range(PROCESSES)]
    chance = random.Random(7)
    kill_at = sorted(chance.sample(range(JOBS * 9 // 10), KILLS))
    most = 0
    while (counts := await case.states())["done"] < JOBS:
        assert set(counts) <= {"ready", "leased", "running", "done"}
        most = max(most, counts["leased"] + counts["running"])
        if kill_at and counts["done"] >= kill_at[0]:
            victim = kill_at.pop(0) % PROCESSES
            workers[victim].kill()
            workers[victim] = case.start_worker(f"W{victim}", **how)
        await asyncio.sleep(0.005)
    assert (most, kill_at) == (3, [])
    await case.up(*workers)
    await case.check_alive(*workers)
    await case.add_many(["one more", "two more", "three more"], seconds=1.0)
    await wait_until(_all_three(case), SLACK, "three more run at once")


def _all_three(case: Case):  # type: ignore[no-untyped-def]
    async def running() -> bool:
        return (await case.rows(LIVE))[0][0] == 3

    return running


async def test_rate(case: Case) -> None:
    """By the times of the claims, which are the database's."""
    await case.add_many([f"job {n}" for n in range(RATE * (SECONDS + 60))])
    how = {"limit": ("rate", float(RATE)), "concurrency": 10}
    workers = [case.start_worker(f"W{n}", **how) for n in range(4 if FULL else 2)]
    await case.up(*workers)
    await asyncio.sleep(SECONDS)
    for worker in workers:
        worker.kill()
    query = select(JobRow.started_at).where(JobRow.started_at.is_not(None))
    starts = sorted(row.started_at for row in await case.rows(query))
    assert starts
    for first, begin in enumerate(starts):
        within = [moment for moment in starts[first:] if moment < begin + timedelta(seconds=1)]
        assert len(within) <= BURST + RATE
    spread = (starts[-1] - starts[0]).total_seconds()
    print(f"{len(starts)} starts in {spread:.1f} s: {len(starts) / (RATE * spread + BURST):.0%}")
