"""A worker that is killed leaves jobs behind that no living process owns.

They must run again after their lease, once each, also when the process comes back under the same
name and works on as if nothing had happened, and when many workers look for them at once.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

from cases.log import by_label, labels
from cases.workers import FULL, LEASE, POLL, SLACK, Case, WorkerProcess, wait_until

NAMES = [f"job {number}" for number in range(20)]


@pytest.mark.parametrize("successors", [["A"], ["B", "C", "D", "E"]], ids=["same_name", "four"])
async def test_orphans_run_once_more(case: Case, successors: list[str]) -> None:
    """And soon: the wait follows the lease, and not the hours that a job may take."""
    await case.add_many(NAMES, seconds=0.6, timeout=7200)
    first = case.start_worker("A", concurrency=10)
    await wait_until(lambda: len(case.log.running(first.pid)) == 10, 10.0, "ten jobs run")
    first.kill()
    killed_at, orphans = time.monotonic(), labels(case.log.starts())
    later = [case.start_worker(name, concurrency=10) for name in successors]
    assert await case.all_ended(within=20.0) == {"done": 20}
    for label, starts in by_label(case.log.starts()).items():
        assert [start.attempt for start in starts] == ([1, 2] if label in orphans else [1]), label
        assert starts[-1].at < killed_at + LEASE + 2 * POLL + SLACK, label
    assert sorted(end.label for end in case.log.ends()) == sorted(NAMES)
    await case.check_alive(*later)


async def test_ten_kills_in_a_row(case: Case) -> None:
    """Twenty jobs outlive ten workers of the same name, each killed while it runs all of them.

    At full length each waits for the leases of the one before; otherwise its clock is put forward.
    """
    kills, begun = 10, time.monotonic()
    jobs = await case.add_many(NAMES, seconds=0.3, max_attempts=20)
    for number in range(kills):
        worker = start_one_more(case, number)
        await wait_until(partial(runs_all, case, worker), 20.0, f"kill {number + 1}")
        worker.kill()
    last = start_one_more(case, kills)
    assert await case.all_ended(within=20.0) == {"done": len(NAMES)}
    starts = by_label(case.log.starts())
    figures = sorted(len(found) for found in starts.values())
    took = time.monotonic() - begun
    print(f"kills: {kills}, starts per job: {figures[0]} to {figures[-1]}, {took:.1f} s")
    for job in jobs:
        label, ended = job.args["label"], await case.scheduler.get(job)
        assert ended.attempt == ended.result == len(starts[label]) == kills + 1
        assert len(case.log.ends(label)) == 1
    await case.check_alive(last)


def start_one_more(case: Case, killed: int) -> WorkerProcess:
    forward = 0.0 if FULL else 1.0 * killed
    return case.start_worker(
        "A", concurrency=20, lease_ttl=1.0, poll_interval=0.1, clock_offset=forward
    )


def runs_all(case: Case, worker: WorkerProcess) -> bool:
    return case.log.running(worker.pid) == set(NAMES)
