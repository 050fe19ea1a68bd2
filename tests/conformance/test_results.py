"""Waiting for jobs wherever they run, and what they return: `wait`, `as_completed`, `result_of`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Connection, text, update
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import (
    DatabaseUnavailableError,
    InvalidJobError,
    JobCancelled,
    JobContext,
    JobFailed,
    JobNotFoundError,
    Scheduler,
    SchedulerStateError,
    SchemaError,
    State,
    StoredResultError,
    inspection,
    waiting,
)
from asyncjobq.clock import monotonic
from asyncjobq.lease import Defaults
from conformance.kit import Jobs
from conformance.moves import unwatched
from conformance.running import serving, until
from conformance.steps import failed, finishing, ids_of, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAR_AWAY = 60.0


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Give the ids that each look at awaited jobs asks for."""
    seen: list[list[int]] = []
    look = inspection.open_among

    def noted(connection: Any, backend: Any, job_ids: Any) -> set[int]:
        seen.append(list(job_ids))
        return look(connection, backend, job_ids)

    monkeypatch.setattr(inspection, "open_among", noted)
    return seen


@pytest.fixture
def only_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no looks but the first ones and those that somebody asks for."""
    monkeypatch.setattr(waiting, "FIRST_PAUSE", FAR_AWAY)
    monkeypatch.setattr(waiting, "LISTEN_AFTER", 0.0)


async def until_true(condition: Callable[[], bool]) -> None:
    """Wait for what this process knows."""

    async def holds() -> bool:
        return condition()

    await until(holds)


async def nobody_looks() -> bool:
    names = {task.get_name() for task in asyncio.all_tasks()}
    return not names & {"asyncjobq waiting", "asyncjobq listening"}


def only_waiting(jobs: Jobs) -> Scheduler:
    """Return a scheduler as in a process that runs no jobs."""
    return jobs.another(poll_interval=FAR_AWAY)


class TestWait:
    async def test_for_what_ends_in_a_process_that_tells_nobody(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        waiter = jobs.another(poll_interval=0.1)
        async with jobs.limited_time():
            waits = asyncio.create_task(waiter.wait(claimed.lease.job_id))
            await asyncio.sleep(0.05)
            jobs.elsewhere(finishing(claimed))
            assert await waits == 1

    @pytest.mark.requires("wake")
    @pytest.mark.usefixtures("only_woken")
    async def test_learns_of_the_end_at_once(self, jobs: Jobs, looks: list[list[int]]) -> None:
        claimed = await jobs.leased()
        waiter = only_waiting(jobs)
        async with jobs.limited_time():
            waits = asyncio.create_task(waiter.wait(claimed.lease.job_id))
            if jobs.backend.listens:  # it looks once more when it listens
                await until_true(lambda: len(looks) >= 2)
            else:
                await asyncio.sleep(0.3)
            jobs.elsewhere(finishing(claimed))
            assert await waits == 1

    @pytest.mark.requires("listen")
    @pytest.mark.usefixtures("only_woken")
    async def test_a_worker_tells_of_ends_while_somebody_waits(self, jobs: Jobs) -> None:
        waiter, worker = only_waiting(jobs), jobs.another()
        go_on = asyncio.Event()

        @worker.handler
        async def work() -> int:
            await go_on.wait()
            return 1

        backend: Any = worker._database.backend

        async def hears() -> bool:
            return bool(backend.awaited_until < float("inf"))

        async def knows() -> bool:
            return bool(backend.awaited_until > monotonic())

        async with serving(worker):
            job = await worker.enqueue(work.job())
            await until(hears)
            backend.awaited_until = 0.0  # nobody has said that he waits
            waits = asyncio.create_task(waiter.wait(job))
            await until(knows)
            go_on.set()
            assert await waits == 1

    @pytest.mark.usefixtures("only_woken")
    async def test_is_told_by_a_worker_of_the_same_scheduler(self, jobs: Jobs) -> None:
        scheduler = jobs.another(poll_interval=FAR_AWAY)

        @scheduler.handler
        async def work() -> int:
            await asyncio.sleep(0.05)
            return 1

        async with serving(scheduler):
            assert await scheduler.wait(await scheduler.enqueue(work.job())) == 1

    async def test_of_many_is_one_look_at_a_time(self, jobs: Jobs, looks: list[list[int]]) -> None:
        made = await jobs.enqueue_many(100)
        claimed = await jobs.claim(100)
        waiter = jobs.another(poll_interval=0.1)
        async with jobs.limited_time(30):
            waits = [asyncio.create_task(waiter.wait(job)) for job in made for _ in range(2)]
            await until_true(lambda: bool(looks))
            jobs.elsewhere(finishing(*claimed))
            assert await asyncio.gather(*waits) == [1] * 200
        assert sorted(looks[0]) == ids_of(made)
        assert len(looks) < 30
        await until(nobody_looks)

    async def test_outlives_an_outage(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        job = await jobs.enqueue()
        waiter, asked = jobs.another(poll_interval=0.05), 0

        async def away(*_: object) -> set[int]:
            nonlocal asked
            asked += 1
            raise DatabaseUnavailableError("away")

        monkeypatch.setattr(waiter._waiters, "_look", away)
        async with jobs.limited_time():
            waits = asyncio.create_task(waiter.wait(job))
            await until_true(lambda: asked > 3)
            await jobs.run_all()
            watch = next(iter(waiter._waiters._watches.values()))
            monkeypatch.setattr(watch, "_look", waiter._still_open)
            assert await waits == 1
        assert len([r for r in caplog.records if "waiting for 1 jobs" in r.message]) == 1

    @pytest.mark.requires("listen")
    @pytest.mark.usefixtures("only_woken")
    async def test_listens_again_when_its_connections_are_cut(
        self, jobs: Jobs, looks: list[list[int]]
    ) -> None:
        claimed = await jobs.leased()
        waiter = only_waiting(jobs)
        kill = text(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE query LIKE '%pg_notify%' AND pid <> pg_backend_pid() AND state = 'idle'"
        )
        async with jobs.limited_time():
            waits = asyncio.create_task(waiter.wait(claimed.lease.job_id))
            await until_true(lambda: len(looks) >= 2)
            assert jobs.elsewhere(lambda c, _: c.scalar(kill)) >= 1
            before = len(looks)
            await until_true(lambda: len(looks) > before)
            await jobs.finish(claimed)
            assert await waits == 1

    @pytest.mark.usefixtures("only_woken")
    @pytest.mark.parametrize("call", ["cancel", "cancel_many"])
    async def test_is_told_of_what_a_call_cancels(
        self, jobs: Jobs, application: AsyncEngine, call: str
    ) -> None:
        """After the commit of the caller's session, if it is made in that."""

        async def cancel(**how: Any) -> None:
            if call == "cancel":
                await jobs.scheduler.cancel(job, **how)
            else:
                await jobs.scheduler.cancel_many(type="work", **how)

        for in_session in (False, True):
            job = await jobs.enqueue()
            async with jobs.limited_time(), AsyncSession(application) as session:
                waits = asyncio.create_task(jobs.scheduler.wait(job))
                await asyncio.sleep(0.05)
                await cancel(**({"session": session} if in_session else {}))
                await session.commit()
                with pytest.raises(JobCancelled):
                    await waits

    async def test_for_a_time(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        with pytest.raises(TimeoutError):
            await jobs.scheduler.wait(job, timeout=0.05)
        await until(nobody_looks)

    async def test_for_no_time(self, jobs: Jobs) -> None:
        """One that has ended has, however short the time."""
        claimed, open_ = await jobs.leased(), await jobs.enqueue()
        await jobs.finish(claimed)
        assert await jobs.scheduler.wait(claimed.lease.job_id, timeout=0) == 1
        with pytest.raises(TimeoutError, match="ready in the queue 'default'"):
            await jobs.scheduler.wait(open_, timeout=0)
        with pytest.raises(JobNotFoundError):
            await jobs.scheduler.wait(12345, timeout=0)

    async def test_for_nothing(self, jobs: Jobs) -> None:
        with pytest.raises(JobNotFoundError):
            await jobs.scheduler.wait(12345)

    async def test_without_tables(self, jobs: Jobs) -> None:
        with pytest.raises(SchemaError):
            await jobs.another(table_prefix="none_").wait(1)

    async def test_of_a_scheduler_that_is_closed(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        waiter = jobs.another()
        waits = asyncio.create_task(waiter.wait(job))
        await asyncio.sleep(0.05)
        await waiter.aclose()
        with pytest.raises(SchedulerStateError, match="closed"):
            await waits

    @pytest.mark.usefixtures("only_woken")
    async def test_for_one_that_is_run_again_meanwhile(self, jobs: Jobs) -> None:
        """What was told may be out of date by the time at which the job is read."""
        claimed = await jobs.leased()
        async with jobs.limited_time():
            waits = asyncio.create_task(jobs.scheduler.wait(claimed.lease.job_id))
            await asyncio.sleep(0.05)
            jobs.scheduler._waiters.tell(claimed.lease.job_id)
            await asyncio.sleep(0.05)
            await jobs.finish(claimed)
            jobs.scheduler._waiters.tell(claimed.lease.job_id)
            assert await waits == 1


class TestAsCompleted:
    async def test_yields_each_once_however_it_ends(self, jobs: Jobs) -> None:
        first, second, third, fourth = await jobs.enqueue_many(4)
        claimed = await jobs.claim(4)
        await jobs.finish(claimed[1])
        seen: list[tuple[int, State]] = []
        async with jobs.limited_time():
            wanted = [first, second, third.id, fourth, second.id]
            async for job in jobs.scheduler.as_completed(wanted):
                seen.append((job.id, job.state))
                if len(seen) == 1:
                    await jobs.finish(claimed[2], outcome=failed("broken"))
                elif len(seen) == 2:
                    await jobs.finish(claimed[0], outcome=succeeded({"a": 1}))
                    await jobs.spoil(fourth, state=State.CANCELLED, in_flight=False)
        assert seen[:2] == [(second.id, State.DONE), (third.id, State.FAILED)]
        assert sorted(seen[2:]) == [(first.id, State.DONE), (fourth.id, State.CANCELLED)]
        assert job.ended

    async def test_of_none(self, jobs: Jobs) -> None:
        assert [job async for job in jobs.scheduler.as_completed([])] == []

    async def test_of_one_that_is_not_there(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        with pytest.raises(JobNotFoundError, match="12345"):
            async for _ in jobs.scheduler.as_completed([job, 12345]):
                pass
        await until(nobody_looks)

    async def test_for_a_time(self, jobs: Jobs) -> None:
        one, other = await jobs.enqueue_many(2)
        await jobs.finish(await jobs.claim_one())
        ended = jobs.scheduler.as_completed([one, other], timeout=0.3)
        assert (await anext(ended)).id == one.id
        with pytest.raises(TimeoutError, match=f"1 jobs .* {other.id}"):
            await anext(ended)

    async def test_for_no_time(self, jobs: Jobs) -> None:
        one, other = await jobs.enqueue_many(2)
        await jobs.finish(await jobs.claim_one())
        ended = jobs.scheduler.as_completed([other, one, one], timeout=0)
        assert (await anext(ended)).id == one.id
        with pytest.raises(TimeoutError):
            await anext(ended)
        assert [job.id async for job in jobs.scheduler.as_completed([one], timeout=0)] == [one.id]

    async def test_of_one_that_is_run_again_meanwhile(self, jobs: Jobs) -> None:
        one, other = await jobs.enqueue_many(2)
        first, second = await jobs.claim(2)
        async with jobs.limited_time():
            ended = jobs.scheduler.as_completed([one, other])
            following = asyncio.create_task(anext(ended))
            await asyncio.sleep(0.05)
            jobs.scheduler._waiters.tell(one.id)
            await jobs.finish(second)
            assert (await following).id == other.id
            following = asyncio.create_task(anext(ended))
            await jobs.finish(first)
            assert (await following).id == one.id
            await ended.aclose()

    async def test_of_many(self, jobs: Jobs, looks: list[list[int]]) -> None:
        """Read in portions; its CPU time goes with the jobs, not with their square."""
        made = await jobs.enqueue_many(1500)
        table = jobs.tables.jobs
        every = update(table).values(state=State.DONE, result=3)

        def done(connection: Connection, some: Any) -> None:
            with unwatched(connection):
                connection.execute(some)

        seen: set[int] = set()
        async with jobs.limited_time(60):
            half = every.where(table.c.id.in_(ids_of(made[::2])))
            await jobs.do(lambda c, _: done(c, half))
            async for job in jobs.scheduler.as_completed(made):
                seen.add(job.id)
                if len(seen) == 750:
                    await jobs.do(lambda c, _: done(c, every))
        assert seen == set(ids_of(made))
        assert len(looks[0]) == 1500
        assert len(looks) < 20


class Size(BaseModel):
    width: int
    height: int = 1


@dataclass
class Box:
    size: Size
    name: str


class TestTypedResults:
    async def test_are_rebuilt_by_the_return_type(self, jobs: Jobs) -> None:
        scheduler = jobs.scheduler

        @scheduler.handler
        async def model() -> Size:
            return Size(width=3)

        @scheduler.handler
        def nested() -> list[Box]:
            return [Box(Size(width=1), "a")]

        @scheduler.handler
        async def plain() -> dict[str, Any]:
            return {"size": Size(width=2)}

        specs = [model.job(), nested.job(), plain.job()]
        made = [await scheduler.enqueue(spec) for spec in specs]
        async with jobs.limited_time():
            await scheduler.drain()
            assert [await scheduler.wait(job.id) for job in made] == [
                Size(width=3),
                [Box(Size(width=1), "a")],
                {"size": {"width": 2, "height": 1}},
            ]
            stored = await scheduler.get(made[0])
            assert stored.result == {"width": 3, "height": 1}
            assert model.result_of(stored) == Size(width=3)
            assert await jobs.another().wait(made[0]) == stored.result

    async def test_that_fit_no_longer(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler("work", aliases=("older",))
        async def work() -> Size:
            return Size(width=1)

        job = await jobs.enqueue("older")
        leased = await jobs.claim_one(types=("older",), defaults=_defaults("older"))
        await jobs.finish(leased, outcome=succeeded({"w": 1}))
        with pytest.raises(StoredResultError, match=r"(?s)Size.*'work'.*width") as caught:
            await jobs.scheduler.wait(job, timeout=10)
        assert (caught.value.job_id, caught.value.result) == (job.id, {"w": 1})

    async def test_of_upstreams(self, jobs: Jobs) -> None:
        scheduler = jobs.scheduler

        @scheduler.handler
        async def measure(width: int) -> Size:
            return Size(width=width)

        @scheduler.handler(max_attempts=1)
        async def fail() -> Size:
            raise ValueError("broken")

        @scheduler.handler
        async def add_up(ctx: JobContext) -> int:
            return sum(measure.result_of(job).width for job in await ctx.upstreams())

        parts = await scheduler.enqueue_many([measure.job(3), measure.job(4)])
        total = await scheduler.enqueue(add_up.job(), depends_on=parts)
        bad = await scheduler.enqueue(fail.job())
        async with jobs.limited_time():
            await scheduler.drain()
            assert await scheduler.wait(total) == 7
        with pytest.raises(JobFailed, match="broken"):
            fail.result_of(await scheduler.get(bad))
        with pytest.raises(InvalidJobError, match="'measure'"):
            fail.result_of(await scheduler.get(parts[0]))
        with pytest.raises(InvalidJobError, match="ready"):
            measure.result_of(await scheduler.enqueue(measure.job(1)))

    async def test_of_a_cancelled_job(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> Size:
            return Size(width=1)

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.cancel(job)
        with pytest.raises(JobCancelled):
            work.result_of(await jobs.scheduler.get(job))


def _defaults(type_name: str) -> Defaults:
    return Defaults(max_attempts={type_name: 5}, timeout={type_name: 3600.0})
