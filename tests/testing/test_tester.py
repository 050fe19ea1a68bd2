"""`JobTester` on each database: what runs, what is found, and what is left as it was."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio.to_thread
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from asyncjobq import (
    ConfigurationError,
    Fail,
    JobFailed,
    LeaseLostError,
    Scheduler,
    SchedulerStateError,
    State,
    enqueue,
)
from asyncjobq.testing import JobTester
from databases import Databases
from testing.shop import flaky, handlers, invoice, mail, make_scheduler, parts, plain


@pytest.fixture
def shop() -> Scheduler:
    """Give the application's scheduler."""
    return make_scheduler()


@pytest.fixture(scope="module")
def urls(databases: Databases) -> Iterator[Callable[[str], str]]:
    """Give what returns the URL of one database for each backend: its tables are emptied."""
    made: dict[str, str] = {}
    with ExitStack() as stack:

        def get(backend_name: str) -> str:
            if backend_name not in made:
                made[backend_name] = stack.enter_context(databases.fresh(backend_name))
            return made[backend_name]

        yield get


@pytest.fixture
def database_url(backend_name: str, urls: Callable[[str], str]) -> str:
    """Give the URL of the backend's database."""
    return urls(backend_name)


@pytest.fixture
def jobs(shop: Scheduler, database_url: str) -> Iterator[JobTester]:
    """Give the application under test on each database."""
    with JobTester(shop, database_url) as tester:
        yield tester


async def test_drain_runs_what_there_is_and_what_that_brings(
    jobs: JobTester, shop: Scheduler
) -> None:
    job = await shop.enqueue("invoice", {"product": "tea"})
    assert await jobs.drain() == {State.DONE: 2, State.FAILED: 0, State.CANCELLED: 0}
    assert await shop.wait(job, timeout=10) == "1 tea"
    assert await jobs.drain() == {State.DONE: 0, State.FAILED: 0, State.CANCELLED: 0}


async def test_drain_raises_what_a_handler_raised(jobs: JobTester, shop: Scheduler) -> None:
    broken = await shop.enqueue("invoice", {"product": "broken"})
    tea = await shop.enqueue("invoice", {"product": "tea"})
    with pytest.raises(ValueError, match="no price") as raised:
        await jobs.drain()
    assert raised.value.__notes__ == [
        f"Raised by the handler of job {broken.id} (invoice), attempt 1."
    ]
    assert (await shop.get(tea)).state == "done", "the others have run"
    (attempt,) = await shop.attempts(broken)
    assert "Raised by" not in (attempt.traceback or "")
    await jobs.drain()  # it is not raised twice


async def test_left_to_the_job(jobs: JobTester, shop: Scheduler) -> None:
    job = await shop.enqueue("invoice", {"product": "unknown"})
    assert (await jobs.drain(raising=False))["failed"] == 1
    assert (await shop.get(job)).state == "failed"
    await shop.enqueue("invoice", {"product": "unknown"})
    with pytest.raises(Fail):
        await jobs.drain()


async def test_a_failure_without_an_error_of_the_handler(jobs: JobTester) -> None:
    await enqueue_unchecked(jobs)
    with pytest.raises(JobFailed, match="wrong"):
        await jobs.drain()


async def test_what_a_handler_decides_is_no_mistake(jobs: JobTester, shop: Scheduler) -> None:
    job = await shop.enqueue("invoice", {"product": "late"})
    assert (await jobs.drain())["done"] == 0
    assert (await shop.get(job)).state == "scheduled"


async def test_retries_are_due_when_the_clock_says_so(jobs: JobTester, shop: Scheduler) -> None:
    job = await shop.enqueue("flaky")
    await jobs.drain(raising=False)
    await jobs.drain(raising=False)
    assert (await shop.get(job)).attempt == 1, "the second is due later"
    jobs.clock.move(timedelta(minutes=1))
    await jobs.drain(raising=False)
    assert (await shop.get(job)).attempt == 2
    assert (await jobs.drain(scheduled=True))["done"] == 1
    assert await shop.wait(job, timeout=10) == 3


async def test_the_clock(jobs: JobTester, shop: Scheduler) -> None:
    to = {"to": "Bo"}
    before = await jobs.clock.now()
    later = await shop.enqueue("mail", to, run_after=timedelta(days=3))
    jobs.clock.move(timedelta(days=2))
    assert (await jobs.drain())["done"] == 0
    moved = await shop.enqueue("mail", to, run_after=timedelta(days=3))
    await jobs.clock.move_to(before + timedelta(days=3, seconds=60))
    assert (await jobs.drain())["done"] == 1
    assert [(await shop.get(job)).state for job in (later, moved)] == ["done", "scheduled"]
    assert timedelta() <= await jobs.clock.now() - before - timedelta(days=3) < timedelta(hours=1)


