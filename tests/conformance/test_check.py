"""The rules of the tables: each is broken by hand, found alone, and mended."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Final

import pytest
from sqlalchemy import Connection, delete, insert, text, update

from asyncjobq import CheckReport, Concurrency, ConfigurationError, Job, JobSpec, State, Workflow
from asyncjobq.backends.base import Backend
from asyncjobq.check import CIRCLE, MOST, OVER_LIMIT, UNSERVED
from asyncjobq.check_small import NOTED_KEY_RULES, rules_for
from asyncjobq.presence import appear
from conformance.kit import Jobs
from conformance.moves import watch_moves
from conformance.steps import TTL, holding
from graphs.kit import workflow, writing

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRACE: Final = 60.0
NOBODY: Final = 10**9

Break = Callable[[Jobs], Awaitable[Any]]
"""Breaks one rule; returns the jobs, or what else names the rows, and the state they mend to."""


async def _family(jobs: Jobs) -> tuple[int, int]:
    """Return a container that waits for the one job in it, and that job."""
    described: Workflow = workflow()
    described.add(JobSpec[Any]("work", {}))
    container, child = await jobs.do(writing(described))
    await jobs.settle()
    return container.id, child.id


async def _pair(jobs: Jobs) -> tuple[Job[Any], Job[Any]]:
    """Return a job, and one that waits for it."""
    first = await jobs.enqueue()
    second = await jobs.enqueue(depends_on=[first])
    await jobs.settle()
    return first, second


async def _end(jobs: Jobs, job: Job[Any] | int) -> None:
    """End a job as nobody would: what is around it is not told."""
    await jobs.spoil(job, state=State.DONE, finished_at=await jobs.now())


def _without_references(jobs: Jobs, *statements: Any) -> None:
    """Write what the tables' foreign keys would refuse."""

    def write(connection: Connection, _: Backend) -> None:
        if jobs.backend_name == "postgresql":
            connection.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in statements:
            connection.execute(statement)

    jobs.elsewhere(write)  # where SQLite looks at no references


async def _note_key(jobs: Jobs, key: str, job_id: int) -> None:
    note = insert(jobs.tables.keys).values(held=key, job_id=job_id)
    await jobs.do(lambda connection, _: connection.execute(note))


async def _forget_keys(jobs: Jobs) -> None:
    await jobs.do(lambda connection, _: connection.execute(delete(jobs.tables.keys)))


async def lease_for_ever(jobs: Jobs) -> Any:
    job = (await jobs.leased()).lease.job_id
    await jobs.spoil(job, lease_expires=None)
    return job, State.READY


async def lease_of_nobody(jobs: Jobs) -> Any:
    job = (await jobs.leased()).lease.job_id
    await jobs.spoil(job, lease_owner=None)
    return job, State.READY


async def lease_run_out(jobs: Jobs) -> Any:
    job = (await jobs.leased()).lease.job_id
    jobs.later(TTL + GRACE + 1)
    return job, State.READY


async def unsettled(jobs: Jobs) -> Any:
    first, _ = await _pair(jobs)
    await jobs.finish(await jobs.claim_one())
    jobs.later(GRACE + 1)
    return first, State.DONE


async def overdue(jobs: Jobs) -> Any:
    job = await jobs.enqueue(run_after=timedelta(seconds=10))
    jobs.later(GRACE + 11)
    return job, State.READY


async def due_never(jobs: Jobs) -> Any:
    job = await jobs.enqueue(run_after=timedelta(seconds=10))
    await jobs.spoil(job, run_after=None)
    return job, State.READY


async def ready_too_early(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, run_after=await jobs.now() + timedelta(hours=1))
    return job, State.SCHEDULED


async def ready_in_spite_of_upstreams(jobs: Jobs) -> Any:
    _, second = await _pair(jobs)
    await jobs.spoil(second, state=State.READY)
    return second, State.BLOCKED


async def container_in_line(jobs: Jobs) -> Any:
    container, _ = await _family(jobs)
    await jobs.spoil(container, state=State.READY)
    return container, State.WAITING


async def lease_left_over(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, lease_expires=await jobs.now() + timedelta(hours=1))
    return job, State.READY


async def attempts_miscounted(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, attempt=1)
    return job, None


async def upstream_done_unseen(jobs: Jobs) -> Any:
    first, second = await _pair(jobs)
    await _end(jobs, first)
    return second, State.READY


async def upstream_failed_unseen(jobs: Jobs) -> Any:
    first, second = await _pair(jobs)
    await _end(jobs, first)
    await jobs.spoil(first, state=State.FAILED)
    return second, State.CANCELLED


