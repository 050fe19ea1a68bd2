"""Everything but making the tables is done with no more than the rights that the README grants."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import pytest
from sqlalchemy import make_url, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import (
    Budget,
    Concurrency,
    Fail,
    Handlers,
    JobContext,
    JobFailed,
    JobRow,
    RateLimit,
    Retry,
    Scheduler,
    State,
    enqueue,
)
from asyncjobq.models import tables_for
from cases.workers import MakeEngine, wait_until

README: Final = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS: Final = re.findall(r"^```sql\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
NEW_ACCOUNT: Final = {
    "postgresql": "CREATE ROLE {name} LOGIN PASSWORD '{password}'",
    "mysql": "CREATE USER '{name}'@'%' IDENTIFIED BY '{password}'",
}
TAKEN_FROM_ALL: Final = {
    "postgresql": [
        "REVOKE ALL ON DATABASE {database} FROM PUBLIC",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
    ],
    "mysql": [],
}
OLD_ACCOUNT: Final = {
    "postgresql": ["DROP OWNED BY {name}", "DROP ROLE {name}"],
    "mysql": ["DROP USER '{name}'@'%'"],
}

pytestmark = pytest.mark.requires("server")
calls = Handlers()


@calls.handler(retry=lambda _attempt, _error: 0.0)
async def greet(name: str) -> str:
    if not name:
        raise Fail("there is no name")
    return f"Hello {name}"


@calls.handler(
    limits=[
        Concurrency("tenants", 1, key="tenant"),
        RateLimit("calls", 1000, per=1),
        Budget("tokens", 100, per=60),
    ]
)
async def ask(ctx: JobContext, tenant: str) -> str:
    await ctx.set_cost(2)
    if ctx.attempt == 1:
        raise Retry(after=0)
    return tenant


@calls.handler
async def divide(ctx: JobContext) -> None:
    ctx.progress(1, 2, "half")
    await ctx.checkpoint({"half": True})
    await ctx.add_child(greet.job("a child"), key="only")
    async with ctx.session() as session, session.begin():
        await ctx.complete(session, None)


def statements(backend: str, database: str, account: str) -> list[str]:
    """Return the README's statements for a server, with other names."""
    block = BLOCKS[0 if backend == "postgresql" else 1]
    named = re.sub(r"\bshop\b", database, block)
    named = re.sub(r"\bapp\b", account, named)
    return [part.strip() for part in named.split(";") if part.strip()]


async def execute(engine: AsyncEngine, commands: Sequence[str], **names: str) -> None:
    async with engine.connect() as connection:
        for command in commands:
            await connection.execute(text(command.format(**names)))


@pytest.fixture
async def account_url(
    backend_name: str, prepared_url: str, make_engine: MakeEngine
) -> AsyncIterator[str]:
    """Give the database's URL for an account that has what the README grants, and nothing else."""
    kind = "postgresql" if backend_name == "postgresql" else "mysql"
    url = make_url(prepared_url)
    assert url.database is not None
    owner = make_engine(prepared_url, isolation_level="AUTOCOMMIT")
    name, password = f"asyncjobq_{secrets.token_hex(4)}", secrets.token_hex(16)
    await execute(owner, [NEW_ACCOUNT[kind]], name=name, password=password)
    try:
        await execute(owner, TAKEN_FROM_ALL[kind], database=url.database)
        await execute(owner, statements(backend_name, url.database, name))
        yield url.set(username=name, password=password).render_as_string(hide_password=False)
    finally:
        await execute(owner, OLD_ACCOUNT[kind], name=name)


@pytest.fixture
def engine(account_url: str, make_engine: MakeEngine) -> AsyncEngine:
    """Give an engine of that account, as an application has one."""
    return make_engine(account_url)


@pytest.fixture
async def scheduler(engine: AsyncEngine) -> AsyncIterator[Scheduler]:
    async with Scheduler(
        engine,
        handlers=[calls],
        poll_interval=0.1,
        retention={"failed": timedelta(days=1)},
    ) as made:
        yield made


async def test_what_the_tables_need_is_granted(scheduler: Scheduler, engine: AsyncEngine) -> None:
    await scheduler.create_schema()  # there is nothing to do, and to do that takes no right
    async with scheduler.serving():
        await run_jobs(scheduler, engine)
        for use in (run_graphs, keep_unique, stay_within_limits, fire_schedules):
            await use(scheduler)
        assert await scheduler.workers()
    await hold_and_end(scheduler)
    assert (await scheduler.check()).clean
    await break_rows(scheduler, engine)
    await look_and_clear(scheduler)


