"""Deleting what ended, while what depends on it still runs.

In other systems a job that was deleted left its dependants waiting for ever or let them run too
early, and a slow deletion locked the whole queue.
"""

from __future__ import annotations

import asyncio

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import JobDepRow, JobSpec
from cases.log import by_label
from cases.workers import FULL, Case

CHAINS = 500 if FULL else 8
CONTAINERS = 20 if FULL else 2
LENGTH = 5


async def test_in_a_loop_while_chains_and_containers_run(case: Case) -> None:
    workers = [case.start_worker(name, lease_ttl=10.0) for name in "ABC"]
    await case.up(*workers)
    over = asyncio.Event()
    pruning = asyncio.create_task(prune_until(case, over))
    for number in range(CHAINS):
        await add_chain(case, number)
        if number % (CHAINS // CONTAINERS) == 0:
            await add_container(case, number)
    await case.all_ended(within=300.0 if FULL else 90.0)
    over.set()
    deleted = await pruning + await case.scheduler.prune(older_than=0.0)

    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    labels = set(starts)
    containers = len({label for label in labels if label.startswith("c") and label.endswith(".0")})
    assert len(labels) == (CHAINS + containers) * LENGTH
    assert {len(entries) for entries in (*starts.values(), *ends.values())} == {1}
    for label in labels:
        name, _, place = label.partition(".")
        if place != "0":
            before = ends[f"{name}.{int(place) - 1}"][0]
            assert before.at <= starts[label][0].at, label
    assert deleted == len(labels) + containers
    assert await case.states() == {}
    assert await case.rows(select(func.count()).select_from(JobDepRow)) == [(0,)]
    await case.check_alive(*workers)


async def prune_until(case: Case, over: asyncio.Event) -> int:
    """Prune again and again; returns how many jobs went."""
    deleted = 0
    while not over.is_set():
        deleted += await case.scheduler.prune(older_than=0.0)
        await asyncio.sleep(0.05)
    return deleted


async def add_chain(case: Case, number: int) -> None:
    """Enqueue jobs each of which depends on the one before, in one transaction."""
    async with AsyncSession(case.engine, expire_on_commit=False) as session:
        before = []
        for place in range(LENGTH):
            spec = JobSpec[int]("work", {"label": f"{number}.{place}"})
            job = spec.options(depends_on=before)
            before = [await case.scheduler.enqueue(job, session=session)]
        await session.commit()


async def add_container(case: Case, number: int) -> None:
    """Enqueue the same in a container."""
    async with case.scheduler.workflow(f"container {number}") as container:
        before = []
        for place in range(LENGTH):
            spec = JobSpec[int]("work", {"label": f"c{number}.{place}"})
            before = [container.add(spec, depends_on=before)]
