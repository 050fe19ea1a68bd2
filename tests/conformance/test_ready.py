"""The ready set: what may run, in which order, and that nothing which may not hides it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection

from asyncjobq import Job, State
from asyncjobq.backends.base import Backend, Lane
from asyncjobq.ready import LaneCursor, any_open, look_once, promote_once
from asyncjobq.states import IN_FLIGHT, Kind
from conformance.kit import Jobs
from conformance.steps import Step, enqueuing, ids_of, scanning, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def claimed_ids(jobs: Jobs, count: int = 100, **where: Any) -> list[int]:
    return ids_of(await jobs.claim(count, **where))


class TestOrder:
    async def test_by_priority_and_then_by_age(self, jobs: Jobs) -> None:
        late, first, second, urgent = [
            await jobs.enqueue(priority=priority) for priority in (200, 100, 100, -1)
        ]
        ids = [(await claimed_ids(jobs, 1))[0] for _ in range(4)]
        assert ids == ids_of([urgent, first, second, late])

    async def test_across_the_lanes_of_a_group(self, jobs: Jobs) -> None:
        """A group's types and limit keys are lanes of their own, and one line."""
        made = [
            await jobs.enqueue(type_name, group_key="acme", priority=priority)
            for type_name, priority in [("b", 3), ("a", 2), ("c", 1), ("a", 5), ("b", 4)]
        ]
        await jobs.spoil(made[4], limit_key="elsewhere")
        ids = [(await claimed_ids(jobs, 1, types=["a", "b", "c"]))[0] for _ in made]
        assert ids == [made[n].id for n in (2, 1, 0, 4, 3)]

    async def test_never_more_than_asked_for_of_a_group(self, jobs: Jobs) -> None:
        for type_name in ("a", "b", "c"):
            await jobs.do(enqueuing(*[spec(type_name, group_key="acme")] * 5))
        assert len(await claimed_ids(jobs, 4, types=["a", "b", "c"])) == 4


class TestFiveConditions:
    """Each is true of the claim itself, whatever a wrong write has left in `state`."""

    async def test_the_state(self, jobs: Jobs) -> None:
        shown = await jobs.enqueue()
        for state in set(State) - {State.READY}:
            hidden = await jobs.enqueue()
            await jobs.spoil(hidden, state=state, in_flight=state in IN_FLIGHT)
        assert await claimed_ids(jobs) == [shown.id]

    async def test_no_unsatisfied_edge(self, jobs: Jobs) -> None:
        shown = await jobs.enqueue()
        hidden = await jobs.enqueue(depends_on=[shown])
        await jobs.spoil(hidden, state=State.READY)
        assert await claimed_ids(jobs) == [shown.id]

    async def test_no_container(self, jobs: Jobs) -> None:
        hidden, shown = await jobs.enqueue_many(2)
        await jobs.spoil(hidden, kind=Kind.CONTAINER)
        assert await claimed_ids(jobs) == [shown.id]

    async def test_the_time_has_come(self, jobs: Jobs) -> None:
        hidden, shown = await jobs.enqueue_many(2)
        await jobs.spoil(hidden, run_after=await jobs.now() + timedelta(seconds=60))
        assert await claimed_ids(jobs) == [shown.id]
        jobs.later(61)
        assert await claimed_ids(jobs) == [hidden.id]

    async def test_no_live_lease(self, jobs: Jobs) -> None:
        hidden, shown = await jobs.enqueue_many(2)
        await jobs.spoil(hidden, lease_expires=await jobs.now() + timedelta(seconds=60))
        assert await claimed_ids(jobs) == [shown.id]
        jobs.later(61)
        assert await claimed_ids(jobs) == [hidden.id]


class TestWhatCannotRunHidesNothing:
    async def test_types_without_a_handler_here(self, jobs: Jobs) -> None:
        for name in ("aaa", "unknown", "zzz"):
            closed = [spec(name, group_key=f"g{n}", priority=-100) for n in range(100)]
            await jobs.do(enqueuing(*closed))
        runnable = await jobs.enqueue(priority=100)
        assert ids_of(await jobs.claim(1, bound=8)) == [runnable.id]

    async def test_other_queues(self, jobs: Jobs) -> None:
        closed = [spec(queue=queue, priority=-100) for queue in ("a", "z") for _ in range(300)]
        await jobs.do(enqueuing(*closed))
        runnable = await jobs.enqueue()
        assert ids_of(await jobs.claim(1, bound=8)) == [runnable.id]

    async def test_the_backlog_of_another_group(self, jobs: Jobs) -> None:
        for group in ("a", "m"):
            await jobs.do(enqueuing(*[spec(group_key=group, priority=1)] * 400))
        others = [await jobs.enqueue(group_key=group) for group in ("b", "n", "z")]
        assert set(ids_of(others)) < set(ids_of(await jobs.claim(1)))

    async def test_jobs_that_are_scheduled_blocked_or_over(self, jobs: Jobs) -> None:
        over = await jobs.enqueue_many(300)
        await jobs.finish(*await jobs.claim(300))
        await jobs.enqueue_many(300, run_after=3600)
        runnable = await jobs.enqueue()
        await jobs.enqueue_many(300, depends_on=[over[0], runnable])
        assert await claimed_ids(jobs) == [runnable.id]


