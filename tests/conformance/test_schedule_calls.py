"""Schedules added, changed, paused and removed, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import (
    ArgumentsError,
    ConfigurationError,
    InvalidJobError,
    ScheduleNotFoundError,
)
from asyncjobq.backends.base import Backend
from asyncjobq.recurrence import define
from asyncjobq.schedules import add_schedule, remove_schedule
from conformance.kit import Jobs
from conformance.meanwhile import moments_of_a_caller
from conformance.recurring import (
    HOUR,
    firing,
    saving,
    schedule,
)
from conformance.steps import spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


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

    @pytest.mark.requires("row_locks")
    async def test_at_any_moment_of_its_removal(self, jobs: Jobs) -> None:
        """It is there afterwards, whichever comes first."""
        definition = define("recurring", spec(), every=HOUR)

        def remove(connection: Connection, backend: Backend) -> str:
            try:
                with connection.begin_nested():
                    remove_schedule(connection, backend, "recurring")
            except OperationalError:
                return "waits"
            return "removed"

        async for moment in jobs.moments():
            await jobs.do(saving())
            add = partial(add_schedule, definition=definition)
            added = await moment.of(add, remove)
            assert added.name == "recurring"
            if moment.other == "waits":
                break  # so it will from here on
            if not moment.last:
                assert await schedule(jobs)

    @pytest.mark.parametrize("call", ["pause_schedule", "resume_schedule"])
    async def test_in_a_transaction_that_waits_for_its_removal(
        self, jobs: Jobs, application: AsyncEngine, call: str
    ) -> None:
        """Nobody is told that it was paused who would find it gone."""

        def remove(connection: Connection, backend: Backend) -> None:
            remove_schedule(connection, backend, "recurring")

        await jobs.do(saving())
        async for moment in moments_of_a_caller(jobs, application, remove):
            try:
                await getattr(jobs.scheduler, call)("recurring", session=moment.session)
            except ScheduleNotFoundError:
                assert moment.result is None
                assert not moment.waits
            else:
                assert moment.waits or moment.over
            await moment.session.rollback()
            await jobs.do(saving())


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
