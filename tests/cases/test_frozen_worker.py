"""A worker that stands still for longer than its lease comes back as if nothing had happened.

Its jobs are another worker's by then. Its late result must be refused, and it must neither extend
nor clear the lease of the new attempt; and it must go on working.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial

import pytest
from sqlalchemy import select

from asyncjobq import JobRow
from cases.log import by_label, labels
from cases.workers import FULL, Case, wait_until

REFUSED = re.compile(r"outcome of job (\d+) .*is refused: its lease was lost")
LOST = re.compile(r"lease of job (\d+) .*(?:is lost|could not be renewed)")


@pytest.mark.parametrize("lease", [1.0, 30.0], ids=["knows", "does_not_know"])
async def test_late_owner_changes_nothing(case: Case, lease: float) -> None:
    """Whether its own clock says that the lease has run out, or the database's alone."""
    old = case.start_worker("A", blocking=True, lease_ttl=lease)
    await case.up(old)
    awaiting = await case.add("awaiting", seconds=0.4)
    blocking = await case.add("blocking", "block", seconds=0.4)
    upstreams = [awaiting, blocking]
    after = await case.add("after", "look_up", key=0, queue="B", depends_on=upstreams)
    await wait_until(lambda: len(case.log.starts(pid=old.pid)) == 2, 10.0, "both jobs run")
    await case.freeze(old)
    new = case.start_worker("B", seconds=0.8, clock_offset=0.0 if lease == 1.0 else lease)
    await wait_until(lambda: len(case.log.starts(pid=new.pid)) == 2, 10.0, "both run again")
    old.thaw()
    while len(case.log.ends(pid=new.pid)) == 0:
        assert await owners(case) == {("B", 2)}
        await asyncio.sleep(0.02)
    await case.all_ended(within=10.0)

    for job in (awaiting, blocking):
        assert (await case.scheduler.get(job)).result == 2
    assert await case.states() == {"done": 3}
    assert len(case.log.starts("awaiting")) == len(case.log.starts("blocking")) == 2
    (start,) = case.log.starts("after")
    assert start.at > max(end.at for end in case.log.ends(pid=new.pid) if end.label != "after")
    assert (await case.scheduler.get(after)).attempt == 1
    refused = {int(number) for number in REFUSED.findall(old.output())}
    lost = {int(number) for number in LOST.findall(old.output())}
    assert lease == 1.0 or blocking.id in refused
    assert refused | lost == {awaiting.id, blocking.id}
    await case.check_alive(new)
    new.kill()  # to whose clock the leases of the other may be over
    await case.check_alive(old)


async def owners(case: Case) -> set[tuple[str, int]]:
    """Return who holds the leases, and the tokens; both jobs must be in flight."""
    query = select(JobRow.lease_owner, JobRow.lease_token).where(JobRow.in_flight)
    rows = await case.rows(query)
    assert len(rows) == 2
    return {(row.lease_owner, row.lease_token) for row in rows}


async def test_all_workers_stand_still(case: Case) -> None:
    """When the whole machine slept, nobody reclaimed, and all wake up at the same moment."""
    lease = 1.0
    workers = [case.start_worker(name, lease_ttl=lease, concurrency=2) for name in "AB"]
    await case.up(*workers)
    names = [f"job {number}" for number in range(4)]
    jobs = await case.add_many(names, seconds=0.5)
    for job in jobs:
        await case.add(f"after {job.args['label']}", depends_on=[job])
    await wait_until(partial(all_started, case, names), 10.0, "four jobs run")
    await case.freeze(*workers)
    await asyncio.sleep((3.0 if FULL else 1.5) * lease)
    for worker in workers:
        worker.thaw()
    assert await case.all_ended(within=15.0) == {"done": 8}

    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    for job in jobs:
        label, ended = job.args["label"], await case.scheduler.get(job)
        assert ended.result == ended.attempt == len(starts[label])
        (start,) = starts[f"after {label}"]
        assert start.at > next(end.at for end in ends[label] if end.attempt == ended.attempt)
    await case.check_alive(*workers)


def all_started(case: Case, names: list[str]) -> bool:
    return labels(case.log.starts()) >= set(names)
