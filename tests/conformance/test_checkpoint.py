"""What a handler stores on its way: seen by the next attempt, and written by nobody who is late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq import (
    ConfigurationError,
    JobContext,
    LeaseLostError,
    ResultError,
    SchedulerStateError,
    State,
    constant,
    services,
)
from asyncjobq.checkpoints import checkpoint_once, store_checkpoint
from asyncjobq.codec import encode
from asyncjobq.lease import Claimed, Lease, reclaim_once
from conformance.contexts import context_of
from conformance.kit import ISOLATION_LEVELS, Jobs
from conformance.steps import TTL, Step, failed, impostor, renewing

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSED = ("REPEATABLE READ", "SERIALIZABLE")


def storing(claimed: Claimed | Lease, value: Any = 1) -> Step[str]:
    """Store a checkpoint in a transaction of ours; says what came of it."""
    lease = claimed if isinstance(claimed, Lease) else claimed.lease

    def step(connection: Any, backend: Any) -> str:
        try:
            stored = checkpoint_once(connection, backend, lease, encode(value))
        except LeaseLostError:
            return "lost"
        return "stored" if stored else "held"

    return step


class TestAlone:
    async def test_is_seen_by_the_next_attempt(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        assert context.checkpointed is None
        for value in ({"row": 1}, [1, "ä"], None, {"row": 7}):
            await context.checkpoint(value)
            assert context.checkpointed == value
        await jobs.finish(claimed, outcome=failed(retry_after=0.0))
        assert context_of(jobs, await jobs.claim_one()).checkpointed == {"row": 7}
        assert (await jobs.scheduler.get(claimed.lease.job_id)).checkpoint == {"row": 7}

    async def test_outlives_a_lost_worker(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await context_of(jobs, claimed).checkpoint(5)
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert context_of(jobs, await jobs.claim_one()).checkpointed == 5

    async def test_may_be_a_model(self, jobs: Jobs) -> None:
        class Place(BaseModel):
            row: int

        context = context_of(jobs, await jobs.leased())
        await context.checkpoint(Place(row=3))
        assert context.checkpointed == {"row": 3}

    @pytest.mark.parametrize("bad", [float("nan"), object(), "x" * 9_000_000])
    async def test_of_what_cannot_be_stored(self, jobs: Jobs, bad: Any) -> None:
        claimed = await jobs.leased()
        with pytest.raises(ResultError, match="checkpoint"):
            await context_of(jobs, claimed).checkpoint(bad)
        assert (await jobs.row(claimed)).checkpoint is None

    @pytest.mark.requires("row_locks")
    async def test_beside_a_session_that_holds_the_row_ends(
        self, jobs: Jobs, session: AsyncSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The handler's own open session would otherwise be waited for by itself."""
        monkeypatch.setattr(services, "HELD_TIMEOUT", 0.1)
        context = context_of(jobs, await jobs.leased())
        await context.checkpoint(1, session)
        async with jobs.limited_time():
            with pytest.raises(SchedulerStateError, match="commit"):
                await context.checkpoint(2)
            await session.commit()
            await context.checkpoint(3)
        assert context.checkpointed == 3


