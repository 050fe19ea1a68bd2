"""Requests to cancel: heard while all slots are busy, true in what they answer, and for one run.

In other systems the loop that looked for requests waited for a free slot; a request was lost in a
race with the job's end; or it stayed and killed the job's next run.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from asyncjobq import Cancelled, Job, JobCancelled, JobNotFoundError, State
from cases.workers import FULL, SLACK, Case

JOBS = 300 if FULL else 40
SECONDS = 0.05


async def test_a_busy_worker_hears_it_at_once(case: Case) -> None:
    """Its only slot is taken, and its lease is renewed in ten seconds."""
    worker = case.start_worker(concurrency=1, lease_ttl=30.0, poll_interval=0.5)
    await case.up(worker)
    job = await case.add("long", seconds=60.0)
    behind = await case.add("behind it", depends_on=[job])
    next_one = await case.add("next")
    while not case.log.starts("long"):
        await asyncio.sleep(0.01)
    assert await case.scheduler.cancel(job) is Cancelled.REQUESTED
    with pytest.raises(JobCancelled):
        await case.scheduler.wait(job, timeout=2.0 + SLACK / 2)
    assert await case.scheduler.wait(next_one, timeout=SLACK) == 1
    with pytest.raises(JobCancelled):
        await case.scheduler.wait(behind, timeout=SLACK)
    assert not case.log.ends("long")
    await case.check_alive(worker)


async def test_at_any_moment_of_many_short_jobs(case: Case) -> None:
    jobs = await case.add_many([f"job {number}" for number in range(JOBS)], seconds=SECONDS)
    behind = [
        await case.add(f"behind {number}", depends_on=[job]) for number, job in enumerate(jobs)
    ]
    worker = case.start_worker(lease_ttl=30.0)  # now, so that not all have ended too soon
    await case.up(worker)
    await case.scheduler.wait(jobs[0], timeout=20.0)
    order = random.sample(jobs, JOBS)
    said = await asyncio.gather(*map(cancelled(case), order))
    answers = {job.id: answer for job, answer in zip(order, said, strict=True)}
    await case.all_ended(within=60.0)
    for number, (job, follower) in enumerate(zip(jobs, behind, strict=True)):
        await assert_true(case, job, answers[job.id], f"job {number}")
        done = (await case.scheduler.get(job)).state == State.DONE
        started = bool(case.log.starts(f"behind {number}"))
        assert started == done
        wanted = State.DONE if done else State.CANCELLED
        assert (await case.scheduler.get(follower)).state == wanted
    assert len(set(answers.values())) > 1
    await case.check_alive(worker)


def cancelled(case: Case) -> Any:
    """Return what cancels a job at some moment while they all run."""

    async def cancel(job: Job[Any]) -> Cancelled:
        await asyncio.sleep(random.uniform(0.0, JOBS * SECONDS / 4 + 0.5))
        return await case.scheduler.cancel(job)

    return cancel


async def assert_true(case: Case, job: Job[Any], answer: Cancelled, label: str) -> None:
    """Assert that what was answered is what happened, and that nothing worked on after it."""
    state = (await case.scheduler.get(job)).state
    possible = {
        Cancelled.CANCELLED: {State.CANCELLED},
        Cancelled.ENDED: {State.DONE},
        Cancelled.REQUESTED: {State.CANCELLED, State.DONE},
    }
    assert state in possible[answer], (label, answer)
    starts, ends = len(case.log.starts(label)), len(case.log.ends(label))
    assert ends == (state == State.DONE)
    assert ends <= starts <= (answer is not Cancelled.CANCELLED)


async def test_of_a_job_that_has_ended_and_is_run_again(case: Case) -> None:
    worker = case.start_worker(types=["work"])
    await case.up(worker)
    first = await case.add("gone", queue="nobody")
    assert await case.scheduler.cancel(first) is Cancelled.CANCELLED
    for _ in range(2):
        assert await case.scheduler.cancel(first) is Cancelled.ENDED
    job = await case.add("again", seconds=1.0)
    while not case.log.starts("again"):
        await asyncio.sleep(0.01)
    await case.scheduler.cancel(job)
    with pytest.raises(JobCancelled):
        await case.scheduler.wait(job, timeout=2.0 + SLACK)
    assert await case.scheduler.cancel(job) is Cancelled.ENDED
    await case.scheduler.retry(job)
    assert await case.scheduler.wait(job, timeout=SLACK * 2) == 1
    assert [entry.event for entry in case.log.entries(label="again")] == ["start", "start", "end"]
    with pytest.raises(JobNotFoundError):
        await case.scheduler.cancel(10**15)
    await case.check_alive(worker)
