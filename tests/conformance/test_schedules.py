"""Recurring jobs: fired at their times, once each, and what becomes of times that were missed."""

from __future__ import annotations

import logging
from datetime import UTC, timedelta
from functools import partial

import pytest
from sqlalchemy import Connection, event, update

from asyncjobq import (
    State,
)
from asyncjobq.backends.base import Backend
from asyncjobq.ready import FiredHere
from asyncjobq.recurrence import define
from asyncjobq.schedules import (
    MOST_MISSED,
    due_schedules,
    pause_schedule,
    save_schedules,
)
from conformance.kit import Jobs
from conformance.recurring import (
    HOUR,
    fired,
    fired_at,
    firing,
    names_fired,
    saving,
    schedule,
    spoil,
)
from conformance.steps import spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
        assert await names_fired(jobs) == ["free"]

    async def test_of_many_at_once(self, jobs: Jobs) -> None:
        definitions = [define(f"number {n}", spec(), every=HOUR) for n in range(130)]
        await jobs.do(lambda c, b: save_schedules(c, b, definitions))
        jobs.later(HOUR)
        assert await jobs.do(firing()) == 100
        assert await jobs.do(firing()) == 30
        assert sorted(await names_fired(jobs)) == sorted(d.name for d in definitions)

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
        assert await names_fired(jobs) == ["sound"]
        assert [record.args[0] for record in caplog.records if record.args] == [  # type: ignore[index]
            "cron",
            "option",
            "policy",
        ]
        assert len(await jobs.do(partial(due_schedules, fired=FiredHere()))) == 3


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
