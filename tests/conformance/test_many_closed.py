"""Lanes that are closed, each by a limit of its own: they hide nothing, and open one by one."""

from __future__ import annotations

from math import inf
from typing import Any, Final

import pytest

from asyncjobq import Concurrency, Handlers, RateLimit, Scheduler
from asyncjobq import rounds as rounds_module
from asyncjobq.backends.base import Lane
from asyncjobq.limit_rules import LimitRules
from asyncjobq.limiter import SKIPPED_KEYS, Limiter
from asyncjobq.ready import Skipped
from asyncjobq.rounds import LONG, Rounds
from conformance.kit import Jobs
from conformance.running import serving
from conformance.steps import enqueuing, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

GROUPS: Final = 256 * (LONG + 1)
HOUR: Final = 3600.0


async def close(jobs: Jobs, groups: list[str], opens_in: float = HOUR) -> None:
    """Let the limit "slow" of these groups have no room for so many seconds."""
    table, now = jobs.tables.limits, await jobs.now()
    rows = [
        {"name": "slow", "value": group, "level": 1 - opens_in / HOUR, "moment": now}
        for group in groups
    ]
    await jobs.do(lambda c, b: b.insert_rows(c, table, rows))


def with_slow_groups(jobs: Jobs, **settings: Any) -> tuple[Scheduler, list[str]]:
    """Return a scheduler that starts one job an hour of each group, and which it has started."""
    scheduler = jobs.another(poll_interval=30, **settings)
    ran: list[str] = []

    @scheduler.handler(limits=[RateLimit("slow", 1, per=HOUR, key="group_key")])
    async def work(group: str) -> None:
        ran.append(group)

    return scheduler, ran


class TestWorker:
    async def test_starts_what_opens_and_what_is_new(self, jobs: Jobs) -> None:
        scheduler, ran = with_slow_groups(jobs, concurrency=3)
        groups = [f"g{n:05}" for n in range(GROUPS)]
        waiting = await jobs.do(
            enqueuing(*(spec("work", {"group": name}, group_key=name) for name in groups))
        )
        await close(jobs, groups[:500] + groups[501:])
        await close(jobs, groups[500:501], opens_in=1.5)
        async with jobs.limited_time(60), serving(scheduler):
            await scheduler.wait(waiting[500])
            fresh = await scheduler.enqueue("work", {"group": "new"}, group_key="g00500 new")
            await scheduler.wait(fresh)
        assert ran == ["g00500", "new"]

    async def test_closed_ones_are_learnt_of_together(self, jobs: Jobs) -> None:
        """A worker that starts looks at the limits of a page at once, and does not try each."""
        scheduler, ran = with_slow_groups(jobs, concurrency=1)
        groups = [f"g{n:05}" for n in range(200)]
        await jobs.do(
            enqueuing(*(spec("work", {"group": name}, group_key=name) for name in groups))
        )
        await close(jobs, groups[:-1])
        worker = scheduler._new_worker()
        claims = 0
        limiter: Any = worker._limiter
        parted = limiter.parted

        def counted(takes: Any) -> Any:
            nonlocal claims
            claims += 1
            return parted(takes)

        limiter.parted = counted
        worker.end_when_idle(scheduled=False)
        tick = worker._tick
        try:
            started = 0
            while not started:
                started = await tick.claim_once()
                await worker._slots.wait_until_empty(0.0)
        finally:
            worker._slots.abandon()
            limiter.close()
            worker.stopped.set()
        assert claims <= 6
        assert ran == groups[-1:] or ran == []


