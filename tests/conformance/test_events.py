"""Events: told of what was committed, in the process that did it, apart from the work."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import FrozenInstanceError, fields
from datetime import UTC
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq import (
    Cancel,
    ConfigurationError,
    JobContext,
    JobSpec,
    Scheduler,
    Snooze,
    after,
    constant,
    events,
)
from asyncjobq.events import Enqueued, Event
from asyncjobq.subscribers import WAITING, Subscribers
from conformance.kit import Jobs
from conformance.running import Latch, serving, until

in_the_tables = pytest.mark.asyncio(loop_scope="module")

KINDS = [
    kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event)
]


SPEC: JobSpec[Any] = JobSpec("unknown")


class Seen:
    """What a subscriber was told."""

    def __init__(self, scheduler: Scheduler, *kinds: type[Event]) -> None:
        self.events: list[Any] = []
        scheduler.on(*kinds)(self.note)

    async def note(self, event: Event) -> None:
        self.events.append(event)

    def names(self, job: Any = None) -> list[str]:
        wanted = None if job is None else job.id
        found = [one for one in self.events if wanted in (None, one.job_id)]
        return [type(one).__name__ for one in found]

    def only(self, kind: type[Any]) -> Any:
        (event,) = [one for one in self.events if type(one) is kind]
        return event


@pytest.fixture
def seen(jobs: Jobs) -> Seen:
    return Seen(jobs.scheduler)


async def told() -> None:
    """Let the subscribers' tasks be told of what waits."""
    for _ in range(5):
        await asyncio.sleep(0)


