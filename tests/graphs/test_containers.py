"""Containers: they hold back what is in them, and end when the last of it has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import JobCancelled, JobFailed, ParentError, State, Workflow, after
from conformance.steps import enqueuing, failed, spec
from graphs.kit import Graphs, cancelling, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, LEASED, WAITING = State.BLOCKED, State.READY, State.LEASED, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


class TestEmptyOnes:
    async def test_end_at_once_and_let_go_what_follows(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        deeper = [inner.container(f"deeper {number}") for number in range(3)]
        await graphs.write(wf)
        job = await graphs.enqueue(depends_on=[wf])
        await graphs.settle()
        assert await graphs.states(wf, inner, *deeper) == [DONE] * 5
        assert await graphs.run() == {job.id}

    async def test_among_others(self, graphs: Graphs) -> None:
        wf = workflow()
        empty = wf.container("empty")
        job = wf.add(spec(), depends_on=[empty])
        last = wf.container("last", depends_on=[job])
        await graphs.write(wf)
        assert await graphs.run() == {job.id}
        assert await graphs.states(empty, last, wf) == [DONE] * 3

    async def test_wait_for_what_they_depend_on(self, graphs: Graphs) -> None:
        first = await graphs.enqueue()
        wf = await graphs.write(workflow(depends_on=[first]))
        await graphs.settle()
        assert await graphs.state(wf) == BLOCKED
        await graphs.run()
        assert await graphs.state(wf) == DONE


class TestGate:
    async def test_holds_back_all_that_is_below(self, graphs: Graphs) -> None:
        gate, other = await graphs.enqueue(), await graphs.enqueue()
        wf = workflow(depends_on=[gate])
        inner = wf.container("inner", depends_on=[other])
        deeper = inner.container("deeper")
        direct, deep = wf.add(spec()), deeper.add(spec())
        await graphs.write(wf)
        claimed = await graphs.start()
        assert set(claimed) == {gate.id, other.id}
        await graphs.end(claimed[other.id])
        assert await graphs.states(wf, inner, deeper, direct, deep) == [BLOCKED] * 5
        await graphs.end(claimed[gate.id])
        assert await graphs.states(wf, inner, deeper) == [WAITING] * 3
        assert await graphs.states(direct, deep) == [READY] * 2

    async def test_opens_for_what_has_no_upstreams_left(self, graphs: Graphs) -> None:
        gate = await graphs.enqueue()
        wf = workflow(depends_on=[gate])
        inner = wf.container("inner")
        first = wf.add(spec())
        second = inner.add(spec(), depends_on=[first])
        later = inner.add(spec(), run_after=3600.0)
        await graphs.write(wf)
        await graphs.run()
        assert await graphs.states(first, second, later) == [READY, BLOCKED, State.SCHEDULED]
        assert await graphs.states(wf, inner) == [WAITING] * 2

    async def test_holds_back_what_is_added_before_it_opens(self, graphs: Graphs) -> None:
        gate = await graphs.enqueue()
        wf = await graphs.write(workflow(depends_on=[gate]))
        job = await graphs.enqueue(parent=wf)
        await graphs.settle()
        assert await graphs.states(wf, job) == [BLOCKED, BLOCKED]
        assert await graphs.run_to_the_end() == [gate.id, job.id]
        assert await graphs.state(wf) == DONE

    async def test_of_one_container_is_another(self, graphs: Graphs) -> None:
        wf = workflow()
        first = wf.container("first")
        jobs = [first.add(spec()) for _ in range(3)]
        second = wf.container("second", depends_on=[first])
        last = second.add(spec())
        await graphs.write(wf)
        assert await graphs.run() == {job.id for job in jobs}
        assert await graphs.run() == {last.id}
        assert await graphs.state(wf) == DONE


class TestEnd:
    async def test_is_done_if_all_in_it_is(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        job, deep = wf.add(spec()), inner.add(spec())
        await graphs.write(wf)
        claimed = await graphs.start()
        assert await graphs.states(wf, inner) == [WAITING, WAITING]
        await graphs.end(claimed[deep.id])
        assert await graphs.states(wf, inner) == [WAITING, DONE]
        await graphs.end(claimed[job.id])
        row = await graphs.row(wf)
        assert (row.state, row.error, row.cause) == (DONE, None, None)
        assert row.finished_at is not None
        assert row.attempt == 0

    async def test_is_a_failure_after_the_last_if_one_failed(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        bad, good = inner.add(spec()), wf.add(spec())
        behind = wf.add(spec(), depends_on=[inner])
        last = wf.add(spec(), depends_on=[good])
        await graphs.write(wf)
        follower = await graphs.enqueue(depends_on=[wf])
        await graphs.run(bad)
        assert await graphs.why(inner) == (FAILED, bad.id)
        assert await graphs.why(behind) == (CANCELLED, inner.id)
        assert await graphs.states(wf, last) == [WAITING, READY]
        await graphs.run()
        assert await graphs.why(wf) == (FAILED, inner.id)
        assert f"job {inner.id}" in (await graphs.row(wf)).error
        assert await graphs.why(follower) == (CANCELLED, wf.id)

    async def test_is_a_failure_if_one_was_cancelled_by_itself(self, graphs: Graphs) -> None:
        wf = workflow()
        one, other = wf.add(spec()), wf.add(spec())
        await graphs.write(wf)
        await graphs.cancel(one)
        await graphs.run_to_the_end()
        assert await graphs.state(other) == DONE
        assert await graphs.why(wf) == (FAILED, one.id)

    async def test_can_be_waited_for(self, graphs: Graphs) -> None:
        scheduler = graphs.scheduler

        @scheduler.handler(max_attempts=1)
        async def work(good: bool) -> None:
            assert good

        async with graphs.limited_time(), scheduler.serving():
            async with scheduler.workflow("good") as good:
                good.add(work.job(good=True))
                good.container("empty")
            assert await scheduler.wait(good) is None
            async with scheduler.workflow("bad") as bad:
                job = bad.add(work.job(good=False))
            with pytest.raises(JobFailed, match=f"job {job.id} in it failed"):
                await scheduler.wait(bad)
            async with scheduler.workflow("long") as long:
                long.add(work.job(good=True), run_after=3600)
            waiting = asyncio.ensure_future(scheduler.wait(long))
            await scheduler.cancel(long)
            with pytest.raises(JobCancelled):
                await waiting

    async def test_lets_go_what_was_to_run_anyway(self, graphs: Graphs) -> None:
        wf = workflow()
        bad = wf.add(spec())
        await graphs.write(wf)
        report = await graphs.enqueue(depends_on=[after(wf, on_failure="run")])
        assert await graphs.run_to_the_end(bad) == [bad.id, report.id]


class TestProgress:
    async def test_counts_the_jobs_below_by_state(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        first, bad = wf.add(spec()), inner.add(spec())
        for _ in range(3):
            inner.add(spec(), depends_on=[first])
        wf.container("empty")
        await graphs.write(wf)
        await graphs.settle()
        progress = graphs.scheduler.progress
        assert await progress(wf) == {READY: 2, BLOCKED: 3}
        await graphs.run(bad)
        await graphs.start()
        assert list((await progress(wf)).items()) == [(LEASED, 3), (DONE, 1), (FAILED, 1)]
        assert await progress(inner) == {FAILED: 1, LEASED: 3}
        assert await progress(first) == {}


def fast_workflow(depth: int) -> tuple[Workflow, Any, list[Any]]:
    """Return a workflow that fails fast, its first job, and all that is beside it and below."""
    wf = workflow(fail_fast=True)
    first = wf.add(spec())
    above: Any = wf
    rest: list[Any] = [wf.add(spec())]
    for level in range(depth):
        above = above.container(f"level {level}")
        rest.append(above)
    rest += [above.add(spec()), above.add(spec(), depends_on=[rest[0]])]
    return wf, first, rest


class TestFailFast:
    @pytest.mark.parametrize("depth", [0, 1, 3])
    async def test_cancels_all_that_has_not_started(self, graphs: Graphs, depth: int) -> None:
        wf, first, rest = fast_workflow(depth)
        await graphs.write(wf)
        await graphs.settle()
        bad = await graphs.claim_one()
        assert bad.lease.job_id == first.id
        await graphs.end(bad, outcome=failed())
        assert await graphs.states(*rest) == [CANCELLED] * len(rest)
        assert await graphs.why(wf) == (FAILED, first.id)
        await graphs.assert_settled()

    async def test_tells_what_runs_and_waits_for_it(self, graphs: Graphs) -> None:
        wf = workflow(fail_fast=True)
        bad, other = wf.add(spec()), wf.container("inner").add(spec())
        await graphs.write(wf)
        claimed = await graphs.start()
        await graphs.end(claimed[bad.id], outcome=failed())
        assert (await graphs.renew(claimed[other.id])).cancel_requested == {claimed[other.id].lease}
        assert await graphs.state(wf) == WAITING
        await graphs.end(claimed[other.id])
        assert await graphs.why(wf) == (FAILED, bad.id)
        assert await graphs.open() == []

    async def test_begins_when_a_container_in_it_fails(self, graphs: Graphs) -> None:
        wf = workflow(fail_fast=True)
        inner = wf.container("inner")
        bad, beside = inner.add(spec()), inner.add(spec())
        later = wf.add(spec(), run_after=3600.0)
        await graphs.write(wf)
        claimed = await graphs.start()
        await graphs.end(claimed[bad.id], outcome=failed())
        assert await graphs.states(inner, later) == [WAITING, State.SCHEDULED]
        await graphs.end(claimed[beside.id])
        assert await graphs.why(inner) == (FAILED, bad.id)
        assert await graphs.why(later) == (CANCELLED, wf.id)
        assert await graphs.why(wf) == (FAILED, inner.id)

    async def test_is_not_begun_by_a_cancellation(self, graphs: Graphs) -> None:
        wf = workflow(fail_fast=True)
        one, other = wf.add(spec()), wf.add(spec())
        await graphs.write(wf)
        await graphs.cancel(one)
        assert await graphs.states(wf, other) == [WAITING, READY]

    async def test_reaches_no_further_than_its_container(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner", fail_fast=True)
        bad, beside, outside = inner.add(spec()), inner.add(spec()), wf.add(spec())
        await graphs.write(wf)
        await graphs.settle()
        await graphs.do(cancelling(beside))
        await graphs.run_to_the_end(bad)
        assert await graphs.states(inner, outside, wf) == [FAILED, DONE, FAILED]

    async def test_takes_nothing_in_that_is_added_later(self, graphs: Graphs) -> None:
        wf = workflow(fail_fast=True)
        bad, running = wf.add(spec()), wf.add(spec())
        await graphs.write(wf)
        claimed = await graphs.start()
        await graphs.end(claimed[bad.id], outcome=failed())
        with pytest.raises(ParentError, match="being cancelled"):
            await graphs.enqueue(parent=wf)
        assert await graphs.state(running) == LEASED


class TestEnqueueInto:
    async def test_one_that_is_open(self, graphs: Graphs) -> None:
        wf = workflow()
        first = wf.add(spec())
        await graphs.write(wf)
        second = await graphs.enqueue(parent=wf)
        third = await graphs.enqueue(parent=wf.id, depends_on=[first, second])
        assert await graphs.run() == {first.id, second.id}
        assert await graphs.state(wf) == WAITING
        assert await graphs.run() == {third.id}
        assert await graphs.state(wf) == DONE

    async def test_one_whose_last_child_has_just_ended(self, graphs: Graphs) -> None:
        wf = workflow()
        first = wf.add(spec())
        await graphs.write(wf)
        claimed = await graphs.start()
        await graphs.finish(claimed[first.id])
        second = await graphs.enqueue(parent=wf)
        await graphs.settle()
        assert await graphs.states(wf, second) == [WAITING, READY]

    async def test_one_that_is_over_is_refused(self, graphs: Graphs) -> None:
        done, cancelled = workflow(), workflow()
        cancelled.add(spec())
        await graphs.write(done)
        await graphs.write(cancelled)
        await graphs.settle()
        await graphs.cancel(cancelled)
        for wf, state in ((done, "done"), (cancelled, "cancelled")):
            with pytest.raises(ParentError, match=f"{wf.id} is {state}"):
                await graphs.enqueue(parent=wf)

    async def test_one_that_is_being_cancelled_is_refused(self, graphs: Graphs) -> None:
        wf = workflow()
        wf.add(spec())
        await graphs.write(wf)
        await graphs.start()
        await graphs.cancel(wf)
        with pytest.raises(ParentError, match="being cancelled"):
            await graphs.enqueue(parent=wf)

    async def test_a_job_is_refused(self, graphs: Graphs) -> None:
        job = await graphs.enqueue()
        with pytest.raises(ParentError, match="add_child"):
            await graphs.enqueue(parent=job)

    async def test_what_does_not_exist_is_refused(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        async with graphs.scheduler.workflow("gone", session=session) as wf:
            wf.add(spec())
        await session.rollback()
        for parent in (wf, 10**12):
            with pytest.raises(ParentError, match="does not exist"):
                await graphs.enqueue(parent=parent)

    async def test_many_in_one_call(self, graphs: Graphs) -> None:
        first = await graphs.write(workflow())
        second = await graphs.write(workflow(depends_on=[first]))
        made = await graphs.do(enqueuing(spec(parent=first), spec(parent=second), spec()))
        assert await graphs.run() == {made[0].id, made[2].id}
        assert await graphs.run() == {made[1].id}
        assert await graphs.states(first, second) == [DONE, DONE]
