"""Cancelling jobs and containers: what is below, and what is added meanwhile, ends with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import Cancelled, JobContext, JobNotFoundError, ParentError, State, after
from conformance.steps import failed, spec
from graphs.kit import Graphs, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, WAITING = State.BLOCKED, State.READY, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


class TestAnswer:
    async def test_says_what_happened(self, graphs: Graphs) -> None:
        running = await graphs.leased()
        ready, scheduled = await graphs.enqueue(), await graphs.enqueue(run_after=60.0)
        blocked = await graphs.enqueue(depends_on=[ready])
        wf = workflow()
        wf.add(spec(), run_after=60.0)
        await graphs.write(wf)
        cancel = graphs.scheduler.cancel
        for job in (blocked, ready, scheduled):
            assert await cancel(job) is Cancelled.CANCELLED
            assert await cancel(job) is Cancelled.ENDED
        for job in (running.lease.job_id, wf):
            assert await cancel(job) is Cancelled.REQUESTED
            assert await cancel(job) is Cancelled.REQUESTED
        await graphs.settle()
        assert await cancel(wf) is Cancelled.ENDED
        with pytest.raises(JobNotFoundError):
            await cancel(10**12)

    async def test_of_a_failed_job_leaves_it_failed(self, graphs: Graphs) -> None:
        bad = await graphs.enqueue()
        await graphs.run(bad)
        assert await graphs.cancel(bad) is Cancelled.ENDED
        assert await graphs.state(bad) == FAILED


class TestOneJob:
    async def test_takes_what_depends_on_it_along(self, graphs: Graphs) -> None:
        job = await graphs.enqueue()
        second = await graphs.enqueue(depends_on=[job])
        third = await graphs.enqueue(depends_on=[second])
        anyway = await graphs.enqueue(depends_on=[after(job, on_failure="run")])
        await graphs.cancel(job)
        assert await graphs.why(job) == (CANCELLED, None)
        assert await graphs.why(second) == (CANCELLED, job.id)
        assert await graphs.why(third) == (CANCELLED, second.id)
        assert await graphs.state(anyway) == READY

    async def test_that_runs_is_told_and_may_still_end_well(self, graphs: Graphs) -> None:
        job = await graphs.leased()
        behind = await graphs.enqueue(depends_on=[job.lease.job_id])
        await graphs.cancel(job)
        assert (await graphs.renew(job)).cancel_requested == {job.lease}
        assert await graphs.state(behind) == BLOCKED
        await graphs.end(job)
        assert await graphs.states(job, behind) == [DONE, READY]

    async def test_that_was_to_be_run_again_is_not(self, graphs: Graphs) -> None:
        job = await graphs.leased()
        await graphs.cancel(job)
        await graphs.end(job, outcome=failed(retry_after=0.0))
        assert await graphs.state(job) == CANCELLED

    async def test_in_a_transaction_that_is_rolled_back_does_nothing(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = workflow()
        inside = wf.add(spec())
        await graphs.write(wf)
        job = await graphs.enqueue()
        for one in (job, wf):
            await graphs.scheduler.cancel(one, session=session)
        await session.rollback()
        await graphs.settle()
        assert await graphs.states(job, wf, inside) == [READY, WAITING, READY]
        await graphs.scheduler.cancel(wf, session=session)
        await session.commit()
        await graphs.settle()
        assert await graphs.states(wf, inside) == [CANCELLED, CANCELLED]


async def deep_workflow(graphs: Graphs, **options: Any) -> tuple[Any, list[Any]]:
    """Write containers in containers with jobs of all sorts; return the outermost, and the rest."""
    wf = workflow(**options)
    above: Any = wf
    rest = []
    for level in range(3):
        above = above.container(f"level {level}")
        first = above.add(spec())
        rest += [above, first, above.add(spec(), depends_on=[first])]
        rest += [above.add(spec(), run_after=60.0), above.container("gated", depends_on=[first])]
        rest.append(rest[-1].add(spec()))
    await graphs.write(wf)
    return wf, rest


class TestContainer:
    async def test_takes_all_that_is_below_along(self, graphs: Graphs) -> None:
        wf, rest = await deep_workflow(graphs)
        follower = await graphs.enqueue(depends_on=[wf])
        await graphs.settle()
        await graphs.cancel(wf)
        assert await graphs.states(wf, *rest) == [CANCELLED] * (len(rest) + 1)
        assert await graphs.why(wf) == (CANCELLED, None)
        assert await graphs.why(follower) == (CANCELLED, wf.id)
        await graphs.assert_settled()

    async def test_before_anything_of_it_is_settled(self, graphs: Graphs) -> None:
        wf, rest = await deep_workflow(graphs)
        await graphs.cancel(wf)
        assert await graphs.states(wf, *rest) == [CANCELLED] * (len(rest) + 1)

    async def test_that_is_not_open_yet_ends_at_once_too(self, graphs: Graphs) -> None:
        gate = await graphs.enqueue(run_after=3600.0)
        wf, rest = await deep_workflow(graphs, depends_on=[gate])
        await graphs.settle()
        assert await graphs.state(wf) == BLOCKED
        assert await graphs.cancel(wf) is Cancelled.REQUESTED
        assert await graphs.states(wf, *rest) == [CANCELLED] * (len(rest) + 1)
        assert await graphs.state(gate) == State.SCHEDULED

    async def test_that_is_empty_and_not_open_yet_ends_at_once(self, graphs: Graphs) -> None:
        gate = await graphs.enqueue()
        wf = await graphs.write(workflow(depends_on=[gate]))
        assert await graphs.cancel(wf) is Cancelled.CANCELLED
        assert await graphs.state(wf) == CANCELLED

    async def test_waits_for_what_runs_in_it(self, graphs: Graphs) -> None:
        wf = workflow()
        running = wf.container("inner").add(spec())
        behind = wf.add(spec(), depends_on=[running])
        await graphs.write(wf)
        claimed = (await graphs.start())[running.id]
        await graphs.cancel(wf)
        assert await graphs.states(wf, behind) == [WAITING, CANCELLED]
        await graphs.end(claimed)
        assert await graphs.states(running, wf) == [DONE, CANCELLED]

    async def test_leaves_what_is_done_in_it(self, graphs: Graphs) -> None:
        wf = workflow()
        first = wf.add(spec())
        second = wf.add(spec(), depends_on=[first])
        await graphs.write(wf)
        await graphs.run()
        await graphs.cancel(wf)
        assert await graphs.states(first, second, wf) == [DONE, CANCELLED, CANCELLED]

    async def test_that_is_inside_another_makes_that_fail(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        inner.add(spec())
        other = wf.add(spec())
        await graphs.write(wf)
        await graphs.settle()
        await graphs.cancel(inner)
        assert await graphs.states(inner, wf, other) == [CANCELLED, WAITING, READY]
        await graphs.run()
        assert await graphs.why(wf) == (FAILED, inner.id)


class TestGrowing:
    async def test_tree_ends_and_starts_nothing_after_its_end(self, graphs: Graphs) -> None:
        """Each job adds two children and two jobs to the container, for as long as it may."""
        scheduler = graphs.scheduler
        started: list[int] = []
        grown = asyncio.Event()
        refused = 0

        @scheduler.handler(max_attempts=1)
        async def grow(ctx: JobContext, into: int) -> None:
            nonlocal refused
            started.append(ctx.job_id)
            if len(started) >= 20:
                grown.set()
            try:
                for _ in range(2):
                    await ctx.add_child(grow.job(into))
                    await ctx.enqueue(grow.job(into), parent=into)
            except ParentError:
                refused += 1

        async with graphs.limited_time(30):
            async with scheduler.serving():
                async with scheduler.workflow("growing") as wf:
                    pass_on = wf.container("inner")
                    pass_on.add(spec(), run_after=3600.0)
                await scheduler.enqueue(grow.job(pass_on.id), parent=pass_on)
                await grown.wait()
                assert await scheduler.cancel(wf) is Cancelled.REQUESTED
                while await graphs.state(wf) != CANCELLED:
                    await asyncio.sleep(0.01)
                after_the_end = len(started)
            await scheduler.drain()
        assert len(started) == after_the_end
        assert await graphs.open() == []
        assert await graphs.state(pass_on) == CANCELLED
        await graphs.assert_settled()

    async def test_of_a_running_parent_whose_handler_returns_normally(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        await graphs.cancel(parent)
        await graphs.end(parent)
        assert await graphs.states(parent, child) == [DONE, CANCELLED]
        assert await graphs.start() == {}


async def test_a_handler_that_was_cancelled_ends_its_container(graphs: Graphs) -> None:
    scheduler = graphs.scheduler
    running, stopped = asyncio.Event(), asyncio.Event()

    @scheduler.handler
    async def work() -> None:
        running.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    quick = graphs.another(handlers=[scheduler._registry()], lease_ttl=1.0, poll_interval=0.05)
    async with graphs.limited_time(), quick.serving():
        async with quick.workflow("running") as wf:
            job = wf.add(work.job())
        await running.wait()
        await quick.cancel(wf)
        await stopped.wait()
        while await graphs.state(wf) != CANCELLED:
            await asyncio.sleep(0.01)
    assert await graphs.state(job) == CANCELLED
