"""External limits: never exceeded by whoever claims, never leaked, and in nobody else's way."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection

from asyncjobq import (
    Budget,
    Capacity,
    Concurrency,
    ConfigurationError,
    HandlerError,
    Handlers,
    JobContext,
    LeaseLostError,
    Limit,
    RateLimit,
    Scheduler,
    State,
)
from asyncjobq.backends.base import Backend, Take
from asyncjobq.codec import encode
from asyncjobq.lease import Claimed
from asyncjobq.limit_control import clear_limit, correct_cost_once, set_limit, set_weight
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limited import LimitedClaim, claim_limited_once
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.permits import make_rows
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.steps import DEFAULTS, TTL, Step, holding, ids_of, scanning

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Point(BaseModel):
    x: int


RETRIED = Outcome(Ending.FAILED, error="again", retry_after=0.0)


def rules_of(*limits: Limit, general: Sequence[Limit] = ()) -> LimitRules:
    """Return the rules where these limits are the handler's of the type "work"."""
    handlers = Handlers()

    @handlers.handler("work", limits=limits)
    async def work(tenant: str = "nobody") -> None: ...

    return LimitRules(general, handlers)


def claiming(rules: LimitRules, count: int = 100, owner: str = "worker") -> Step[LimitedClaim]:
    """Lease up to `count` jobs of each lane under these limits."""

    def step(connection: Connection, backend: Backend) -> LimitedClaim:
        takes = [Take((lane,), count) for lane in scanning()(connection, backend)]
        return claim_limited_once(connection, backend, owner, takes, TTL, DEFAULTS, rules)

    return step


async def tried(jobs: Jobs, rules: LimitRules) -> LimitedClaim:
    """Claim, once the limits have their rows."""
    result = await jobs.do(claiming(rules))
    if result.missing:
        assert result.claimed == []
        await jobs.do(lambda c, b: make_rows(c, b, result.missing))
        result = await jobs.do(claiming(rules))
    return result


async def claim(jobs: Jobs, rules: LimitRules) -> list[Claimed]:
    return (await tried(jobs, rules)).claimed


class TestConcurrency:
    async def test_no_more_run_than_may(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("gpu", 2))
        enqueued = await jobs.enqueue_many(5)
        first = await tried(jobs, rules)
        assert ids_of(first.claimed) == ids_of(enqueued[:2])
        second = await tried(jobs, rules)
        assert second.claimed == []
        assert second.waits == {("gpu", ""): None}
        await jobs.finish(first.claimed[0])
        assert ids_of(await claim(jobs, rules)) == ids_of(enqueued[2:3])

    @pytest.mark.parametrize("end", ["done", "retried", "reclaimed", "pruned"])
    async def test_a_permit_is_over_with_its_lease(self, jobs: Jobs, end: str) -> None:
        rules = rules_of(Concurrency("gpu", 1))
        await jobs.enqueue_many(2)
        for _ in range(3):
            (held,) = await claim(jobs, rules)
            assert await claim(jobs, rules) == []
            if end == "retried":
                await jobs.finish(held, outcome=RETRIED)
            elif end == "reclaimed":
                jobs.later(TTL + 1)
                assert await claim(jobs, rules) == []  # its handler may still run
                assert await jobs.reclaim() == [held.lease.job_id]
            else:
                await jobs.finish(held)
                await jobs.enqueue()
            if end == "pruned":
                table = jobs.tables.jobs
                gone = table.delete().where(table.c.id == held.lease.job_id)
                await jobs.do(lambda c, _, gone=gone: c.execute(gone))
        permits = await jobs.do(lambda c, b: c.execute(b.tables.permits.select()).all())
        assert len(permits) == 1  # none is left to pile up

    @pytest.mark.requires("row_locks")
    async def test_of_two_who_claim_at_once(self, jobs: Jobs) -> None:
        """Each looks before the other has committed: a count alone would let both pass."""
        rules = rules_of(Concurrency("gpu", 3))
        await jobs.enqueue_many(8)
        async for moment in jobs.moments():
            await jobs.enqueue_many(8)
            await jobs.do(lambda c, b: make_rows(c, b, [("gpu", "")]))
            mine = await moment.of(claiming(rules), claiming(rules, owner="other"))
            assert len(mine.claimed) + len(moment.other.claimed) <= 3
            assert len(await claim(jobs, rules)) == 3 - len(mine.claimed) - len(
                moment.other.claimed
            )

    async def test_is_shared_by_name_and_holds_for_all_that_have_it(self, jobs: Jobs) -> None:
        gpu = Concurrency("gpu", 1)
        handlers = Handlers()
        for name in ("work", "train"):
            handlers.handler(name, limits=[gpu])(_nothing)
        rules = LimitRules((), handlers)
        await jobs.enqueue("work")
        await jobs.enqueue("train")

        def step(connection: Connection, backend: Backend) -> LimitedClaim:
            lanes = scanning(types=["work", "train"])(connection, backend)
            takes = [Take((lane,), 5) for lane in lanes]
            return claim_limited_once(connection, backend, "w", takes, TTL, defaults, rules)

        defaults = type(DEFAULTS)({"work": 5, "train": 5}, {"work": 1.0, "train": 1.0})
        await jobs.do(lambda c, b: make_rows(c, b, [("gpu", "")]))
        assert len((await jobs.do(step)).claimed) == 1