class TestRounds:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(rounds_module, "monotonic", lambda: now[0])
        return now

    async def test_a_long_one_that_found_nothing_rests(self, clock: list[float]) -> None:
        rounds = Rounds(pause=1.0)
        for _ in range(LONG + 1):
            rounds.page(0, resumed=False)
        clock[0] += 0.2
        assert rounds.last_page()
        assert rounds.rests
        clock[0] += 0.1
        assert rounds.next == inf
        rounds.wake()
        assert rounds.rests  # for as long as it took
        assert rounds.next == pytest.approx(0.1)
        clock[0] += 0.11
        assert not rounds.rests
        assert rounds.next == inf

    async def test_no_longer_than_the_pause_or_its_own_time(self, clock: list[float]) -> None:
        for took, rests in ((0.2, 1.0), (3.0, 3.0)):
            rounds = Rounds(pause=1.0)
            for _ in range(LONG + 1):
                rounds.page(0, resumed=False)
            clock[0] += took
            assert rounds.last_page()
            clock[0] += rests - 0.01
            assert rounds.rests
            clock[0] += 0.02
            assert not rounds.rests

    @pytest.mark.parametrize("started", [0, 1])
    async def test_a_short_one_or_one_that_found_something_does_not(self, started: int) -> None:
        rounds = Rounds(pause=1.0)
        for _ in range(LONG + started):
            rounds.page(started, resumed=False)
        assert rounds.last_page()
        assert not rounds.rests

    async def test_begins_at_the_beginning_once_more_if_it_began_in_the_middle(self) -> None:
        rounds = Rounds(pause=1.0)
        rounds.page(0, resumed=True)
        assert not rounds.last_page()
        rounds.page(0, resumed=False)
        assert rounds.last_page()

    async def test_does_not_rest_once_the_slots_were_full(self) -> None:
        rounds = Rounds(pause=1.0)
        for _ in range(LONG + 1):
            rounds.page(0, resumed=False)
        assert rounds.last_page()
        rounds.full()
        assert not rounds.rests


KINDS: Final = [("default", "work"), ("default", "other"), ("media", "work")]


def limiter_of(*limits: Any) -> Limiter:
    handlers = Handlers()

    @handlers.handler("work", limits=limits)
    async def work(tenant: str) -> None: ...

    @handlers.handler
    async def other() -> None: ...

    return Limiter(LimitRules((), handlers), 60.0, lambda: None)


def lane(limit_key: str = "", group: str = "", queue: str = "default") -> Lane:
    return Lane(queue, "work", limit_key, group, 0, 1.0)


class TestWhatIsSkipped:
    async def test_queues_and_types_of_a_limit_without_room(self) -> None:
        limiter = limiter_of(Concurrency("gpu", 1), Concurrency("media", 1, queue="media"))
        assert limiter.skipped(KINDS) == Skipped()
        limiter.note({("media", ""): None})
        assert limiter.skipped(KINDS).kinds == {("media", "work")}
        limiter.note({("gpu", ""): None})
        assert limiter.skipped(KINDS).kinds == {("default", "work"), ("media", "work")}
        limiter.told()
        assert limiter.skipped(KINDS) == Skipped()

    async def test_keys_without_room_once_they_were_met(self) -> None:
        limiter = limiter_of(Concurrency("tenant", 1, key="tenant"))
        limiter.note({("tenant", "a"): None})
        assert limiter.open([lane("tenant=a"), lane("tenant=b")]) == [lane("tenant=b")]
        assert limiter.skipped(KINDS).keys == {("default", "work", "tenant=a")}
        limiter.told()
        assert limiter.skipped(KINDS) == Skipped()

    async def test_no_key_because_of_its_group(self) -> None:
        limiter = limiter_of(Concurrency("group", 1, key="group_key"))
        limiter.note({("group", "g"): None})
        assert limiter.open([lane("tenant=a", "g"), lane("tenant=a", "h")]) == [
            lane("tenant=a", "h")
        ]
        assert limiter.skipped(KINDS) == Skipped()
        limiter.told()
        assert limiter.take_reopened() == [lane("tenant=a", "g")]
        assert limiter.take_reopened() == []

    async def test_no_more_keys_than_a_statement_takes(self) -> None:
        limiter = limiter_of(Concurrency("tenant", 1, key="tenant"))
        for n in range(SKIPPED_KEYS + 50):
            limiter.note({("tenant", str(n)): None})
            assert limiter.open([lane(f"tenant={n}")]) == []
        keys = limiter.skipped(KINDS).keys
        assert len(keys) == SKIPPED_KEYS
        assert ("default", "work", f"tenant={SKIPPED_KEYS + 49}") in keys

    async def test_tells_whether_anything_has_opened(self) -> None:
        key = ("default", "work", "tenant=a")
        some = Skipped(frozenset({KINDS[1]}), frozenset({key}))
        assert Skipped().closes(some)
        assert some.closes(some)
        assert some.closes(Skipped(frozenset({KINDS[0], KINDS[1]})))
        assert not some.closes(Skipped(frozenset({KINDS[1]})))
        assert not some.closes(Skipped(keys=frozenset({key})))
