"""Processes that ask for the same unique keys at the same time, and roll half of it back.

There must never be two live jobs of one key, nobody may be told of a job that is not there, and no
error may reach a caller but the one that was asked for: no deadlock, no duplicate key, no time-out.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import JobRow, JobSpec
from cases import asking_program
from cases.workers import FULL, Case, wait_until

PROCESSES = 8 if FULL else 4
TIMES = 500 if FULL else 40
KEYS = 50 if FULL else 8
MANY = 20_000 if FULL else 2_000

_forks = multiprocessing.get_context("forkserver")


async def test_processes_ask_for_the_same_keys(case: Case, tmp_path: Path) -> None:
    worker = case.start_worker(lease_ttl=10.0, concurrency=8)
    await case.up(worker)
    reports = [tmp_path / f"report {number}" for number in range(PROCESSES)]
    begun = time.monotonic()
    asking = [
        _forks.Process(target=asking_program.run, args=(case.url, n, TIMES, KEYS, str(report)))
        for n, report in enumerate(reports)
    ]
    for process in asking:
        process.start()
    await wait_until(lambda: all(report.exists() for report in reports), 900.0, "all have asked")
    for process in asking:
        await asyncio.to_thread(process.join)
    took = time.monotonic() - begun
    told = [json.loads(report.read_text()) for report in reports]
    ends: Counter[str] = sum((Counter(one["ends"]) for one in told), Counter())
    print(f"{PROCESSES} times {TIMES} enqueues of {KEYS} keys in {took:.1f} s: {dict(ends)}")
    assert [error for one in told for error in one["errors"]] == []
    assert sum(ends.values()) == PROCESSES * TIMES
    await case.all_ended(within=60.0)

    columns = (JobRow.id, JobRow.unique_key, JobRow.created_at, JobRow.finished_at)
    rows = await case.rows(select(*columns).order_by(JobRow.unique_key, JobRow.id))
    new = sorted(job_id for one in told for job_id in one["ids"]["new"])
    assert sorted(row.id for row in rows) == new
    assert {job_id for one in told for job_id in one["ids"]["existing"]} <= set(new)
    for before, after in pairwise(rows):
        if before.unique_key == after.unique_key:
            assert before.finished_at <= after.created_at
    await case.check_alive(worker)


async def test_many_at_once(case: Case) -> None:
    """Half of them twice, and half of the rest held already."""
    numbers = [*range(MANY * 3 // 4), *range(MANY // 4)]
    specs = [JobSpec[int]("parked", {"n": n}).options(unique_key=f"key {n}") for n in numbers]
    held = await case.scheduler.enqueue_many(specs[: MANY // 4])
    begun = time.monotonic()
    async with AsyncSession(case.engine) as session:
        made = await case.scheduler.enqueue_many(specs, session=session)
        await session.commit()
    print(f"{MANY} with keys in {time.monotonic() - begun:.1f} s")
    assert [job.args["n"] for job in made] == numbers
    assert made[: MANY // 4] == made[MANY * 3 // 4 :] == held
    assert [job.existing for job in made].count(False) == MANY // 2
    assert await case.rows(select(func.count()).select_from(JobRow)) == [(MANY * 3 // 4,)]
