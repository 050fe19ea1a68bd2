"""A deploy replaces one worker after the other while jobs run.

The new one is up before the old one is told to stop. Some jobs need longer than the old one waits:
they go back, start again elsewhere, and have not used an attempt.
"""

from __future__ import annotations

import signal

from sqlalchemy import select

from asyncjobq import JobRow, JobSpec
from cases.log import by_label, labels
from cases.workers import FULL, Case, WorkerProcess, wait_until

WORKERS = 4
TURNS = 20 if FULL else WORKERS
JOBS_PER_TURN = 100 if FULL else 50
SLOTS = 4
LONG_JOBS = (WORKERS + 1) * SLOTS
LONG, STOP_TIMEOUT = 1.0, 0.15
LEASE = 30.0
"""Seconds that no busy machine takes: a lease that is lost here was left behind by a worker."""


async def test_a_rolling_restart_costs_no_job_and_no_attempt(case: Case) -> None:
    serving = [start_one(case, number) for number in range(WORKERS)]
    await case.up(*serving)
    jobs = [job for turn in range(TURNS) for job in await replace_oldest(case, serving, turn)]
    assert await case.all_ended(within=300.0 if FULL else 60.0) == {"done": len(jobs)}
    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    assert set(starts) == set(jobs)
    assert {label: len(found) for label, found in ends.items()} == dict.fromkeys(jobs, 1)
    assert {entry.attempt for found in starts.values() for entry in found} == {1}
    assert {row.attempt for row in await case.rows(select(JobRow.attempt))} == {1}
    interrupted = sum(len(found) - 1 for found in starts.values())
    print(f"jobs: {len(jobs)}, workers replaced: {TURNS}, interruptions: {interrupted}")
    assert interrupted > 0
    live = {worker.worker_id for worker in await case.scheduler.workers()}
    assert live == {worker.id for worker in serving}
    await case.check_alive(*serving)


def start_one(case: Case, number: int) -> WorkerProcess:
    options = {"concurrency": SLOTS, "lease_ttl": LEASE, "stop_timeout": STOP_TIMEOUT}
    return case.start_worker(f"worker {number}", **options)


async def replace_oldest(case: Case, serving: list[WorkerProcess], turn: int) -> list[str]:
    """Put a new worker in the place of the one that serves longest; returns the jobs' labels."""
    new = start_one(case, WORKERS + turn)
    await case.up(new)
    serving.append(new)
    old, names = serving.pop(0), list[str]()

    def may_go() -> bool:
        return runs_a_long_one(case, old) or labels(case.log.ends()) >= set(names)

    while not (names and runs_a_long_one(case, old)):  # the others may have been quicker
        names += await add_jobs(case, f"{turn}.{len(names)}")
        await wait_until(may_go, 60.0, f"{old.id} runs a long job, or all have ended")
    old.send(signal.SIGTERM)
    assert await old.exited(within=20.0) == 0, old.output()
    return names


def runs_a_long_one(case: Case, worker: WorkerProcess) -> bool:
    return any(label.startswith("long") for label in case.log.running(worker.pid))


async def add_jobs(case: Case, turn: str) -> list[str]:
    """Enqueue jobs, before all others as many long ones as there are slots."""
    long = {f"long {turn}.{number}": LONG for number in range(LONG_JOBS)}
    short = {
        f"short {turn}.{number}": 0.05 + 0.01 * (number % 16)
        for number in range(JOBS_PER_TURN - LONG_JOBS)
    }
    specs = [
        JobSpec[int]("work", {"label": label, "seconds": took}).options(priority=priority)
        for priority, jobs in enumerate((long, short))
        for label, took in jobs.items()
    ]
    await case.scheduler.enqueue_many(specs)
    return [*long, *short]
