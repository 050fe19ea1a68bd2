"""Serving: from start to stop, and what neither handlers nor the database can do to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from asyncjobq import (
    Concurrency,
    DatabaseUnavailableError,
    Handlers,
    JobFailed,
    Limit,
    SchedulerStateError,
    State,
)
from asyncjobq.backends.base import Take
from asyncjobq.finalize import Written
from asyncjobq.lease import Claimed
from asyncjobq.tick import Tick
from conformance.kit import Jobs
from conformance.running import Latch, served, serving, until
from conformance.steps import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestServe:
    async def test_until_stopped(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def add(a: int, b: int) -> int:
            return a + b

        for n in range(2):
            async with served(jobs.scheduler) as task:
                job = await jobs.scheduler.enqueue(add.job(n, b=1))
                assert await jobs.scheduler.wait(job) == n + 1
                jobs.scheduler.stop()
                jobs.scheduler.stop()
            assert task.result() is None

    async def test_in_the_background(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> int:
            return 1

        async with asyncio.timeout(10), jobs.scheduler.serving() as scheduler:
            assert scheduler is jobs.scheduler
            assert await scheduler.wait(await scheduler.enqueue(work.job())) == 1

    async def test_in_the_background_for_no_time_at_all(self, jobs: Jobs) -> None:
        for _ in range(2):
            async with serving(jobs.scheduler):
                pass

    async def test_in_the_background_of_a_block_that_fails(self, jobs: Jobs) -> None:
        with pytest.raises(LookupError):
            async with serving(jobs.scheduler):
                raise LookupError
        async with serving(jobs.scheduler):
            pass

    async def test_twice_at_once_is_refused(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        async with served(jobs.scheduler):
            job = await latch.enqueue(jobs.scheduler)
            for again in (jobs.scheduler.serve, jobs.scheduler.drain):
                with pytest.raises(SchedulerStateError, match="serves already"):
                    await again()
            with pytest.raises(SchedulerStateError):
                async with jobs.scheduler.serving():
                    pass
            latch.go_on.set()
            assert await jobs.scheduler.wait(job) == "gone on"
            jobs.scheduler.stop()

    async def test_stopping_what_does_not_serve_does_nothing(self, jobs: Jobs) -> None:
        jobs.scheduler.stop()
        async with serving(jobs.scheduler):
            pass
        jobs.scheduler.stop()

    async def test_closing_ends_it(self, jobs: Jobs) -> None:
        async with served(jobs.scheduler) as task:
            await asyncio.sleep(0)
            await jobs.scheduler.aclose()
        assert task.result() is None
        await jobs.scheduler.aclose()

    async def test_with_handlers_of_several_registries(self, jobs: Jobs) -> None:
        first, second = Handlers(), Handlers()
        scheduler = jobs.another(handlers=[first, second])

        @first.handler(aliases=["old name"])
        async def one() -> int:
            return 1

        @second.handler
        async def two() -> int:
            return 2

        made = [await scheduler.enqueue(what) for what in ("old name", "one", "two")]
        async with serving(scheduler):
            assert [await scheduler.wait(job) for job in made] == [1, 1, 2]

    async def test_never_more_than_its_slots(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=5, queues={"default": 3, "media": 1})
        running: dict[str, int] = {"default": 0, "media": 0}
        most = dict(running)

        @scheduler.handler
        async def work(queue: str) -> None:
            running[queue] += 1
            most[queue] = max(most[queue], running[queue])
            await asyncio.sleep(0.005)
            running[queue] -= 1

        for queue in running:
            await scheduler.enqueue_many([work.job(queue).options(queue=queue)] * 15)
        async with jobs.limited_time():
            assert (await scheduler.drain())[State.DONE] == 30
        assert most == {"default": 3, "media": 1}

    async def test_whatever_its_handlers_raise(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(max_attempts=1)
        async def bad(number: int) -> None:
            raise [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), OSError()][number]

        @jobs.scheduler.handler
        async def good() -> int:
            return 1

        async with serving(jobs.scheduler):
            for number in range(4):
                with pytest.raises(JobFailed):
                    await jobs.scheduler.wait(await jobs.scheduler.enqueue(bad.job(number)))
            assert await jobs.scheduler.wait(await jobs.scheduler.enqueue(good.job())) == 1

    async def test_one_that_cannot_be_started_strands_no_other(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work() -> int:
            return 1

        made = [await jobs.scheduler.enqueue(work.job()) for _ in range(3)]
        await jobs.spoil(made[1], timeout=1e300)  # its deadline lies beyond the calendar
        async with serving(jobs.scheduler):
            with pytest.raises(JobFailed, match="cannot be started: OverflowError"):
                await jobs.scheduler.wait(made[1])
            for job in (made[0], made[2]):
                assert await jobs.scheduler.wait(job) == 1
        assert [(await jobs.row(job)).attempt for job in made] == [1, 1, 1]

    async def test_although_the_database_fails_for_a_while(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        @jobs.scheduler.handler
        async def work(number: int) -> int:
            return number

        run, observer = jobs.database.run, jobs.another()
        errors = [ValueError("a bug"), ConnectionError("cut"), DatabaseUnavailableError("away")]

        async def fails_at_first(step: Any, **how: Any) -> Any:
            if errors:
                raise errors.pop()
            return await run(step, **how)

        async with serving(jobs.scheduler):
            made = [await jobs.scheduler.enqueue(work.job(n)) for n in range(3)]
            monkeypatch.setattr(jobs.database, "run", fails_at_first)

            async def all_done() -> bool:
                return {job.state for job in await observer.find()} == {State.DONE}

            await until(all_done)
        monkeypatch.undo()
        assert [(await jobs.row(job)).attempt for job in made] == [1, 1, 1]

    async def test_counts_what_was_written_although_it_was_not_told_so(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        @jobs.scheduler.handler
        async def work() -> None: ...

        run, cuts = jobs.database.run, [1]

        async def loses_an_answer(step: Any, **how: Any) -> Any:
            answer = await run(step, **how)
            if isinstance(answer, Written) and cuts:
                cuts.pop()
                raise DatabaseUnavailableError("cut off after COMMIT")
            return answer

        await jobs.scheduler.enqueue_many([work.job()] * 3)
        monkeypatch.setattr(jobs.database, "run", loses_an_answer)
        async with jobs.limited_time():
            assert (await jobs.scheduler.drain())[State.DONE] == 3
        assert cuts == []
        assert "its lease was lost" not in caplog.text


class TestStop:
    async def test_lets_running_jobs_end_and_starts_no_more(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=1)
        latch = Latch(scheduler)
        async with served(scheduler):
            running = await latch.enqueue(scheduler)
            waiting = await scheduler.enqueue(latch.handler.job())
            scheduler.stop()
            latch.go_on.set()
        assert await jobs.states(running, waiting) == [State.DONE, State.READY]
        assert (await jobs.row(waiting)).attempt == 0

    async def test_gives_back_what_does_not_end_in_time(self, jobs: Jobs) -> None:
        scheduler = jobs.another(stop_timeout=0)
        latch = Latch(scheduler, max_attempts=1)
        async with served(scheduler):
            job = await latch.enqueue(scheduler)
            scheduler.stop()
        row = await jobs.row(job)
        assert (row.state, row.attempt, row.in_flight) == (State.READY, 0, False)
        assert latch.cancelled == 1

    async def test_now_does_not_wait(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        async with served(jobs.scheduler):
            job = await latch.enqueue(jobs.scheduler)
            jobs.scheduler.stop()
            await asyncio.sleep(0)
            jobs.scheduler.stop(now=True)
        assert await jobs.state(job) == State.READY

    async def test_asked_again_waits_all_the_same(self, jobs: Jobs) -> None:
        """Whoever stops it before the end of its block has stopped it twice."""
        latch = Latch(jobs.scheduler)
        async with asyncio.timeout(PATIENCE), jobs.scheduler.serving():
            job = await latch.enqueue(jobs.scheduler)
            jobs.scheduler.stop()
            jobs.scheduler.stop()
            asyncio.get_running_loop().call_later(0.1, latch.go_on.set)
        assert await jobs.state(job) == State.DONE
        assert latch.cancelled == 0

    async def test_leaves_its_lease_to_a_thread_that_goes_on(self, jobs: Jobs) -> None:
        """Released, the job would run twice at the same time."""
        scheduler = jobs.another(stop_timeout=0, lease_ttl=1)
        running, go_on = threading.Event(), threading.Event()

        @scheduler.handler
        def work() -> None:
            running.set()
            go_on.wait(10)

        async with served(scheduler):
            job = await scheduler.enqueue(work.job())
            await asyncio.to_thread(running.wait, 10)
            scheduler.stop()
        assert (await jobs.row(job)).in_flight
        go_on.set()

    async def test_keeps_the_leases_of_those_that_still_run(self, jobs: Jobs) -> None:
        scheduler = jobs.another(lease_ttl=3)
        latch = Latch(scheduler)
        async with served(scheduler):
            job = await latch.enqueue(scheduler)
            scheduler.stop()

            async def renewed() -> bool:
                return await jobs.state(job) == State.RUNNING

            await until(renewed)
            latch.go_on.set()
        assert await jobs.state(job) == State.DONE


class TestCancel:
    async def test_of_serve_drains_and_is_raised_then(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        async with served(jobs.scheduler) as task:
            job = await latch.enqueue(jobs.scheduler)
            task.cancel()
            await asyncio.sleep(0.02)
            assert not task.done()
            latch.go_on.set()
        assert task.cancelled()
        assert await jobs.state(job) == State.DONE
        assert latch.cancelled == 0

    async def test_of_serve_twice_releases_at_once(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        async with served(jobs.scheduler) as task:
            job = await latch.enqueue(jobs.scheduler)
            task.cancel()
            await asyncio.sleep(0.01)
            task.cancel()
        assert task.cancelled()
        row = await jobs.row(job)
        assert (row.state, row.attempt) == (State.READY, 0)

    async def test_of_a_block_that_serves(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)

        async def block() -> None:
            async with jobs.scheduler.serving():
                await asyncio.sleep(60)

        task = asyncio.create_task(block())
        async with jobs.limited_time():
            job = await latch.enqueue(jobs.scheduler)
            task.cancel()
            await asyncio.sleep(0.01)
            latch.go_on.set()
            await asyncio.wait({task})
        assert task.cancelled()
        assert await jobs.state(job) == State.DONE

    async def test_of_drain(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        await jobs.scheduler.enqueue(latch.handler.job())
        task = asyncio.create_task(jobs.scheduler.drain())
        async with jobs.limited_time():
            await latch.running.wait()
            task.cancel()
            await asyncio.sleep(0.01)
            latch.go_on.set()
            await asyncio.wait({task})
        assert task.cancelled()


class TestWhereJobsEndAsFastAsTheyAreClaimed:
    """Each claim leaves a slot free, as if one of its jobs had ended by then."""

    COUNT = 40

    async def positions(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, limits: Sequence[Limit]
    ) -> dict[str, int]:
        """Serve a group with many jobs; return behind how many of them others have run."""
        claim, order = Tick._claim, list[str]()

        async def claim_until_one_has_ended(tick: Tick, takes: list[Take]) -> list[Claimed]:
            claimed = await claim(tick, takes)
            while tick._slots.free == 0:
                await asyncio.sleep(0)
            return claimed

        monkeypatch.setattr(Tick, "_claim", claim_until_one_has_ended)
        scheduler = jobs.another(concurrency=2, poll_interval=0.01, limits=limits)

        @scheduler.handler
        async def crowd(number: int) -> None:
            if number == 4:
                await scheduler.enqueue(newcomer.job(), group_key="another")
                await scheduler.enqueue(due.job(), group_key="third", run_after=0.001)
            order.append("crowd")

        @scheduler.handler
        async def newcomer() -> None:
            order.append("newcomer")

        @scheduler.handler
        async def due() -> None:
            order.append("due")

        await scheduler.enqueue_many(crowd.job(number) for number in range(self.COUNT))
        await scheduler.drain(scheduled=True)
        return {name: order.index(name) for name in ("newcomer", "due")}

    @pytest.mark.parametrize("limits", [[], [Concurrency("wide", 1000)]], ids=["free", "limited"])
    async def test_others_have_their_turn(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, limits: list[Limit]
    ) -> None:
        positions = await self.positions(jobs, monkeypatch, limits)
        assert positions["newcomer"] < self.COUNT / 2
        assert positions["due"] < self.COUNT