class TestInASession:
    async def test_is_part_of_its_transaction(self, jobs: Jobs, session: AsyncSession) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        await context.checkpoint(1, session)
        await session.rollback()
        assert ((await jobs.row(claimed)).checkpoint, context.checkpointed) == (None, None)
        await context.checkpoint(2, session=session)
        assert context.checkpointed is None
        await session.commit()
        assert ((await jobs.row(claimed)).checkpoint, context.checkpointed) == (2, 2)
        await context.checkpoint(3, session=session)
        await session.close()
        await session.execute(text("SELECT 1"))
        await session.commit()
        assert ((await jobs.row(claimed)).checkpoint, context.checkpointed) == (2, 2)

    async def test_in_a_savepoint(self, jobs: Jobs, session: AsyncSession) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        await session.execute(_touching(jobs))
        async with session.begin_nested():
            await context.checkpoint(1, session)
        assert context.checkpointed is None
        inner = await session.begin_nested()
        await context.checkpoint(2, session)
        await inner.rollback()
        await session.commit()
        assert ((await jobs.row(claimed)).checkpoint, context.checkpointed) == (1, 1)

    async def test_in_a_connection(self, jobs: Jobs, application: AsyncEngine) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        async with application.connect() as connection:
            await context.checkpoint(1, connection)
            await connection.rollback()
            await context.checkpoint(2, connection)
            assert context.checkpointed is None
            await connection.commit()
        assert ((await jobs.row(claimed)).checkpoint, context.checkpointed) == (2, 2)

    async def test_at_each_isolation_level(self, jobs: Jobs, application: AsyncEngine) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        for number, level in enumerate(ISOLATION_LEVELS[jobs.backend_name]):
            engine = application.execution_options(isolation_level=level)
            async with AsyncSession(engine) as session:
                if jobs.backend_name == "postgresql" and level in REFUSED:
                    with pytest.raises(ConfigurationError, match=level):
                        await context.checkpoint(number, session)
                    await session.execute(text("SELECT 1"))
                    continue
                await context.checkpoint(number, session)
                await session.commit()
            assert context.checkpointed == number

    async def test_without_transactions_is_refused(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        context = context_of(jobs, await jobs.leased())
        engine = application.execution_options(isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await context.checkpoint(1, session)


class TestFence:
    @pytest.mark.parametrize("wrong", ["owner", "token"])
    async def test_of_somebody_else(self, jobs: Jobs, session: AsyncSession, wrong: str) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        other = context_of(jobs, claimed, impostor(claimed.lease, wrong))
        with pytest.raises(LeaseLostError) as lost:
            await other.checkpoint(1)
        with pytest.raises(LeaseLostError):
            await other.checkpoint(1, session)
        assert lost.value.job_id == claimed.lease.job_id
        await session.commit()
        assert (await jobs.row(claimed), other.checkpointed) == (before, None)

    async def test_of_an_owner_that_is_late(self, jobs: Jobs, session: AsyncSession) -> None:
        late = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        for claim in (False, True):
            if claim:
                await jobs.claim_one("another")
            for where in (None, session):
                with pytest.raises(LeaseLostError, match="lost"):
                    await context_of(jobs, late).checkpoint(1, where)
                await session.rollback()
        assert (await jobs.row(late)).checkpoint is None

    async def test_of_a_job_that_has_ended(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.finish(claimed)
        with pytest.raises(LeaseLostError):
            await context_of(jobs, claimed).checkpoint(1)


@pytest.mark.requires("row_locks")
class TestAtAnyMoment:
    async def test_comes_a_reclaim(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            said = await moment.of(storing(claimed), meanwhile=reclaim_once)
            reclaimed = bool(moment.other)
            assert said == ("lost" if reclaimed and not moment.last else "stored")
            assert (await jobs.row(claimed)).checkpoint == (1 if said == "stored" else None)

    async def test_of_a_reclaim_it_comes(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            taken = await moment.of(reclaim_once, meanwhile=storing(claimed))
            assert taken
            row = await jobs.row(claimed)
            assert (row.checkpoint == 1) == (moment.other == "stored")
            assert row.state == State.READY

    async def test_of_a_renewal_it_comes(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            renewal = await moment.of(renewing(claimed), meanwhile=storing(claimed))
            assert renewal.renewed == {claimed.lease}
            assert (await jobs.row(claimed)).checkpoint == (1 if moment.other == "stored" else None)

    async def test_a_session_that_holds_it_is_not_reclaimed(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        """What was stored under the fence is committed before anybody else has the job."""
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        async with jobs.limited_time():
            await context_of(jobs, claimed).checkpoint(1, session)
            assert await jobs.reclaim() == []
            await session.commit()
            assert await jobs.reclaim() == [claimed.lease.job_id]
        assert context_of(jobs, await jobs.claim_one()).checkpointed == 1

    async def test_a_session_that_waits_for_a_reclaim_is_refused(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        async with jobs.limited_time():
            async with jobs.transaction() as take:
                assert await take(reclaim_once)
                storing_ = asyncio.create_task(context_of(jobs, claimed).checkpoint(1, session))
                await asyncio.sleep(0.1)
                assert not storing_.done()
            with pytest.raises(LeaseLostError):
                await storing_
        await session.rollback()


class TestInAWorker:
    async def test_a_retry_goes_on_where_the_last_attempt_was(self, jobs: Jobs) -> None:
        began: list[tuple[int, Any]] = []

        @jobs.scheduler.handler(retry=constant(0.0), max_attempts=4)
        async def work(ctx: JobContext) -> int:
            began.append((ctx.attempt, ctx.checkpointed))
            for row in range(ctx.checkpointed or 0, 10):
                if row == 4 * ctx.attempt:
                    raise ValueError("broken")
                await ctx.checkpoint(row + 1)
            return len(began)

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
            assert await jobs.scheduler.wait(job) == 3
        assert began == [(1, None), (2, 4), (3, 8)]

    async def test_from_a_thread(self, jobs: Jobs, sync_engine: Engine) -> None:
        seen: list[Any] = []

        @jobs.scheduler.handler
        def work(ctx: JobContext) -> None:
            ctx.await_(ctx.checkpoint, 1)
            seen.append(ctx.checkpointed)
            ctx.checkpoint_sync(2)
            seen.append(ctx.checkpointed)
            with Session(sync_engine) as session, session.begin():
                ctx.checkpoint_sync(3, session)
                seen.append(ctx.checkpointed)
            seen.append(ctx.checkpointed)

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
            await jobs.scheduler.wait(job)
        assert seen == [1, 2, 2, 3]


async def test_the_write_itself_carries_the_fence(jobs: Jobs) -> None:
    claimed = await jobs.leased()
    for wrong in ("owner", "token"):
        lease = impostor(claimed.lease, wrong)
        with pytest.raises(LeaseLostError):
            await jobs.do(lambda c, b, lease=lease: store_checkpoint(c, b, lease, encode(1)))
    assert (await jobs.row(claimed)).checkpoint is None


def _touching(jobs: Jobs) -> Any:
    """Return a write of the application's own: SQLite's driver begins with the first one."""
    version = jobs.tables.version
    return version.update().values(version=version.c.version)
