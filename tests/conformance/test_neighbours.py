"""What is one step away from a job, and jobs in the order in which people look at them."""

from __future__ import annotations

import pytest

from asyncjobq import ConfigurationError, JobNotFoundError
from conformance.kit import Jobs
from conformance.steps import ids_of, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestNeighbours:
    async def test_are_named(self, jobs: Jobs) -> None:
        first = await jobs.enqueue()
        async with jobs.scheduler.workflow("all") as workflow:
            one = workflow.add(spec(), depends_on=[first])
            two = workflow.add(spec(), depends_on=[one])
            workflow.add(spec(), depends_on=[two])
        around = await jobs.scheduler.neighbours(one)
        assert around.parent is not None
        assert around.parent.id == workflow.id
        assert (ids_of(around.upstreams), ids_of(around.dependants)) == ([first.id], [two.id])
        assert (around.children, around.cut) == ((), False)
        whole = await jobs.scheduler.neighbours(workflow.id)
        assert (whole.parent, len(whole.children)) == (None, 3)

    async def test_are_bounded(self, jobs: Jobs) -> None:
        first = await jobs.enqueue()
        for _ in range(4):
            await jobs.enqueue(depends_on=[first])
        around = await jobs.scheduler.neighbours(first, limit=3)
        assert (len(around.dependants), around.cut) == (3, True)
        around = await jobs.scheduler.neighbours(first, limit=4)
        assert (len(around.dependants), around.cut) == (4, False)
        assert (await jobs.scheduler.neighbours(first, limit=0)).cut

    async def test_of_none(self, jobs: Jobs) -> None:
        with pytest.raises(JobNotFoundError):
            await jobs.scheduler.neighbours(12345)
        with pytest.raises(ConfigurationError, match="limit must be an int"):
            await jobs.scheduler.neighbours(1, limit=-1)


async def test_the_newest_jobs_come_first_page_by_page(jobs: Jobs) -> None:
    ids = ids_of(await jobs.enqueue_many(5))[::-1]
    find = jobs.scheduler.find
    assert ids_of(await find(newest=True)) == ids
    assert ids_of(await find(newest=True, limit=2)) == ids[:2]
    assert ids_of(await find(newest=True, limit=2, after=ids[1])) == ids[2:4]
    assert ids_of(await find(newest=True, state="done")) == []