class TestRate:
    async def test_no_more_start_than_may(self, jobs: Jobs) -> None:
        rules = rules_of(RateLimit("api", 10, per=100, burst=3))
        await jobs.enqueue_many(9)
        assert len(await claim(jobs, rules)) == 3
        held = await tried(jobs, rules)
        assert held.claimed == []
        (wait,) = held.waits.values()
        assert wait == pytest.approx(10, abs=3)
        jobs.later(10.5)
        assert len(await claim(jobs, rules)) == 1
        jobs.later(1000)
        assert len(await claim(jobs, rules)) == 3

    async def test_a_retry_is_a_start(self, jobs: Jobs) -> None:
        rules = rules_of(RateLimit("api", 1, per=100))
        await jobs.enqueue()
        (started,) = await claim(jobs, rules)
        await jobs.finish(started, outcome=RETRIED)
        assert await claim(jobs, rules) == []
        jobs.later(101)
        assert len(await claim(jobs, rules)) == 1


class TestBudget:
    async def test_costs_add_up_to_no_more_than_may(self, jobs: Jobs) -> None:
        rules = rules_of(Budget("tokens", 10, per=3600))
        enqueued = [await jobs.enqueue(cost=cost) for cost in (4, 4, 4, 1)]
        held = await tried(jobs, rules)
        assert ids_of(held.claimed) == ids_of(enqueued[:2])
        assert set(held.waits) == {("tokens", "")}
        jobs.later(3600)
        assert ids_of(await claim(jobs, rules)) == ids_of(enqueued[2:])

    async def test_is_corrected_by_what_a_job_really_cost(self, jobs: Jobs) -> None:
        rules = rules_of(Budget("tokens", 10, per=3600))
        for _ in range(3):
            await jobs.enqueue(cost=6)
        (first,) = await claim(jobs, rules)
        await jobs.do(lambda c, b: correct_cost_once(c, b, first.lease, 1.5, rules))
        assert (await jobs.row(first)).cost == 1.5
        (second,) = await claim(jobs, rules)
        await jobs.do(lambda c, b: correct_cost_once(c, b, second.lease, 12, rules))
        jobs.later(3600)
        assert len(await claim(jobs, rules)) == 1  # 3.5 are paid back: 6 fit

    @pytest.mark.requires("row_locks")
    async def test_waits_for_no_session_that_may_be_the_handlers_own(self, jobs: Jobs) -> None:
        rules = rules_of(Budget("tokens", 10, per=3600))
        await jobs.enqueue(cost=6)
        (first,) = await claim(jobs, rules)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(first))
            assert not await jobs.do(lambda c, b: correct_cost_once(c, b, first.lease, 1, rules))
        assert await jobs.do(lambda c, b: correct_cost_once(c, b, first.lease, 1, rules))
        assert (await jobs.row(first)).cost == 1

    @pytest.mark.parametrize("args", [{}, {"tenant": {}}, {"tenant": 5}])
    async def test_what_no_key_can_be_made_of_stops_no_claim(self, jobs: Jobs, args: Any) -> None:
        scheduler = jobs.another(limits=[])

        @scheduler.handler(limits=[Concurrency("one", 1, key="tenant")])
        async def odd(tenant: Point = None) -> None:  # type: ignore[assignment]
            """Its default is none of its type."""

        @scheduler.handler
        async def other() -> None: ...

        job = await jobs.enqueue("odd")
        await jobs.spoil(job, args=args)
        await scheduler.enqueue(other.job())
        async with jobs.limited_time():
            ended = await scheduler.drain()
        assert ended[State.DONE] >= 1
        assert (await scheduler.get(job)).ended

    async def test_only_for_whoever_holds_the_lease(self, jobs: Jobs) -> None:
        rules = rules_of(Budget("tokens", 10, per=3600))
        await jobs.enqueue(cost=6)
        (first,) = await claim(jobs, rules)
        await jobs.finish(first, outcome=RETRIED)
        with pytest.raises(LeaseLostError):
            await jobs.do(lambda c, b: correct_cost_once(c, b, first.lease, 1, rules))
        assert (await jobs.row(first)).cost == 6