async def circle(jobs: Jobs) -> Any:
    container, child = await _family(jobs)
    outside = await jobs.enqueue(depends_on=[container])
    await jobs.settle()
    await jobs.spoil(child, state=State.BLOCKED)
    edge = insert(jobs.tables.deps).values(job_id=child, depends_on_id=outside.id)
    await jobs.do(lambda connection, _: connection.execute(edge))
    return child, State.CANCELLED


async def blocked_by_nothing(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, state=State.BLOCKED)
    return job, State.READY


async def blocked_in_an_open_container(jobs: Jobs) -> Any:
    _, child = await _family(jobs)
    await jobs.spoil(child, state=State.BLOCKED)
    return child, State.READY


async def waiting_for_nobody(jobs: Jobs) -> Any:
    container, child = await _family(jobs)
    await _end(jobs, child)
    return container, State.DONE


async def parent_ended_before_child(jobs: Jobs) -> Any:
    container, child = await _family(jobs)
    await _end(jobs, container)
    return child, State.CANCELLED


async def parent_missing(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    table = jobs.tables.jobs
    _without_references(jobs, update(table).where(table.c.id == job.id).values(parent_id=NOBODY))
    return job, State.READY


async def cancellation_not_passed_on(jobs: Jobs) -> Any:
    container, child = await _family(jobs)
    await jobs.spoil(container, cancel_requested=True)
    return child, State.CANCELLED


async def cancellation_ignored(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, cancel_requested=True)
    return job, State.CANCELLED


async def no_time_of_the_end(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.run_all()
    await jobs.spoil(job, finished_at=None)
    return job, State.DONE


async def an_end_to_come(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await jobs.spoil(job, finished_at=await jobs.now())
    return job, State.READY


async def key_held_after_the_end(jobs: Jobs) -> Any:
    job = await jobs.enqueue(unique_key="key")
    await jobs.run_all()
    await jobs.spoil(job, unique_held="key")
    if jobs.backend.notes_keys:
        await _note_key(jobs, "key", job.id)
    return job, State.DONE


async def key_lost(jobs: Jobs) -> Any:
    job = await jobs.enqueue(unique_key="key")
    await jobs.spoil(job, unique_held=None)
    await _forget_keys(jobs)
    return job, State.READY


async def key_not_noted(jobs: Jobs) -> Any:
    job = await jobs.enqueue(unique_key="key")
    await _forget_keys(jobs)
    return job, State.READY


async def key_noted_for_nobody(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    await _note_key(jobs, "key", job.id)
    return "key", None


async def permit_without_limit(jobs: Jobs) -> Any:
    claimed = await jobs.leased()
    permit = insert(jobs.tables.permits).values(
        limit_id=NOBODY, job_id=claimed.lease.job_id, token=1
    )
    await jobs.do(lambda connection, _: connection.execute(permit))
    return claimed.lease.job_id, State.LEASED


async def paused_schedule_that_fires(jobs: Jobs) -> Any:
    await jobs.scheduler.add_schedule("hourly", JobSpec[Any]("work", {}), every=3600)
    schedules = jobs.tables.schedules
    await jobs.do(lambda c, _: c.execute(update(schedules).values(paused=True)))
    return "hourly", None


async def edge_of_no_job(jobs: Jobs) -> Any:
    job = await jobs.enqueue()
    edge = insert(jobs.tables.deps).values(job_id=NOBODY, depends_on_id=job.id)
    _without_references(jobs, edge)
    return NOBODY, None


async def attempt_of_no_job(jobs: Jobs) -> Any:
    values = {"job_id": NOBODY, "attempt": 1, "ending": "failed", "finished_at": await jobs.now()}
    attempt = insert(jobs.tables.attempts).values(values)
    await jobs.do(lambda connection, _: connection.execute(attempt))
    return NOBODY, None


BREAKS: Final[dict[Break, str]] = {
    lease_for_ever: "lease without end",
    lease_of_nobody: "lease without end",
    lease_run_out: "lease run out",
    unsettled: "unsettled",
    overdue: "overdue",
    due_never: "overdue",
    ready_too_early: "ready too early",
    ready_in_spite_of_upstreams: "ready in spite of upstreams",
    container_in_line: "container in line",
    lease_left_over: "lease left over",
    attempts_miscounted: "attempts miscounted",
    upstream_done_unseen: "upstream's end missed",
    upstream_failed_unseen: "upstream's end missed",
    circle: "circle",
    blocked_by_nothing: "blocked by nothing",
    blocked_in_an_open_container: "blocked by nothing",
    waiting_for_nobody: "waiting for nobody",
    parent_ended_before_child: "parent ended before child",
    parent_missing: "parent missing",
    cancellation_not_passed_on: "cancellation not passed on",
    cancellation_ignored: "cancellation ignored",
    no_time_of_the_end: "time of the end",
    an_end_to_come: "time of the end",
    key_held_after_the_end: "key held wrongly",
    key_lost: "key lost",
    permit_without_limit: "permit without limit",
    paused_schedule_that_fires: "paused schedule that fires",
    edge_of_no_job: "edge of no job",
    attempt_of_no_job: "attempt of no job",
}
NOTED: Final[dict[Break, str]] = {
    key_not_noted: "key not noted",
    key_noted_for_nobody: "key noted for nobody",
}


async def check(jobs: Jobs, **options: Any) -> CheckReport:
    return await jobs.scheduler.check(grace=GRACE, **options)


def found(report: CheckReport) -> dict[str, tuple[int | str, ...]]:
    return {finding.rule: finding.examples for finding in report.findings}


@asynccontextmanager
async def any_move(jobs: Jobs) -> AsyncIterator[None]:
    """Let the repair make moves that no step of a job's path makes."""

    def stop_watching(connection: Connection, _: Backend) -> None:
        if connection.dialect.name == "sqlite":
            connection.execute(text("DROP TRIGGER IF EXISTS moves"))

    await jobs.do(stop_watching)
    yield
    await jobs.do(lambda connection, _: watch_moves(connection))


async def break_and_mend(jobs: Jobs, break_it: Break, rule: str) -> None:
    broken, state = await break_it(jobs)
    name = broken.id if isinstance(broken, Job) else broken
    assert found(await check(jobs)) == {rule: (name,)}
    async with any_move(jobs):
        report = await jobs.scheduler.repair(grace=GRACE)
    assert found(report.found) == {rule: (name,)}
    if report.found.findings[0].mending is None:
        assert (report.mended, found(report.left)) == ((), {rule: (name,)})
        return
    assert [(one.rule, one.count) for one in report.mended] == [(rule, 1)]
    assert report.left.clean
    assert (await check(jobs)).clean
    if state is not None:
        assert await jobs.state(broken) == state


class TestRules:
    @pytest.mark.parametrize("break_it", BREAKS, ids=lambda one: one.__name__)
    async def test_each_is_found_alone_and_mended(self, jobs: Jobs, break_it: Break) -> None:
        await break_and_mend(jobs, break_it, BREAKS[break_it])

    @pytest.mark.parametrize("break_it", NOTED, ids=lambda one: one.__name__)
    async def test_those_of_noted_keys(self, jobs: Jobs, break_it: Break) -> None:
        if jobs.backend.notes_keys:
            await break_and_mend(jobs, break_it, NOTED[break_it])
        else:  # there, an index of the jobs themselves has the keys
            assert not {rule.name for rule in NOTED_KEY_RULES} & {*(await check(jobs)).checked}

    async def test_each_has_a_test(self, jobs: Jobs) -> None:
        known = {rule.name for rule in rules_for(jobs.backend)} | {CIRCLE.name}
        assert known | set(NOTED.values()) == {*BREAKS.values(), *NOTED.values()}
        assert {*(await check(jobs)).checked} == known | {OVER_LIMIT.name, UNSERVED.name}

    async def test_a_limit_that_is_exceeded(self, jobs: Jobs) -> None:
        limited = jobs.another(limits=[Concurrency("crane", 1)])
        first, second = (await jobs.leased()).lease, (await jobs.leased()).lease
        tables = jobs.tables
        permits = [
            {"limit_id": 1, "job_id": lease.job_id, "token": lease.token}
            for lease in (first, second)
        ]

        def fill(connection: Connection, _: Backend) -> None:
            connection.execute(insert(tables.limits).values(id=1, name="crane", value=""))
            connection.execute(insert(tables.permits), permits)

        await jobs.do(fill)
        assert found(await limited.check()) == {"limit exceeded": ("crane",)}
        assert (await check(jobs)).clean  # a scheduler that does not have this limit
        await limited.set_limit("crane", 2)
        assert (await limited.check()).clean

    async def test_a_type_that_no_live_worker_serves(self, jobs: Jobs) -> None:
        for type_, queue in (("work", "default"), ("wrok", "default"), ("work", "media")):
            await jobs.enqueue(type_, queue=queue)
        jobs.later(GRACE + 1)
        assert (await check(jobs)).clean  # no worker is there, which may be meant
        settings = jobs.scheduler.settings
        await jobs.do(lambda c, b: appear(c, b, settings, ["work"]))
        assert found(await check(jobs)) == {UNSERVED.name: ("wrok in default", "work in media")}
        await jobs.enqueue("new")  # a worker for it may be starting
        assert "new in default" not in found(await check(jobs))[UNSERVED.name]


class TestCheck:
    async def test_finds_nothing_in_what_is_under_way(self, jobs: Jobs) -> None:
        await _pair(jobs)
        await _family(jobs)
        await jobs.enqueue(unique_key="key", run_after=timedelta(hours=1))
        for claimed in await jobs.claim(10):
            assert (await check(jobs)).clean
            await jobs.finish(claimed)
        assert (await check(jobs)).clean  # unsettled, but just so
        await jobs.settle()
        assert (await check(jobs)).clean

    async def test_counts_all_and_names_some(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(5)
        for job in made:
            await jobs.spoil(job, attempt=1)
        (finding,) = (await check(jobs, examples=2)).findings
        assert (finding.count, finding.examples) == (5, (made[0].id, made[1].id))

    async def test_looks_at_every_slice(self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("asyncjobq.check.SLICE", 2)
        made = await jobs.enqueue_many(5)
        for job in made:
            await jobs.spoil(job, attempt=1)
        (finding,) = (await check(jobs, examples=MOST)).findings
        assert finding.examples == tuple(job.id for job in made)

    async def test_takes_any_grace(self, jobs: Jobs) -> None:
        await lease_run_out(jobs)
        assert (await jobs.scheduler.check(grace=1e300, timeout=1e300)).clean

    async def test_says_what_it_had_no_time_for(self, jobs: Jobs) -> None:
        report = await check(jobs, timeout=0)
        assert not report.clean
        assert (report.findings, report.checked) == ((), ())
        assert set(report.unfinished) >= {"unsettled", "blocked by nothing", "limit exceeded"}

    @pytest.mark.parametrize(
        "wrong", [{"examples": -1}, {"examples": True}, {"grace": -1}, {"timeout": -0.1}]
    )
    async def test_refuses_numbers_that_mean_nothing(
        self, jobs: Jobs, wrong: dict[str, Any]
    ) -> None:
        for call in (jobs.scheduler.check, jobs.scheduler.repair):
            with pytest.raises(ConfigurationError, match=next(iter(wrong))):
                await call(**wrong)


class TestRepair:
    async def test_leaves_a_job_to_the_worker_that_holds_it(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        first = await jobs.enqueue()
        edge = insert(jobs.tables.deps).values(job_id=claimed.lease.job_id, depends_on_id=first.id)
        await jobs.do(lambda connection, _: connection.execute(edge))
        before = await jobs.row(claimed)
        report = await jobs.scheduler.repair(grace=GRACE)
        assert found(report.left) == {"ready in spite of upstreams": (claimed.lease.job_id,)}
        assert report.mended == ()
        assert await jobs.row(claimed) == before

    async def test_leaves_what_another_transaction_has_locked(self, jobs: Jobs) -> None:
        if jobs.backend.one_writer:
            return  # there, it waits for the end of that transaction
        claimed = await jobs.leased()
        await jobs.spoil(claimed, lease_expires=None)
        async with jobs.transaction() as take:
            await take(holding(claimed))
            report = await jobs.scheduler.repair(grace=GRACE)
            assert found(report.left) == {"lease without end": (claimed.lease.job_id,)}
        assert (await jobs.scheduler.repair(grace=GRACE)).left.clean

    async def test_takes_nothing_for_mended_that_it_could_not_check_again(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await blocked_by_nothing(jobs)
        check_it, times = jobs.scheduler._checking, itertools.chain([60.0], itertools.repeat(0.0))
        monkeypatch.setattr(
            jobs.scheduler, "_checking", lambda grace, _: check_it(grace, next(times))
        )
        report = await jobs.scheduler.repair(grace=GRACE)
        assert (report.mended, report.left.checked) == ((), ())

    async def test_gives_no_key_to_two(self, jobs: Jobs) -> None:
        first = await jobs.enqueue(unique_key="key")
        await jobs.spoil(first, unique_held=None)
        await _forget_keys(jobs)
        second = await jobs.enqueue(unique_key="key")
        report = await jobs.scheduler.repair(grace=GRACE)
        assert found(report.left) == {"key lost": (first.id,)}
        assert (await jobs.row(second)).unique_held == "key"
