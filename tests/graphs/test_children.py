"""Children of running jobs: added under the lease, named by keys, waited for by their parent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import CycleError, Job, JobContext, ParentError, State, constant
from asyncjobq.control import Cancelled
from asyncjobq.lease import Claimed
from conformance.steps import TTL, failed, spec, succeeded
from graphs.kit import Graphs, adding, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, LEASED, WAITING = State.BLOCKED, State.READY, State.LEASED, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


async def children_of(graphs: Graphs, parent: Any) -> list[Job[Any]]:
    found = await graphs.scheduler.find(limit=1000)
    return [job for job in found if job.parent_id == parent.id]


class TestParent:
    async def test_waits_for_its_children_and_takes_its_own_result(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        follower = await graphs.enqueue(depends_on=[parent.lease.job_id])
        child = await graphs.add_child(parent)
        await graphs.end(parent, outcome=succeeded({"own": 1}))
        row = await graphs.row(parent)
        assert (row.state, row.in_flight, row.lease_owner) == (WAITING, False, None)
        assert row.finished_at is None
        assert await graphs.states(child, follower) == [READY, BLOCKED]
        assert await graphs.run() == {child.id}
        assert (await graphs.row(parent)).result == {"own": 1}
        assert await graphs.states(parent, child, follower) == [DONE, DONE, READY]

    async def test_ends_at_once_if_its_children_have(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        assert await graphs.run() == {child.id}
        await graphs.finish(parent)
        assert await graphs.state(parent) == DONE

    async def test_does_not_fail_with_a_child(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        bad = await graphs.add_child(parent)
        behind = await graphs.add_child(parent, depends_on=[bad])
        await graphs.end(parent)
        await graphs.run_to_the_end(bad)
        assert await graphs.states(bad, behind, parent) == [FAILED, CANCELLED, DONE]

    async def test_fails_by_itself_after_its_children(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        await graphs.end(parent, outcome=failed("its own error"))
        assert await graphs.state(parent) == WAITING
        await graphs.run_to_the_end()
        row = await graphs.row(parent)
        assert (row.state, row.error, row.cause) == (FAILED, "its own error", None)
        assert await graphs.state(child) == DONE

    async def test_waits_for_grandchildren(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        await graphs.end(parent)
        claimed = await graphs.claim_one()
        grandchild = await graphs.add_child(claimed)
        await graphs.end(claimed)
        assert await graphs.states(parent, child, grandchild) == [WAITING, WAITING, READY]
        assert await graphs.run() == {grandchild.id}
        assert await graphs.states(parent, child) == [DONE, DONE]

    async def test_in_a_container_holds_that_open(self, graphs: Graphs) -> None:
        wf = workflow()
        wf.add(spec())
        await graphs.write(wf)
        parent = await graphs.claim_one()
        child = await graphs.add_child(parent)
        await graphs.end(parent)
        assert await graphs.states(wf, child) == [WAITING, READY]
        assert await graphs.scheduler.progress(wf) == {WAITING: 1, READY: 1}
        await graphs.run()
        assert await graphs.states(wf, parent) == [DONE, DONE]

    async def test_that_fails_for_good_after_a_child_of_an_earlier_attempt(
        self, graphs: Graphs
    ) -> None:
        parent = await graphs.leased(max_attempts=1)
        child = await graphs.add_child(parent)
        graphs.later(TTL + 1)
        await graphs.reclaim()
        assert await graphs.state(parent) == WAITING
        await graphs.run_to_the_end()
        row = await graphs.row(parent)
        assert row.state == FAILED
        assert "worker was lost" in row.error
        assert await graphs.state(child) == DONE


class TestOrder:
    async def test_of_siblings_is_by_their_edges(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        first = await graphs.add_child(parent)
        second = await graphs.add_child(parent, depends_on=[first])
        outside = await graphs.enqueue()
        third = await graphs.add_child(parent, depends_on=[second, outside])
        assert await graphs.run() == {first.id, outside.id}
        assert await graphs.run() == {second.id}
        assert await graphs.run() == {third.id}

    async def test_children_run_while_their_parent_does(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        assert await graphs.run() == {child.id}
        assert await graphs.states(parent, child) == [LEASED, DONE]

    async def test_one_that_would_wait_for_itself_is_refused(self, graphs: Graphs) -> None:
        wf = workflow()
        wf.add(spec())
        await graphs.write(wf)
        behind = await graphs.enqueue(depends_on=[wf])
        parent = await graphs.claim_one()
        number = parent.lease.job_id
        for upstream, path in ((number, [number]), (wf.id, [wf.id]), (behind, [behind.id, wf.id])):
            with pytest.raises(CycleError) as refused:
                await graphs.add_child(parent, depends_on=[upstream])
            assert refused.value.path[1:] == [str(job) for job in path]
        assert await children_of(graphs, await graphs.row(parent)) == []


async def attempts(graphs: Graphs, count: int) -> list[Claimed]:
    """Lease a job, lose it, and lease it again."""
    held = [await graphs.leased()]
    while len(held) < count:
        graphs.later(TTL + 1)
        await graphs.reclaim()
        number = held[0].lease.job_id
        held.append((await graphs.start())[number])
    return held


class TestKey:
    async def test_names_one_child_over_all_attempts(self, graphs: Graphs) -> None:
        first = await graphs.leased()
        made = [await graphs.add_child(first, key) for key in ("a", "b", "a")]
        assert made[0].id == made[2].id != made[1].id
        assert await graphs.run() == {made[0].id, made[1].id}
        graphs.later(TTL + 1)
        await graphs.reclaim()
        second = await graphs.claim_one()
        again = [await graphs.add_child(second, key) for key in ("b", "c", "a")]
        assert [job.id for job in again] == [made[1].id, again[1].id, made[0].id]
        assert again[0].state == DONE
        assert again[0].result == 1
        assert len(await children_of(graphs, await graphs.row(second))) == 3

    async def test_is_its_parents_own(self, graphs: Graphs) -> None:
        one, other = await graphs.leased(), await graphs.leased()
        assert (await graphs.add_child(one, "a")).id != (await graphs.add_child(other, "a")).id

    @pytest.mark.parametrize(("key", "other"), [("a", "A"), ("a", "a "), ("é", "e"), ("", " ")])
    async def test_is_compared_byte_for_byte(self, graphs: Graphs, key: str, other: str) -> None:
        parent = await graphs.leased()
        assert (await graphs.add_child(parent, key)).id != (
            await graphs.add_child(parent, other)
        ).id

    async def test_without_one_each_call_adds_a_child(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        assert (await graphs.add_child(parent)).id != (await graphs.add_child(parent)).id

    async def test_of_a_child_that_is_open_holds_a_parent_that_runs_again(
        self, graphs: Graphs
    ) -> None:
        first, second = await attempts(graphs, 2)
        child = await graphs.add_child(second, "a")
        graphs.later(TTL + 1)
        await graphs.reclaim()
        assert await graphs.states(second, child) == [READY, BLOCKED]
        claimed = await graphs.start()
        third = claimed.pop(first.lease.job_id)
        assert (await graphs.add_child(third, "a")).id == child.id
        await graphs.end(third)
        assert await graphs.state(third) == WAITING
        await graphs.end(*claimed.values())
        assert await graphs.states(third, child) == [DONE, DONE]


class TestLostLease:
    async def test_adds_no_child(self, graphs: Graphs) -> None:
        first, second = await attempts(graphs, 2)
        for key in (None, "a"):
            with pytest.raises(ParentError, match="lease was lost"):
                await graphs.add_child(first, key)
        assert (await graphs.add_child(second)).parent_id == first.lease.job_id

    async def test_after_the_end_adds_no_child(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        await graphs.finish(parent)
        with pytest.raises(ParentError):
            await graphs.add_child(parent)


class TestCancel:
    async def test_of_the_parent_cancels_its_children(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        first = await graphs.add_child(parent)
        running = (await graphs.start())[first.id]
        second = await graphs.add_child(parent)
        assert await graphs.cancel(parent) is Cancelled.REQUESTED
        assert await graphs.why(second) == (CANCELLED, parent.lease.job_id)
        told = (await graphs.renew(parent, running)).cancel_requested
        assert told == {parent.lease, running.lease}
        with pytest.raises(ParentError, match="being cancelled"):
            await graphs.add_child(parent)
        await graphs.end(parent)
        assert await graphs.state(parent) == WAITING
        await graphs.end(running)
        assert await graphs.states(parent, first) == [CANCELLED, DONE]
        await graphs.assert_settled()

    async def test_of_a_parent_that_was_taken_back_starts_it_no_more(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        await graphs.add_child(parent)
        running = (await graphs.start()).popitem()[1]
        graphs.later(TTL - 1)
        await graphs.renew(running)
        graphs.later(TTL - 1)
        assert await graphs.reclaim() == [parent.lease.job_id]
        assert await graphs.cancel(parent) is Cancelled.REQUESTED
        assert await graphs.start() == {}
        await graphs.end(running)
        assert await graphs.states(parent, running) == [CANCELLED, DONE]


class TestInHandlers:
    async def test_a_parent_adds_children_and_they_add_theirs(self, graphs: Graphs) -> None:
        scheduler = graphs.scheduler

        @scheduler.handler
        async def leaf(number: int) -> int:
            return number

        @scheduler.handler
        async def branch(ctx: JobContext, number: int) -> int:
            first = await ctx.add_child(leaf.job(number), key="first")
            await ctx.add_child(leaf.job(number + 1), key="second")
            await ctx.add_child("leaf", {"number": first.id})
            return number

        @scheduler.handler
        def root(ctx: JobContext) -> str:
            for number in range(3):
                ctx.await_(ctx.add_child, branch.job(number * 10), key=str(number))
            return "root"

        job = await scheduler.enqueue(root.job())
        async with graphs.limited_time():
            await scheduler.drain()
        assert await scheduler.wait(job) == "root"
        assert await scheduler.progress(job) == {DONE: 12}

    async def test_a_parent_that_is_killed_runs_again_and_doubles_nothing(
        self, graphs: Graphs
    ) -> None:
        """It adds two children and is lost; the next attempt finds them and adds two more."""
        scheduler = graphs.scheduler
        added = asyncio.Event()

        @scheduler.handler
        async def leaf(number: int) -> int:
            return number

        @scheduler.handler(retry=constant(0))
        async def root(ctx: JobContext) -> int:
            for number in range(2 if ctx.attempt == 1 else 4):
                await ctx.add_child(leaf.job(number), key=str(number))
            if ctx.attempt == 1:
                added.set()
                await asyncio.sleep(60)
            return ctx.attempt

        job = await scheduler.enqueue(root.job())
        other = graphs.another(handlers=[scheduler._registry()], poll_interval=0.05)
        async with graphs.limited_time(), scheduler.serving():
            await added.wait()
            graphs.later(3600)  # its lease is over, for all that the database knows
            await graphs.reclaim()
            assert await other.wait(job) == 2
        assert await scheduler.progress(job) == {DONE: 4}

    async def test_a_child_in_a_session_is_there_when_that_commits(self, graphs: Graphs) -> None:
        scheduler = graphs.scheduler

        @scheduler.handler
        async def leaf() -> None: ...

        @scheduler.handler
        async def root(ctx: JobContext, commit: bool) -> None:
            async with ctx.session() as session:
                await ctx.add_child(leaf.job(), session=session)
                await (session.commit() if commit else session.rollback())

        jobs = [await scheduler.enqueue(root.job(commit=commit)) for commit in (True, False)]
        async with graphs.limited_time():
            await scheduler.drain()
        assert [len(await children_of(graphs, job)) for job in jobs] == [1, 0]
        assert await graphs.open() == []


@pytest.mark.requires("row_locks")
async def test_a_child_of_an_open_session_is_not_missed_by_its_parents_end(
    graphs: Graphs, session: AsyncSession
) -> None:
    """The parent ends before the child is committed: the child is cancelled, and does not wait."""
    parent = await graphs.leased()
    connection = await session.connection()
    child = await connection.run_sync(lambda sync: adding(parent)(sync, graphs.backend))
    await graphs.end(parent)
    assert await graphs.state(parent) == DONE
    await session.commit()
    await graphs.settle()
    assert await graphs.why(child) == (CANCELLED, parent.lease.job_id)
