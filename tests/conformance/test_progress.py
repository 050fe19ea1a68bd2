"""How far a job is: reported at any rate, stored at a modest one, under the fence."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from sqlalchemy import event

from asyncjobq import InvalidJobError, JobContext, State
from asyncjobq.clock import monotonic
from asyncjobq.finalize import Finished, finalize_once
from asyncjobq.heartbeat import REPORT_INTERVAL, Heartbeat
from asyncjobq.lease import Claimed, Lease, reclaim_once, renew_once, store_progress
from asyncjobq.progress import Progress
from asyncjobq.run import JobRun
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.runs import run_of, wait_for_ever
from conformance.steps import TTL, Step, claiming, holding, impostor, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

HALF = {"done": 1, "total": 2, "message": None}


def reported(done: float, total: float | None = None, message: str | None = None) -> Any:
    """Return a report as it is stored."""
    progress = Progress()
    progress.report(done, total, message)
    return progress.pending


def reporting(claimed: Claimed | Lease, done: int = 1) -> Step[Any]:
    """Renew a lease together with a report."""
    lease = claimed if isinstance(claimed, Lease) else claimed.lease
    return lambda c, b: renew_once(c, b, [lease], TTL, {lease: reported(done, 2)})


class Kept:
    """Leases that a heartbeat keeps, all renewed at a moment that the test puts back."""

    def __init__(self, jobs: Jobs) -> None:
        self.heartbeat = Heartbeat(jobs.database, TTL)
        self.runs: list[JobRun] = []

    def add(self, *claimed: Claimed) -> None:
        for one in claimed:
            run = run_of(wait_for_ever)
            run.claimed = one
            self.runs.append(run)
            self.heartbeat.add(run, monotonic())
            self.heartbeat._beats[one.lease].renewed = True

    def let_pass(self, seconds: float) -> None:
        for beat in self.heartbeat._beats.values():
            beat.reported_at -= seconds


class TestHeartbeat:
    async def test_stores_what_was_reported_last(self, jobs: Jobs) -> None:
        kept, claimed = Kept(jobs), await jobs.leased()
        kept.add(claimed)
        for done in range(100):
            kept.runs[0].context.progress(done, 100, "ä🙂" * done)
        await kept.heartbeat.renew_once()
        job = await jobs.scheduler.get(claimed.lease.job_id)
        assert job.progress == {"done": 99, "total": 100, "message": "ä🙂" * 99}
        assert job.state == State.RUNNING

    async def test_at_most_about_once_a_second(self, jobs: Jobs) -> None:
        kept, claimed = Kept(jobs), await jobs.leased()
        kept.add(claimed)
        for done, stored in ((1, 1), (2, 1), (3, 1)):
            kept.runs[0].context.progress(done)
            await kept.heartbeat.renew_once()
            assert (await jobs.row(claimed)).progress["done"] == stored
        kept.let_pass(REPORT_INTERVAL)
        await kept.heartbeat.renew_once()
        assert (await jobs.row(claimed)).progress["done"] == 3

    async def test_of_all_jobs_in_a_few_statements_and_of_none_in_none(self, jobs: Jobs) -> None:
        kept = Kept(jobs)
        await jobs.enqueue_many(20)
        claimed = await jobs.claim(20)
        kept.add(*claimed)
        statements: list[str] = []
        run = jobs.database.run

        async def counted(work: Any, **how: Any) -> Any:
            def noted(connection: Any) -> Any:
                @event.listens_for(connection, "before_cursor_execute")
                def note(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
                    statements.append(statement)

                result = work(connection)
                event.remove(connection, "before_cursor_execute", note)
                return result

            return await run(noted, **how)

        jobs.database.run = counted  # type: ignore[method-assign]
        try:
            await kept.heartbeat.renew_once()
            assert statements == []
            for number, one in enumerate(kept.runs):
                one.context.progress(number)
            await kept.heartbeat.renew_once()
        finally:
            del jobs.database.run  # type: ignore[method-assign]
        assert len(statements) == 3
        assert [(await jobs.row(one)).progress["done"] for one in claimed] == list(range(20))

    @pytest.mark.requires("row_locks")
    async def test_of_a_row_that_somebody_holds_is_stored_later(self, jobs: Jobs) -> None:
        kept, claimed = Kept(jobs), await jobs.leased()
        kept.add(claimed)
        kept.runs[0].context.progress(1, 2)
        async with jobs.limited_time(), jobs.transaction() as take:
            await take(holding(claimed))
            await kept.heartbeat.renew_once()
        assert (await jobs.row(claimed)).progress is None
        await kept.heartbeat.renew_once()
        assert (await jobs.row(claimed)).progress == HALF


class TestFence:
    @pytest.mark.parametrize("wrong", ["owner", "token"])
    async def test_of_a_renewal(self, jobs: Jobs, wrong: str) -> None:
        claimed = await jobs.leased()
        before = await jobs.row(claimed)
        lease = impostor(claimed.lease, wrong)
        assert (await jobs.do(reporting(lease))).lost == {lease}
        assert await jobs.row(claimed) == before

    @pytest.mark.parametrize("wrong", ["owner", "token"])
    async def test_of_the_write_itself(self, jobs: Jobs, wrong: str) -> None:
        claimed = await jobs.leased()
        lease = impostor(claimed.lease, wrong)
        await jobs.do(lambda c, b: store_progress(c, b, {lease: reported(1)}))
        assert (await jobs.row(claimed)).progress is None

    async def test_of_an_owner_that_is_late(self, jobs: Jobs) -> None:
        late = await jobs.leased("worker")
        jobs.later(TTL + 1)
        await jobs.reclaim()
        current = await jobs.claim_one("another")
        await jobs.do(reporting(current, 2))
        await jobs.do(reporting(late))
        item = Finished(late.lease, succeeded(1), reported(1))
        await jobs.do(lambda c, b: finalize_once(c, b, [item]))
        assert (await jobs.row(late)).progress["done"] == 2

    @pytest.mark.requires("row_locks")
    async def test_with_a_theft_at_any_moment(self, jobs: Jobs) -> None:
        """A report is stored exactly where the renewal that carries it succeeds."""
        async for moment in jobs.moments():
            claimed = await jobs.leased()
            jobs.later(TTL + 1)
            renewal = await moment.of(reporting(claimed), meanwhile=_reclaim_and_claim)
            row = await jobs.row(claimed)
            assert (row.progress is None) == (claimed.lease in renewal.lost)
            assert row.lease_owner == ("worker" if row.progress else "thief")


class TestInAWorker:
    async def test_is_seen_by_others_while_it_runs(self, jobs: Jobs) -> None:
        scheduler = jobs.another(lease_ttl=1.0)
        go_on = asyncio.Event()

        @scheduler.handler
        async def work(ctx: JobContext) -> None:
            ctx.progress(1, 2)
            await go_on.wait()

        async with serving(scheduler):
            job = await scheduler.enqueue(work.job())

            async def seen() -> bool:
                return (await jobs.scheduler.get(job)).progress == HALF

            await until(seen)
            go_on.set()
            await scheduler.wait(job)

    @pytest.mark.parametrize("end", ["done", "failed"])
    async def test_the_last_one_is_stored_with_the_end(self, jobs: Jobs, end: str) -> None:
        @jobs.scheduler.handler(max_attempts=1)
        def work(ctx: JobContext) -> None:
            for done in range(1000):
                ctx.progress(done)
            time.sleep(0)
            if end == "failed":
                raise ValueError("broken")

        job = await jobs.scheduler.enqueue(work.job())
        async with jobs.limited_time():
            await jobs.scheduler.drain()
        ended = await jobs.scheduler.get(job)
        assert (ended.state, ended.progress["done"]) == (end, 999)


@pytest.mark.parametrize(
    "bad",
    [
        ("1",),
        (float("nan"),),
        (-1,),
        (True,),
        (None,),
        (1, "2"),
        (1, float("inf")),
        (1, 2, 3),
        (10**400,),
    ],
)
async def test_what_is_no_progress_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"progress\(\) takes"):
        Progress().report(*(*bad, None, None)[:3])


async def test_a_message_may_be_anything_that_is_text() -> None:
    text = reported(1, None, "a\x00\ud800" + "b" * 2000)
    assert "\\\\x00" in text
    assert len(text) < 1200


def _reclaim_and_claim(connection: Any, backend: Any) -> Any:
    taken = reclaim_once(connection, backend)
    return claiming(1, "thief")(connection, backend) if taken else []