class TestKeys:
    async def test_one_limit_for_each_value(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("tenant", 1, key="tenant"))
        for tenant in ("a", "a", "b"):
            key = rules.key_of("default", "work", {"tenant": tenant})
            await _enqueue_with_key(jobs, key, tenant)
        claimed = await claim(jobs, rules)
        assert sorted(job.limit_key for job in claimed) == ["tenant=a", "tenant=b"]

    async def test_one_limit_for_each_group(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("group", 1, key="group_key"))
        for group in ("a", "a", "b", "A"):
            await jobs.enqueue(group_key=group)
        assert sorted(job.group_key for job in await claim(jobs, rules)) == ["A", "a", "b"]

    async def test_who_enqueued_by_name_did_not_know_them(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("tenant", 1, key="tenant"))
        for tenant in ("a", "a", "b"):
            await jobs.enqueue(args={"tenant": tenant})
        await jobs.enqueue()  # the parameter's default counts
        first = await tried(jobs, rules)
        assert (first.claimed, first.rekeyed) == ([], True)
        claimed = await claim(jobs, rules)
        assert sorted(job.limit_key for job in claimed) == [
            "tenant=a", "tenant=b", "tenant=nobody",
        ]  # fmt: skip

    async def test_a_job_in_the_wrong_lane_moves_to_its_own(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("tenant", 5, key="tenant"))
        await _enqueue_with_key(jobs, "tenant=a", "b")
        await _enqueue_with_key(jobs, "tenant=a", "a")
        first = await tried(jobs, rules)
        assert ([job.limit_key for job in first.claimed], first.rekeyed) == (["tenant=a"], True)
        assert [job.limit_key for job in await claim(jobs, rules)] == ["tenant=b"]

    async def test_a_key_that_is_no_argument_is_refused(self) -> None:
        with pytest.raises(HandlerError, match=r"keyed by 'tenent'.*It takes|keyed by 'tenent'"):
            rules_of(Concurrency("tenant", 1, key="tenent"))

    async def test_two_limits_of_one_name_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="two different limits named 'gpu'"):
            rules_of(Concurrency("gpu", 1), general=[Concurrency("gpu", 2)])


