"""SIGTERM asks a worker to end in good order.

It claims nothing more; running jobs have the stop timeout to end; those that need longer go back
into the line, and neither they nor those that wait have used an attempt.
"""

from __future__ import annotations

import signal
import time

from sqlalchemy import delete, func, select

from asyncjobq import JobRow
from cases.workers import Case, WorkerProcess, wait_until

WAITING = [f"job {number:03}" for number in range(100)]


async def test_running_jobs_end_and_no_other_starts(case: Case) -> None:
    await case.add_many(WAITING, seconds=0.8)
    worker = case.start_worker(concurrency=4, stop_timeout=3.0)
    await wait_until(lambda: len(case.log.starts()) == 4, 10.0, "four jobs run")
    worker.send(signal.SIGTERM)
    assert await worker.exited(within=4.0) == 0, worker.output()
    assert len(case.log.starts()) == len(case.log.ends()) == 4
    assert await unburned(case) == 96
    assert await case.states() == {"done": 4, "ready": 96}
    await case.write(delete(JobRow).where(JobRow.state == "ready"))
    await case.check_alive(await successor(case))


async def test_jobs_that_do_not_end_in_time_go_back(case: Case) -> None:
    await case.add_many(WAITING, seconds=30.0)
    worker = case.start_worker(concurrency=4, stop_timeout=0.5)
    await wait_until(lambda: len(case.log.starts()) == 4, 10.0, "four jobs run")
    worker.send(signal.SIGTERM)
    asked_at = time.monotonic()
    assert await worker.exited(within=0.5 + 1.0 + 1.0) == 0, worker.output()
    took = time.monotonic() - asked_at
    assert took >= 0.5, took
    assert (len(case.log.starts()), len(case.log.ends())) == (4, 0)
    assert await unburned(case) == 100
    await case.write(delete(JobRow))
    await case.check_alive(await successor(case))


async def test_a_second_signal_does_not_wait(case: Case) -> None:
    await case.add_many(WAITING[:4], seconds=30.0)
    worker = case.start_worker(concurrency=4, stop_timeout=30.0)
    await wait_until(lambda: len(case.log.starts()) == 4, 10.0, "four jobs run")
    worker.send(signal.SIGTERM)
    worker.send(signal.SIGINT)
    assert await worker.exited(within=2.0) == 0, worker.output()
    assert await unburned(case) == 4


async def unburned(case: Case) -> int:
    """Return how many jobs wait as if they had never been started."""
    query = select(func.count()).select_from(JobRow)
    fresh = query.where(JobRow.state == "ready", JobRow.attempt == 0, JobRow.lease_owner.is_(None))
    ((count,),) = await case.rows(fresh)
    return int(count)


async def successor(case: Case) -> WorkerProcess:
    worker = case.start_worker("B")
    await case.up(worker)
    return worker