@in_the_tables
class TestAttempts:
    async def test_that_succeed(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler
        async def work() -> int:
            return 1

        job = await jobs.scheduler.enqueue(work.job(), group_key="acme")
        await jobs.scheduler.drain()
        assert seen.names(job) == ["Enqueued", "Leased", "Started", "Succeeded"]
        enqueued, *attempt = seen.events
        assert (enqueued.attempt, enqueued.worker_id) == (0, None)
        worker = jobs.scheduler.settings.worker_id
        assert {(one.attempt, one.worker_id) for one in attempt} == {(1, worker)}
        for event in seen.events:
            assert (event.type, event.queue, event.group_key) == ("work", "default", "acme")
            assert event.at.tzinfo is UTC
        assert seen.only(events.Leased).age >= 0
        assert seen.only(events.Succeeded).duration >= 0

    async def test_that_fail(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler(retry=constant(0), max_attempts=2)
        async def work() -> None:
            raise ValueError("broken")

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        attempt = ["Leased", "Started"]
        assert seen.names(job) == ["Enqueued", *attempt, "Retried", *attempt, "Failed"]
        retried, failed = seen.only(events.Retried), seen.only(events.Failed)
        assert (retried.attempt, retried.delay, failed.attempt) == (1, 0.0, 2)
        assert "ValueError: broken" in retried.error
        assert "ValueError: broken" in failed.error

    @pytest.mark.parametrize(
        ("attempts", "names"), [(2, ["TimedOut", "Retried"]), (1, ["TimedOut", "Failed"])]
    )
    async def test_that_time_out(
        self, jobs: Jobs, seen: Seen, attempts: int, names: list[str]
    ) -> None:
        @jobs.scheduler.handler(timeout=0.05, max_attempts=attempts, retry=constant(3600))
        async def work() -> None:
            await asyncio.sleep(60)

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        assert seen.names(job)[3:] == names
        assert "timed out" in seen.events[-1].error

    async def test_that_end_otherwise(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler
        async def snooze() -> None:
            raise Snooze(3600)

        @jobs.scheduler.handler
        async def cancel() -> None:
            raise Cancel("not needed")

        snoozed = await jobs.scheduler.enqueue(snooze.job())
        cancelled = await jobs.scheduler.enqueue(cancel.job())
        await jobs.scheduler.drain()
        assert seen.names(snoozed)[-1] == "Snoozed"
        assert seen.only(events.Snoozed).delay == 3600
        assert seen.names(cancelled)[-1] == "Cancelled"
        assert "not needed" in seen.only(events.Cancelled).error

    async def test_that_shutdown_interrupts(self, jobs: Jobs) -> None:
        scheduler = jobs.another(poll_interval=0.1, stop_timeout=0)
        seen, latch = Seen(scheduler), Latch(scheduler)
        async with serving(scheduler):
            job = await latch.enqueue(scheduler)
        assert seen.names(job)[-1] == "Interrupted"

    async def test_whose_lease_is_lost(self, jobs: Jobs, seen: Seen) -> None:
        latch = Latch(jobs.scheduler)
        async with serving(jobs.scheduler):
            job = await latch.enqueue(jobs.scheduler)
            await jobs.spoil(job, lease_token=99)
            latch.go_on.set()
            await until(_async(lambda: "LeaseLost" in seen.names(job)))
        assert "Succeeded" not in seen.names(job)

    async def test_a_request_to_cancel_is_told_as_what_became_of_the_job(
        self, jobs: Jobs, seen: Seen
    ) -> None:
        """Also where the handler would have been run again."""
        running = asyncio.Event()

        @jobs.scheduler.handler
        async def work() -> None:
            running.set()
            await go_on.wait()
            raise Snooze(0)

        go_on = asyncio.Event()
        async with serving(jobs.scheduler):
            job = await jobs.scheduler.enqueue(work.job())
            await running.wait()
            await jobs.scheduler.cancel(job)
            go_on.set()
            await until(_async(lambda: "Cancelled" in seen.names(job)))
        assert "Snoozed" not in seen.names(job)

    async def test_that_their_handlers_complete(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> None:
            async with ctx.session() as session, session.begin():
                await ctx.complete(session, 1)
            raise ValueError("too late to fail")

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        assert seen.names(job) == ["Enqueued", "Leased", "Started", "Succeeded"]

    async def test_that_the_database_refuses(
        self, jobs: Jobs, seen: Seen, monkeypatch: Any
    ) -> None:
        from asyncjobq import writer

        finalize = writer.finalize_once

        def refuse(connection: Any, backend: Any, batch: Any) -> Any:
            if any(item.outcome.result for item in batch):
                raise ValueError("no such value")
            return finalize(connection, backend, batch)

        monkeypatch.setattr(writer, "finalize_once", refuse)
        latch = Latch(jobs.scheduler)
        latch.go_on.set()
        job = await jobs.scheduler.enqueue(latch.handler.job())
        await jobs.scheduler.drain()
        assert seen.names(job)[-1] == "Failed"
        assert seen.only(events.Failed).error


@in_the_tables
class TestOtherEnds:
    async def test_of_dependants_and_containers(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler(max_attempts=1)
        async def work(good: bool) -> None:
            if not good:
                raise ValueError

        async with jobs.scheduler.workflow("all") as workflow:
            bad = workflow.add(work.job(False))
            behind = workflow.add(work.job(True), depends_on=[bad])
            beside = workflow.add(work.job(True), depends_on=[after(bad, on_failure="run")])
        await jobs.scheduler.drain()
        assert seen.names(bad)[-1] == "Failed"
        assert seen.names(behind) == ["Enqueued", "Settled", "Cancelled"]
        assert seen.names(beside)[-1] == "Succeeded"
        assert seen.names(workflow) == ["Enqueued", "Settled", "Failed"]
        states = {one.job_id: one.state for one in seen.events if type(one) is events.Settled}
        assert states == {behind.id: "cancelled", workflow.id: "failed"}

    async def test_of_a_job_with_children_is_told_once(self, jobs: Jobs, seen: Seen) -> None:
        @jobs.scheduler.handler
        async def leaf() -> None: ...

        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> None:
            await ctx.add_child(leaf.job(), key="a")
            await ctx.add_child(leaf.job(), key="a")

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        assert seen.names(job) == ["Enqueued", "Leased", "Started", "Settled", "Succeeded"]
        assert seen.names().count("Enqueued") == 2

    async def test_of_jobs_whose_worker_died(self, jobs: Jobs, seen: Seen) -> None:
        jobs.scheduler.handler("other")(lambda: None)
        first = await jobs.leased(owner="dead")
        last = await jobs.leased(owner="dead", max_attempts=1)
        jobs.later(60)
        await jobs.scheduler.drain()
        assert [one.job_id for one in seen.events if type(one) is events.Reclaimed] == [
            first.lease.job_id,
            last.lease.job_id,
        ]
        failed = seen.only(events.Failed)
        assert (failed.job_id, failed.attempt) == (last.lease.job_id, 1)
        assert "worker was lost" in failed.error

    @pytest.mark.parametrize("commits", [True, False])
    async def test_by_a_call(
        self, jobs: Jobs, seen: Seen, session: AsyncSession, commits: bool
    ) -> None:
        one, two = [await jobs.enqueue() for _ in range(2)]
        await jobs.scheduler.cancel(one)
        await told()
        assert seen.names(one) == ["Cancelled"]
        await jobs.scheduler.cancel(two, session=session)
        await told()
        assert seen.names(two) == []
        await (session.commit() if commits else session.rollback())
        await told()
        assert seen.names(two) == ["Cancelled"] * commits

    @pytest.mark.parametrize("commits", [True, False])
    async def test_of_many_by_a_call(
        self, jobs: Jobs, seen: Seen, session: AsyncSession, commits: bool
    ) -> None:
        await jobs.leased()
        one, two = [await jobs.enqueue() for _ in range(2)]
        await jobs.scheduler.cancel_many(type="work")
        await told()
        assert seen.names() == ["Cancelled"] * 2  # the one that runs is only asked
        assert [event.job_id for event in seen.events] == [one.id, two.id]
        three = await jobs.enqueue()
        await jobs.scheduler.cancel_many(type="work", session=session)
        await told()
        assert seen.names(three) == []
        await (session.commit() if commits else session.rollback())
        await told()
        assert seen.names(three) == ["Cancelled"] * commits


End = Callable[[AsyncSession], Awaitable[None]]


@in_the_tables
class TestEnqueued:
    """In the caller's transaction: after its commit, and never after a rollback."""

    async def test_after_the_commit_and_once(
        self, jobs: Jobs, seen: Seen, session: AsyncSession
    ) -> None:
        jobs_made = await jobs.scheduler.enqueue_many([SPEC, SPEC], session=session)
        await told()
        assert seen.events == []
        await session.commit()
        await told()
        assert [one.job_id for one in seen.events] == [job.id for job in jobs_made]
        await session.commit()
        again = await jobs.scheduler.enqueue(SPEC, session=session)
        await session.commit()
        await told()
        assert [one.job_id for one in seen.events[2:]] == [again.id]

    @pytest.mark.parametrize(
        "end", [AsyncSession.rollback, AsyncSession.close], ids=["rollback", "close"]
    )
    async def test_never_after_a_rollback(
        self, jobs: Jobs, seen: Seen, session: AsyncSession, end: End
    ) -> None:
        await jobs.scheduler.enqueue(SPEC, session=session)
        await end(session)
        await session.commit()
        await told()
        assert seen.events == []

    async def test_never_after_a_rollback_to_a_savepoint(
        self, jobs: Jobs, seen: Seen, session: AsyncSession
    ) -> None:
        kept = await jobs.scheduler.enqueue(SPEC, session=session)
        with pytest.raises(ZeroDivisionError):
            async with session.begin_nested():
                await jobs.scheduler.enqueue(SPEC, session=session)
                async with session.begin_nested():  # released, and undone by the outer one
                    await jobs.scheduler.enqueue(SPEC, session=session)
                raise ZeroDivisionError
        async with session.begin_nested():
            released = await jobs.scheduler.enqueue(SPEC, session=session)
        await told()
        assert seen.events == []
        await session.commit()
        await told()
        assert [one.job_id for one in seen.events] == [kept.id, released.id]
        assert [job.id for job in await jobs.scheduler.find()] == [kept.id, released.id]

    async def test_never_in_a_transaction_that_somebody_else_will_end(
        self, jobs: Jobs, seen: Seen, application: AsyncEngine
    ) -> None:
        """As tests of applications do: what their session commits is rolled back."""
        async with application.connect() as connection, connection.begin() as outer:
            joined = AsyncSession(connection, join_transaction_mode="create_savepoint")
            async with joined:
                await jobs.scheduler.enqueue(SPEC, session=joined)
                await joined.commit()
            await outer.rollback()
        await told()
        assert seen.events == []

    async def test_of_a_connection_nobody_is_told(
        self, jobs: Jobs, seen: Seen, application: AsyncEngine
    ) -> None:
        async with application.begin() as connection:
            await jobs.scheduler.enqueue(SPEC, session=connection)
        await told()
        assert seen.events == []

    async def test_of_a_recurring_job(self, jobs: Jobs, seen: Seen) -> None:
        latch = Latch(jobs.scheduler)
        latch.go_on.set()
        await jobs.scheduler.add_schedule("hourly", latch.handler.job(), every=3600)
        jobs.later(3601)
        async with serving(jobs.scheduler):
            await until(_async(lambda: "Succeeded" in seen.names()))
        enqueued = seen.only(Enqueued)
        assert enqueued.type == "latch"
        assert enqueued.worker_id == jobs.scheduler.settings.worker_id

    async def test_from_a_thread(self, jobs: Jobs, seen: Seen, sync_engine: Any) -> None:
        plain: list[Event] = []
        jobs.scheduler.on(Enqueued)(plain.append)

        def enqueue() -> int:
            with Session(sync_engine) as session:
                job = jobs.scheduler.enqueue_sync(session, SPEC)
                session.commit()
                return job.id

        alone = await asyncio.to_thread(enqueue)  # no loop is known: plain ones are called there
        assert ([one.job_id for one in plain], seen.events) == ([alone], [])
        async with serving(jobs.scheduler):
            beside = await asyncio.to_thread(enqueue)
            await until(_async(lambda: beside in [one.job_id for one in seen.events]))
        assert [one.job_id for one in plain] == [alone, beside]


def _async(condition: Callable[[], bool]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return condition()

    return look


@in_the_tables
async def test_an_event_is_told_after_the_commit(jobs: Jobs) -> None:
    """The row that it tells of is seen on another connection."""
    states: dict[str, str] = {}

    @jobs.scheduler.on()
    async def look(event: Event) -> None:
        state = (await jobs.row(event.job_id)).state
        states.setdefault(type(event).__name__, state)

    @jobs.scheduler.handler(retry=constant(3600))
    async def work(good: bool) -> None:
        if not good:
            raise ValueError

    await jobs.scheduler.enqueue(work.job(False))
    await jobs.scheduler.drain()
    await jobs.scheduler.enqueue(work.job(True))
    await jobs.scheduler.drain()
    assert states["Retried"] == "scheduled"
    assert states["Succeeded"] == "done"


def event_of(job_id: int = 1, kind: type[Event] = Enqueued) -> Event:
    return kind(job_id=job_id, type="work", queue="default", group_key="")


class TestSubscribers:
    """Without a database."""

    @pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), asyncio.CancelledError()])
    async def test_one_that_raises_harms_nothing(
        self, error: BaseException, caplog: pytest.LogCaptureFixture
    ) -> None:
        subscribers, seen = Subscribers(), list[Event]()

        async def bad(_: Event) -> None:
            raise error

        def bad_too(_: Event) -> None:
            raise error

        for function in (bad, bad_too, seen.append):
            subscribers.add(function, ())
        for number in range(3):
            subscribers.emit(event_of(number))
        await subscribers.flush()
        assert [one.job_id for one in seen] == [0, 1, 2]
        assert caplog.text.count("failed at") == 6

    async def test_a_slow_one_keeps_nobody_up(self, caplog: pytest.LogCaptureFixture) -> None:
        subscribers, seen, go_on = Subscribers(), list[int](), asyncio.Event()

        async def slow(event: Event) -> None:
            await go_on.wait()
            seen.append(event.job_id)

        quick: list[Event] = []
        end = subscribers.add(slow, ())
        subscribers.add(quick.append, ())
        subscribers.emit(event_of(0))
        await told()
        for number in range(1, WAITING + 101):
            subscribers.emit(event_of(number))
            await asyncio.sleep(0) if number % 100 == 0 else None
        await told()
        assert len(quick) == WAITING + 101
        assert "64 events were dropped" in caplog.text
        assert len(caplog.records) == 7  # the 1st, 2nd, 4th, … 64th
        go_on.set()
        await subscribers.flush()
        assert seen == list(range(WAITING + 1))
        end()
        subscribers.emit(event_of(5000))
        await told()
        assert 5000 not in seen

    async def test_one_that_hangs_is_waited_for_shortly(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("asyncjobq.subscribers.FLUSHING", 0.02)
        before, subscribers = asyncio.all_tasks(), Subscribers()

        async def hang(_: Event) -> None:
            await asyncio.sleep(60)

        subscribers.add(hang, ())
        subscribers.emit(event_of())
        await subscribers.flush()
        assert len(asyncio.all_tasks() - before) == 1
        await subscribers.flush(last=True)
        assert asyncio.all_tasks() == before
        assert "has not been told of all" in caplog.text

    async def test_nothing_is_made_that_nobody_wants(self) -> None:
        subscribers = Subscribers()
        assert not any(map(subscribers.wants, KINDS))
        end = subscribers.add(print, (events.Failed,))
        assert [kind for kind in KINDS if subscribers.wants(kind)] == [events.Failed]
        end()
        end()
        assert not any(map(subscribers.wants, KINDS))

    async def test_kinds_include_what_is_below_them(self) -> None:
        subscribers = Subscribers()
        subscribers.add(print, (Event,))
        assert all(map(subscribers.wants, KINDS))

    async def test_a_subscriber_does_not_see_the_context_of_who_causes_the_event(self) -> None:
        from contextvars import ContextVar

        tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
        subscribers, seen = Subscribers(), list[str]()
        subscribers.add(lambda _: seen.append(tenant.get()), ())
        tenant.set("a request's")
        subscribers.emit(event_of())
        await subscribers.flush()
        assert seen == ["nobody"]

    @pytest.mark.parametrize(
        "kind",
        ["failed", Exception, events.Failed(error="", job_id=1, type="", queue="", group_key="")],
        ids=["name", "foreign", "event"],
    )
    def test_what_is_no_kind_is_refused(self, kind: Any) -> None:
        scheduler = Scheduler("sqlite+aiosqlite:///never.db")
        with pytest.raises(ConfigurationError, match="no kind of event"):
            scheduler.subscribe(print, kind)
        with pytest.raises(ConfigurationError, match="def or an async def"):
            scheduler.subscribe(events.Failed(**vars(event_of()), error=""))  # type: ignore[arg-type]

    def test_without_a_loop(self, caplog: pytest.LogCaptureFixture) -> None:
        subscribers, seen = Subscribers(), list[Event]()

        async def never(_: Event) -> None: ...

        def bad(_: Event) -> None:
            raise ValueError("bad")

        for function in (never, bad, seen.append):
            subscribers.add(function, ())
        thread = threading.Thread(target=subscribers.emit, args=[event_of()])
        thread.start()
        thread.join()
        assert len(seen) == 1
        assert "no event loop runs" in caplog.text
        assert "failed at" in caplog.text

    def test_one_scheduler_in_several_loops(self) -> None:
        subscribers, seen = Subscribers(), list[int]()

        async def note(event: Event) -> None:
            await asyncio.sleep(0)
            seen.append(event.job_id)

        async def use(number: int) -> None:
            subscribers.emit(event_of(number))
            await subscribers.flush(last=True)

        subscribers.add(note, ())
        for number in range(3):
            asyncio.run(use(number))
        assert seen == [0, 1, 2]


def test_events_are_frozen_plain_values() -> None:
    import pickle

    event = event_of()
    with pytest.raises(FrozenInstanceError):
        event.job_id = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301
    for kind in KINDS:
        assert kind.__doc__
        assert {"job_id", "type", "queue", "group_key", "attempt", "at"} <= {
            field.name for field in fields(kind)
        }


@in_the_tables
async def test_stopping_flushes(jobs: Jobs, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []

    @jobs.scheduler.on(events.Succeeded)
    async def slow(event: Event) -> None:
        await asyncio.sleep(0.05)
        seen.append(event)

    latch = Latch(jobs.scheduler)
    latch.go_on.set()
    for _ in range(3):
        await jobs.scheduler.enqueue(latch.handler.job())
    with caplog.at_level(logging.WARNING):
        await jobs.scheduler.drain()
    assert len(seen) == 3
    assert caplog.text == ""
