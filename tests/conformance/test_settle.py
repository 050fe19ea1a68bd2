"""The outbox: whatever ended or is new, its neighbours come to agree with it, and none strands."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from asyncjobq import Job, State, settle
from asyncjobq.settle import settle_once
from conformance.kit import Jobs, assert_nothing_is_stranded
from conformance.steps import enqueuing, failed, ids_of, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chain(jobs: Jobs, length: int) -> list[Job[Any]]:
    made = [await jobs.enqueue()]
    for _ in range(length - 1):
        made.append(await jobs.enqueue(depends_on=made[-1:]))
    return made


class TestRelease:
    async def test_after_the_only_upstream(self, jobs: Jobs) -> None:
        first, second = await chain(jobs, 2)
        await jobs.settle()
        assert await jobs.states(first, second) == [State.READY, State.BLOCKED]
        assert await jobs.run_all() == [first.id]
        assert await jobs.states(first, second) == [State.DONE, State.READY]
        await assert_nothing_is_stranded(jobs)

    async def test_after_the_last_upstream(self, jobs: Jobs) -> None:
        upstreams = [await jobs.enqueue(priority=n) for n in range(3)]
        last = await jobs.enqueue(depends_on=upstreams)
        for _ in range(3):
            assert await jobs.state(last) == State.BLOCKED
            await jobs.finish(await jobs.claim_one())
            await jobs.settle()
        assert await jobs.state(last) == State.READY

    async def test_in_every_order_of_events(self, jobs: Jobs) -> None:
        """The upstream's end, the dependant's commit and the settling of each."""
        for settle_between in (False, True):
            upstream = await jobs.leased()
            before = await jobs.enqueue(depends_on=[upstream.lease.job_id])
            if settle_between:
                await jobs.settle()
            await jobs.finish(upstream)
            between = await jobs.enqueue(depends_on=[upstream.lease.job_id])
            if settle_between:
                await jobs.settle()
            after = await jobs.enqueue(depends_on=[upstream.lease.job_id])
            await jobs.settle()
            assert await jobs.states(before, between, after) == [State.READY] * 3
            await jobs.run_all()

    async def test_to_its_due_time(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        later = await jobs.enqueue(depends_on=[upstream], run_after=60)
        past = await jobs.enqueue(depends_on=[upstream], run_after=-60)
        await jobs.run_all()
        assert await jobs.states(later, past) == [State.SCHEDULED, State.READY]
        jobs.later(61)
        await jobs.promote()
        assert await jobs.state(later) == State.READY

    async def test_to_its_due_time_by_the_clock_of_the_database(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        soon = await jobs.enqueue(depends_on=[upstream], run_after=timedelta(hours=1))
        jobs.later(7200)
        await jobs.run_all()
        assert await jobs.state(soon) == State.READY

    async def test_not_while_the_upstream_will_be_retried(self, jobs: Jobs) -> None:
        _, second = await chain(jobs, 2)
        await jobs.run_all(failed(retry_after=0.0))
        assert await jobs.state(second) == State.BLOCKED
        await jobs.run_all()
        assert await jobs.state(second) == State.READY

    async def test_across_queues_and_types(self, jobs: Jobs) -> None:
        first = await jobs.enqueue()
        second = await jobs.enqueue("other", queue="elsewhere", depends_on=[first])
        await jobs.run_all()
        assert await jobs.state(second) == State.READY

    async def test_of_a_diamond_of_depth_four(self, jobs: Jobs) -> None:
        rows = [[await jobs.enqueue()]]
        for width in (3, 3, 1):
            rows.append([await jobs.enqueue(depends_on=rows[-1]) for _ in range(width)])
        for row in rows:
            assert await jobs.run_all() == ids_of(row)
        await assert_nothing_is_stranded(jobs)


class TestFailure:
    async def test_cancels_down_the_chain_and_says_because_of_whom(self, jobs: Jobs) -> None:
        made = await chain(jobs, 5)
        await jobs.run_all(failed("no such file"))
        stored = [await jobs.scheduler.get(job) for job in made]
        assert [job.state for job in stored] == [State.FAILED] + [State.CANCELLED] * 4
        assert [job.cause for job in stored] == [None, *ids_of(made[:4])]
        assert stored[1].error == f"upstream job {made[0].id} failed"
        assert stored[2].error == f"upstream job {made[1].id} was cancelled"
        assert all(job.finished_at for job in stored)
        await assert_nothing_is_stranded(jobs)

    async def test_in_a_diamond(self, jobs: Jobs) -> None:
        top = await jobs.enqueue()
        left = await jobs.enqueue(depends_on=[top], priority=1)
        right = await jobs.enqueue(depends_on=[top], priority=2)
        bottom = await jobs.enqueue(depends_on=[left, right])
        await jobs.run_all()
        await jobs.finish(await jobs.claim_one(), outcome=failed())
        await jobs.settle()
        assert await jobs.states(left, right, bottom) == ["failed", "ready", "cancelled"]
        assert (await jobs.scheduler.get(bottom)).cause == left.id
        await jobs.run_all()
        assert await jobs.state(bottom) == State.CANCELLED
        await assert_nothing_is_stranded(jobs)

    async def test_before_the_dependant_was_enqueued(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        await jobs.run_all(failed())
        first = await jobs.enqueue(depends_on=[upstream])
        second = await jobs.enqueue(depends_on=[first])
        await jobs.settle()
        assert await jobs.states(first, second) == [State.CANCELLED] * 2
        await assert_nothing_is_stranded(jobs)

    async def test_of_a_scheduled_dependant_does_not_wait_for_its_time(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        later = await jobs.enqueue(depends_on=[upstream], run_after=3600)
        await jobs.run_all(failed())
        assert await jobs.state(later) == State.CANCELLED

    async def test_may_be_run_anyway(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        anyway = await jobs.enqueue(depends_on=[upstream])
        deps = jobs.tables.deps
        await jobs.do(lambda c, _: c.execute(update(deps).values(on_failure="run")))
        await jobs.run_all(failed())
        assert await jobs.state(anyway) == State.READY

    async def test_beside_an_upstream_that_is_done(self, jobs: Jobs) -> None:
        good, bad = await jobs.leased(), await jobs.leased()
        last = await jobs.enqueue(depends_on=[good.lease.job_id, bad.lease.job_id])
        await jobs.finish(good)
        await jobs.finish(bad, outcome=failed())
        await jobs.settle()
        assert await jobs.state(last) == State.CANCELLED
        assert (await jobs.scheduler.get(last)).cause == bad.lease.job_id


class TestBeyondOneBatch:
    @pytest.fixture(autouse=True)
    def small_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(settle, "FOLLOWERS", 40)

    async def test_many_dependants_of_one(self, jobs: Jobs) -> None:
        for end, state in ((None, State.READY), (failed(), State.CANCELLED)):
            upstream = await jobs.enqueue(priority=-1)
            made = await jobs.do(enqueuing(*[spec(depends_on=[upstream])] * 130))
            await jobs.settle()
            await jobs.finish(await jobs.claim_one(), outcome=end)
            await jobs.settle()
            assert ids_of(await jobs.scheduler.find(state=state, limit=200)) == ids_of(made)
            await assert_nothing_is_stranded(jobs)

    async def test_dependants_of_several(self, jobs: Jobs) -> None:
        upstreams = await jobs.enqueue_many(3)
        for number in range(3):
            pair = [upstreams[number], upstreams[number - 1]]
            await jobs.do(enqueuing(*[spec(depends_on=pair)] * 50))
        await jobs.run_all()
        assert len(await jobs.scheduler.find(state=State.READY, limit=200)) == 150
        await assert_nothing_is_stranded(jobs)

    async def test_many_upstreams_of_one(self, jobs: Jobs) -> None:
        upstreams = await jobs.enqueue_many(1050)
        last = await jobs.enqueue(depends_on=upstreams)
        await jobs.run_all()
        assert await jobs.state(last) == State.BLOCKED
        await jobs.run_all()
        assert await jobs.state(last) == State.READY
        await assert_nothing_is_stranded(jobs)

    async def test_many_that_end_at_once(self, jobs: Jobs) -> None:
        upstreams = await jobs.enqueue_many(settle.ROWS + 50)
        made = await jobs.do(enqueuing(*(spec(depends_on=[job]) for job in upstreams)))
        await jobs.run_all()
        assert len(await jobs.scheduler.find(state=State.READY, limit=1000)) == len(made)
        await assert_nothing_is_stranded(jobs)

    async def test_each_call_is_bounded(self, jobs: Jobs) -> None:
        for _ in range(3):
            await jobs.enqueue(depends_on=[await jobs.enqueue()])
        settled = await jobs.do(lambda c, b: settle_once(c, b, limit=2))
        assert settled.settled == 2
        assert len(await jobs.unsettled()) == 1


class TestRepeated:
    async def test_changes_nothing_more(self, jobs: Jobs) -> None:
        made = await chain(jobs, 3)
        await jobs.run_all()
        before = [await jobs.row(job) for job in made]
        assert not (await jobs.do(settle_once)).moved
        assert [await jobs.row(job) for job in made] == before

    async def test_although_everything_were_unsettled(self, jobs: Jobs) -> None:
        done, ready, blocked = await chain(jobs, 3)
        bad = await jobs.leased(priority=-1)
        cancelled = await jobs.enqueue(depends_on=[bad.lease.job_id])
        await jobs.finish(bad, outcome=failed())
        await jobs.run_all()
        leased = await jobs.claim_one()
        made: list[Any] = [done, ready, blocked, bad, cancelled]
        before = [await jobs.row(job) for job in made]
        for job in made:
            await jobs.spoil(job, settled=False)
        await jobs.settle()
        assert [await jobs.row(job) for job in made] == before
        assert leased.lease.job_id == ready.id
