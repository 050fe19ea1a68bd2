"""A worker with fifty running jobs goes; another that is up already starts all of them again.

After `kill -9` when their leases have run out, after SIGTERM as soon as they are released. At full
length the lease and the poll interval are those that a scheduler has unless told otherwise.
"""

from __future__ import annotations

import signal
import time

from sqlalchemy import select

from asyncjobq import JobRow
from cases.log import by_label, labels
from cases.workers import FULL, LEASE, POLL, SLACK, Case, WorkerProcess, wait_until

NAMES = [f"job {number:02}" for number in range(50)]
TTL, INTERVAL = (30.0, 1.0) if FULL else (LEASE, POLL)
STOP_TIMEOUT = 0.5


async def test_after_kill_9_all_start_again_with_their_leases_end(case: Case) -> None:
    going, staying = await two_workers(case)
    going.kill()
    gone_at = time.monotonic()
    took = await all_started_again(case, staying, TTL, since=gone_at)
    print(f"kill -9: all {len(NAMES)} started again after {took:.2f} s, the lease being {TTL} s")
    await check_attempts(case, going, staying, attempt=2)


async def test_after_sigterm_all_start_again_with_their_release(case: Case) -> None:
    going, staying = await two_workers(case)
    going.send(signal.SIGTERM)
    released_at = time.monotonic() + STOP_TIMEOUT
    took = await all_started_again(case, staying, STOP_TIMEOUT, since=released_at)
    print(f"SIGTERM: all {len(NAMES)} started again {took:.2f} s after the stop timeout's end")
    assert await going.exited(within=10.0) == 0, going.output()
    await check_attempts(case, going, staying, attempt=1)


async def two_workers(case: Case) -> tuple[WorkerProcess, WorkerProcess]:
    """Return a worker that runs all jobs without end, and one that would end them at once."""
    await case.add_many(NAMES)
    options = {"concurrency": len(NAMES), "lease_ttl": TTL, "poll_interval": INTERVAL}
    going = case.start_worker("A", seconds=3600.0, stop_timeout=STOP_TIMEOUT, **options)
    await wait_until(lambda: case.log.running(going.pid) == set(NAMES), 20.0, "all jobs run")
    staying = case.start_worker("B", seconds=0.0, **options)
    await case.up(staying)
    assert await case.scheduler.wait(await case.add("first of B", queue="B"), timeout=20.0) == 1
    return going, staying


async def all_started_again(
    case: Case, staying: WorkerProcess, lasts: float, *, since: float
) -> float:
    """Return how many seconds after `since` the last job started again."""

    def all_started() -> bool:
        return labels(case.log.starts(pid=staying.pid)) >= set(NAMES)

    await wait_until(all_started, lasts + 2 * INTERVAL + SLACK, "all jobs start again")
    return max(entry.at for entry in case.log.starts(pid=staying.pid)) - since


async def check_attempts(
    case: Case, going: WorkerProcess, staying: WorkerProcess, *, attempt: int
) -> None:
    """Check that each job was started once by each worker, and ended once, in this attempt."""
    assert await case.all_ended(within=20.0) == {"done": len(NAMES) + 1}
    starts = by_label(case.log.starts())
    for label in NAMES:
        found = [(entry.pid, entry.attempt) for entry in starts[label]]
        assert found == [(going.pid, 1), (staying.pid, attempt)], label
        assert len(case.log.ends(label)) == 1
    query = select(JobRow.attempt).where(JobRow.queue == "default")
    assert {row.attempt for row in await case.rows(query)} == {attempt}
    await case.check_alive(staying)
