"""What is counted of jobs and limits, and that counting has a bound."""

from __future__ import annotations

from typing import Any

import pytest

from asyncjobq import (
    Budget,
    Capacity,
    Concurrency,
    ConfigurationError,
    JobContext,
    JobNotFoundError,
    KindStats,
    LimitState,
    RateLimit,
    Scheduler,
    State,
)
from conformance.kit import Jobs
from conformance.running import Latch, serving
from conformance.steps import enqueuing, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestJobs:
    async def test_by_queue_type_and_state(self, jobs: Jobs) -> None:
        await jobs.leased()
        await jobs.enqueue_many(3)
        await jobs.enqueue("other", run_after=60)
        first = await jobs.enqueue(queue="media")
        await jobs.enqueue(queue="media", depends_on=[first])
        stats = await jobs.scheduler.stats()
        assert stats.whole
        assert stats.kinds == (
            KindStats("default", "other", {State.SCHEDULED: 1}),
            KindStats("default", "work", {State.LEASED: 1, State.READY: 3}),
            KindStats("media", "work", {State.BLOCKED: 1, State.READY: 1}),
        )
        assert stats.jobs == {
            State.READY: 4, State.LEASED: 1, State.SCHEDULED: 1, State.BLOCKED: 1,
        }  # fmt: skip

    async def test_of_nothing(self, jobs: Jobs) -> None:
        stats = await jobs.scheduler.stats()
        assert (stats.kinds, stats.limits, stats.whole) == ((), (), True)

    async def test_what_can_run_or_runs_whatever_its_age(self, jobs: Jobs) -> None:
        """And of the rest the newest, where there are more than are to be looked at."""
        await jobs.leased()
        await jobs.enqueue_many(2, queue="media")
        await jobs.enqueue("other", run_after=60)
        await jobs.enqueue_many(5, queue="busy")
        first = await jobs.enqueue(queue="last")
        await jobs.enqueue_many(9, queue="last", depends_on=[first])
        stats = await jobs.scheduler.stats(most=4)
        assert not stats.whole
        assert {(kind.queue, kind.type): kind.jobs for kind in stats.kinds} == {
            ("default", "work"): {State.LEASED: 1},
            ("default", "other"): {State.SCHEDULED: 1},
            ("media", "work"): {State.READY: 2},
            ("busy", "work"): {State.READY: 4},
            ("last", "work"): {State.READY: 1, State.BLOCKED: 4},
        }

    @pytest.mark.parametrize("most", [0, -1, 1.5, True, None])
    async def test_no_bound_is_refused(self, jobs: Jobs, most: Any) -> None:
        for call in (jobs.scheduler.stats, jobs.scheduler.limits):
            with pytest.raises(ConfigurationError, match="most must be an int of at least 1"):
                await call(most=most)


def by_name(states: list[LimitState]) -> dict[str, LimitState]:
    return {state.name: state for state in states}


class TestLimits:
    async def test_use_and_waiters(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=4)
        limits = [Concurrency("gpu", 1), RateLimit("api", 60, per=60, burst=2)]
        latch = Latch(scheduler, limits=limits)
        async with serving(scheduler):
            await latch.enqueue(scheduler)
            await scheduler.enqueue_many([latch.handler.job()] * 2)
            stats = await scheduler.stats()
            assert stats.jobs[State.READY] == 2
            gpu, api = by_name(list(stats.limits))["gpu"], by_name(list(stats.limits))["api"]
            assert (gpu.kind, gpu.used, gpu.waiting, gpu.full) == ("concurrency", 1, 2, True)
            assert (api.kind, api.waiting, api.full, api.per) == ("rate", 2, False, 60)
            assert list(stats.limits) == await scheduler.limits() or api.used > 0
            latch.go_on.set()

    async def test_of_many_the_first(self, jobs: Jobs) -> None:
        scheduler = jobs.another(limits=[Concurrency("group", 1, key="group_key")])
        scheduler.handler("work")(_nothing)
        await jobs.do(enqueuing(*(spec(group_key=f"g{n:02}") for n in range(20))))
        found = await scheduler.limits(most=5)
        assert len(found) == 5
        assert all(state.waiting == 1 for state in found)


class TestWhatHoldsAJob:
    def scheduler(self, jobs: Jobs) -> Scheduler:
        scheduler = jobs.another(
            concurrency=4, limits=[Concurrency("all", 5), Budget("tokens", 10, per=3600)]
        )

        async def free() -> int:
            return 1

        @scheduler.handler(
            "work", cost=3,
            limits=[Concurrency("tenant", 0, key="tenant"), Capacity("memory", free)],
        )  # fmt: skip
        async def work(ctx: JobContext, tenant: str = "nobody") -> None: ...

        return scheduler

    async def test_is_full(self, jobs: Jobs) -> None:
        scheduler = self.scheduler(jobs)
        job = await scheduler.enqueue("work", {"tenant": "acme"})
        states = by_name(await scheduler.limits(job))
        assert {name: state.full for name, state in states.items()} == {
            "all": False, "tokens": False, "tenant": True, "memory": None,
        }  # fmt: skip
        assert (states["tenant"].value, states["tenant"].opens_in) == ("acme", None)
        await scheduler.set_limit("tenant", 2)
        assert not by_name(await scheduler.limits(job.id))["tenant"].full

    async def test_also_where_its_key_is_not_stored_yet(self, jobs: Jobs) -> None:
        scheduler = self.scheduler(jobs)
        job = await jobs.enqueue(args={"tenant": "zeta"})
        assert by_name(await scheduler.limits(job))["tenant"].value == "zeta"

    async def test_because_of_its_own_cost(self, jobs: Jobs) -> None:
        scheduler = self.scheduler(jobs)
        await scheduler.set_limit("tenant", 9)
        await scheduler.set_limit("tokens", 8)
        jobs_ = [
            await scheduler.enqueue("work", **options) for options in ({}, {}, {}, {"cost": 2})
        ]
        async with serving(scheduler):
            for job in jobs_[:2]:  # 3 and 3 of 8
                await scheduler.wait(job)
        held, fits = (
            by_name(await scheduler.limits(jobs_[2])),
            by_name(await scheduler.limits(jobs_[3])),
        )
        assert (held["tokens"].used, held["tokens"].full) == (6, True)
        assert held["tokens"].opens_in is not None
        assert fits["tokens"].full is False

    async def test_of_none(self, jobs: Jobs) -> None:
        with pytest.raises(JobNotFoundError):
            await self.scheduler(jobs).limits(12345)

    async def test_of_a_type_without_a_handler_here(self, jobs: Jobs) -> None:
        job = await jobs.enqueue("unknown")
        states = await self.scheduler(jobs).limits(job)
        assert {state.name for state in states} == {"all", "tokens"}


async def _nothing() -> None: ...