async def run_jobs(scheduler: Scheduler, engine: AsyncEngine) -> None:
    async with AsyncSession(engine) as session, session.begin():
        mine = await scheduler.enqueue(greet.job("Ada"), session=session)
        named = await enqueue(session, "greet", {"name": "Bo"})
    assert await scheduler.wait(mine, timeout=20) == "Hello Ada"
    assert await scheduler.wait(named, timeout=20) == "Hello Bo"


async def run_graphs(scheduler: Scheduler) -> None:
    async with scheduler.workflow("graph") as graph:
        first = graph.add(divide.job())
        part = graph.container("part", depends_on=[first])
        part.add(greet.job("Cy"))
        failing = part.add(greet.job(""))
        part.add(greet.job("Di"), depends_on=[failing])
    with pytest.raises(JobFailed):
        await scheduler.wait(graph, timeout=20)
    assert [attempt.message for attempt in await scheduler.attempts(failing)] == [
        "there is no name"
    ]
    await scheduler.retry(failing)
    with pytest.raises(JobFailed):
        await scheduler.wait(failing, timeout=20)
    assert (await scheduler.graph(graph)).jobs


async def keep_unique(scheduler: Scheduler) -> None:
    for conflict in ("return", "replace"):
        later = greet.job("Eve").options(
            unique_key="eve", on_conflict=conflict, run_after=timedelta(days=1)
        )
        kept = await scheduler.enqueue(later)
    assert (await scheduler.get(kept)).state is State.SCHEDULED
    again = greet.job("Flo").options(unique_key="flo", unique_while="waiting")
    for _ in range(2):
        await scheduler.wait(await scheduler.enqueue(again), timeout=20)


async def stay_within_limits(scheduler: Scheduler) -> None:
    await scheduler.set_limit("calls", 500, per=1)
    await scheduler.set_weight("acme", 2)
    jobs = [await scheduler.enqueue(ask.job("acme"), group_key="acme") for _ in range(3)]
    for job in jobs:
        await scheduler.wait(job, timeout=20)
    assert {limit.name for limit in await scheduler.limits()} == {"tenants", "calls", "tokens"}
    await scheduler.clear_limit("calls")


async def fire_schedules(scheduler: Scheduler) -> None:
    await scheduler.add_schedule("greeting", greet.job("Gus"), every=1)

    async def fired() -> bool:
        (schedule,) = await scheduler.schedules()
        return schedule.last_job_id is not None

    await wait_until(fired, 20.0, "the schedule fires")
    await scheduler.pause_schedule("greeting")
    await scheduler.resume_schedule("greeting")
    await scheduler.remove_schedule("greeting")


async def hold_and_end(scheduler: Scheduler) -> None:
    await scheduler.pause(type="greet")
    assert await scheduler.paused()
    held = await scheduler.enqueue(greet.job("Hal"))
    assert (await scheduler.explain(held)).reasons
    await scheduler.cancel(held)
    await scheduler.cancel_many(type="greet")
    await scheduler.resume(type="greet")
    assert await scheduler.retry_many(type="greet", state="cancelled") > 0
    await scheduler.drain()


async def break_rows(scheduler: Scheduler, engine: AsyncEngine) -> None:
    """Leave one job blocked by nothing, and one in the hands of a worker that is gone."""
    blocked, orphan = await scheduler.enqueue_many([greet.job("Ian"), greet.job("Joy")])
    row = update(JobRow).where(JobRow.id == blocked.id).values(state="blocked")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    lease = {"lease_owner": "gone", "lease_token": 1, "lease_expires": long_ago}
    taken = {"state": "running", "in_flight": True, "attempt": 1, "max_attempts": 5, **lease}
    async with engine.begin() as connection:
        await connection.execute(row)
        await connection.execute(update(JobRow).where(JobRow.id == orphan.id).values(taken))


async def look_and_clear(scheduler: Scheduler) -> None:
    assert (await scheduler.stats()).jobs
    assert await scheduler.find(type="greet")
    repaired = await scheduler.repair(grace=0)
    assert len(repaired.mended) == 2
    assert repaired.left.clean
    assert await scheduler.drain() == {"done": 2, "failed": 0, "cancelled": 0}
    assert await scheduler.prune(older_than=0) > 0


@pytest.mark.parametrize("command", ["CREATE TABLE more (id INT)", "DROP TABLE jobs"])
async def test_nothing_more_is_granted(engine: AsyncEngine, command: str) -> None:
    with pytest.raises(DBAPIError):
        await execute(engine, [command])


@pytest.mark.parametrize("block", BLOCKS)
def test_each_table_is_named(block: str) -> None:
    named = set(re.findall(r"\b(?:jobs|asyncjobq_schema|job_[a-z_]+)\b", block))
    sequences = {name for name in named if name.endswith("_id_seq")}
    assert named - sequences == {table.name for table in tables_for().all}