class TestAtRuntime:
    async def test_set_and_cleared(self, jobs: Jobs) -> None:
        rules = rules_of(Concurrency("gpu", 1), RateLimit("api", 0, per=60))
        await jobs.enqueue_many(9)
        assert await claim(jobs, rules) == []
        await jobs.do(lambda c, b: set_limit(c, b, "api", amount=1e6, per=None, burst=100))
        await jobs.do(lambda c, b: set_limit(c, b, "gpu", amount=4, per=None, burst=None))
        claimed = await claim(jobs, rules)
        assert len(claimed) == 4
        await jobs.do(lambda c, b: clear_limit(c, b, "gpu"))
        await jobs.finish(claimed[0])
        assert await claim(jobs, rules) == []  # three still run, where one may

    async def test_what_a_limit_cannot_have_is_refused(self, jobs: Jobs) -> None:
        scheduler = jobs.another(limits=[Concurrency("gpu", 1), Capacity("memory", _nothing)])
        for name, options, reason in [
            ("gpu", {"amount": 1.5}, "most of the limit 'gpu' must be an int"),
            ("gpu", {"amount": 1, "per": 60}, "it has no per"),
            ("gpu", {"amount": 1, "burst": 3}, "it has no burst"),
            ("memory", {"amount": 1}, "is a capacity"),
            ("other", {"amount": -1}, "must be a number of at least 0"),
            ("x" * 65, {"amount": 1}, "1 to 64 characters"),
        ]:
            amount = options.pop("amount")
            with pytest.raises(ConfigurationError, match=reason):
                await scheduler.set_limit(name, amount, **options)

    async def test_the_weight_of_a_group(self, jobs: Jobs) -> None:
        for group in ("a", "b"):
            await jobs.enqueue(group_key=group, weight=2)
        await jobs.do(lambda c, b: set_weight(c, b, "b", 7))
        await jobs.do(lambda c, b: set_weight(c, b, "b", 5))
        lanes = await jobs.do(scanning())
        assert {lane.group_key: lane.head_weight for lane in lanes} == {"a": 2, "b": 5}
        await jobs.do(lambda c, b: set_weight(c, b, "b", None))
        assert {lane.head_weight for lane in await jobs.do(scanning())} == {2}


