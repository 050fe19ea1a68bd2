"""Recurring jobs: fired at their times, once each, and what becomes of times that were missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, event, update
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import (
    ArgumentsError,
    CatchUp,
    ConfigurationError,
    HandlerError,
    Handlers,
    InvalidJobError,
    Job,
    Schedule,
    ScheduleNotFoundError,
    Scheduler,
    State,
)
from asyncjobq.backends.base import Backend
from asyncjobq.ready import look_once
from asyncjobq.recurrence import define
from asyncjobq.schedules import MOST_MISSED, fire_once, pause_schedule, save_schedules
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.steps import Step, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOUR = 3600.0


def saving(name: str = "recurring", /, *, job: Any = None, **how: Any) -> Step[None]:
    """Store a schedule: hourly, unless another timing is given."""
    timing = {} if "cron" in how else {"every": HOUR}
    definition = define(name, job or spec(), **{**timing, **how})
    return lambda connection, backend: save_schedules(connection, backend, [definition])


def firing(*declared: str) -> Step[int]:
    return lambda connection, backend: fire_once(connection, backend, declared)


async def fired(jobs: Jobs) -> list[Job[Any]]:
    return await jobs.scheduler.find(limit=5000)


async def schedule(jobs: Jobs, name: str = "recurring") -> Schedule:
    return next(s for s in await jobs.scheduler.schedules() if s.name == name)


def fired_at(job: Job[Any]) -> datetime:
    assert job.meta is not None
    return datetime.fromisoformat(job.meta["fired_at"])


class TestFiring:
    async def test_at_its_time_and_not_before(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        begun = await schedule(jobs)
        jobs.later(HOUR - 1)
        assert await jobs.do(firing()) == 0
        jobs.later(1.0)
        assert await jobs.do(firing()) == 1
        assert await jobs.do(firing()) == 0
        (job,) = await fired(jobs)
        assert (job.type, job.state, job.queue) == ("work", State.READY, "default")
        assert begun.next_fire is not None
        assert job.meta == {"schedule": "recurring", "fired_at": begun.next_fire.isoformat()}
        after = await schedule(jobs)
        assert after.next_fire == begun.next_fire + timedelta(hours=1)
        assert (after.last_fire, after.last_job_id) == (begun.next_fire, job.id)

    async def test_by_a_cron_expression(self, jobs: Jobs) -> None:
        await jobs.do(saving(cron="0 4 * * *", timezone="Europe/Berlin"))
        found = await schedule(jobs)
        assert found.next_fire is not None
        assert found.next_fire.tzinfo is UTC
        assert found.next_fire.hour in (2, 3)
        jobs.later((found.next_fire - await jobs.now()).total_seconds() + 0.01)
        assert await jobs.do(firing()) == 1
        assert fired_at((await fired(jobs))[0]) == found.next_fire

    async def test_keeps_its_phase(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        first = (await schedule(jobs)).next_fire
        assert first is not None
        for number in range(1, 4):
            jobs.later(HOUR + 1.5)
            assert await jobs.do(firing()) == 1
            assert (await schedule(jobs)).next_fire == first + number * timedelta(hours=1)

    async def test_with_the_options_of_its_jobs(self, jobs: Jobs) -> None:
        job = spec(
            "other",
            {"path": "a.png"},
            queue="media",
            group_key="acme",
            weight=2,
            priority=5,
            timeout=None,
            max_attempts=2,
            cost=3,
            name="nightly",
            meta={"of": ("Ada",)},
        )
        await jobs.do(saving(job=job))
        jobs.later(HOUR)
        await jobs.do(firing())
        (made,) = await fired(jobs)
        assert (made.type, made.args) == ("other", {"path": "a.png"})
        assert (made.queue, made.group_key, made.weight, made.priority) == ("media", "acme", 2, 5)
        assert (made.timeout, made.max_attempts, made.cost, made.name) == (0.0, 2, 3, "nightly")
        assert made.meta is not None
        assert made.meta["of"] == ["Ada"]
        assert made.meta["schedule"] == "recurring"

    @pytest.mark.requires("row_locks")
    async def test_once_at_any_moment_of_another_firing(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            await jobs.do(saving())
            jobs.later(HOUR)
            ours = await moment.of(firing(), meanwhile=firing())
            assert ours + moment.other == 1
            assert len(await fired(jobs)) == 1

    async def test_moved_on_behind_its_lock_fires_nothing(self, jobs: Jobs) -> None:
        """As if whatever keeps two workers apart did not."""
        await jobs.do(saving())
        jobs.later(HOUR)

        def work(connection: Connection, backend: Backend) -> int:
            table, moved = backend.tables.schedules, []

            def move_on(_: object, __: object, statement: str, *___: object) -> None:
                if statement.startswith("INSERT INTO") and not moved:
                    moved.append(True)
                    connection.execute(update(table).values(next_fire=backend.now(HOUR)))

            event.listen(connection, "before_cursor_execute", move_on)
            return firing()(connection, backend)

        with pytest.raises(RuntimeError, match="while it was locked"):
            await jobs.do(work)
        assert await fired(jobs) == []

    @pytest.mark.requires("row_locks")
    async def test_goes_round_what_somebody_holds(self, jobs: Jobs) -> None:
        await jobs.do(saving("held"))
        await jobs.do(saving("free"))
        jobs.later(HOUR)
        async with jobs.transaction() as take:
            await take(partial(pause_schedule, name="held"))
            assert jobs.elsewhere(firing()) == 1
        assert [job.meta and job.meta["schedule"] for job in await fired(jobs)] == ["free"]

    async def test_of_many_at_once(self, jobs: Jobs) -> None:
        definitions = [define(f"number {n}", spec(), every=HOUR) for n in range(130)]
        await jobs.do(lambda c, b: save_schedules(c, b, definitions))
        jobs.later(HOUR)
        assert await jobs.do(firing()) == 100
        assert await jobs.do(firing()) == 30
        assert {job.meta["schedule"] for job in await fired(jobs) if job.meta} == {
            definition.name for definition in definitions
        }

    async def test_one_that_this_release_does_not_understand_keeps_no_other(
        self, jobs: Jobs, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("cron", "policy", "option", "sound"):
            await jobs.do(saving(name))
        await spoil(jobs, "cron", every=None, cron="0 0 * * * * 2099")
        await spoil(jobs, "policy", catch_up="sometimes")
        await spoil(jobs, "option", options={"color": "red"})
        jobs.later(HOUR)
        with caplog.at_level(logging.WARNING):
            await jobs.do(firing())
        assert [job.meta["schedule"] for job in await fired(jobs) if job.meta] == ["sound"]
        assert [record.args[0] for record in caplog.records if record.args] == [  # type: ignore[index]
            "cron",
            "option",
            "policy",
        ]
        assert await jobs.do(firing()) == 0  # until in a while


async def spoil(jobs: Jobs, name: str, **values: Any) -> None:
    """Write what no code of this release would."""
    table = jobs.tables.schedules
    await jobs.do(lambda c, _: c.execute(update(table).where(table.c.name == name).values(values)))


class TestMissedTimes:
    @pytest.mark.parametrize(("policy", "count"), [("none", 0), ("latest", 1), ("all", 10)])
    async def test_by_policy(self, jobs: Jobs, policy: str, count: int) -> None:
        await jobs.do(saving(catch_up=policy))
        first = (await schedule(jobs)).next_fire
        assert first is not None
        jobs.later(10.5 * HOUR)
        assert await jobs.do(firing()) == 1
        expected = [first + n * timedelta(hours=1) for n in range(10)][10 - count :]
        assert [fired_at(job) for job in await fired(jobs)] == expected
        after = await schedule(jobs)
        assert after.next_fire == first + timedelta(hours=10)
        assert after.last_fire == (expected[-1] if expected else None)
        await jobs.do(firing())
        assert len(await fired(jobs)) == count

    async def test_within_a_minute_none_is_missed(self, jobs: Jobs) -> None:
        await jobs.do(saving(catch_up="none"))
        jobs.later(HOUR + 50)
        await jobs.do(firing())
        assert len(await fired(jobs)) == 1

    async def test_are_bounded(self, jobs: Jobs) -> None:
        await jobs.do(saving(every=1, catch_up="all"))
        jobs.later(2 * MOST_MISSED)
        await jobs.do(firing())
        times = [fired_at(job) for job in await fired(jobs)]
        assert len(times) == MOST_MISSED
        assert times == sorted(set(times))
        assert times[-1] == (await schedule(jobs)).last_fire


class TestOverlap:
    async def test_lets_a_time_pass_while_the_last_job_is_open(self, jobs: Jobs) -> None:
        await jobs.do(saving(overlap=False, catch_up="all"))
        jobs.later(3 * HOUR)
        for _ in range(3):
            assert await jobs.do(firing()) == 1
            jobs.later(HOUR)
        (job,) = await fired(jobs)
        await jobs.finish(await jobs.claim_one())
        await jobs.do(firing())
        assert [found.id > job.id for found in await fired(jobs)] == [False, True]

    async def test_is_allowed_unless_refused(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        for _ in range(3):
            jobs.later(HOUR)
            await jobs.do(firing())
        assert len(await fired(jobs)) == 3


async def next_fire_seen(jobs: Jobs, declared: Sequence[str] | None) -> float | None:
    return (await jobs.do(partial(look_once, declared=declared))).next_fire


class TestDeclaredInCode:
    async def test_fired_by_workers_that_have_it_there(self, jobs: Jobs) -> None:
        await jobs.do(saving("ours", declared=True))
        await jobs.do(saving("theirs", declared=True, every=HOUR / 2))
        assert await next_fire_seen(jobs, []) is None
        seen = await next_fire_seen(jobs, ["ours"])
        assert seen is not None
        assert HOUR / 2 < seen <= HOUR
        jobs.later(HOUR)
        assert await jobs.do(firing()) == 0
        assert await jobs.do(firing("ours")) == 1
        assert [job.meta["schedule"] for job in await fired(jobs) if job.meta] == ["ours"]

    async def test_any_worker_sees_when_one_that_was_added_fires(self, jobs: Jobs) -> None:
        assert await next_fire_seen(jobs, ["unknown"]) is None
        await jobs.do(saving("added"))
        await jobs.do(saving("earlier", declared=True, every=60))
        for declared, most in ([[], HOUR], [["earlier"], 60]):
            seen = await next_fire_seen(jobs, declared)
            assert seen is not None
            assert most - 10 < seen <= most
        assert await next_fire_seen(jobs, None) is None

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


class TestSaving:
    async def test_the_same_again_changes_nothing(self, jobs: Jobs) -> None:
        how: dict[str, Any] = {"cron": "*/5 * * * *", "timezone": "Europe/Berlin"}
        job = spec("work", {"a": (1, 2)}, meta={"b": (3,)}, timeout=60)
        await jobs.do(saving(job=job, **how))
        before = await schedule(jobs)
        jobs.later(2000)
        await jobs.do(saving(job=job, **how))
        assert await schedule(jobs) == before

    async def test_another_timing_starts_anew(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        jobs.later(HOUR)
        await jobs.do(firing())
        before = await schedule(jobs)
        await jobs.do(saving(every=60))
        after = await schedule(jobs)
        assert after.next_fire is not None
        assert after.next_fire - await jobs.now() <= timedelta(seconds=60)
        assert (after.last_fire, after.last_job_id) == (before.last_fire, before.last_job_id)

    async def test_anything_else_keeps_the_time(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        before = await schedule(jobs)
        jobs.later(60)
        await jobs.do(saving(job=spec("other"), overlap=False, catch_up="none"))
        after = await schedule(jobs)
        assert (after.type, after.overlap, after.catch_up) == ("other", False, "none")
        assert after.next_fire == before.next_fire

    async def test_what_is_paused_stays_paused(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        await jobs.scheduler.pause_schedule("recurring")
        await jobs.do(saving(every=60))
        jobs.later(2 * HOUR)
        assert (await schedule(jobs)).next_fire is None
        assert await jobs.do(firing()) == 0

    async def test_code_takes_over_what_was_added(self, jobs: Jobs) -> None:
        await jobs.do(saving())
        before = await schedule(jobs)
        await jobs.do(saving(declared=True))
        after = await schedule(jobs)
        assert after.declared
        assert after.next_fire == before.next_fire

    async def test_names_that_databases_might_confuse(self, jobs: Jobs) -> None:
        names = ["Acme", "acme", "acme ", "é"]
        for name in names:
            await jobs.do(saving(name))
        assert [s.name for s in await jobs.scheduler.schedules()] == sorted(names)


class TestCalls:
    async def test_add_list_pause_resume_remove(self, jobs: Jobs) -> None:
        scheduler = jobs.scheduler
        added = await scheduler.add_schedule("a", "work", {"x": 1}, every=timedelta(hours=1))
        assert [added] == await scheduler.schedules()
        assert (added.args, added.every, added.paused, added.declared) == (
            {"x": 1},
            HOUR,
            False,
            False,
        )
        await scheduler.pause_schedule("a")
        await scheduler.pause_schedule("a")
        jobs.later(10 * HOUR)
        assert await jobs.do(firing()) == 0
        await scheduler.resume_schedule("a")
        (resumed,) = await scheduler.schedules()
        assert added.next_fire is not None
        assert resumed.next_fire == added.next_fire + timedelta(hours=10)
        assert await jobs.do(firing()) == 0
        await scheduler.remove_schedule("a")
        assert await scheduler.schedules() == []

    async def test_names_that_are_not_there(self, jobs: Jobs) -> None:
        scheduler = jobs.scheduler
        for call in (
            scheduler.remove_schedule,
            scheduler.pause_schedule,
            scheduler.resume_schedule,
        ):
            with pytest.raises(ScheduleNotFoundError, match="no schedule 'gone'") as caught:
                await call("gone")
            assert caught.value.name == "gone"

    async def test_arguments_are_checked_where_the_handler_is_known(self, jobs: Jobs) -> None:
        scheduler = jobs.another()

        @scheduler.handler(queue="media")
        async def resize(path: str) -> None: ...

        with pytest.raises(ArgumentsError, match="path"):
            await scheduler.add_schedule("a", "resize", every=60)
        added = await scheduler.add_schedule("a", resize.job("x"), every=60)
        assert added.options == {"queue": "media"}

    @pytest.mark.parametrize(
        ("how", "error"),
        [
            ({}, "takes one of cron= and every="),
            ({"cron": "@daily", "every": 60}, "takes one of cron= and every="),
            ({"cron": "* * *"}, "it has 3 fields"),
            ({"cron": "@daily", "timezone": "Berlin"}, "timezone='Berlin'"),
            ({"every": 0}, "every must be at least 1 second"),
            ({"every": 60, "timezone": "Europe/Berlin"}, "leave that out"),
            ({"every": 60, "catch_up": "some"}, "'none', 'latest', 'all'"),
            ({"every": 60, "overlap": "no"}, "overlap must be True or False"),
            ({"every": 60, "run_after": 60}, "cannot have run_after="),
            ({"every": 60, "depends_on": [1]}, "cannot have depends_on="),
            ({"every": 60, "parent": 1}, "cannot have parent="),
            ({"every": 60, "color": "red"}, "Unknown job option 'color'"),
        ],
    )
    async def test_refused_with_the_callers_transaction_still_good(
        self, jobs: Jobs, session: AsyncSession, how: dict[str, Any], error: str
    ) -> None:
        with pytest.raises((ConfigurationError, InvalidJobError), match=error):
            await jobs.scheduler.add_schedule("a", "work", session=session, **how)
        await jobs.scheduler.add_schedule("b", "work", every=60, session=session)
        await session.commit()
        assert [s.name for s in await jobs.scheduler.schedules()] == ["b"]

    @pytest.mark.parametrize("name", ["", "x" * 256, "a\x00b", 5])
    async def test_names_that_cannot_be(self, jobs: Jobs, name: Any) -> None:
        with pytest.raises(InvalidJobError, match="schedule's name"):
            await jobs.scheduler.add_schedule(name, "work", every=60)

    async def test_what_stands_in_code_is_changed_there(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        await jobs.do(saving("a", declared=True))
        with pytest.raises(ConfigurationError, match="'a' is declared in code"):
            await jobs.scheduler.add_schedule("a", "work", every=60, session=session)
        await session.rollback()

    async def test_rolled_back_was_never_added(self, jobs: Jobs, session: AsyncSession) -> None:
        await jobs.scheduler.add_schedule("a", "work", every=60, session=session)
        assert len(await jobs.scheduler.schedules(session=session)) == 1
        await session.rollback()
        assert await jobs.scheduler.schedules() == []


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
