"""Limits where it is hard: changed while workers wait, of other releases, with odd keys."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asyncjobq import Budget, Concurrency, ConfigurationError, Limit, RateLimit, State
from asyncjobq.errors import InvalidJobError
from conformance.kit import Jobs
from conformance.running import Latch, serving
from conformance.test_limits import claim, rules_of, tried

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLOSED: dict[str, Limit] = {
    "a rate of nothing": RateLimit("limit", 0, per=1),
    "a slow rate": RateLimit("limit", 1, per=86_400),
    "an empty budget": Budget("limit", 0, per=86_400),
    "no concurrency": Concurrency("limit", 0),
}


class TestChangedAtRuntime:
    @pytest.mark.parametrize("limit", CLOSED.values(), ids=CLOSED)
    @pytest.mark.parametrize("here", [True, False], ids=["here", "elsewhere"])
    async def test_workers_that_wait_see_it(self, jobs: Jobs, limit: Limit, here: bool) -> None:
        """Within a poll, however long the limit would have stayed closed."""
        scheduler, ran = jobs.another(poll_interval=0.2), []

        @scheduler.handler(limits=[limit])
        async def work(n: int) -> None:
            ran.append(n)

        free = _free(scheduler)
        made = await scheduler.enqueue_many([work.job(n) for n in range(3)])
        async with serving(scheduler):
            await scheduler.wait(await scheduler.enqueue(free.job()))
            change = scheduler if here else jobs.another(limits=[limit])
            more = {} if isinstance(limit, Concurrency) else {"per": 1.0}
            await change.set_limit("limit", 1000, **more)
            for job in made:
                await scheduler.wait(job)
        assert sorted(ran) == [0, 1, 2]

    async def test_lowered_below_what_runs(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("gpu", 3))
        await jobs.enqueue_many(9)
        running = await claim(jobs, rules)
        assert len(running) == 3
        await jobs.scheduler.set_limit("gpu", 1)
        for ended in running[:2]:
            assert await claim(jobs, rules) == []
            await jobs.finish(ended)
        assert await claim(jobs, rules) == []
        await jobs.finish(running[2])
        assert len(await claim(jobs, rules)) == 1


def _free(scheduler: Any) -> Any:
    @scheduler.handler
    async def free() -> None: ...

    return free


class TestReleases:
    async def test_that_say_different_numbers(self, jobs: Jobs) -> None:
        """Each goes by its own, and counts what the other has started."""
        old, new = rules_of(Concurrency("gpu", 3)), rules_of(Concurrency("gpu", 1))
        await jobs.enqueue_many(9)
        assert len(await claim(jobs, new)) == 1
        assert len(await claim(jobs, old)) == 2
        assert await claim(jobs, new) == []

    @pytest.mark.parametrize("other", [RateLimit("x", 5, per=60), Budget("x", 5, per=60)])
    async def test_that_mean_different_things(self, jobs: Jobs, other: Limit) -> None:
        for limit in (
            other,
            Concurrency("x", 2),
            RateLimit("x", 9, per=60),
            Budget("x", 9, per=60),
        ):
            await jobs.enqueue_many(3)
            started = await claim(jobs, rules_of(limit))
            assert started
            jobs.later(61)
            await jobs.finish(*started)

    async def test_of_which_one_has_no_limit_any_more(self, jobs: Jobs) -> None:
        """Its jobs stand under keys that mean nothing now."""
        keyed = rules_of(Concurrency("tenant", 1, key="tenant"))
        for tenant in ("a", "a", "b"):
            await jobs.enqueue(args={"tenant": tenant})
        await tried(jobs, keyed)
        unkeyed = rules_of(Concurrency("gpu", 9))
        found = await tried(jobs, unkeyed)
        assert found.rekeyed
        claimed = await claim(jobs, unkeyed)
        assert len(claimed) == 3
        await jobs.finish(*claimed)

        scheduler = jobs.another()
        scheduler.handler("work")(_anything)
        for tenant in ("a", "a", "b"):
            await jobs.enqueue(args={"tenant": tenant})
        await tried(jobs, keyed)
        async with jobs.limited_time():
            assert (await scheduler.drain())[State.DONE] == 3


async def _anything(**_: Any) -> None: ...


class TestAllOrNothing:
    async def test_a_job_takes_no_part_of_its_limits(self, jobs: Jobs) -> None:
        """Where the last of five has no room, nothing of the others is used up."""
        open_ = [
            Concurrency("a", 5), RateLimit("b", 5, per=3600, burst=5), Budget("c", 5, per=3600),
            Concurrency("d", 5, key="tenant"),
        ]  # fmt: skip
        await jobs.enqueue_many(3)
        for last in (Concurrency("e", 0), RateLimit("e", 0, per=1), Budget("e", 0, per=60)):
            rules = rules_of(*open_, last)
            for _ in range(3):
                assert await claim(jobs, rules) == []
        limits, permits = jobs.tables.limits, jobs.tables.permits
        levels = await jobs.do(lambda c, _: c.execute(limits.select()).all())
        assert all(row.level is None for row in levels)
        assert await jobs.do(lambda c, _: c.execute(permits.select()).all()) == []
        assert len(await claim(jobs, rules_of(*open_))) == 3


KEYS = {
    "nul": "a\0b",
    "long": "x" * 5000,
    "emoji": "🙂" * 40,
    "quotes": "'\"\\;--",
    "equals": "a=b&tenant=c",
    "blanks": " a ",
}


class TestOddKeys:
    @pytest.mark.parametrize("tenant", KEYS.values(), ids=KEYS)
    async def test_are_keys_like_others(self, jobs: Jobs, tenant: str) -> None:
        """Of a producer who knew of the limit, or by name."""
        rules = rules_of(Concurrency("tenant", 1, key="tenant"))
        scheduler = jobs.another(limits=[])

        @scheduler.handler("work", limits=[Concurrency("tenant", 1, key="tenant")])
        async def work(tenant: str) -> None: ...

        await scheduler.enqueue("work", {"tenant": tenant})
        await jobs.enqueue(args={"tenant": tenant})
        await jobs.enqueue(args={"tenant": "other"})
        await tried(jobs, rules)
        claimed = await claim(jobs, rules)
        live = await jobs.scheduler.find(state=State.LEASED)
        assert len({job.limit_key for job in live}) == len(live) == 2
        assert await claim(jobs, rules) == []
        assert claimed or live

    async def test_of_unlike_values_are_unlike(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("tenant", 1, key="tenant"))
        values = ["a\0b", "a\0c", "ab", "x" * 200, "x" * 201, "", " ", None, 5, [1], {"a": 1}]
        keys = {rules.key_of("default", "work", {"tenant": value}) for value in values}
        assert len(keys) == len(values) - 1  # None is like nothing
        assert all(len(key) <= 128 for key in keys)


class TestNumbersOutOfRange:
    @pytest.mark.parametrize(
        "make",
        [
            lambda: RateLimit("x", 1e308, per=1),
            lambda: RateLimit("x", 1, per=1e300),
            lambda: RateLimit("x", 1, per=1e-300),
            lambda: RateLimit("x", 1, per=1, burst=10**12),
            lambda: RateLimit("x", float("nan"), per=1),
            lambda: RateLimit("x", -1, per=1),
            lambda: Budget("x", 1, per=1e300),
            lambda: Budget("x", float("inf"), per=1),
            lambda: Concurrency("x", 10**400),
        ],
    )
    async def test_of_limits(self, make: Any) -> None:
        with pytest.raises(ConfigurationError, match="of the limit 'x'"):
            make()

    @pytest.mark.parametrize("cost", [-1, float("nan"), float("inf"), 1e300, True, "5"])
    async def test_of_costs(self, jobs: Jobs, cost: Any) -> None:
        with pytest.raises(InvalidJobError, match="cost must be a finite number"):
            await jobs.scheduler.enqueue("work", cost=cost)

    @pytest.mark.parametrize(
        "change",
        [{"amount": 1e300}, {"amount": 1, "per": 1e300}, {"amount": 1, "burst": 10**12}],
    )
    async def test_of_changes(self, jobs: Jobs, change: dict[str, Any]) -> None:
        scheduler = jobs.another(limits=[RateLimit("x", 1, per=1)])
        options = dict(change)
        with pytest.raises(ConfigurationError, match=r"of the limit 'x'|burst|per"):
            await scheduler.set_limit("x", options.pop("amount"), **options)


class TestDrain:
    @pytest.mark.parametrize(
        "limit",
        [limit for name, limit in CLOSED.items() if name != "a slow rate"],
        ids=[name for name in CLOSED if name != "a slow rate"],
    )
    async def test_returns_where_a_limit_allows_nothing(
        self, jobs: Jobs, limit: Limit, caplog: pytest.LogCaptureFixture
    ) -> None:
        scheduler = jobs.another(poll_interval=0.05)

        @scheduler.handler(limits=[limit])
        async def held() -> None: ...

        waiting = await scheduler.enqueue(held.job())
        free = await scheduler.enqueue(_free(scheduler).job())
        with caplog.at_level(logging.WARNING):
            async with jobs.limited_time():
                assert (await scheduler.drain())[State.DONE] == 1
        assert await jobs.states(waiting, free) == [State.READY, State.DONE]
        assert "the limit 'limit' allows nothing" in caplog.text

    async def test_by_what_was_set(self, jobs: Jobs) -> None:
        scheduler = jobs.another(poll_interval=0.05)

        @scheduler.handler(limits=[Concurrency("gpu", 1)])
        async def held() -> None: ...

        waiting = await scheduler.enqueue(held.job())
        await scheduler.set_limit("gpu", 0)
        async with jobs.limited_time():
            assert (await scheduler.drain())[State.DONE] == 0
        await scheduler.clear_limit("gpu")
        async with jobs.limited_time():
            assert (await scheduler.drain())[State.DONE] == 1
        assert await jobs.state(waiting) == State.DONE

    async def test_waits_for_what_runs(self, jobs: Jobs) -> None:
        """Also under a limit that allows nothing any more."""
        scheduler = jobs.another(poll_interval=0.05)
        latch = Latch(scheduler, limits=[Concurrency("gpu", 1)])
        async with serving(scheduler):
            job = await latch.enqueue(scheduler)
            await scheduler.set_limit("gpu", 0)
            other = jobs.another(poll_interval=0.05)
            other.handler("latch", limits=[Concurrency("gpu", 1)])(_anything)
            latch.go_on.set()
            async with jobs.limited_time():
                await other.drain()
            assert await jobs.state(job) == State.DONE
