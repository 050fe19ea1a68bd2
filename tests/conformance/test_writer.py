"""The group commit of outcomes: each is told what became of it, and none spoils another."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import pytest
from sqlalchemy import make_url, text

from asyncjobq import DatabaseUnavailableError, State
from asyncjobq.codec import encode
from asyncjobq.finalize import Finished
from asyncjobq.outbox import Outbox
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.writer import BATCH_ROWS, BREAKS, OutcomeWriter
from conformance.breaking import breaking
from conformance.kit import Jobs
from conformance.runs import given
from conformance.steps import TTL, failed, holding, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def refusing(jobs: Jobs, error: str) -> AsyncIterator[None]:
    """Make the database refuse rows with this error text."""
    if jobs.backend_name == "sqlite":
        make = (
            f"CREATE TRIGGER refuse BEFORE UPDATE ON jobs WHEN NEW.error = '{error}' "
            "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        )
        undo = "DROP TRIGGER refuse"
    else:
        condition = f"CHECK (error IS NULL OR error <> '{error}')"
        make = f"ALTER TABLE jobs ADD CONSTRAINT refuse {condition}"
        undo = "ALTER TABLE jobs DROP CONSTRAINT refuse"
    await jobs.do(lambda c, _: c.execute(text(make)))
    try:
        yield
    finally:
        await jobs.do(lambda c, _: c.execute(text(undo)))


FULL = {
    "postgresql": (
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'disk full' USING ERRCODE = '53100'; END $$",
        "CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW "
        "WHEN (length(NEW.result::text) > 1000) EXECUTE FUNCTION full_disk()",
    ),
    "mysql": (
        "CREATE TRIGGER refuse BEFORE UPDATE ON jobs FOR EACH ROW BEGIN "
        "IF length(NEW.result) > 1000 THEN "
        "SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1021; END IF; END",
    ),
}
FULL["mariadb"] = FULL["mysql"]


@asynccontextmanager
async def full_disk(jobs: Jobs) -> AsyncIterator[None]:
    """Leave the database room for small outcomes only."""
    if jobs.backend_name == "sqlite":
        with closing(sqlite3.connect(str(make_url(jobs.url).database))) as connection:
            connection.execute("VACUUM")  # or there is room that earlier tests have left
        pages = await jobs.do(lambda c, _: c.execute(text("PRAGMA page_count")).scalar_one())
        limit = text(f"PRAGMA max_page_count = {pages + 5}")
        await jobs.database.run(lambda c: c.execute(limit).close())
        yield
        await jobs.database.run(lambda c: c.execute(text("PRAGMA max_page_count = 100000")).close())
        return
    for statement in FULL[jobs.backend_name]:
        await jobs.do(lambda c, _, statement=statement: c.exec_driver_sql(statement))  # type: ignore[misc]
    try:
        yield
    finally:
        postgresql = jobs.backend_name == "postgresql"
        drop = "DROP FUNCTION full_disk CASCADE" if postgresql else "DROP TRIGGER refuse"
        await jobs.do(lambda c, _: c.exec_driver_sql(drop))


def writer_of(jobs: Jobs) -> OutcomeWriter:
    return OutcomeWriter(jobs.database, Outbox(jobs.database))


async def written_together(jobs: Jobs, *items: Finished) -> list[bool]:
    """Have a writer write these at once; return what each was told."""
    writer = writer_of(jobs)

    async def write() -> None:
        while True:
            with suppress(DatabaseUnavailableError):
                await writer.write_once()

    async with jobs.limited_time(), asyncio.TaskGroup() as group:
        told = [given(writer, item) for item in items]
        writing = group.create_task(write())
        await asyncio.wait(told)
        writing.cancel()
    return [one.result() for one in told]


class TestWriter:
    async def test_tells_each_what_became_of_it(self, jobs: Jobs) -> None:
        lost = await jobs.leased()
        jobs.later(TTL + 1)
        await jobs.reclaim()
        kept = await jobs.claim_one()
        other = await jobs.leased()
        items = [Finished(job.lease, succeeded(1)) for job in (lost, other, kept)]
        assert await written_together(jobs, *items) == [None, "done", "done"]

    async def test_an_outcome_that_is_refused_spoils_no_other(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(5)
        claimed = await jobs.claim(5)
        ends = [succeeded(1), succeeded(2), failed("refuse me"), failed("fine"), succeeded(5)]
        async with refusing(jobs, "refuse me"):
            items = [Finished(job.lease, end) for job, end in zip(claimed, ends, strict=True)]
            states = ["done", "done", "failed", "failed", "done"]
            assert await written_together(jobs, *items) == states
        stored = [await jobs.scheduler.get(job.lease.job_id) for job in claimed]
        assert [job.state for job in stored] == ["done", "done", "failed", "failed", "done"]
        assert [job.result for job in stored] == [1, 2, None, None, 5]
        assert stored[3].error == "fine"
        assert "refused the outcome" in (stored[2].error or "")

    async def test_a_retry_that_is_refused_ends_its_job(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        async with refusing(jobs, "refuse me"):
            refused = failed("refuse me", retry_after=1.0)
            await written_together(jobs, Finished(claimed.lease, refused))
        assert await jobs.state(claimed) == State.FAILED

    async def test_one_that_breaks_the_connection_holds_up_no_other(self, jobs: Jobs) -> None:
        """As one does that is longer than the server takes: the connection is all it ends."""
        await jobs.enqueue_many(4)
        claimed = await jobs.claim(4)
        ends = [succeeded(1), succeeded("too long"), failed("fine"), succeeded(4)]
        items = [Finished(job.lease, end) for job, end in zip(claimed, ends, strict=True)]
        async with breaking(jobs, "too long") as breaks:
            states = ["done", "failed", "failed", "done"]
            assert await written_together(jobs, *items) == states
        assert len(breaks) >= 2 * BREAKS
        assert await jobs.states(*claimed) == states
        error = (await jobs.scheduler.get(claimed[1].lease.job_id)).error
        assert "refused the outcome" in (error or "")

    async def test_one_that_breaks_the_connection_for_a_while_is_written(self, jobs: Jobs) -> None:
        first, second = await jobs.leased(), await jobs.leased()
        items = [Finished(first.lease, succeeded("x")), Finished(second.lease, succeeded("y"))]
        writer = writer_of(jobs)
        told = [given(writer, item) for item in items]
        await asyncio.sleep(0)
        async with breaking(jobs, "x"):
            await writer.write_once()
            assert [one.done() for one in told] == [False, True]
        await writer.write_once()
        assert await asyncio.gather(*told) == ["done", "done"]
        assert (await jobs.scheduler.get(first.lease.job_id)).result == "x"

    async def test_gathers_while_a_transaction_is_under_way(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await jobs.enqueue_many(10)
        claimed = await jobs.claim(10)
        writer = writer_of(jobs)
        batches: list[int] = []
        under_way, go_on = asyncio.Event(), asyncio.Event()
        run_items = writer._run

        async def counted(items: Any) -> Any:
            batches.append(len(items))
            under_way.set()
            await go_on.wait()
            return await run_items(items)

        monkeypatch.setattr(writer, "_run", counted)
        items = [Finished(job.lease, succeeded(1)) for job in claimed]
        told = [given(writer, items[0])]
        async with jobs.limited_time():
            first = asyncio.ensure_future(writer.write_once())
            await under_way.wait()
            told += [given(writer, item) for item in items[1:]]
            await asyncio.sleep(0)
            go_on.set()
            await first
            await writer.write_once()
            assert await asyncio.gather(*told) == ["done"] * 10
        assert batches == [1, 9]

    async def test_in_bounded_batches(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        await jobs.enqueue_many(6)
        claimed = await jobs.claim(6)
        large = Outcome(Ending.SUCCEEDED, result=encode("x" * 1_500_000))
        sizes: list[int] = []
        run = jobs.database.run

        async def counted(work: Any, **how: Any) -> Any:
            written = await run(work, **how)
            sizes.append(len(written.written))
            return written

        monkeypatch.setattr(jobs.database, "run", counted)
        await written_together(jobs, *(Finished(job.lease, large) for job in claimed))
        assert sum(sizes) == 6
        assert max(sizes) < 6
        assert BATCH_ROWS <= 1000

    async def test_keeps_what_it_could_not_write(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = await jobs.leased(), await jobs.leased()
        writer = writer_of(jobs)
        told = [given(writer, Finished(job.lease, succeeded(1))) for job in (first, second)]
        await asyncio.sleep(0)

        async def away(*_: object, **__: object) -> None:
            raise DatabaseUnavailableError("away")

        with monkeypatch.context() as patch:
            patch.setattr(jobs.database, "run", away)
            with pytest.raises(DatabaseUnavailableError):
                await writer.write_once()
        assert not any(one.done() for one in told)
        await writer.write_once()
        assert await asyncio.gather(*told) == ["done", "done"]

    async def test_a_full_disk_is_no_refusal(self, jobs: Jobs) -> None:
        """Also while the database answers, and has room for what would be written instead."""
        claimed = await jobs.leased()
        writer = writer_of(jobs)
        large = succeeded("x" * 500_000)
        told = given(writer, Finished(claimed.lease, large))
        await asyncio.sleep(0)
        async with jobs.limited_time():
            async with full_disk(jobs):
                for _ in range(BREAKS + 1):
                    with pytest.raises(DatabaseUnavailableError):
                        await writer.write_once()
                assert not told.done()
            await writer.write_once()
            assert await told == State.DONE
        assert await jobs.state(claimed) == State.DONE

    async def test_an_outage_of_a_moment_is_no_refusal(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        claimed, run = await jobs.leased(), jobs.database.run
        errors = [DatabaseUnavailableError("away")]

        async def away_once(*args: Any, **how: Any) -> Any:
            if errors:
                raise errors.pop()
            return await run(*args, **how)

        monkeypatch.setattr(jobs.database, "run", away_once)
        assert await written_together(jobs, Finished(claimed.lease, succeeded(1))) == ["done"]
        assert await jobs.state(claimed) == State.DONE

    @pytest.mark.requires("row_locks")
    async def test_comes_back_to_what_somebody_holds_and_stalls_nobody(self, jobs: Jobs) -> None:
        held, free = await jobs.leased(), await jobs.leased()
        writer = writer_of(jobs)
        async with jobs.limited_time():
            async with jobs.transaction() as take:
                await take(holding(held))
                told = given(writer, Finished(held.lease, succeeded(1)))
                await asyncio.sleep(0)
                await writer.write_once()
                other = given(writer, Finished(free.lease, succeeded(1)))
                await asyncio.sleep(0)
                await writer.write_once()
                assert await other
                assert not told.done()
            await writer.write_once()
            assert await told
        assert await jobs.states(held, free) == [State.DONE, State.DONE]
