"""Settling beside other transactions: whatever overlaps, no job waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from asyncjobq import Job, State
from asyncjobq.lease import Claimed, reclaim_once
from asyncjobq.settle import ROWS, settle_once
from conformance.kit import Jobs, assert_nothing_is_stranded
from conformance.steps import (
    TTL,
    both,
    enqueuing,
    failed,
    finishing,
    holding,
    ids_of,
    settling,
    spec,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def two_last_upstreams(jobs: Jobs) -> tuple[Claimed, Claimed, Job[Any]]:
    """Return two leased jobs and the settled one that waits for both."""
    first, second = await jobs.leased(), await jobs.leased()
    last = await jobs.enqueue(depends_on=[first.lease.job_id, second.lease.job_id])
    await jobs.settle()
    return first, second, last


@pytest.mark.requires("row_locks")
class TestOverlappingTransactions:
    async def test_two_last_upstreams_settle(self, jobs: Jobs) -> None:
        """Neither settler may take the other's upstream for open and leave it at that."""
        first, second, last = await two_last_upstreams(jobs)
        await jobs.finish(first)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(settle_once)
            await jobs.finish(second)
            await jobs.settle()
            assert await jobs.unsettled() == ids_of([first, second])
        await jobs.settle()
        assert await jobs.state(last) == State.READY
        await assert_nothing_is_stranded(jobs)

    async def test_one_settles_while_the_other_is_being_finished(self, jobs: Jobs) -> None:
        first, second, last = await two_last_upstreams(jobs)
        await jobs.finish(first)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(finishing(second))
            await jobs.settle()
            assert await jobs.state(last) == State.BLOCKED
        await jobs.settle()
        assert await jobs.state(last) == State.READY
        await assert_nothing_is_stranded(jobs)

    async def test_an_edge_is_committed_while_its_upstream_is_being_finished(
        self, jobs: Jobs
    ) -> None:
        """The upstream does not see the edge, and must not be seen as running by its settler."""
        upstream = await jobs.leased()
        dependant = spec(depends_on=[upstream.lease.job_id])
        async with jobs.limited_time(), jobs.transaction() as worker:
            async with jobs.transaction() as caller:
                (made,) = await caller(enqueuing(dependant))
                written = await worker(finishing(upstream))
                assert not written.unsettled
            await jobs.settle()
            assert await jobs.unsettled() == [made.id]
        await jobs.settle()
        assert await jobs.state(made) == State.READY
        await assert_nothing_is_stranded(jobs)

    async def test_an_edge_is_committed_after_its_upstream_was_settled(self, jobs: Jobs) -> None:
        upstream = await jobs.leased()
        async with jobs.limited_time(), jobs.transaction() as caller:
            (made,) = await caller(enqueuing(spec(depends_on=[upstream.lease.job_id])))
            await jobs.finish(upstream)
            await jobs.settle()
        await jobs.settle()
        assert await jobs.state(made) == State.READY

    async def test_a_neighbour_that_somebody_holds_is_waited_for_by_nobody(
        self, jobs: Jobs
    ) -> None:
        held = await jobs.leased()
        waiting = await jobs.enqueue(depends_on=[held.lease.job_id])
        free = await jobs.leased()
        other = await jobs.enqueue(depends_on=[free.lease.job_id])
        await jobs.finish(held, free)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(held))
            await jobs.settle()
            assert await jobs.states(waiting, other) == [State.BLOCKED, State.READY]
        await jobs.settle()
        assert await jobs.state(waiting) == State.READY

    async def test_many_neighbours_of_a_held_row_hide_no_other(self, jobs: Jobs) -> None:
        held = await jobs.leased()
        await jobs.do(enqueuing(*[spec(depends_on=[held.lease.job_id])] * (ROWS + 20)))
        free = await jobs.leased()
        other = await jobs.enqueue(depends_on=[free.lease.job_id])
        await jobs.finish(free)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(held))
            await jobs.settle()
            assert await jobs.state(other) == State.READY


