"""Pauses of queues and types: no claim that begins after one takes a job of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import InvalidJobError, State
from asyncjobq.control import pause
from asyncjobq.pauses import Closed
from asyncjobq.ready import LaneCursor, look_once
from conformance.kit import Jobs
from conformance.running import Latch, serving
from conformance.steps import Step, claiming, ids_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, LEASED, DONE = State.READY, State.LEASED, State.DONE
EVERYWHERE: dict[str, Any] = {"queues": ("default", "other"), "types": ("play", "work")}


def pausing(kind: str, name: str) -> Step[None]:
    return lambda connection, backend: pause(connection, backend, kind, name)


class TestClaim:
    @pytest.mark.parametrize("lanes", [{"queue": "other"}, {"type": "play"}])
    async def test_takes_nothing_of_it_until_it_is_resumed(
        self, jobs: Jobs, lanes: dict[str, str]
    ) -> None:
        held = await jobs.enqueue(lanes.get("type", "work"), queue=lanes.get("queue", "default"))
        free = await jobs.enqueue()
        await jobs.scheduler.pause(**lanes)
        assert ids_of(await jobs.claim(5, **EVERYWHERE)) == [free.id]
        assert await jobs.scheduler.resume(**lanes)
        assert ids_of(await jobs.claim(5, **EVERYWHERE)) == [held.id]
        assert not await jobs.scheduler.resume(**lanes)

    async def test_of_a_name_that_is_the_others(self, jobs: Jobs) -> None:
        job = await jobs.enqueue("work", queue="default")
        await jobs.scheduler.pause(queue="work")
        await jobs.scheduler.pause(type="default")
        await jobs.scheduler.pause(type="Work")
        await jobs.scheduler.pause(type="work ")
        assert ids_of(await jobs.claim()) == [job.id]

    async def test_leaves_what_runs(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.scheduler.pause(queue="default")
        assert (await jobs.renew(claimed)).renewed == {claimed.lease}
        await jobs.finish(claimed)
        assert await jobs.state(claimed) == DONE

    @pytest.mark.requires("row_locks")
    @pytest.mark.parametrize("kind", ["queue", "type"])
    async def test_that_begins_after_it(self, jobs: Jobs, kind: str) -> None:
        """Whatever the scan before it had found."""
        name = {"queue": "default", "type": "work"}[kind]
        async for moment in jobs.moments():
            job = await jobs.enqueue()
            claimed = await moment.of(claiming(), meanwhile=pausing(kind, name))
            if moment.number < 2:
                assert claimed == []
                assert await jobs.state(job) == READY

    @pytest.mark.requires("row_locks")
    async def test_while_somebody_pauses_it_again(self, jobs: Jobs) -> None:
        """A pause that is locked at this moment is one: it is not skipped like a locked job."""
        await jobs.enqueue()
        await jobs.scheduler.pause(type="work")
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(pausing("type", "work"))
            assert await jobs.claim() == []


class TestCall:
    async def test_says_what_is_paused(self, jobs: Jobs) -> None:
        scheduler, before = jobs.scheduler, await jobs.now()
        assert await scheduler.paused() == []
        await scheduler.pause(type="work")
        first = (await scheduler.paused())[0].paused_at
        await scheduler.pause(queue="b")
        await scheduler.pause(queue="a")
        await scheduler.pause(type="work")
        found = await scheduler.paused()
        named = [(pause.queue, pause.type) for pause in found]
        assert named == [("a", None), ("b", None), (None, "work")]
        assert found[2].paused_at == first >= before

    async def test_in_a_transaction_of_the_caller(self, jobs: Jobs, session: AsyncSession) -> None:
        job = await jobs.enqueue()
        await jobs.scheduler.pause(queue="default", session=session)
        await session.rollback()
        assert ids_of(await jobs.claim()) == [job.id]
        await jobs.scheduler.pause(queue="default", session=session)
        await session.commit()
        await jobs.enqueue()
        assert await jobs.claim() == []
        await jobs.scheduler.resume(queue="default", session=session)
        await session.commit()
        assert await jobs.scheduler.paused() == []

    @pytest.mark.parametrize(
        "wrong",
        [{}, {"queue": "a", "type": "b"}, {"queue": 5}, {"queue": "q" * 65}, {"type": "\0"}],
    )
    async def test_that_names_nothing_is_refused(self, jobs: Jobs, wrong: dict[str, Any]) -> None:
        for call in (jobs.scheduler.pause, jobs.scheduler.resume):
            with pytest.raises(InvalidJobError):
                await call(**wrong)


class TestScan:
    async def test_leaves_out_what_is_known_to_be_closed(self, jobs: Jobs) -> None:
        """So that it hides nothing, however many lanes it has."""
        for number in range(5):
            await jobs.enqueue("play", group_key=f"group {number}")
        open_ = await jobs.enqueue("work")
        lanes = LaneCursor(("default",), ("play", "work"), bound=2)
        assert len(await jobs.do(lanes.scan_once)) == 2
        assert lanes.cut
        assert lanes.close(Closed(types=frozenset({"play"})))
        (lane,) = await jobs.do(lanes.scan_once)
        assert lane.type == open_.type
        assert not lanes.cut

    @pytest.mark.parametrize(
        "closed", [Closed(queues=frozenset({"default"})), Closed(types=frozenset({"work"}))]
    )
    async def test_of_what_is_closed_altogether(self, jobs: Jobs, closed: Closed) -> None:
        await jobs.enqueue_many(3)
        lanes = LaneCursor(("default",), ("work",), bound=1)
        await jobs.do(lanes.scan_once)
        assert lanes.close(closed)
        assert await jobs.do(lanes.scan_once) == []
        assert not lanes.cut
        assert not lanes.close(closed)

    async def test_is_told_by_the_chores(self, jobs: Jobs) -> None:
        assert not (await jobs.do(look_once)).paused
        await jobs.scheduler.pause(type="work")
        assert (await jobs.do(look_once)).paused


class TestWorker:
    async def test_lets_run_what_runs_and_starts_the_rest_when_it_is_resumed(
        self, jobs: Jobs
    ) -> None:
        scheduler = jobs.scheduler
        latch = Latch(scheduler)

        @scheduler.handler
        async def free() -> None: ...

        async with serving(scheduler):
            running = await latch.enqueue(scheduler)
            await scheduler.pause(type="latch")
            held = await scheduler.enqueue(latch.handler.job())
            await scheduler.wait(await scheduler.enqueue(free.job()))
            latch.go_on.set()
            assert await scheduler.wait(running) == "gone on"
            assert await jobs.state(held) == READY
            await scheduler.resume(type="latch")
            assert await scheduler.wait(held) == "gone on"

    async def test_drains_what_is_not_paused(self, jobs: Jobs) -> None:
        scheduler = jobs.scheduler
        ran: list[str] = []
        for name in ("held", "free"):
            scheduler.handler(name)(partial(_note, ran, name))
        await scheduler.pause(type="held")
        for name in ("held", "free", "held"):
            job = await scheduler.enqueue(name)
        late = await scheduler.enqueue("held", run_after=60.0)
        async with jobs.limited_time():
            assert (await scheduler.drain(scheduled=True))[DONE] == 1
        assert ran == ["free"]
        assert await jobs.states(job, late) == [READY, State.SCHEDULED]
        await scheduler.resume(type="held")
        async with jobs.limited_time():
            assert (await scheduler.drain())[DONE] == 2


async def _note(ran: list[str], name: str) -> None:
    ran.append(name)