async def round_of(jobs: Jobs, cursor: LaneCursor) -> list[list[Lane]]:
    """Scan until the last lane was seen."""
    pages = [await jobs.do(cursor.scan_once)]
    while cursor.cut:
        pages.append(await jobs.do(cursor.scan_once))
        assert len(pages) < 100, "the scan never comes to its end"
    return pages


def groups_of(pages: Sequence[Sequence[Lane]]) -> list[str]:
    return [lane.group_key for page in pages for lane in page]


class TestRotation:
    async def test_three_hundred_groups_are_seen_in_turn(self, jobs: Jobs) -> None:
        names = [f"group {n:03}" for n in range(310)]
        await jobs.do(enqueuing(*(spec(group_key=name) for name in names)))
        cursor = LaneCursor(("default",), ("work",))
        for _ in range(2):
            pages = await round_of(jobs, cursor)
            assert groups_of(pages) == names
            assert len(pages) == 2

    async def test_three_hundred_groups_all_run(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=40)

        @scheduler.handler
        async def work() -> None: ...

        await jobs.do(enqueuing(*(spec(group_key=f"g{n}") for n in range(310))))
        async with jobs.limited_time():
            counts = await scheduler.drain()
        assert counts[State.DONE] == 310

    @pytest.mark.parametrize("count", [7, 8, 9, 16, 24])
    async def test_a_round_has_an_end_whatever_the_number(self, jobs: Jobs, count: int) -> None:
        await jobs.do(enqueuing(*(spec(group_key=f"g{n:02}") for n in range(count))))
        cursor = LaneCursor(("default",), ("work",), bound=8)
        for _ in range(3):
            pages = await round_of(jobs, cursor)
            assert sorted(groups_of(pages)) == [f"g{n:02}" for n in range(count)]

    async def test_over_queues_and_types(self, jobs: Jobs) -> None:
        queues, types, groups = ["a", "b"], ["x", "y", "z"], [f"g{n}" for n in range(7)]
        places = {(q, t, "", g) for q in queues for t in types for g in groups}
        await jobs.do(enqueuing(*(spec(t, queue=q, group_key=g) for q, t, _, g in places)))
        cursor = LaneCursor(tuple(queues), tuple(types), bound=5)
        pages = await round_of(jobs, cursor)
        assert {lane.place for page in pages for lane in page} == places

    async def test_where_the_types_have_unequal_numbers_of_groups(self, jobs: Jobs) -> None:
        names = [("x", n) for n in range(20)] + [("y", 0)] + [("z", n) for n in range(3)]
        await jobs.do(enqueuing(*(spec(t, group_key=f"g{n:02}") for t, n in names)))
        cursor = LaneCursor(("default",), ("x", "y", "z"), bound=4)
        pages = await round_of(jobs, cursor)
        seen = {(lane.type, lane.group_key) for page in pages for lane in page}
        assert seen == {(t, f"g{n:02}") for t, n in names}

    async def test_over_keys_whose_order_databases_disagree_on(self, jobs: Jobs) -> None:
        names = ["", " ", "A", "a", "a ", "a  ", "B", "Z", "_", "b", "z", "é", "🙂", "\uffee"]
        await jobs.do(enqueuing(*(spec(group_key=name) for name in names)))
        cursor = LaneCursor(("default",), ("work",), bound=3)
        pages = await round_of(jobs, cursor)
        assert groups_of(pages) == sorted(names)

    async def test_few_lanes_with_long_backlogs(self, jobs: Jobs) -> None:
        for group in ("a", "b", "c"):
            await jobs.do(enqueuing(*[spec(group_key=group)] * 40))
        cursor = LaneCursor(("default",), ("work",), bound=16)
        pages = await round_of(jobs, cursor)
        assert groups_of(pages) == ["a", "b", "c"]
        assert len(pages) == 1

    async def test_limit_keys_are_lanes_of_their_own(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(6, group_key="acme")
        for n, job in enumerate(made):
            await jobs.spoil(job, limit_key=f"key {n // 2}")
        lanes = await jobs.do(scanning())
        assert [lane.limit_key for lane in lanes] == ["key 0", "key 1", "key 2"]

    async def test_a_lane_shows_its_first_job(self, jobs: Jobs) -> None:
        for group in ("a", "b"):
            for priority, weight in ((9, 1.0), (3, 7.5), (5, 2.0)):
                await jobs.enqueue(group_key=group, priority=priority, weight=weight)
        lanes = await jobs.do(scanning())
        assert [(lane.head_priority, lane.head_weight) for lane in lanes] == [(3, 7.5)] * 2

    async def test_without_queues_or_types_there_is_nothing_to_look_for(self, jobs: Jobs) -> None:
        await jobs.enqueue()
        assert await jobs.do(scanning(types=[])) == []
        assert await jobs.do(scanning(queues=[])) == []


class TestPromoting:
    async def test_what_is_due_and_nothing_else(self, jobs: Jobs) -> None:
        soon, later = await jobs.enqueue(run_after=10), await jobs.enqueue(run_after=100)
        assert await jobs.promote() == 0
        jobs.later(11)
        assert await jobs.promote() == 1
        assert await jobs.states(soon, later) == [State.READY, State.SCHEDULED]

    async def test_the_oldest_first_up_to_a_limit(self, jobs: Jobs) -> None:
        last = await jobs.enqueue_many(3, run_after=20)
        first = await jobs.enqueue_many(3, run_after=10)
        jobs.later(21)
        for expected in (first[:2], [*first[2:], *last[:1]], last[1:]):
            await jobs.do(partial(promote_once, limit=2))
            ready = await jobs.scheduler.find(state=State.READY)
            assert set(ids_of(expected)) <= set(ids_of(ready))

    @pytest.mark.requires("row_locks")
    async def test_at_any_moment_of_another_promotion(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            made = await jobs.enqueue_many(3, run_after=10)
            jobs.later(11)
            moved = await moment.of(promote_once, meanwhile=promote_once)
            assert moved + moment.other == 3
            assert await jobs.states(*made) == [State.READY] * 3

    @pytest.mark.requires("row_locks")
    async def test_leaves_alone_what_was_cancelled_meanwhile(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            job = await jobs.enqueue(run_after=10)
            jobs.later(11)
            if moment.number > 1:  # the row is locked from here on
                return
            await moment.of(promote_once, meanwhile=cancelling(job))
            assert await jobs.state(job) == State.CANCELLED


def cancelling(job: Job[Any]) -> Step[None]:
    def step(connection: Connection, backend: Backend) -> None:
        table = backend.tables.jobs
        scheduled = table.c.id == job.id, table.c.state == State.SCHEDULED
        connection.execute(table.update().where(*scheduled).values(state=State.CANCELLED))

    return step


class TestLooking:
    async def test_nothing_to_do(self, jobs: Jobs) -> None:
        await jobs.enqueue()
        await jobs.leased()
        chores = await jobs.do(look_once)
        assert (chores.expired, chores.unsettled, chores.next_due) == (False, False, None)

    async def test_an_expired_lease(self, jobs: Jobs) -> None:
        await jobs.leased()
        jobs.later(31)
        assert (await jobs.do(look_once)).expired

    async def test_an_unsettled_job(self, jobs: Jobs) -> None:
        await jobs.enqueue(depends_on=[await jobs.enqueue()])
        assert (await jobs.do(look_once)).unsettled

    async def test_the_next_due_time(self, jobs: Jobs) -> None:
        await jobs.enqueue(run_after=100)
        await jobs.enqueue(run_after=20)
        assert (await jobs.do(look_once)).next_due == pytest.approx(20, abs=2)
        jobs.later(50)
        assert (await jobs.do(look_once)).next_due == pytest.approx(-30, abs=2)

    @pytest.mark.parametrize("scheduled", [False, True])
    async def test_whether_jobs_of_these_queues_and_types_are_open(
        self, jobs: Jobs, scheduled: bool
    ) -> None:
        async def is_open() -> bool:
            return await jobs.do(
                lambda c, b: any_open(c, b, ("default",), ("work",), scheduled=scheduled)
            )

        await jobs.enqueue(queue="other")
        await jobs.enqueue("another type")
        assert not await is_open()
        await jobs.enqueue(run_after=60)
        assert await is_open() is scheduled
        ready = await jobs.enqueue()
        assert await is_open()
        assert (await jobs.claim_one()).lease.job_id == ready.id
        assert await is_open()