class TestWorker:
    async def test_runs_what_is_under_its_limit_beside_what_is_over(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=4, poll_interval=30)
        running, most, order = 0, 0, []
        go_on = asyncio.Event()

        @scheduler.handler(limits=[Concurrency("one", 1)])
        async def limited(n: int) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            order.append(n)
            await go_on.wait()
            running -= 1

        @scheduler.handler
        async def free() -> None: ...

        over = await scheduler.enqueue_many([limited.job(n) for n in range(5)])
        under = await scheduler.enqueue_many([free.job()] * 20)
        async with serving(scheduler):
            for job in under:
                await scheduler.wait(job)
            assert order == [0]
            (state,) = await scheduler.limits()
            assert (state.name, state.kind, state.amount) == ("one", "concurrency", 1)
            assert (state.used, state.waiting) == (1, 4)
            go_on.set()
            for job in over:
                await scheduler.wait(job)
        assert (most, order) == (1, [0, 1, 2, 3, 4])

    async def test_all_limits_of_a_job_hold(self, jobs: Jobs) -> None:
        """The handler's, the queue's and the scheduler's."""
        scheduler = jobs.another(
            concurrency=9,
            poll_interval=0.05,
            queues=("default", "media"),
            limits=[Concurrency("all", 3), Concurrency("media", 2, queue="media")],
        )
        running: Counter[str] = Counter()
        most: Counter[str] = Counter()

        @scheduler.handler(limits=[Concurrency("work", 1)])
        async def work(kinds: list[str]) -> None:
            for kind in kinds:
                running[kind] += 1
                most[kind] = max(most[kind], running[kind])
            await asyncio.sleep(0.01)
            for kind in kinds:
                running[kind] -= 1

        scheduler.handler("other")(work.function)
        for queue in ("default", "media"):
            for name in ("work", "other"):
                args = {"kinds": ["all", queue, name]}
                await scheduler.enqueue_many(
                    [work.job(**args).options(queue=queue)] * 5
                    if name == "work"
                    else [scheduler._spec(name, args, {"queue": queue})] * 5
                )
        async with jobs.limited_time():
            counts = await scheduler.drain()
        assert counts[State.DONE] == 20
        assert most["all"] <= 3
        assert most["media"] <= 2
        assert most["work"] == 1

    async def test_a_capacity_says_how_many_may_start(self, jobs: Jobs) -> None:
        answers: list[Any] = [0, LookupError("no GPU"), "many", 2]
        asked = asyncio.Event()

        async def memory() -> float:
            answer = answers.pop(0) if answers else 0
            if not answers:
                asked.set()
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

        scheduler = jobs.another(concurrency=8, poll_interval=0.02)
        started: list[int] = []

        @scheduler.handler(limits=[Capacity("memory", memory)])
        async def limited(n: int) -> None:
            started.append(n)
            await asyncio.Event().wait()

        @scheduler.handler
        async def free() -> None: ...

        await scheduler.enqueue_many([limited.job(n) for n in range(5)])
        async with serving(scheduler):
            await scheduler.wait(await scheduler.enqueue(free.job()))
            await asked.wait()

            async def both_started() -> bool:
                return len(started) == 2

            await until(both_started)
            await scheduler.wait(await scheduler.enqueue(free.job()))
            for job in await scheduler.find(type="limited"):
                await scheduler.cancel(job)
        assert started == [0, 1]

    async def test_a_capacity_that_hangs_stalls_nobody_else(self, jobs: Jobs) -> None:
        hangs = asyncio.Event()

        async def memory() -> int:
            await hangs.wait()
            return 5

        scheduler = jobs.another(poll_interval=0.05)

        @scheduler.handler(limits=[Capacity("memory", memory)])
        async def limited() -> None: ...

        @scheduler.handler
        async def free() -> None: ...

        waiting = await scheduler.enqueue(limited.job())
        async with serving(scheduler):
            for _ in range(3):
                await scheduler.wait(await scheduler.enqueue(free.job()))
            assert (await scheduler.get(waiting)).state is State.READY
            hangs.set()
            await scheduler.wait(waiting)

    async def test_a_handler_says_what_it_really_cost(self, jobs: Jobs) -> None:
        scheduler = jobs.another(
            poll_interval=0.05, limits=[Budget("tokens", 100, per=86_400, key="tenant")]
        )

        @scheduler.handler
        async def ask(ctx: JobContext, tokens: int, **_: str) -> None:
            await ctx.set_cost(tokens)

        for tokens in (70, 20):
            await scheduler.enqueue(ask.job(tenant="acme", tokens=tokens), cost=10)
        await scheduler.enqueue("ask", {"tenant": "zeta", "tokens": 1}, cost=5)
        async with jobs.limited_time():
            await scheduler.drain()
        states = {state.value: state for state in await scheduler.limits()}
        assert {value: state.used for value, state in states.items()} == {"acme": 90, "zeta": 1}


async def _enqueue_with_key(jobs: Jobs, key: str, tenant: str) -> None:
    job = await jobs.enqueue(args={"tenant": tenant})
    await jobs.spoil(job, limit_key=key)
    assert encode({"tenant": tenant})


async def _nothing() -> int:
    return 0


async def test_a_scheduler_refuses_what_is_no_limit() -> None:
    with pytest.raises(ConfigurationError, match="limits takes Concurrency, RateLimit"):
        Scheduler("sqlite+aiosqlite:///nowhere.db", limits=["gpu"])  # type: ignore[list-item]
