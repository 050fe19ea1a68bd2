"""Edges: who waits for whom, across transactions, and what becomes of it when one fails."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import (
    CycleError,
    InvalidJobError,
    JobContext,
    ParentError,
    State,
    UnknownUpstreamError,
    after,
    constant,
)
from conformance.steps import TTL, enqueuing, failed, spec
from graphs.kit import Graphs, cancelling, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, DONE = State.BLOCKED, State.READY, State.DONE
FAILED, CANCELLED = State.FAILED, State.CANCELLED


async def ended(graphs: Graphs, state: State) -> Any:
    """Return a job that ended so."""
    job = await graphs.enqueue()
    if state is CANCELLED:
        await graphs.cancel(job)
    else:
        await graphs.end(await graphs.claim_one(), outcome=failed() if state is FAILED else None)
    return job


class TestWaiting:
    async def test_across_transactions_and_workflows(self, graphs: Graphs) -> None:
        first, second = workflow("first"), workflow("second")
        inside = first.add(spec())
        await graphs.write(first)
        after_inside = second.add(spec(), depends_on=[inside])
        await graphs.write(second)
        after_first = await graphs.enqueue(depends_on=[first])
        after_all = await graphs.enqueue(depends_on=[second, after_first, inside.id])
        assert await graphs.run() == {inside.id}
        assert await graphs.run() == {after_inside.id, after_first.id}
        assert await graphs.run() == {after_all.id}

    async def test_for_a_job_that_is_named_twice(self, graphs: Graphs) -> None:
        upstream = await graphs.enqueue()
        job = await graphs.enqueue(depends_on=[upstream, upstream.id, after(upstream)])
        assert len((await graphs.scheduler.graph(job)).edges) == 1
        assert await graphs.run_to_the_end() == [upstream.id, job.id]

    @pytest.mark.parametrize("strict_first", [True, False])
    async def test_of_two_rules_for_one_job_the_stricter_counts(
        self, graphs: Graphs, strict_first: bool
    ) -> None:
        upstream = await graphs.enqueue()
        edges = [after(upstream), after(upstream, on_failure="run")]
        job = await graphs.enqueue(depends_on=edges if strict_first else edges[::-1])
        await graphs.run(upstream)
        assert await graphs.why(job) == (CANCELLED, upstream.id)


@pytest.mark.parametrize("before_it_is_settled", [False, True])
class TestWhatHasEndedBefore:
    """Also where the upstream ends after the enqueue, and before anybody has settled it."""

    @pytest.mark.parametrize(
        ("end", "rule", "state"),
        [
            (DONE, "cancel", READY),
            (DONE, "run", READY),
            (FAILED, "cancel", CANCELLED),
            (FAILED, "run", READY),
            (CANCELLED, "cancel", CANCELLED),
            (CANCELLED, "run", READY),
        ],
    )
    async def test_is_resolved_by_the_rule_of_the_edge(
        self, graphs: Graphs, before_it_is_settled: bool, end: State, rule: str, state: State
    ) -> None:
        upstream = await ended(graphs, end)
        edge = after(upstream, on_failure=rule)
        if before_it_is_settled:
            upstream = await graphs.enqueue()
            edge = after(upstream, on_failure=rule)
            job = await graphs.enqueue(depends_on=[edge])
            if end is CANCELLED:
                await graphs.do(cancelling(upstream))
            else:
                outcome = failed() if end is FAILED else None
                await graphs.finish(await graphs.claim_one(), outcome=outcome)
        else:
            job = await graphs.enqueue(depends_on=[edge])
        assert await graphs.state(job) == BLOCKED
        await graphs.settle()
        cause = upstream.id if state is CANCELLED else None
        assert await graphs.why(job) == (state, cause)
        await graphs.assert_settled()

    async def test_holds_a_container_likewise(
        self, graphs: Graphs, before_it_is_settled: bool
    ) -> None:
        upstream = await graphs.enqueue()
        if not before_it_is_settled:
            await graphs.run(upstream)
        wf = workflow(depends_on=[upstream])
        inner = wf.container("inner")
        job = inner.add(spec())
        await graphs.write(wf)
        if before_it_is_settled:
            await graphs.finish(await graphs.claim_one(), outcome=failed())
        await graphs.settle()
        assert await graphs.states(wf, inner, job) == [CANCELLED] * 3
        assert (await graphs.why(wf))[1] == upstream.id


class TestFailure:
    async def test_cancels_what_depends_on_it_transitively(self, graphs: Graphs) -> None:
        chain = [await graphs.enqueue()]
        for _ in range(5):
            chain.append(await graphs.enqueue(depends_on=chain[-1:]))
        await graphs.run(chain[0])
        assert await graphs.state(chain[0]) == FAILED
        for upstream, job in itertools.pairwise(chain):
            assert await graphs.why(job) == (CANCELLED, upstream.id)
            assert f"job {upstream.id}" in (await graphs.row(job)).error

    async def test_in_the_middle_of_a_diamond(self, graphs: Graphs) -> None:
        top = await graphs.enqueue()
        left, right = [await graphs.enqueue(depends_on=[top]) for _ in range(2)]
        bottom = await graphs.enqueue(depends_on=[left, right])
        anyway = await graphs.enqueue(depends_on=[after(left, on_failure="run"), right])
        last = await graphs.enqueue(depends_on=[bottom])
        assert await graphs.run_to_the_end(left) == [top.id, left.id, right.id, anyway.id]
        assert await graphs.why(bottom) == (CANCELLED, left.id)
        assert await graphs.why(last) == (CANCELLED, bottom.id)

    async def test_lets_go_what_was_to_run_anyway(self, graphs: Graphs) -> None:
        bad = await graphs.enqueue()
        behind = await graphs.enqueue(depends_on=[bad])
        edges = [after(bad, on_failure="run"), after(behind, on_failure="run")]
        report = await graphs.enqueue(depends_on=edges)
        assert await graphs.run_to_the_end(bad) == [bad.id, report.id]

    async def test_by_the_sweeper_is_like_any_other(self, graphs: Graphs) -> None:
        lost = await graphs.leased(max_attempts=1)
        number = lost.lease.job_id
        strict = await graphs.enqueue(depends_on=[number])
        anyway = await graphs.enqueue(depends_on=[after(number, on_failure="run")])
        graphs.later(TTL + 1)
        assert await graphs.reclaim() == [number]
        await graphs.settle()
        assert await graphs.why(strict) == (CANCELLED, number)
        assert await graphs.state(anyway) == READY

    async def test_of_an_attempt_that_is_not_the_last_changes_nothing(self, graphs: Graphs) -> None:
        again = await graphs.leased()
        job = await graphs.enqueue(depends_on=[again.lease.job_id])
        await graphs.end(again, outcome=failed(retry_after=0.0))
        assert await graphs.states(again, job) == [READY, BLOCKED]


class TestRefusal:
    @pytest.mark.parametrize("unknown", [10**12, 0, -1])
    async def test_of_an_upstream_that_does_not_exist(self, graphs: Graphs, unknown: int) -> None:
        known = await graphs.enqueue()
        with pytest.raises(UnknownUpstreamError) as refused:
            await graphs.enqueue(depends_on=[known, unknown])
        assert refused.value.job_ids == [unknown]
        assert await graphs.count() == 1

    async def test_of_an_upstream_that_was_rolled_back(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        gone = await graphs.scheduler.enqueue("work", session=session)
        await session.rollback()
        with pytest.raises(UnknownUpstreamError):
            await graphs.enqueue(depends_on=[gone])

    async def test_of_a_rule_that_does_not_exist(self, graphs: Graphs) -> None:
        job = await graphs.enqueue()
        with pytest.raises(InvalidJobError, match="on_failure"):
            after(job, on_failure="ignore")

    async def test_leaves_the_callers_transaction_usable(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = await graphs.write(workflow())
        scheduler = graphs.scheduler
        refusals: list[tuple[type[Exception], dict[str, Any]]] = [
            (UnknownUpstreamError, {"depends_on": [10**12]}),
            (CycleError, {"parent": wf, "depends_on": [wf]}),
            (ParentError, {"parent": 10**12}),
        ]
        first = await scheduler.enqueue("work", session=session)
        for error, options in refusals:
            with pytest.raises(error):
                await scheduler.enqueue("work", session=session, **options)
        second = await scheduler.enqueue("work", session=session, depends_on=[first])
        await session.commit()
        assert await graphs.run_to_the_end() == [first.id, second.id]


class TestUpstreamsInAHandler:
    async def test_show_which_failed_and_what_the_others_returned(self, graphs: Graphs) -> None:
        scheduler = graphs.scheduler

        @scheduler.handler(retry=constant(0), max_attempts=1)
        async def fetch(part: int) -> dict[str, int]:
            if part == 1:
                raise ValueError("no part 1")
            return {"part": part}

        @scheduler.handler
        async def report(ctx: JobContext) -> list[Any]:
            return [
                [job.args["part"], job.state, job.result, job.error and job.error.splitlines()[-1]]
                for job in await ctx.upstreams()
            ]

        parts = await scheduler.enqueue_many([fetch.job(part) for part in range(3)])
        edges = [after(part, on_failure="run") for part in parts]
        job = await scheduler.enqueue(report.job(), depends_on=edges)
        async with graphs.limited_time():
            await scheduler.drain()
        assert await scheduler.wait(job) == [
            [0, "done", {"part": 0}, None],
            [1, "failed", None, "ValueError: no part 1"],
            [2, "done", {"part": 2}, None],
        ]

    async def test_are_none_without_edges(self, graphs: Graphs) -> None:
        @graphs.scheduler.handler
        async def report(ctx: JobContext) -> int:
            return len(await ctx.upstreams())

        job = await graphs.scheduler.enqueue(report.job())
        async with graphs.limited_time():
            await graphs.scheduler.drain()
        assert await graphs.scheduler.wait(job) == 0


async def test_jobs_that_depend_on_each_other_are_written_together(graphs: Graphs) -> None:
    """Of one call, in which none knows the id of another."""
    first = await graphs.enqueue()
    specs = [spec(depends_on=[first]) for _ in range(3)]
    made = await graphs.do(enqueuing(*specs))
    assert await graphs.run_to_the_end() == [first.id, *(job.id for job in made)]