@pytest.mark.requires("row_locks")
class TestAtAnyMoment:
    async def test_of_a_settling_comes_another(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            first, second, last = await two_last_upstreams(jobs)
            await jobs.finish(first, second)
            await moment.of(settle_once, meanwhile=settling)
            await jobs.settle()
            assert await jobs.state(last) == State.READY
            await assert_nothing_is_stranded(jobs)

    async def test_of_a_settling_the_other_upstream_ends_and_settles(self, jobs: Jobs) -> None:
        for end in (None, failed()):
            async for moment in jobs.moments():
                first, second, last = await two_last_upstreams(jobs)
                await jobs.finish(first)
                ending = both(finishing(second, outcome=end), settling)
                await moment.of(settle_once, meanwhile=ending)
                await jobs.settle()
                assert await jobs.state(last) == (State.CANCELLED if end else State.READY)
                await assert_nothing_is_stranded(jobs)

    async def test_of_settling_a_new_job_its_upstream_ends(self, jobs: Jobs) -> None:
        for end in (None, failed()):
            async for moment in jobs.moments():
                upstream = await jobs.leased()
                made = await jobs.enqueue(depends_on=[upstream.lease.job_id])
                ending = finishing(upstream, outcome=end)
                await moment.of(settle_once, meanwhile=ending)
                if moment.other.held:
                    await jobs.do(ending)
                await jobs.settle()
                assert await jobs.state(made) == (State.CANCELLED if end else State.READY)
                await assert_nothing_is_stranded(jobs)

    async def test_of_a_finish_an_edge_is_committed(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            upstream = await jobs.leased()
            edge = both(enqueuing(spec(depends_on=[upstream.lease.job_id])), settling)
            await moment.of(finishing(upstream), meanwhile=edge)
            (made,) = moment.other[0]
            await jobs.settle()
            assert await jobs.state(made) == State.READY
            await assert_nothing_is_stranded(jobs)

    async def test_of_an_enqueue_its_upstream_ends_and_settles(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            upstream = await jobs.leased()
            enqueue = enqueuing(spec(depends_on=[upstream.lease.job_id]))
            (made,) = await moment.of(enqueue, meanwhile=both(finishing(upstream), settling))
            await jobs.settle()
            assert await jobs.state(made) == State.READY
            await assert_nothing_is_stranded(jobs)

    async def test_of_a_settling_an_upstream_is_reclaimed_for_good(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            lost = await jobs.leased(max_attempts=1)
            made = await jobs.enqueue(depends_on=[lost.lease.job_id])
            jobs.later(TTL + 1)
            await moment.of(settle_once, meanwhile=both(reclaim_once, settling))
            await jobs.reclaim()
            await jobs.settle()
            assert await jobs.state(made) == State.CANCELLED
            await assert_nothing_is_stranded(jobs)

    async def test_of_a_reclaim_an_edge_is_committed(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            lost = await jobs.leased(max_attempts=1)
            jobs.later(TTL + 1)
            edge = both(enqueuing(spec(depends_on=[lost.lease.job_id])), settling)
            await moment.of(reclaim_once, meanwhile=edge)
            (made,) = moment.other[0]
            await jobs.settle()
            assert await jobs.state(made) == State.CANCELLED
            await assert_nothing_is_stranded(jobs)


async def test_eight_workers_settle_a_net_without_stranding_any(jobs: Jobs) -> None:
    layers: list[Sequence[Job[Any]]] = [await jobs.enqueue_many(12)]
    for _ in range(2):
        above = layers[-1]
        pairs = [(above[n], above[n - 5]) for n in range(len(above))]
        layers.append(await jobs.do(enqueuing(*(spec(depends_on=pair) for pair in pairs))))
    last = await jobs.enqueue(depends_on=layers[-1])

    async def work(owner: str) -> None:
        while await jobs.state(last) != State.DONE:
            left = [job.lease for job in await jobs.claim(3, owner)]
            while left:  # a settler may hold the row of an upstream for a moment
                left = [item.lease for item in (await jobs.finish(*left)).held]
            await jobs.settle()

    async with jobs.limited_time(60):
        await asyncio.gather(*(work(f"worker {n}") for n in range(8)))
    done = await jobs.scheduler.find(state=State.DONE)
    assert [job.attempt for job in done] == [1] * 37
    await assert_nothing_is_stranded(jobs)
