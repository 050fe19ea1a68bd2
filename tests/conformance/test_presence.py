"""The rows of workers: written while they serve, and gone with them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from asyncjobq import Scheduler, WorkerState
from asyncjobq.presence import (
    FORGOTTEN,
    MOST_TYPES,
    Presence,
    appear,
    forget_once,
    gone_for_long,
    pause_of,
    unserved,
    vanish,
)
from asyncjobq.settings import Settings
from conformance.kit import Jobs
from conformance.running import Latch, serving, until
from conformance.steps import Step

pytestmark = pytest.mark.asyncio(loop_scope="module")


def settings(worker_id: str = "one", **changed: Any) -> Settings:
    made = Scheduler("sqlite+aiosqlite:///unused.db", worker_id=worker_id, **changed)
    return made.settings


def appearing(
    worker_id: str = "one",
    types: tuple[str, ...] = ("work",),
    *,
    stopping: bool = False,
    **how: Any,
) -> Step[None]:
    own = settings(worker_id, **how)
    return lambda c, b: appear(c, b, own, types, stopping=stopping)


async def named(jobs: Jobs) -> dict[str, WorkerState]:
    return {worker.worker_id: worker for worker in await jobs.scheduler.workers()}


class TestRow:
    async def test_says_what_it_serves(self, jobs: Jobs) -> None:
        await jobs.do(appearing(queues={"a": 3, "b": 2}, concurrency=5))
        (worker,) = await jobs.scheduler.workers()
        assert (worker.worker_id, worker.queues, worker.types) == (
            "one",
            {"a": 3, "b": 2},
            ("work",),
        )
        assert (worker.concurrency, worker.live, worker.stopping) == (5, True, False)
        assert worker.started_at == worker.seen_at
        assert worker.serves("a", "work")
        assert not worker.serves("a", "other")
        assert not worker.serves("default", "work")

    async def test_is_written_anew(self, jobs: Jobs) -> None:
        await jobs.do(appearing())
        before = (await named(jobs))["one"]
        jobs.later(10)
        await jobs.do(appearing(stopping=True))
        after = (await named(jobs))["one"]
        assert after.started_at == before.started_at
        assert (after.seen_at - before.seen_at).total_seconds() >= 10
        assert after.stopping
        assert not after.takes_jobs

    async def test_of_one_that_falls_silent(self, jobs: Jobs) -> None:
        await jobs.do(appearing(lease_ttl=30))
        for seconds, live in ((29, True), (2, False)):
            jobs.later(seconds)
            assert (await named(jobs))["one"].live is live
        assert (await named(jobs))["one"].silent_for >= 31
        assert not (await named(jobs))["one"].serves("default", "work")

    async def test_goes_with_it(self, jobs: Jobs) -> None:
        await jobs.do(appearing())
        await jobs.do(appearing("two"))
        await jobs.do(lambda c, b: vanish(c, b, "one"))
        assert list(await named(jobs)) == ["two"]

    async def test_of_one_gone_for_long_is_deleted_unless_it_came_back(self, jobs: Jobs) -> None:
        for worker_id in ("one", "two"):
            await jobs.do(appearing(worker_id, lease_ttl=30))
        jobs.later(FORGOTTEN * 30 - 1)
        assert await jobs.do(gone_for_long) == []
        jobs.later(2)
        gone = await jobs.do(gone_for_long)
        assert gone == ["one", "two"]
        await jobs.do(appearing("two"))
        await jobs.do(lambda c, b: forget_once(c, b, gone))
        assert list(await named(jobs)) == ["two"]

    async def test_does_not_name_too_many_types(self, jobs: Jobs) -> None:
        await jobs.do(appearing(types=tuple(f"t{n}" for n in range(MOST_TYPES + 1))))
        worker = (await named(jobs))["one"]
        assert worker.types is None
        assert worker.serves("default", "whatever")

    async def test_says_how_many_jobs_it_has(self, jobs: Jobs) -> None:
        await jobs.do(appearing(queues={"default": 4, "media": 2}, concurrency=4))
        await jobs.enqueue_many(3)
        await jobs.claim(3, owner="one")
        await jobs.enqueue_many(2)
        await jobs.claim(1, owner="another")
        worker = (await named(jobs))["one"]
        assert worker.jobs == {"default": 3}
        assert (worker.free("default"), worker.free("media"), worker.free("none")) == (1, 1, 0)


async def test_how_often_it_is_written() -> None:
    assert pause_of(30) == 10
    assert pause_of(1) == 5


async def test_what_nobody_serves(jobs: Jobs) -> None:
    kinds = [("default", "work"), ("default", "wrok"), ("media", "work")]
    assert unserved([], kinds) == []  # nobody is there to ask
    await jobs.do(appearing())
    workers = await jobs.scheduler.workers()
    assert unserved(workers, kinds) == kinds[1:]
    assert unserved([replace(workers[0], live=False)], kinds) == []


class TestWorker:
    async def test_is_there_while_it_serves(self, jobs: Jobs) -> None:
        scheduler = jobs.another(concurrency=3, queues=("default", "media"), stop_timeout=5)
        latch = Latch(scheduler)
        async with serving(scheduler):
            await latch.enqueue(scheduler)

            async def there() -> bool:
                return bool(await scheduler.workers())

            await until(there)
            (worker,) = await scheduler.workers()
            assert worker.worker_id == scheduler.settings.worker_id
            assert (worker.queues, worker.types) == ({"default": 3, "media": 3}, ("latch",))
            assert worker.jobs == {"default": 1}
            latch.go_on.set()
        assert await jobs.scheduler.workers() == []

    async def test_says_that_it_stops(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("asyncjobq.presence.AT_ONCE", 0.0)
        scheduler = jobs.another(stop_timeout=30)
        latch = Latch(scheduler)
        async with serving(scheduler):
            await latch.enqueue(scheduler)
            scheduler.stop()

            async def says_so() -> bool:
                return [worker.stopping for worker in await jobs.scheduler.workers()] == [True]

            await until(says_so)
            latch.go_on.set()
        assert await jobs.scheduler.workers() == []

    async def test_that_drains_for_a_moment_writes_nothing(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        written: list[Any] = []
        monkeypatch.setattr("asyncjobq.presence.appear", lambda *a, **_: written.append(a))
        scheduler = jobs.another()
        scheduler.handler("work")(_nothing)
        await scheduler.enqueue("work")
        async with jobs.limited_time():
            await scheduler.drain()
        assert written == []

    async def test_that_cannot_delete_its_row_ends_all_the_same(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> None:
            raise LookupError

        monkeypatch.setattr("asyncjobq.presence.vanish", broken)
        presence = Presence(jobs.database, settings(), ["work"])
        await presence.appear_once(asyncio.Event())
        await presence.vanish_once()
        assert list(await named(jobs)) == ["one"]

    async def test_forgets_others_now_and_then(self, jobs: Jobs) -> None:
        await jobs.do(appearing("gone", lease_ttl=30))
        jobs.later(FORGOTTEN * 30 + 1)
        await Presence(jobs.database, settings(), ["work"]).appear_once(asyncio.Event())
        assert list(await named(jobs)) == ["one"]


async def _nothing() -> None: ...
