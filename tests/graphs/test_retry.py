"""Running again what failed: it revives exactly what the failure had cancelled."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import InvalidJobError, JobNotFoundError, State, after
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.settle import settle_once
from conformance.steps import failed, spec
from graphs.kit import Graphs, cancelling, retrying, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, WAITING = State.BLOCKED, State.READY, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


class TestOneJob:
    async def test_runs_as_if_it_were_new(self, graphs: Graphs) -> None:
        job = await graphs.enqueue(max_attempts=1)
        await graphs.run(job)
        await graphs.retry(job)
        row = await graphs.row(job)
        assert (row.state, row.attempt, row.error, row.finished_at) == (READY, 0, None, None)
        assert row.lease_token == 1
        claimed = await graphs.claim_one()
        assert (claimed.attempt, claimed.lease.token) == (1, 2)
        await graphs.end(claimed)
        assert await graphs.state(job) == DONE

    async def test_that_was_cancelled_runs_too(self, graphs: Graphs) -> None:
        job = await graphs.enqueue()
        await graphs.cancel(job)
        await graphs.retry(job)
        assert await graphs.run() == {job.id}

    async def test_is_refused_unless_it_failed_or_was_cancelled(self, graphs: Graphs) -> None:
        done, running = await graphs.leased(), await graphs.leased()
        await graphs.finish(done)
        ready = await graphs.enqueue()
        wf = workflow()
        wf.add(spec())
        await graphs.write(wf)
        for job in (done, running, ready, wf):
            with pytest.raises(InvalidJobError, match="only failed and cancelled"):
                await graphs.retry(job)
        with pytest.raises(JobNotFoundError):
            await graphs.retry(10**12)

    async def test_in_a_transaction_that_is_rolled_back_does_nothing(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        job = await graphs.enqueue()
        behind = await graphs.enqueue(depends_on=[job])
        await graphs.run(job)
        await graphs.scheduler.retry(job, session=session)
        await session.rollback()
        await graphs.settle()
        assert await graphs.states(job, behind) == [FAILED, CANCELLED]
        await graphs.scheduler.retry(job, session=session)
        await session.commit()
        assert await graphs.run_to_the_end() == [job.id, behind.id]


class TestRevival:
    async def test_of_a_chain(self, graphs: Graphs) -> None:
        chain = [await graphs.enqueue()]
        for _ in range(5):
            chain.append(await graphs.enqueue(depends_on=chain[-1:]))
        await graphs.run_to_the_end(chain[2])
        assert await graphs.states(*chain) == [DONE] * 2 + [FAILED] + [CANCELLED] * 3
        await graphs.retry(chain[2])
        assert await graphs.states(*chain) == [DONE] * 2 + [READY] + [BLOCKED] * 3
        assert await graphs.run_to_the_end() == [job.id for job in chain[2:]]

    async def test_of_a_diamond_with_two_failures_waits_for_both(self, graphs: Graphs) -> None:
        top = await graphs.enqueue()
        left, right = [await graphs.enqueue(depends_on=[top]) for _ in range(2)]
        bottom = await graphs.enqueue(depends_on=[left, right])
        await graphs.run_to_the_end(left, right)
        assert await graphs.state(bottom) == CANCELLED
        for one, other in ((left, right), (right, left)):
            await graphs.retry(one)
            assert await graphs.states(one, other, bottom) in (
                [READY, FAILED, CANCELLED],
                [READY, DONE, BLOCKED],
            )
            await graphs.run()
        assert await graphs.run_to_the_end() == [bottom.id]
        assert await graphs.state(bottom) == DONE

    async def test_leaves_alone_what_others_cancelled(self, graphs: Graphs) -> None:
        bad, worse = await graphs.enqueue(), await graphs.enqueue()
        ours = await graphs.enqueue(depends_on=[bad])
        theirs = await graphs.enqueue(depends_on=[worse])
        before = await graphs.enqueue(depends_on=[bad])
        below = await graphs.enqueue(depends_on=[before])
        unrelated = await graphs.enqueue()
        await graphs.cancel(before)
        await graphs.cancel(unrelated)
        await graphs.run(bad, worse)
        await graphs.retry(bad)
        assert await graphs.states(bad, ours, theirs) == [READY, BLOCKED, CANCELLED]
        assert await graphs.states(before, below, unrelated) == [CANCELLED] * 3
        assert await graphs.run_to_the_end() == [bad.id, ours.id]

    async def test_runs_nothing_again_that_ran_anyway(self, graphs: Graphs) -> None:
        bad = await graphs.enqueue()
        report = await graphs.enqueue(depends_on=[after(bad, on_failure="run")])
        assert await graphs.run_to_the_end(bad) == [bad.id, report.id]
        await graphs.retry(bad)
        assert await graphs.run_to_the_end() == [bad.id]
        assert await graphs.state(report) == DONE

    async def test_is_undone_by_another_failure(self, graphs: Graphs) -> None:
        bad = await graphs.enqueue()
        behind = await graphs.enqueue(depends_on=[bad])
        for _ in range(3):
            await graphs.run(bad)
            assert await graphs.why(behind) == (CANCELLED, bad.id)
            await graphs.retry(bad)
        assert await graphs.run_to_the_end() == [bad.id, behind.id]

    async def test_of_what_the_failure_has_yet_to_cancel(self, graphs: Graphs) -> None:
        """The retry comes before the failure is settled: nothing was cancelled at all."""
        bad = await graphs.leased()
        behind = await graphs.enqueue(depends_on=[bad.lease.job_id])
        await graphs.finish(bad, outcome=failed())
        await graphs.retry(bad)
        assert await graphs.states(bad, behind) == [READY, BLOCKED]

    async def test_of_a_container_that_is_still_being_cancelled(self, graphs: Graphs) -> None:
        """It has been told, but what is in it has not: it is revived once it has ended."""
        bad = await graphs.leased()
        wf = workflow(depends_on=[bad.lease.job_id])
        inside = wf.add(spec())
        await graphs.write(wf)
        await graphs.settle()
        await graphs.finish(bad, outcome=failed())
        await graphs.do(settle_once)
        row = await graphs.row(wf)
        assert (row.state, row.cancel_requested) == (WAITING, True)
        await graphs.retry(bad)
        assert await graphs.states(bad, wf, inside) == [READY, BLOCKED, BLOCKED]
        assert await graphs.run_to_the_end() == [bad.lease.job_id, inside.id]

    async def test_leaves_it_cancelled_while_the_upstream_is(self, graphs: Graphs) -> None:
        bad = await graphs.enqueue()
        behind = await graphs.enqueue(depends_on=[bad])
        await graphs.run(bad)
        await graphs.retry(behind)
        assert await graphs.why(behind) == (CANCELLED, bad.id)
        await graphs.retry(bad)
        assert await graphs.run_to_the_end() == [bad.id, behind.id]

    async def test_waits_for_an_upstream_that_it_was_to_run_without(self, graphs: Graphs) -> None:
        """Both were cancelled by the same failure; both are revived, and keep their order."""
        bad = await graphs.enqueue()
        first = await graphs.enqueue(depends_on=[bad])
        second = await graphs.enqueue(depends_on=[bad, after(first, on_failure="run")])
        await graphs.run(bad)
        assert await graphs.states(first, second) == [CANCELLED, CANCELLED]
        await graphs.retry(bad)
        assert await graphs.run_to_the_end() == [bad.id, first.id, second.id]


class TestInAContainer:
    async def test_opens_it_and_revives_what_followed(self, graphs: Graphs) -> None:
        outer = workflow()
        wf = outer.container("inner")
        bad, good = wf.add(spec()), wf.add(spec())
        behind = wf.add(spec(), depends_on=[bad])
        await graphs.write(outer)
        follower = await graphs.enqueue(depends_on=[outer])
        await graphs.run_to_the_end(bad)
        assert await graphs.states(outer, wf, follower) == [FAILED, FAILED, CANCELLED]
        await graphs.retry(bad)
        assert await graphs.states(outer, wf, bad) == [WAITING, WAITING, READY]
        assert await graphs.states(behind, follower, good) == [BLOCKED, BLOCKED, DONE]
        assert await graphs.run_to_the_end() == [bad.id, behind.id, follower.id]
        assert await graphs.states(outer, wf) == [DONE, DONE]

    async def test_that_fails_fast_revives_the_rest_of_it(self, graphs: Graphs) -> None:
        wf = workflow(fail_fast=True)
        bad = wf.add(spec())
        later = wf.add(spec(), run_after=3600.0)
        deep, running = (wf.container("inner").add(spec()) for _ in range(2))
        await graphs.write(wf)
        await graphs.settle()
        claimed = await graphs.start()
        await graphs.end(claimed[bad.id], outcome=failed())
        told = Outcome(Ending.CANCELLED, error="cancelled on request")
        await graphs.end(claimed[deep.id], claimed[running.id], outcome=told)
        assert await graphs.states(wf, later, deep) == [FAILED, CANCELLED, CANCELLED]
        await graphs.retry(bad)
        assert await graphs.states(wf, bad, deep, running) == [WAITING, READY, READY, READY]
        assert await graphs.state(later) == State.SCHEDULED

    async def test_that_was_never_open_does_not_open_it(self, graphs: Graphs) -> None:
        """Nor does it start what the container's upstream, which failed, holds back."""
        bad = await graphs.enqueue()
        wf = workflow(depends_on=[bad])
        job = wf.container("inner").add(spec())
        await graphs.write(wf)
        await graphs.run(bad)
        assert await graphs.states(wf, job) == [CANCELLED, CANCELLED]
        await graphs.retry(job)
        assert await graphs.start() == {}
        assert await graphs.why(wf) == (CANCELLED, bad.id)
        await graphs.retry(bad)
        assert await graphs.run_to_the_end() == [bad.id, job.id]

    async def test_that_waits_for_its_turn_does_not_open_it(self, graphs: Graphs) -> None:
        gate = await graphs.enqueue(run_after=3600.0)
        wf = workflow(depends_on=[gate])
        inner = wf.container("inner")
        job = inner.add(spec())
        await graphs.write(wf)
        await graphs.settle()
        await graphs.cancel(inner)
        assert await graphs.states(inner, job) == [CANCELLED, CANCELLED]
        await graphs.retry(job)
        assert await graphs.start() == {}
        assert await graphs.states(wf, inner, job) == [BLOCKED] * 3


