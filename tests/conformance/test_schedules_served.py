"""Schedules that stand in code, and workers that fire them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, text

import asyncjobq.firing
from asyncjobq import (
    ArgumentsError,
    CatchUp,
    ConfigurationError,
    HandlerError,
    Handlers,
    InvalidJobError,
    Scheduler,
    State,
)
from asyncjobq.backends.base import Backend
from asyncjobq.firing import Firing
from asyncjobq.ready import FiredHere, look_once
from asyncjobq.schedules import Fired, fire_once
from conformance.kit import Jobs
from conformance.recurring import (
    HOUR,
    fired,
    firing,
    names_fired,
    saving,
    spoil,
)
from conformance.running import serving, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def next_fire_seen(jobs: Jobs, *declared: str) -> float | None:
    return (await jobs.do(partial(look_once, fired=FiredHere(declared)))).next_fire


class TestDeclaredInCode:
    async def test_fired_by_workers_that_have_it_there(self, jobs: Jobs) -> None:
        await jobs.do(saving("ours", declared=True))
        await jobs.do(saving("theirs", declared=True, every=HOUR / 2))
        assert await next_fire_seen(jobs) is None
        seen = await next_fire_seen(jobs, "ours")
        assert seen is not None
        assert HOUR / 2 < seen <= HOUR
        jobs.later(HOUR)
        assert await jobs.do(firing()) == 0
        assert await jobs.do(firing("ours")) == 1
        assert await names_fired(jobs) == ["ours"]

    async def test_any_worker_sees_when_one_that_was_added_fires(self, jobs: Jobs) -> None:
        assert await next_fire_seen(jobs, "unknown") is None
        await jobs.do(saving("added"))
        await jobs.do(saving("earlier", declared=True, every=60))
        for declared, most in ([[], HOUR], [["earlier"], 60]):
            seen = await next_fire_seen(jobs, *declared)
            assert seen is not None
            assert most - 10 < seen <= most
        assert (await jobs.do(look_once)).next_fire is None

    async def test_a_registry_without_a_scheduler(self, jobs: Jobs) -> None:
        reports = Handlers()

        @reports.cron("0 4 * * *", timezone="Europe/Berlin", priority=3)
        @reports.every(timedelta(hours=1), name="hourly", args={"day": "today"}, catch_up="all")
        @reports.handler(timeout=60, queue="slow")
        async def report(day: str = "yesterday") -> str:
            return day

        @reports.every(5)
        def tidy() -> None: ...

        assert await report("now") == "now"
        assert report.job().queue == "slow"
        scheduler = jobs.another(handlers=[reports])
        async with serving(scheduler):
            await until(partial(count_is, jobs, 3))
        found = {s.name: s for s in await jobs.scheduler.schedules()}
        assert set(found) == {"report", "hourly", "tidy"}
        assert all(s.declared for s in found.values())
        assert found["report"].options == {"queue": "slow", "priority": 3}
        assert (found["hourly"].every, found["hourly"].args) == (HOUR, {"day": "today"})
        assert (found["hourly"].catch_up, found["tidy"].type) == (CatchUp.ALL, "tidy")

    async def test_what_is_wrong_is_said_at_once(self) -> None:
        handlers = Handlers()

        @handlers.every(60)
        def once() -> None: ...

        def takes(day: str) -> None: ...

        with pytest.raises(HandlerError, match="'once' is declared twice"):
            handlers.cron("@daily")(once)
        with pytest.raises(ArgumentsError, match="day"):
            handlers.every(5)(takes)
        with pytest.raises(ConfigurationError, match="minute"):
            handlers.cron("x * * * *", name="x")(once)
        with pytest.raises(InvalidJobError, match="priority"):
            handlers.every(5, name="x", priority="high")(once)  # type: ignore[arg-type]
        handlers.every(5, name="twice")(once)

    async def test_many_workers_start_at_once(self, jobs: Jobs) -> None:
        def worker() -> Scheduler:
            scheduler = jobs.another(concurrency=1)
            for name in ("a", "b", "c"):
                scheduler.every(HOUR, name=name)(scheduler.handler(name)(lambda: None))
            return scheduler

        async with serving(*(worker() for _ in range(4))):
            await until(partial(count_is, jobs, 3))
        assert {s.name for s in await jobs.scheduler.schedules()} == {"a", "b", "c"}

    async def test_the_worker_that_started_last_decides(self, jobs: Jobs) -> None:
        """And no worker says again what it said when it started."""

        def release(expression: str) -> Scheduler:
            scheduler = jobs.another(poll_interval=0.05)
            scheduler.cron(expression)(scheduler.handler("work")(lambda: None))
            return scheduler

        old, new = release("@daily"), release("@hourly")
        async with serving(old):
            await until(partial(count_is, jobs, 1))
            async with serving(new):
                await until(partial(expression_is, jobs, "@hourly"))
                await asyncio.sleep(0.2)
                assert await expression_is(jobs, "@hourly")


async def count_is(jobs: Jobs, count: int) -> bool:
    return len(await jobs.scheduler.schedules()) == count


async def expression_is(jobs: Jobs, expression: str) -> bool:
    return [s.cron for s in await jobs.scheduler.schedules()] == [expression]


class TestOneWorker:
    async def test_leaves_to_others_what_it_does_not_understand(self, jobs: Jobs) -> None:
        for name in ("odd", "sound"):
            await jobs.do(saving(name))
        await spoil(jobs, "odd", catch_up="sometimes")
        jobs.later(HOUR)
        worker = Firing(jobs.database, {})
        assert await worker.fire_once()
        assert await names_fired(jobs) == ["sound"]
        assert worker.here == FiredHere(unfit=("odd",))
        seen = (await jobs.do(partial(look_once, fired=worker.here))).next_fire
        assert seen is not None
        assert seen > 0  # so that it does not look for ever
        await spoil(jobs, "odd", catch_up="latest")
        assert await Firing(jobs.database, {}).fire_once()
        assert sorted(await names_fired(jobs)) == ["odd", "sound"]

    async def test_fires_each_by_itself_if_the_database_refuses_them_together(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refusing(
            connection: Connection, backend: Backend, names: Sequence[str], added: Mapping[str, Any]
        ) -> Fired:
            result = fire_once(connection, backend, names, added)
            if "refused" in names:
                connection.execute(text("SELECT nothing FROM nowhere"))
            return result

        monkeypatch.setattr(asyncjobq.firing, "fire_once", refusing)
        for name in ("a", "refused", "z"):
            await jobs.do(saving(name))
        jobs.later(HOUR)
        worker = Firing(jobs.database, {})
        assert await worker.fire_once()
        assert sorted(await names_fired(jobs)) == ["a", "z"]
        assert worker.here == FiredHere(unfit=("refused",))
        assert not await worker.fire_once()


class TestServing:
    """With half a minute to the next poll."""

    @staticmethod
    def idle(jobs: Jobs) -> tuple[Scheduler, asyncio.Queue[None]]:
        scheduler, runs = jobs.another(poll_interval=30), asyncio.Queue[None]()

        @scheduler.handler
        async def work() -> None:
            runs.put_nowait(None)

        return scheduler, runs

    async def test_fires_when_it_is_time(self, jobs: Jobs) -> None:
        scheduler, runs = self.idle(jobs)
        scheduler.cron("* * * * * *", name="declared")(scheduler._handlers["work"])
        async with serving(scheduler):
            for _ in range(2):
                await runs.get()
        assert {job.meta["schedule"] for job in await fired(jobs) if job.meta} == {"declared"}

    async def test_fires_what_is_added_meanwhile(self, jobs: Jobs) -> None:
        scheduler, runs = self.idle(jobs)
        async with serving(scheduler):
            await asyncio.sleep(0.15)
            await scheduler.add_schedule("added", "work", every=1)
            await runs.get()

    @pytest.mark.requires("wake")
    async def test_fires_what_is_added_by_another_process(self, jobs: Jobs) -> None:
        scheduler, runs = self.idle(jobs)
        async with serving(scheduler):
            await asyncio.sleep(0.15)
            jobs.elsewhere(saving(every=1))
            await runs.get()

    async def test_draining_fires_nothing_and_declares_nothing(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        jobs.later(HOUR)
        scheduler = jobs.scheduler
        scheduler.every(60)(scheduler.handler("work")(lambda: None))
        for scheduled in (False, True):
            async with jobs.limited_time():
                counts = await scheduler.drain(scheduled=scheduled)
            assert counts[State.DONE] == 0
        assert [s.name for s in await scheduler.schedules()] == ["recurring"]
