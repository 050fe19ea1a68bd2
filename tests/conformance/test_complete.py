"""A job that its handler ends in its own transaction: effects and `done` are one commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from asyncjobq import (
    ConfigurationError,
    JobContext,
    LeaseLostError,
    ResultError,
    State,
    constant,
)
from asyncjobq.finalize import Finished, finalize_once
from asyncjobq.lease import Claimed, completed_among, reclaim_once
from conformance.contexts import context_of
from conformance.kit import ISOLATION_LEVELS, Jobs, assert_nothing_is_stranded
from conformance.running import serving, until
from conformance.steps import TTL, enqueuing, failed, finishing, impostor, spec, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

business = Table("business", MetaData(), Column("job_id", BigInteger, index=True))
REFUSED = ("REPEATABLE READ", "SERIALIZABLE")


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _business(application: AsyncEngine) -> AsyncIterator[None]:
    """Have an empty table of the application's own."""
    async with application.begin() as connection:
        await connection.run_sync(business.metadata.create_all)
    yield
    async with application.begin() as connection:
        await connection.run_sync(business.metadata.drop_all)


def effect(job: Claimed | int) -> Any:
    job_id = job.lease.job_id if isinstance(job, Claimed) else job
    return business.insert().values(job_id=job_id)


async def effects(jobs: Jobs) -> list[int]:
    query = select(business.c.job_id)
    return list(await jobs.do(lambda c, _: c.scalars(query).all()))


async def ended(jobs: Jobs, claimed: Claimed) -> tuple[State, Any, bool]:
    row = await jobs.row(claimed)
    return State(row.state), row.result, row.settled


