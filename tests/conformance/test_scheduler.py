"""What a scheduler does for its callers: draining, waiting, finding; and for its handlers."""

from __future__ import annotations

import asyncio

import pytest

from asyncjobq import (
    Fail,
    Handlers,
    JobCancelled,
    JobContext,
    JobFailed,
    JobNotFoundError,
    State,
    constant,
)
from conformance.kit import Jobs
from conformance.running import Latch, serving
from conformance.steps import TTL, finishing, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestDrain:
    async def test_says_what_ended_how(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(retry=constant(0))
        async def work(good: bool) -> None:
            if not good:
                raise Fail("bad")

        for good in (True, True, False):
            job = await jobs.scheduler.enqueue(work.job(good))
        await jobs.scheduler.enqueue(work.job(good=True), depends_on=[job])
        async with jobs.limited_time():
            counts = await jobs.scheduler.drain()
            assert counts == {State.DONE: 2, State.FAILED: 1, State.CANCELLED: 1}
            assert str(counts) == "{'done': 2, 'failed': 1, 'cancelled': 1}"
            assert set((await jobs.scheduler.drain()).values()) == {0}

    async def test_waits_for_due_times_if_asked(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> None: ...

        job = await jobs.scheduler.enqueue(work.job(), run_after=0.3)
        async with jobs.limited_time():
            assert (await jobs.scheduler.drain())[State.DONE] == 0
            assert await jobs.state(job) == State.SCHEDULED
            assert (await jobs.scheduler.drain(scheduled=True))[State.DONE] == 1

    async def test_leaves_what_is_not_for_this_scheduler(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> None: ...

        unknown = await jobs.enqueue("unknown")
        other = await jobs.scheduler.enqueue(work.job(), queue="other")
        behind = await jobs.scheduler.enqueue(work.job(), depends_on=[unknown])
        ours = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            assert (await jobs.scheduler.drain())[State.DONE] == 1
        states = [State.READY, State.READY, State.BLOCKED, State.DONE]
        assert await jobs.states(unknown, other, behind, ours) == states

    async def test_takes_up_what_dead_workers_left(self, jobs: Jobs) -> None:
        """A lease that ran out, an end that was not settled, a due time that has come."""
        lost = await jobs.leased()
        ended = await jobs.leased()
        dependant = await jobs.enqueue(depends_on=[ended.lease.job_id])
        await jobs.settle()
        await jobs.finish(ended)
        due = await jobs.enqueue(run_after=TTL)
        jobs.later(TTL + 1)

        @jobs.scheduler.handler
        async def work() -> None: ...

        async with jobs.limited_time():
            assert (await jobs.scheduler.drain())[State.DONE] == 3
        assert await jobs.states(lost, dependant, due) == [State.DONE] * 3
        assert (await jobs.row(lost)).attempt == 2

    async def test_with_two_workers_runs_each_once(self, jobs: Jobs) -> None:
        ran: list[int] = []
        handlers = Handlers()

        @handlers.handler
        async def work(number: int) -> None:
            ran.append(number)

        workers = [jobs.another(handlers=[handlers]) for _ in range(2)]
        first = await workers[0].enqueue_many([work.job(n) for n in range(30)])
        for n in range(30, 60):
            await workers[0].enqueue(work.job(n), depends_on=first[n % 7 :: 7])
        async with jobs.limited_time(30):
            counts = await asyncio.gather(*(worker.drain() for worker in workers))
        assert sorted(ran) == list(range(60))
        assert sum(count[State.DONE] for count in counts) == 60


class TestWait:
    async def test_for_each_kind_of_end(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(max_attempts=1)
        async def bad() -> None:
            raise ValueError("broken")

        failing = await jobs.scheduler.enqueue(bad.job())
        dependant = await jobs.scheduler.enqueue(bad.job(), depends_on=[failing])
        async with serving(jobs.scheduler):
            with pytest.raises(JobFailed, match="broken") as failure:
                await jobs.scheduler.wait(failing)
            with pytest.raises(JobCancelled) as cancelled:
                await jobs.scheduler.wait(dependant.id)
        assert (failure.value.job_id, cancelled.value.job_id) == (failing.id, dependant.id)
        assert cancelled.value.cause == failing.id
        assert "ValueError: broken" in (failure.value.error or "")

    async def test_for_what_ends_elsewhere(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        waiting = asyncio.create_task(jobs.scheduler.wait(claimed.lease.job_id))
        await asyncio.sleep(0.01)
        jobs.elsewhere(finishing(claimed))
        async with jobs.limited_time():
            assert await waiting == 1

    async def test_only_so_long(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        says = rf"Job {job.id} \(work\) has not ended in time; it is ready in the queue 'default'"
        with pytest.raises(TimeoutError, match=says):
            await jobs.scheduler.wait(job, timeout=0.02)
        assert await jobs.state(job) == State.READY

    async def test_for_what_is_not_there(self, jobs: Jobs) -> None:
        for call in (jobs.scheduler.wait, jobs.scheduler.get):
            with pytest.raises(JobNotFoundError, match="4711") as caught:
                await call(4711)
            assert caught.value.job_id == 4711

    async def test_of_many_for_one_job(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        async with serving(jobs.scheduler):
            job = await latch.enqueue(jobs.scheduler)
            waiting = [asyncio.create_task(jobs.scheduler.wait(job)) for _ in range(5)]
            latch.go_on.set()
            assert await asyncio.gather(*waiting) == ["gone on"] * 5


class TestFind:
    async def test_what_matches_oldest_first(self, jobs: Jobs) -> None:
        made = [
            await jobs.enqueue(type_name, queue=queue, group_key=group)
            for type_name, queue, group in [("a", "q", "g"), ("b", "q", "h"), ("a", "r", "g")]
        ]
        find = jobs.scheduler.find
        assert await find() == made
        assert await find(type="a") == [made[0], made[2]]
        assert await find(queue="q", group_key="h") == [made[1]]
        assert await find(state="ready", limit=2) == made[:2]
        assert await find(after=made[1].id) == made[2:]
        assert await find(state=[State.DONE, State.FAILED]) == []

    async def test_what_is_directly_below(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("w") as wf:
            inner = wf.container("inner")
            made = [wf.add(spec()), inner.add(spec())]
        find = jobs.scheduler.find
        assert [job.id for job in await find(parent=wf)] == [inner.id, made[0].id]
        assert [job.id for job in await find(parent=inner.id, type="work")] == [made[1].id]
        assert await find(parent=made[0].id) == []


class TestContext:
    async def test_the_results_of_its_upstreams(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def part(number: int) -> int:
            return number

        @jobs.scheduler.handler
        async def total(ctx: JobContext) -> int:
            return sum(job.result for job in await ctx.upstreams())

        @jobs.scheduler.handler
        def total_in_a_thread(ctx: JobContext) -> int:
            return sum(job.result for job in ctx.await_(ctx.upstreams))

        parts = await jobs.scheduler.enqueue_many([part.job(n) for n in range(4)])
        async with serving(jobs.scheduler):
            for handler in (total, total_in_a_thread):
                job = await jobs.scheduler.enqueue(handler.job(), depends_on=parts)
                assert await jobs.scheduler.wait(job) == 6

    async def test_enqueues_further_jobs(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def count_down(ctx: JobContext, n: int) -> int | None:
            return (await ctx.enqueue("count_down", {"n": n - 1})).id if n else None

        async with jobs.limited_time():
            await jobs.scheduler.enqueue(count_down.job(5))
            assert (await jobs.scheduler.drain())[State.DONE] == 6

    async def test_a_session_of_the_handlers_own(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> list[str]:
            async with ctx.session() as session, session.begin():
                await jobs.scheduler.enqueue("other", session=session, queue="q")
            return [job.type for job in await jobs.scheduler.find(queue="q")]

        async with serving(jobs.scheduler):
            job = await jobs.scheduler.enqueue(work.job())
            assert await jobs.scheduler.wait(job) == ["other"]

    async def test_its_deadline_by_the_clock_of_the_database(self, jobs: Jobs) -> None:
        jobs.later(7200)

        @jobs.scheduler.handler(timeout=60)
        async def work(ctx: JobContext) -> float:
            assert ctx.deadline is not None
            return float((ctx.deadline - await jobs.now()).total_seconds())

        @jobs.scheduler.handler(timeout=None)
        async def endless(ctx: JobContext) -> bool:
            return ctx.deadline is None

        async with serving(jobs.scheduler):
            left = await jobs.scheduler.wait(await jobs.scheduler.enqueue(work.job()))
            assert left == pytest.approx(60, abs=20)  # two hours off, by the other clock
            assert await jobs.scheduler.wait(await jobs.scheduler.enqueue(endless.job()))


async def test_whose_timeout_counts(jobs: Jobs) -> None:
    """The job's, else the handler's, else the scheduler's."""
    scheduler = jobs.another(default_timeout=0.05)

    @scheduler.handler(max_attempts=1)
    async def default() -> None:
        await asyncio.sleep(60)

    @scheduler.handler(max_attempts=2, timeout=0.06, retry=constant(0))
    async def own() -> None:
        await asyncio.sleep(60)

    async with serving(scheduler):
        for spec, error, attempt in (
            (default.job(), "timed out after 0.05 s", 1),
            (own.job(), "timed out after 0.06 s", 2),
            (own.job().options(timeout=0.07, max_attempts=1), "timed out after 0.07 s", 1),
        ):
            job = await scheduler.enqueue(spec)
            with pytest.raises(JobFailed, match=error):
                await scheduler.wait(job)
            assert (await scheduler.get(job)).attempt == attempt
