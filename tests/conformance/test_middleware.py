"""What wraps the runs of jobs: in which order, what it sees and changes, what its errors do."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from typing import Any

import pytest

from asyncjobq import Fail, HandlerError, Handlers, JobContext, Scheduler, Snooze, constant
from asyncjobq.middleware import Call
from asyncjobq.outcomes import Ending
from asyncjobq.run import Stop
from asyncjobq.states import State
from conformance.kit import Jobs
from conformance.running import serving, until
from conformance.runs import ended, outcome_of, raising, run_of

TENANT: ContextVar[str] = ContextVar("TENANT", default="nobody")


def noting(notes: list[str], name: str) -> Any:
    async def around(job: JobContext, call: Call) -> Any:
        notes.append(f"{name} before")
        try:
            return await call()
        finally:
            notes.append(f"{name} after {job.type}")

    return around


async def sets_tenant(job: JobContext, call: Call) -> Any:
    TENANT.set(f"tenant of {job.job_id}")
    return await call()


class TestOneRun:
    """Without a database."""

    async def test_the_first_is_outermost(self) -> None:
        notes: list[str] = []
        layers = [noting(notes, "first"), noting(notes, "second")]
        outcome = await outcome_of(lambda: notes.append("handler"), around=layers)
        assert outcome.ending == Ending.SUCCEEDED
        assert notes == [
            "first before",
            "second before",
            "handler",
            "second after work",
            "first after work",
        ]

    async def test_sees_and_changes_the_result(self) -> None:
        async def double(_: JobContext, call: Call) -> Any:
            return 2 * await call()

        for function in (lambda: 4, _four):
            assert (await outcome_of(function, around=[double, double])).result == "16"

    async def test_may_answer_without_the_handler(self) -> None:
        async def cached(_: JobContext, call: Call) -> Any:  # noqa: ARG001
            return "cached"

        assert (await outcome_of(raising(ValueError()), around=[cached])).result == '"cached"'

    async def test_sees_and_changes_the_error(self) -> None:
        seen: list[BaseException] = []

        async def look(_: JobContext, call: Call) -> Any:
            try:
                return await call()
            except ValueError as error:
                seen.append(error)
                raise Fail("translated") from error

        error = ValueError("broken")
        outcome = await outcome_of(raising(error), around=[look])
        assert (outcome.state, seen) == (State.FAILED, [error])
        assert "translated" in (outcome.error or "")
        assert "asyncjobq/" not in (outcome.error or "")

    @pytest.mark.parametrize("error", [ValueError("of its own"), SystemExit(3)])
    @pytest.mark.parametrize("before", [True, False])
    async def test_its_own_error_is_the_jobs(self, error: BaseException, before: bool) -> None:
        async def broken(_: JobContext, call: Call) -> Any:
            if before:
                raise error
            await call()
            raise error

        outcome = await outcome_of(_four, around=[broken])
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, 7.0)
        assert type(error).__name__ in (outcome.error or "")

    async def test_may_end_the_attempt(self) -> None:
        async def later(_: JobContext, call: Call) -> Any:  # noqa: ARG001
            raise Snooze(5)

        assert (await outcome_of(_four, around=[later])).ending == Ending.SNOOZED

    @pytest.mark.parametrize("reason", [Stop.CANCELLED, Stop.INTERRUPTED, Stop.TIMED_OUT])
    async def test_is_cancelled_with_the_handler(self, reason: Stop) -> None:
        notes: list[str] = []
        run = run_of(lambda: None, around=[noting(notes, "outer"), _hangs])
        outcome = asyncio.ensure_future(ended(run))
        await asyncio.sleep(0.01)
        run.stop(reason)
        async with asyncio.timeout(5):
            assert (await outcome).ending.name == reason.name
        assert notes == ["outer before", "outer after work"]

    async def test_the_handlers_thread_is_left_to_end_before_it(self) -> None:
        started, go_on = threading.Event(), threading.Event()
        notes, over = list[str](), asyncio.Event()

        async def around(_: JobContext, call: Call) -> Any:
            try:
                return await call()
            finally:
                notes.append(f"after the thread: {go_on.is_set()}")
                over.set()

        def work() -> None:
            started.set()
            go_on.wait(10)

        run = run_of(work, around=[around])
        outcome = asyncio.ensure_future(ended(run))
        assert await asyncio.to_thread(started.wait, 10)
        run.stop(Stop.TIMED_OUT)
        assert ((await outcome).ending, notes) == (Ending.TIMED_OUT, [])
        go_on.set()
        async with asyncio.timeout(5):
            await over.wait()
        assert notes == ["after the thread: True"]

    async def test_what_it_sets_is_seen_by_handlers_of_both_kinds_and_by_no_other_job(self) -> None:
        async def reports() -> str:
            return TENANT.get()

        def reports_in_a_thread() -> str:
            seen = TENANT.get()
            TENANT.set("left behind in a thread")
            return seen

        TENANT.set("the worker's")
        for function in [reports, reports_in_a_thread] * 3:
            outcome = await outcome_of(function, around=[sets_tenant])
            assert outcome.result == '"tenant of 1"'
            assert (await outcome_of(function)).result == '"nobody"'
        assert TENANT.get() == "the worker's"


async def _four() -> int:
    return 4


async def _hangs(_: JobContext, call: Call) -> Any:
    await asyncio.sleep(60)
    return await call()


def _plain(_: Any, call: Any) -> Any:
    return call()


async def _takes_one(job: Any) -> Any: ...


async def _yields(_: Any, call: Any) -> Any:
    yield await call()


@pytest.mark.parametrize("function", [_plain, _takes_one, _yields, 3, None])
def test_what_cannot_wrap_a_run_is_refused(function: Any) -> None:
    for owner in (Handlers(), Scheduler("sqlite+aiosqlite:///never.db")):
        with pytest.raises(HandlerError, match=r"async def around\(job, call\)"):
            owner.around(function)


@pytest.mark.asyncio(loop_scope="module")
class TestScheduler:
    async def test_wraps_all_handlers_and_a_registry_its_own(self, jobs: Jobs) -> None:
        notes: list[str] = []
        media, reports = Handlers(), Handlers()
        media.handler("encode")(lambda: notes.append("encode"))
        reports.handler("report")(lambda: notes.append("report"))
        scheduler = jobs.another(handlers=[media, reports], poll_interval=0.1)
        scheduler.around(noting(notes, "all"))
        media.around(noting(notes, "media"))
        for name in ("encode", "report"):
            await scheduler.enqueue(name)
            await scheduler.drain()
        assert notes == [
            *["all before", "media before", "encode", "media after encode", "all after encode"],
            *["all before", "report", "all after report"],
        ]

    async def test_an_error_in_it_is_retried_like_the_handlers(self, jobs: Jobs) -> None:
        @jobs.scheduler.around
        async def flaky(job: JobContext, call: Call) -> Any:
            if job.attempt == 1:
                raise ConnectionError("not yet")
            return await call()

        @jobs.scheduler.handler(retry=constant(0))
        async def work() -> str:
            return "done"

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        row = await jobs.row(job)
        assert (row.state, row.attempt, row.result) == ("done", 2, "done")

    async def test_carries_the_context_of_the_caller_in_meta(self, jobs: Jobs) -> None:
        """A trace goes from a request into its job, and from there into the jobs that it makes."""
        trace: ContextVar[str] = ContextVar("trace", default="none")

        @jobs.scheduler.meta_from
        def carried() -> dict[str, Any]:
            return {"trace": trace.get()}

        @jobs.scheduler.around
        async def continued(job: JobContext, call: Call) -> Any:
            trace.set(job.meta["trace"])
            return await call()

        @jobs.scheduler.handler
        def leaf() -> str:
            return trace.get()

        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> list[Any]:
            child = await ctx.add_child(leaf.job())
            other = await ctx.enqueue(leaf.job(), meta={"trace": "own", "more": 1})
            return [trace.get(), child.id, other.id, ctx.meta, ctx.queue, ctx.group_key]

        trace.set("request 7")
        job = await jobs.scheduler.enqueue(work.job(), group_key="acme", meta={"user": "Ada"})
        async with jobs.scheduler.workflow("all") as workflow:
            inner = workflow.add(leaf.job())
        trace.set("request 8")
        await jobs.scheduler.drain()
        seen, child, other, meta, queue, group_key = (await jobs.row(job)).result
        assert seen == "request 7"
        assert (meta, queue, group_key) == (
            {"trace": "request 7", "user": "Ada"},
            "default",
            "acme",
        )
        assert (await jobs.row(child)).result == "request 7"
        assert (await jobs.row(other)).result == "own"
        assert (await jobs.row(other)).meta == {"trace": "own", "more": 1}
        assert (await jobs.row(inner.id)).result == "request 7"
        assert (await jobs.row(workflow.id)).meta == {"trace": "request 7"}

    async def test_of_a_schedule_carries_nothing_of_whoever_added_it(self, jobs: Jobs) -> None:
        """Nor of whoever started the worker; but it has what middleware looks for in every job."""
        trace: ContextVar[str] = ContextVar("trace", default="none")

        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> Any:
            return ctx.meta

        async def seen() -> dict[str, Any]:
            done = await jobs.scheduler.find(state="done")
            return {job.result["schedule"]: job.result for job in done}

        async def both() -> bool:
            return len(await seen()) == 2

        jobs.scheduler.every(1, name="declared")(work)
        jobs.scheduler.meta_from(lambda: {"trace": trace.get(), "user": "nobody"})
        trace.set("request 7")
        added = await jobs.scheduler.add_schedule(
            "added", work.job(), every=1, meta={"user": "Ada"}
        )
        assert added.options["meta"] == {"user": "Ada"}
        async with serving(jobs.scheduler):
            await until(both)
        carried = {name: (meta["trace"], meta["user"]) for name, meta in (await seen()).items()}
        assert carried == {"added": ("none", "Ada"), "declared": ("none", "nobody")}

    async def test_meta_is_empty_where_none_was_given(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler
        async def work(ctx: JobContext) -> dict[str, Any]:
            return ctx.meta

        job = await jobs.scheduler.enqueue(work.job())
        await jobs.scheduler.drain()
        assert (await jobs.row(job)).result == {}
        assert (await jobs.row(job)).meta is None

    async def test_meta_that_cannot_be_stored_is_refused_before_anything_is_written(
        self, jobs: Jobs
    ) -> None:
        jobs.scheduler.meta_from(lambda: {"trace": object()})
        with pytest.raises(ValueError, match="meta cannot be stored"):
            await jobs.scheduler.enqueue("unknown")
        assert await jobs.scheduler.find() == []
