"""A job that kills its process each time would be started for ever, and take others down with it.

Attempts are counted when a job is claimed and not when its handler raises, so that it ends failed
after as many as it has; those that were killed beside it are run again.
"""

from __future__ import annotations

from sqlalchemy import update

from asyncjobq import JobRow
from cases.log import by_label
from cases.workers import Case, WorkerProcess, wait_until

LEASE = 1.0
HARMLESS = [f"harmless {number}" for number in range(20)]


async def test_it_ends_failed_after_its_attempts(case: Case) -> None:
    await case.add_many(HARMLESS[:2], seconds=0.2)
    killer = await case.add("killer", "crash", max_attempts=3)
    await case.add_many(HARMLESS[2:], seconds=0.2)
    worker = await supervised(case)
    states = await case.states()
    assert states == {"done": 20, "failed": 1}
    assert [start.attempt for start in case.log.starts("killer")] == [1, 2, 3]
    ended = await case.scheduler.get(killer)
    assert "worker was lost" in (ended.error or "")
    assert "attempt 3 of 3" in (ended.error or "")
    for label, ends in by_label(case.log.ends()).items():
        assert len(ends) == 1, (label, ends)
    await case.check_alive(worker)


async def test_cancelling_it_between_two_crashes(case: Case) -> None:
    killer = await case.add("killer", "crash", max_attempts=5)
    first = case.start_worker(lease_ttl=LEASE)
    assert await first.exited(within=20.0) == 1
    request = update(JobRow).where(JobRow.id == killer.id).values(cancel_requested=True)
    await case.write(request)
    worker = await supervised(case)
    assert (await case.scheduler.get(killer)).state == "cancelled"
    assert len(case.log.starts("killer")) == 1
    await case.check_alive(worker)


async def supervised(case: Case) -> WorkerProcess:
    """Keep one worker running, as a service manager would, until all jobs have ended."""
    worker = case.start_worker(lease_ttl=LEASE, clock_offset=LEASE)

    async def ended() -> bool:
        nonlocal worker
        if worker.exit_code is not None:
            forward = LEASE * (len(case.workers) + 1)  # the leases of the one before are over
            worker = case.start_worker(lease_ttl=LEASE, clock_offset=forward)
        states = await case.states()
        return set(states) <= {"done", "failed", "cancelled"}

    await wait_until(ended, 30.0, "every job has ended")
    return worker
