"""Batches that are larger than what one statement of a database can carry.

Twenty thousand jobs, and one job that waits for all of them, must go in one transaction, in order,
without an error about parameters; the same for what later reads and settles them.
"""

from __future__ import annotations

from functools import partial

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import Cancelled, Job, JobDepRow, JobRow, JobSpec, after
from cases.workers import FULL, Case, wait_until

JOBS = 40_000 if FULL else 20_000
CHILDREN = 20_000 if FULL else 4_000


async def test_many_jobs_at_once_and_one_after_all_of_them(case: Case) -> None:
    specs = [JobSpec[int]("parked", {"label": str(number)}) for number in range(JOBS)]
    async with AsyncSession(case.engine) as session:
        upstreams = await case.scheduler.enqueue_many(specs, session=session)
        assert await case.states() == {}
        await session.commit()
    assert [job.args["label"] for job in upstreams] == [str(number) for number in range(JOBS)]
    rows = await case.rows(select(JobRow.id, JobRow.args).order_by(JobRow.id))
    assert [(row.id, row.args) for row in rows] == [(job.id, job.args) for job in upstreams]

    waiting = await case.add("waits for all", depends_on=upstreams)
    assert await case.rows(select(func.count()).select_from(JobDepRow)) == [(JOBS,)]
    worker = case.start_worker(lease_ttl=10.0)
    await case.up(worker)
    await wait_until(partial(nothing_is_unsettled, case), 60.0, "its edges are settled")
    await case.check_alive(worker)
    assert (await case.scheduler.get(waiting)).state == "blocked"
    await end_all(upstreams, case)
    assert await case.scheduler.wait(waiting, timeout=60.0) == 1
    assert len(case.log.starts("waits for all")) == 1
    await case.check_alive(worker)


async def end_all(upstreams: list[Job[int]], case: Case) -> None:
    """End them as if they had run, which would take a minute; the last remain to be settled."""
    last = upstreams[0 if FULL else -500].id
    upstream = JobRow.type == "parked"
    await case.write(
        update(JobDepRow).where(JobDepRow.depends_on_id < last).values(satisfied=True),
        update(JobRow).where(upstream).values(state="done", finished_at=JobRow.created_at),
        update(JobRow).where(upstream, JobRow.id >= last).values(settled=False),
    )


async def test_cancelling_a_container_with_many_children(case: Case) -> None:
    """They end without help, with their cause, and nothing is left to settle."""
    async with case.scheduler.workflow("large") as workflow:
        for number in range(CHILDREN):
            workflow.add(JobSpec[int]("work", {"label": str(number)}), run_after=3600)
    behind = await case.add("behind", depends_on=[after(workflow, on_failure="run")])
    worker = case.start_worker(lease_ttl=10.0)
    await case.up(worker)
    assert await case.scheduler.cancel(workflow) is Cancelled.REQUESTED
    assert await case.scheduler.wait(behind, timeout=60.0) == 1
    assert await case.states() == {"cancelled": CHILDREN + 1, "done": 1}
    causes = select(JobRow.cause, func.count()).where(JobRow.parent_id == workflow.id)
    rows = await case.rows(causes.group_by(JobRow.cause))
    assert [tuple(row) for row in rows] == [(workflow.id, CHILDREN)]
    await wait_until(partial(nothing_is_unsettled, case), 60.0, "the children are settled too")
    assert case.log.starts() == case.log.starts("behind")
    await case.check_alive(worker)


async def nothing_is_unsettled(case: Case) -> bool:
    return not await case.rows(select(JobRow.id).where(~JobRow.settled).limit(1))