class TestContainer:
    async def test_runs_again_what_did_not_succeed_in_it(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        bad, good = inner.add(spec()), inner.add(spec())
        behind, cancelled = wf.add(spec(), depends_on=[bad]), wf.add(spec())
        after_good = wf.add(spec(), depends_on=[good])
        await graphs.write(wf)
        await graphs.do(cancelling(cancelled))
        await graphs.run_to_the_end(bad)
        assert await graphs.states(wf, inner) == [FAILED, FAILED]
        await graphs.retry(wf)
        assert await graphs.states(wf, inner, bad, cancelled) == [WAITING, WAITING, READY, READY]
        assert await graphs.states(good, after_good, behind) == [DONE, DONE, BLOCKED]
        assert await graphs.run_to_the_end() == [bad.id, cancelled.id, behind.id]
        assert await graphs.states(wf, inner) == [DONE, DONE]
        await graphs.assert_settled()

    async def test_that_was_cancelled_runs_on(self, graphs: Graphs) -> None:
        wf = workflow()
        first = wf.add(spec())
        second = wf.container("inner", depends_on=[first]).add(spec())
        await graphs.write(wf)
        await graphs.run()
        await graphs.cancel(wf)
        await graphs.retry(wf)
        assert await graphs.run_to_the_end() == [second.id]
        assert await graphs.states(wf, first) == [DONE, DONE]

    async def test_that_is_over_takes_new_jobs_then(self, graphs: Graphs) -> None:
        wf = workflow()
        bad = wf.add(spec())
        await graphs.write(wf)
        await graphs.run(bad)
        await graphs.do(retrying(wf))
        job = await graphs.enqueue(parent=wf, depends_on=[bad])
        assert await graphs.run_to_the_end() == [bad.id, job.id]


class TestParentsAndChildren:
    async def test_a_child_that_failed_opens_its_parent(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        bad = await graphs.add_child(parent)
        behind = await graphs.add_child(parent, depends_on=[bad])
        await graphs.end(parent)
        await graphs.run_to_the_end(bad)
        assert await graphs.states(parent, bad, behind) == [DONE, FAILED, CANCELLED]
        await graphs.retry(bad)
        assert await graphs.states(parent, bad, behind) == [WAITING, READY, BLOCKED]
        assert await graphs.run_to_the_end() == [bad.id, behind.id]
        assert (await graphs.row(parent)).result == 1
        assert await graphs.state(parent) == DONE

    async def test_a_parent_that_failed_finds_its_children(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent, "a")
        await graphs.end(parent, outcome=failed())
        await graphs.run_to_the_end()
        await graphs.retry(parent)
        assert await graphs.states(parent, child) == [READY, DONE]
        again = await graphs.claim_one()
        assert (await graphs.add_child(again, "a")).id == child.id
        await graphs.end(again)
        assert await graphs.state(parent) == DONE

    async def test_a_parent_that_was_cancelled_revives_its_children(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child: Any = await graphs.add_child(parent, "a")
        await graphs.cancel(parent)
        await graphs.end(parent, outcome=Outcome(Ending.CANCELLED, error="cancelled on request"))
        assert await graphs.states(parent, child) == [CANCELLED, CANCELLED]
        await graphs.retry(parent)
        claimed = await graphs.start()
        assert set(claimed) == {parent.lease.job_id, child.id}
        await graphs.end(*claimed.values())
        assert await graphs.states(parent, child) == [DONE, DONE]