class TestTransaction:
    async def test_holds_the_effects_and_the_end(self, jobs: Jobs, session: AsyncSession) -> None:
        claimed = await jobs.leased()
        await session.execute(effect(claimed))
        await context_of(jobs, claimed).complete(session, {"a": 1})
        await session.commit()
        assert await ended(jobs, claimed) == (State.DONE, {"a": 1}, False)
        row = await jobs.row(claimed)
        assert (row.in_flight, row.lease_owner, row.lease_token) == (False, None, 1)
        assert row.finished_at is not None
        assert await effects(jobs) == [claimed.lease.job_id]

    async def test_rolled_back_has_not_ended_it(self, jobs: Jobs, session: AsyncSession) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        await session.execute(effect(claimed))
        await context_of(jobs, claimed).complete(session, 1)
        await session.rollback()
        assert (await jobs.row(claimed), await effects(jobs)) == (before, [])

    async def test_of_a_connection(self, jobs: Jobs, application: AsyncEngine) -> None:
        claimed = await jobs.leased()
        async with application.begin() as connection:
            await connection.execute(effect(claimed))
            await context_of(jobs, claimed).complete(connection)
        assert await ended(jobs, claimed) == (State.DONE, None, False)

    @pytest.mark.parametrize("kind", ["session", "connection"])
    async def test_that_is_synchronous(self, jobs: Jobs, sync_engine: Engine, kind: str) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        if kind == "session":
            with Session(sync_engine) as session, session.begin():
                context.complete_sync(session, [1])
        else:
            with sync_engine.begin() as connection:
                context.complete_sync(connection, [1])
        assert await ended(jobs, claimed) == (State.DONE, [1], False)

    async def test_at_each_isolation_level(self, jobs: Jobs, application: AsyncEngine) -> None:
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            claimed = await jobs.leased()
            engine = application.execution_options(isolation_level=level)
            async with AsyncSession(engine) as session:
                await session.execute(effect(claimed))
                if jobs.backend_name != "sqlite":
                    await jobs.renew(claimed)  # what a snapshot must not make fail
                if jobs.backend_name == "postgresql" and level in REFUSED:
                    with pytest.raises(ConfigurationError, match=level):
                        await context_of(jobs, claimed).complete(session, 1)
                    await session.execute(effect(claimed))
                    continue
                await context_of(jobs, claimed).complete(session, 1)
                await session.commit()
            assert await ended(jobs, claimed) == (State.DONE, 1, False)

    async def test_that_is_none_is_refused(self, jobs: Jobs, application: AsyncEngine) -> None:
        claimed = await jobs.leased()
        engine = application.execution_options(isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
                await context_of(jobs, claimed).complete(session)
        wrong: Any = None
        with pytest.raises(ConfigurationError, match="AsyncSession"):
            await context_of(jobs, claimed).complete(wrong)
        assert await jobs.state(claimed) == State.LEASED

    @pytest.mark.requires("server")
    async def test_of_another_database_is_refused(self, jobs: Jobs, tmp_path: Any) -> None:
        claimed = await jobs.leased()
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
        async with AsyncSession(engine) as session:
            with pytest.raises(ConfigurationError, match="sqlite"):
                await context_of(jobs, claimed).complete(session)
        await engine.dispose()

    @pytest.mark.parametrize("bad", [float("nan"), object(), "x" * 9_000_000])
    async def test_goes_on_after_a_result_that_is_refused(
        self, jobs: Jobs, session: AsyncSession, bad: Any
    ) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        await session.execute(effect(claimed))
        with pytest.raises(ResultError, match="result"):
            await context.complete(session, bad)
        await context.complete(session, "good")
        await session.commit()
        assert await ended(jobs, claimed) == (State.DONE, "good", False)
        assert await effects(jobs) == [claimed.lease.job_id]


class TestFence:
    @pytest.mark.parametrize("wrong", ["owner", "token"])
    async def test_of_somebody_else(self, jobs: Jobs, session: AsyncSession, wrong: str) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        with pytest.raises(LeaseLostError, match="lost"):
            await context_of(jobs, claimed, impostor(claimed.lease, wrong)).complete(session, 1)
        await session.commit()
        assert await jobs.row(claimed) == before

    async def test_of_an_owner_that_is_late(self, jobs: Jobs, session: AsyncSession) -> None:
        late = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        for claim in (False, True):
            if claim:
                await jobs.claim_one("another")
            before = await jobs.row(late)
            await session.execute(effect(late))
            with pytest.raises(LeaseLostError, match="lost"):
                await context_of(jobs, late).complete(session, 1)
            await session.rollback()
            assert await jobs.row(late) == before

    async def test_once_is_enough(self, jobs: Jobs, session: AsyncSession) -> None:
        context = context_of(jobs, await jobs.leased())
        await context.complete(session, 1)
        for again in (context.complete(session, 2), context.checkpoint(2, session)):
            with pytest.raises(LeaseLostError, match="completed already"):
                await again
        await session.commit()
        with pytest.raises(LeaseLostError, match="completed already"):
            await context.checkpoint(2)
        assert (await jobs.scheduler.get(context.job_id)).result == 1

    @pytest.mark.requires("row_locks")
    async def test_a_session_that_waits_for_a_reclaim_is_refused(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        async with jobs.limited_time():
            async with jobs.transaction() as take:
                assert await take(reclaim_once)
                completing = asyncio.create_task(context_of(jobs, claimed).complete(session, 1))
                await asyncio.sleep(0.1)
                assert not completing.done()
            with pytest.raises(LeaseLostError):
                await completing
        await session.rollback()
        assert await jobs.state(claimed) == State.READY

    @pytest.mark.requires("row_locks")
    async def test_a_session_that_completes_is_not_reclaimed(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        jobs.later(TTL + 1)
        async with jobs.limited_time():
            await context_of(jobs, claimed).complete(session, 1)
            assert await jobs.reclaim() == []
            written = await jobs.finish(claimed, outcome=failed())
            assert [item.lease for item in written.held] == [claimed.lease]
            assert (await jobs.renew(claimed)).held == {claimed.lease}
            await session.commit()
        assert await jobs.reclaim() == []
        assert await ended(jobs, claimed) == (State.DONE, 1, False)


class TestNeighbours:
    async def test_are_told_after_the_commit_by_anybody(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        """Also where the worker died between the commit and the settling."""
        claimed = await jobs.leased()
        dependant = await jobs.enqueue(depends_on=[claimed.lease.job_id])
        await jobs.settle()
        await context_of(jobs, claimed).complete(session, 1)
        await session.commit()
        assert await jobs.state(dependant) == State.BLOCKED

        @jobs.scheduler.handler
        async def work() -> None: ...

        async with jobs.limited_time():
            await jobs.scheduler.drain()
        assert await jobs.state(dependant) == State.DONE
        await assert_nothing_is_stranded(jobs)

    @pytest.mark.requires("row_locks")
    async def test_an_edge_that_comes_between_end_and_commit(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        await context_of(jobs, claimed).complete(session, 1)
        dependant = await jobs.enqueue(depends_on=[claimed.lease.job_id])
        await jobs.settle()
        await session.commit()
        await jobs.settle()
        assert await jobs.state(dependant) == State.READY
        await assert_nothing_is_stranded(jobs)

    @pytest.mark.requires("row_locks")
    async def test_an_edge_that_is_open_while_its_upstream_is_completed(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        async with jobs.limited_time(), jobs.transaction() as caller:
            (dependant,) = await caller(enqueuing(spec(depends_on=[claimed.lease.job_id])))
            await context_of(jobs, claimed).complete(session, 1)
            await session.commit()
            await jobs.settle()
        await jobs.settle()
        assert await jobs.state(dependant) == State.READY
        await assert_nothing_is_stranded(jobs)

    async def test_an_edge_that_comes_before_or_after(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        upstream = claimed.lease.job_id
        before = await jobs.enqueue(depends_on=[upstream])
        await context_of(jobs, claimed).complete(session, 1)
        await session.commit()
        after = await jobs.enqueue(depends_on=[upstream])
        await jobs.settle()
        assert await jobs.states(before, after) == [State.READY, State.READY]

    async def test_children_are_waited_for(self, jobs: Jobs, session: AsyncSession) -> None:
        claimed = await jobs.leased()
        context = context_of(jobs, claimed)
        await session.execute(select(business.c.job_id))  # an old snapshot, where that exists
        child = await context.add_child("child")
        dependant = await jobs.enqueue(depends_on=[context.job_id])
        await context.complete(session, "own")
        await session.commit()
        await jobs.settle()
        assert await jobs.states(claimed, dependant) == [State.WAITING, State.BLOCKED]
        await jobs.spoil(child, type="work")
        await jobs.run_all(outcome=failed())
        await jobs.settle()
        job = await jobs.scheduler.get(context.job_id)
        assert (job.state, job.result) == (State.DONE, "own")
        assert await jobs.state(dependant) == State.READY

    async def test_a_request_to_cancel_comes_too_late(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        claimed = await jobs.leased()
        await jobs.scheduler.cancel(claimed.lease.job_id)
        await context_of(jobs, claimed).complete(session, 1)
        await session.commit()
        await jobs.settle()
        assert await ended(jobs, claimed) == (State.DONE, 1, True)


class TestOutcome:
    """What the worker writes when the handler has returned, after a completion."""

    @pytest.mark.parametrize(
        "outcome", [succeeded(2), failed("late"), failed("late", retry_after=0.0)]
    )
    async def test_counts_for_nothing(
        self, jobs: Jobs, session: AsyncSession, outcome: Any
    ) -> None:
        claimed = await jobs.leased()
        await context_of(jobs, claimed).complete(session, 1)
        await session.commit()
        item = Finished(claimed.lease, outcome, completing=True)
        written = await jobs.do(lambda c, b: finalize_once(c, b, [item]))
        assert written.completed == {claimed.lease: State.DONE}
        assert (written.lost, written.written) == ([], [])
        assert written.unsettled == {claimed.lease.job_id}
        assert await ended(jobs, claimed) == (State.DONE, 1, False)

    async def test_of_a_lost_lease_is_lost_although_it_was_completing(self, jobs: Jobs) -> None:
        """As by a reclaim, which leaves the token as it is."""
        late = await jobs.leased(max_attempts=2)
        jobs.later(TTL + 1)
        await jobs.reclaim()
        item = Finished(late.lease, succeeded(1), completing=True)

        async def lost() -> bool:
            written = await jobs.do(lambda c, b: finalize_once(c, b, [item]))
            return [one.lease for one in written.lost] == [late.lease]

        assert await lost()
        second = await jobs.claim_one()
        assert await lost()
        await jobs.do(finishing(second))
        assert await lost()

    async def test_of_a_worker_that_was_lost_with_open_children(self, jobs: Jobs) -> None:
        late = await jobs.leased(max_attempts=1)
        await context_of(jobs, late).add_child("child")
        jobs.later(TTL + 1)
        await jobs.reclaim()
        assert await jobs.state(late) == State.WAITING
        found = await jobs.do(lambda c, b: completed_among(c, b, [late.lease]))
        assert found == {}


class TestInAWorker:
    async def test_the_return_value_is_ignored(self, jobs: Jobs, application: AsyncEngine) -> None:
        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> int:
            ctx.progress(9)
            async with ctx.session() as session, session.begin():
                await session.execute(effect(ctx.job_id))
                await ctx.complete(session, 1)
            return 2

        job = await jobs.scheduler.enqueue(work.job())
        after = await jobs.scheduler.enqueue(work.job(), depends_on=[job])
        async with jobs.limited_time():
            assert (await jobs.scheduler.drain())[State.DONE] == 2
            assert await jobs.scheduler.wait(job) == 1
        assert await effects(jobs) == [job.id, after.id]
        assert (await jobs.row(job)).progress["done"] == 9
        await assert_nothing_is_stranded(jobs)

    async def test_an_error_afterwards_is_logged_and_ignored(
        self, jobs: Jobs, caplog: pytest.LogCaptureFixture
    ) -> None:
        @jobs.scheduler.handler(retry=constant(0.0))
        async def work(ctx: JobContext) -> None:
            async with ctx.session() as session, session.begin():
                await ctx.complete(session, ctx.attempt)
            raise ValueError("too late")

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
        assert (await jobs.scheduler.get(job)).result == 1
        (message,) = [r.message for r in caplog.records if "too late" in r.message]
        assert "completed" in message

    async def test_rolled_back_the_end_of_the_handler_counts(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(retry=constant(0.0))
        async def work(ctx: JobContext) -> str:
            if ctx.attempt < 3:
                async with ctx.session() as session:
                    await session.execute(effect(ctx.job_id))
                    await ctx.complete(session, "completed")
                    if ctx.attempt == 1:
                        raise ValueError("before the commit")
            return "returned"

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
            assert await jobs.scheduler.wait(job) == "returned"
        assert ((await jobs.row(job)).attempt, await effects(jobs)) == (2, [])

    async def test_goes_on_without_a_lease(
        self, jobs: Jobs, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The renewal that finds it gone neither cancels the handler nor calls the lease lost."""
        scheduler = jobs.another(lease_ttl=1.0)
        go_on, ended_well = asyncio.Event(), asyncio.Event()

        @scheduler.handler
        async def work(ctx: JobContext) -> None:
            async with ctx.session() as session, session.begin():
                await ctx.complete(session, 1)
            await go_on.wait()
            ended_well.set()

        async with serving(scheduler):
            job = await scheduler.enqueue(work.job())
            assert await jobs.scheduler.wait(job) == 1
            worker: Any = scheduler._worker

            async def noticed() -> bool:
                return all(beat.completed for beat in worker._heartbeat._beats.values())

            await until(noticed)
            await asyncio.sleep(1.1)  # longer than the lease was
            go_on.set()
            await ended_well.wait()
        assert not [r for r in caplog.records if r.levelname in ("WARNING", "ERROR")]

    async def test_from_a_thread(self, jobs: Jobs, sync_engine: Engine) -> None:
        @jobs.scheduler.handler
        def work(ctx: JobContext) -> None:
            with Session(sync_engine) as session, session.begin():
                session.execute(effect(ctx.job_id))
                ctx.complete_sync(session, "from a thread")

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
            assert await jobs.scheduler.wait(job) == "from a thread"
        assert await effects(jobs) == [job.id]