async def test_the_clock_in_sessions(jobs: JobTester, shop: Scheduler, database_url: str) -> None:
    jobs.clock.move(timedelta(days=2))
    engine = create_async_engine(database_url)
    async with AsyncSession(engine) as session, session.begin():
        await shop.enqueue("mail", {"to": "Bo"}, session=session, run_after=60)
        await enqueue(session, "mail", {"to": "Bo"}, queue="mails", run_after=60)
    await engine.dispose()
    assert (await jobs.drain())["done"] == 0
    jobs.clock.move(61)
    assert (await jobs.drain())["done"] == 2


async def test_one_that_enqueues_itself_does_not_go_on_for_ever(
    jobs: JobTester, shop: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncjobq.testing.tester.MOST_MOVES", 3)

    @shop.handler
    async def again_and_again() -> None:
        await shop.enqueue("again_and_again", run_after=timedelta(days=1))

    await shop.enqueue("again_and_again")
    with pytest.raises(AssertionError, match="After 3 due times"):
        await jobs.drain(scheduled=True)


async def test_run_one(jobs: JobTester, shop: Scheduler) -> None:
    await shop.enqueue("invoice", {"product": "tea"}, priority=200)
    await shop.enqueue("invoice", {"product": "cup"})
    first = await jobs.run_one()
    assert (first.state, first.result) == ("done", "1 cup")
    assert (await jobs.run_one("mail")).result == "to Ada"
    assert (await jobs.run_one("invoice")).result == "1 tea"
    await shop.enqueue("flaky")
    await jobs.run_one("mail")
    with pytest.raises(OSError, match="attempt 1"):
        await jobs.run_one()
    with pytest.raises(AssertionError, match="no job that could run now") as raised:
        await jobs.run_one()
    assert "(flaky, scheduled for " in str(raised.value)
    jobs.clock.move(60)
    assert (await jobs.run_one(raising=False)).state == "scheduled"


async def test_run_one_whose_arguments_do_not_fit(jobs: JobTester, shop: Scheduler) -> None:
    for _ in range(3):
        await enqueue_unchecked(jobs)
    with pytest.raises(JobFailed):
        await jobs.run_one()
    assert len(await shop.find(state="ready")) == 2


async def enqueue_unchecked(jobs: JobTester) -> None:
    """Enqueue what a producer without the handler may: arguments that it does not take."""
    async with jobs.scheduler.database.session() as session, session.begin():
        await enqueue(session, "mail", {"wrong": 1}, queue="mails")


async def test_contexts(jobs: JobTester, shop: Scheduler) -> None:
    context = await jobs.context(
        attempt=3, checkpointed={"row": 7}, group_key="acme", meta={"a": 1}
    )
    assert (context.attempt, context.checkpointed, context.meta) == (3, {"row": 7}, {"a": 1})
    assert (context.group_key, context.type, context.args) == ("acme", "test", {})
    assert await flaky(context) == 3
    await context.checkpoint({"row": 8})
    assert (await shop.get(context.job_id)).checkpoint == context.checkpointed == {"row": 8}

    assert (await jobs.context(flaky)).max_attempts == 3
    parent = await jobs.context("parts", {"number": 2})
    assert (parent.args, parent.max_attempts) == ({"number": 2}, 5)
    assert await parts(parent, 2) == 2
    assert [job.args for job in await shop.find(parent=parent.job_id)] == [{"to": "0"}, {"to": "1"}]
    assert (await jobs.drain())["done"] == 3, "the children, and their parent behind them"
    assert (await shop.get(parent.job_id)).state == "done"
    with pytest.raises(LeaseLostError):
        await context.checkpoint({"row": 9})


async def test_contexts_of_upstreams_completion_and_threads(
    jobs: JobTester, shop: Scheduler
) -> None:
    upstream = await shop.enqueue("mail", {"to": "Bo"})
    context = await jobs.context(depends_on=[upstream])
    (given,) = await context.upstreams()
    assert given.id == upstream.id
    async with context.session() as session, session.begin():
        await context.complete(session, "by hand")
    assert await shop.wait(context.job_id, timeout=10) == "by hand"
    again = await jobs.context()
    assert await anyio.to_thread.run_sync(plain, again, "a") == "A"
    await jobs.drain()
    assert await shop.wait(context.job_id, timeout=10) == "by hand"
    assert (await shop.get(again.job_id)).progress == {"done": 1, "total": 2, "message": None}


async def test_inline(jobs: JobTester, shop: Scheduler) -> None:
    jobs.inline()
    job = await shop.enqueue("invoice", {"product": "tea"})
    assert (job.state, job.result) == ("done", "1 tea")
    many = await shop.enqueue_many([mail.job(str(n)) for n in range(3)])
    assert [one.result for one in many] == ["to 0", "to 1", "to 2"]
    first = await shop.enqueue("mail", {"to": "Bo"}, unique_key="b", unique_for=60)
    second = await shop.enqueue("mail", {"to": "Bo"}, unique_key="b", unique_for=60)
    assert (first.existing, second.existing, second.id) == (False, True, first.id)
    with pytest.raises(ValueError, match="no price"):
        await shop.enqueue("invoice", {"product": "broken"})
    late = await shop.enqueue("mail", {"to": "Bo"}, run_after=60)
    assert late.state == "scheduled", "what is due later waits for the clock"
    async with shop.workflow("w") as workflow:
        node = workflow.add(mail.job("Ada"))
    assert (await shop.get(node)).state == "done"


async def test_inline_at_the_commit_of_a_session(
    jobs: JobTester, shop: Scheduler, database_url: str
) -> None:
    jobs.inline()
    engine = create_async_engine(database_url)
    async with AsyncSession(engine) as session, session.begin():
        job = await shop.enqueue("invoice", {"product": "tea"}, session=session)
        other = await enqueue(session, "mail", {"to": "Bo"}, queue="mails")
        assert job.state == "ready"
    assert [(await shop.get(one)).state for one in (job, other)] == ["done", "done"]
    async with AsyncSession(engine) as session:
        await shop.enqueue("mail", {"to": "Cy"}, session=session)
        await session.rollback()
    assert await shop.find(state="ready") == []
    async with engine.begin() as connection:
        direct = await shop.enqueue("mail", {"to": "Di"}, session=connection)
    assert (await shop.get(direct)).state == "ready", "a connection tells of no commit"
    await jobs.drain()
    async with AsyncSession(engine) as session, session.begin():
        await shop.enqueue("invoice", {"product": "broken"}, session=session)
    await engine.dispose()
    with pytest.raises(ValueError, match="no price"):
        await jobs.drain()


async def test_inline_from_several_tasks(jobs: JobTester, shop: Scheduler) -> None:
    jobs.inline()
    calls = [shop.enqueue("invoice", {"product": str(n)}) for n in range(8)]
    assert {job.result for job in await asyncio.gather(*calls)} == {f"1 {n}" for n in range(8)}


def test_an_error_at_a_commit_is_not_lost(shop: Scheduler) -> None:
    async def break_inline(tester: JobTester) -> None:
        async with tester.scheduler.database.session() as session, session.begin():
            await shop.enqueue("invoice", {"product": "broken"}, session=session)

    with pytest.raises(ValueError, match="no price"):
        with JobTester(shop) as tester:
            tester.inline()
            asyncio.run(break_inline(tester))


async def test_nothing_runs_unless_the_test_says_so(jobs: JobTester, shop: Scheduler) -> None:
    job = await shop.enqueue("mail", {"to": "Bo"})
    async with shop.serving():
        serving = asyncio.create_task(shop.serve())
        await jobs.clock.now()
        assert (await shop.get(job)).state == "ready"
        assert not serving.done()
        shop.stop()
        await serving
    await jobs.drain()
    assert (await shop.get(job)).state == "done"


async def test_assertions(jobs: JobTester, shop: Scheduler) -> None:
    first = await shop.enqueue("invoice", {"product": "tea", "quantity": 2}, group_key="acme")
    found = await jobs.assert_enqueued("invoice", args={"product": "tea"}, group_key="acme")
    assert found.id == first.id
    await shop.enqueue("invoice", {"product": "cup"})
    assert (await jobs.assert_enqueued(invoice, count=2)).args["product"] == "cup"
    with pytest.raises(AssertionError, match="1 were expected of 'invoice', 2 were enqueued:"):
        await jobs.assert_enqueued("invoice", count=1)
    await jobs.assert_not_enqueued("mail")
    with pytest.raises(AssertionError, match="None was expected of 'invoice', 2 were"):
        await jobs.assert_not_enqueued("invoice")
    with pytest.raises(TypeError, match="has no 'colour'"):
        await jobs.assert_enqueued("invoice", colour="red")


async def test_assertions_wait_and_look_into_transactions(
    jobs: JobTester, shop: Scheduler, database_url: str
) -> None:
    looking = asyncio.create_task(jobs.assert_enqueued("mail", within=30))
    await jobs.clock.now()
    await shop.enqueue("mail", {"to": "Bo"})
    assert (await looking).args == {"to": "Bo"}
    engine = create_async_engine(database_url)
    async with AsyncSession(engine) as session:
        await shop.enqueue("plain", {"text": "a"}, session=session)
        await jobs.assert_enqueued("plain", session=session)
        if jobs.scheduler.database.backend.name != "mysql":
            with pytest.raises(AssertionError, match="session= is there once that has committed"):
                await jobs.assert_enqueued("plain")
        await session.rollback()
    await engine.dispose()


async def test_the_tables_are_emptied(shop: Scheduler, database_url: str) -> None:
    async with Scheduler(database_url) as producer:
        await producer.create_schema()
        await producer.enqueue("mail", {"to": "Bo"}, queue="mails")
        with JobTester(shop, database_url) as tester:
            assert await producer.find() == []
            await shop.enqueue("mail", {"to": "Bo"})
            await tester.drain()
            assert len(await producer.find()) == 1
        assert await producer.find() == []


async def test_jobs_that_may_be_no_tests_are_left_alone(shop: Scheduler) -> None:
    with TemporaryDirectory(prefix="jobs-") as folder:
        url = f"sqlite+aiosqlite:///{folder}/shop.db"
        async with Scheduler(url) as producer:
            await producer.create_schema()
            await producer.enqueue("mail", {"to": "Bo"})
            with pytest.raises(ConfigurationError, match=r'has jobs already, 1 .*"test" in its'):
                JobTester(shop, url).__enter__()
            assert len(await producer.find()) == 1


async def test_everything_is_put_back(shop: Scheduler) -> None:
    before = dict(vars(shop))
    around = list(shop._around)
    with JobTester(shop) as tester:
        assert isinstance(shop, Scheduler)
        assert type(shop).__name__ == "Scheduler"
        assert "production" not in shop.url
        await shop.enqueue("mail", {"to": "Bo"})
        with pytest.raises(SchedulerStateError, match="another test has it"):
            JobTester(shop).__enter__()
        await tester.drain()
    assert type(shop) is Scheduler
    changed = {name for name, value in vars(shop).items() if before.get(name) is not value}
    assert changed <= {"_rules"}
    assert shop._around == around
    assert "production" in shop.url


def test_a_scheduler_on_the_applications_engine(tmp_path: Path) -> None:
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/test.db")
    shop = Scheduler(engine)
    with pytest.raises(ConfigurationError, match="job_database"):
        JobTester(shop).__enter__()

    async def use(tester: JobTester) -> None:
        async with AsyncSession(engine) as session, session.begin():
            await shop.enqueue("work", session=session)
        await tester.assert_enqueued("work")
        await engine.dispose()

    with JobTester(shop, engine) as tester:
        asyncio.run(use(tester))


async def test_several_schedulers_and_registries() -> None:
    web, worker = Scheduler("sqlite+aiosqlite:///nowhere.db"), make_scheduler()
    with JobTester([web, worker]) as tester:
        await web.enqueue("mail", {"to": "Bo"}, queue="mails")
        assert (await tester.drain())["done"] == 1
        await web.enqueue("mail", {"to": "Bo"}, queue="mails")
        assert (await tester.run_one("mail")).state == "done"
    with JobTester(handlers) as tester:
        await tester.scheduler.enqueue("invoice", {"product": "tea"})
        assert (await tester.drain())["done"] == 2
    with pytest.raises(ConfigurationError, match="neither schedulers nor"):
        JobTester(["jobs"])  # type: ignore[list-item]


def test_without_a_running_loop(shop: Scheduler) -> None:
    threads = threading.active_count()
    with JobTester(shop) as tester:
        asyncio.run(shop.enqueue("invoice", {"product": "tea"}))
        assert asyncio.run(tester.drain())["done"] == 2
        asyncio.run(tester.assert_enqueued("mail", state="done"))
    assert threading.active_count() == threads


def test_schemas_and_prefixes(database_url: str, backend_name: str) -> None:
    shop = Scheduler("sqlite+aiosqlite:///nowhere.db", table_prefix="shop_")
    shop.handler("mail")(lambda to: to)
    for _ in range(2):
        with JobTester(shop, database_url) as tester:
            asyncio.run(shop.enqueue("mail", {"to": "Bo"}))
            assert asyncio.run(tester.drain())["done"] == 1, backend_name
            assert tester.scheduler.database.backend.tables.jobs.name == "shop_jobs"
    with_schema = Scheduler("postgresql+asyncpg://nobody@127.0.0.1:9/x", schema="jobs")
    with JobTester(with_schema) as tester:
        asyncio.run(with_schema.enqueue("mail"))
        asyncio.run(tester.assert_enqueued("mail"))


def test_values_are_compared_as_they_are_stored() -> None:
    moment = datetime(2026, 11, 29, tzinfo=UTC)
    with JobTester() as tester:
        enqueued = {"pair": [1, 2], "at": moment.isoformat()}
        asyncio.run(tester.scheduler.enqueue("work", enqueued))
        asyncio.run(tester.assert_enqueued("work", {"pair": (1, 2), "at": moment.isoformat()}))
        with pytest.raises(AssertionError, match="pair is"):
            asyncio.run(tester.assert_enqueued("work", {"pair": json}))
