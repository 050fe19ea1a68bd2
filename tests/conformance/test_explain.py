"""Why a job is not running: each reason as data, and in words."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Connection, event, insert

from asyncjobq import (
    Budget,
    Capacity,
    Concurrency,
    Explanation,
    Job,
    JobNotFoundError,
    RateLimit,
    Scheduler,
    State,
    Why,
    after,
)
from asyncjobq.backends.base import Backend
from asyncjobq.explain import COUNTED, NAMED
from asyncjobq.presence import appear
from asyncjobq.reasons import duration
from conformance.kit import Jobs
from conformance.steps import enqueuing, failed, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def explained(jobs: Jobs, job: Any, scheduler: Scheduler | None = None) -> Explanation:
    return await (scheduler or jobs.scheduler).explain(job)


def whys(found: Explanation) -> list[Why]:
    return [reason.why for reason in found.reasons]


async def live(jobs: Jobs, worker_id: str = "worker", types: Any = ("work",), **how: Any) -> None:
    """Let a worker be there that does nothing."""
    how = {"stopping": False, **how}
    stopping = how.pop("stopping")
    own = Scheduler("sqlite+aiosqlite:///unused.db", worker_id=worker_id, **how).settings
    await jobs.do(lambda c, b: appear(c, b, own, types, stopping=stopping))


def knowing(jobs: Jobs, **options: Any) -> Scheduler:
    """Return a scheduler that has the handler of `work`."""
    scheduler = jobs.another()

    @scheduler.handler("work", **options)
    async def work(tenant: str = "nobody") -> None: ...

    return scheduler


async def test_nobody(jobs: Jobs) -> None:
    with pytest.raises(JobNotFoundError):
        await jobs.scheduler.explain(12345)


async def test_changes_nothing(jobs: Jobs) -> None:
    job = await jobs.enqueue()
    before = await jobs.row(job)
    await explained(jobs, job)
    assert await jobs.row(job) == before


class TestReady:
    async def test_and_nothing_holds_it(self, jobs: Jobs) -> None:
        await live(jobs)
        scheduler = knowing(jobs)
        found = await explained(jobs, await scheduler.enqueue("work"), scheduler)
        assert whys(found) == [Why.NEXT]
        assert str(found).splitlines() == [
            f"Job {found.job.id} ('work', queue 'default') is ready.",
            "Nothing holds it: a worker that serves it starts it in a moment.",
        ]
        assert (found.max_attempts, found.attempts_left, found.limits_known) == (5, 5, True)

    async def test_no_worker(self, jobs: Jobs) -> None:
        found = await explained(jobs, await jobs.enqueue())
        assert whys(found)[0] == Why.NO_WORKER
        assert "No worker is live" in str(found)

    @pytest.mark.parametrize(
        ("workers", "text"),
        [
            ([{"queues": ["other"]}], "None of the 1 live workers serves the queue 'default'."),
            ([{"types": ["wrok"]}], "has a handler for 'work'."),
            ([{"queues": ["other"]}, {"types": ["wrok"]}], "No live worker both serves"),
            ([{"stopping": True}], "No worker is live (1 that would serve it are stopping)"),
        ],
    )
    async def test_no_worker_serves_it(self, jobs: Jobs, workers: Any, text: str) -> None:
        for number, how in enumerate(workers):
            await live(jobs, f"worker {number}", **how)
        found = await explained(jobs, await jobs.enqueue())
        assert found.reasons[0].why == Why.NO_WORKER
        assert text in found.reasons[0].text
        assert found.workers is not None
        assert found.workers.both == 0

    async def test_paused(self, jobs: Jobs) -> None:
        await live(jobs)
        job = await jobs.enqueue()
        for paused in ({"queue": "default"}, {"type": "work"}, {"type": "other"}):
            await jobs.scheduler.pause(**paused)
        found = await explained(jobs, job)
        assert whys(found)[:2] == [Why.PAUSED, Why.PAUSED]
        assert {pause.queue or pause.type for pause in found.paused} == {"default", "work"}
        assert "The queue 'default' is paused since 2" in str(found)

    async def test_behind_others_of_its_group(self, jobs: Jobs) -> None:
        await live(jobs)
        await jobs.enqueue(group_key="acme", weight=3, priority=200)
        await jobs.enqueue("other", group_key="acme", priority=1)
        for priority in (1, 100):
            await jobs.do(enqueuing(*[spec(group_key="acme", weight=3, priority=priority)] * 2))
        job = await jobs.enqueue(group_key="acme", weight=3)
        await jobs.enqueue(group_key="acme", weight=3)
        await jobs.enqueue(group_key="zeta", weight=1)
        found = await explained(jobs, job, knowing(jobs))
        assert found.line is not None
        assert (found.line.before.number, found.line.before.more) == (4, False)
        assert (found.line.weight, found.line.share) == (3, 0.75)
        assert found.line.groups.number == 2
        assert whys(found) == [Why.BEHIND]
        assert (
            "4 jobs are before it in the group 'acme'; that has the weight 3, and 75% of the slots "
            "beside the 2 groups that have ready jobs."
        ) in str(found)
        await jobs.scheduler.set_weight("acme", 1)
        line = (await explained(jobs, job)).line
        assert line is not None
        assert line.share == 0.5

    async def test_behind_more_than_are_counted(self, jobs: Jobs) -> None:
        await jobs.enqueue_many(COUNTED + 5)
        job = await jobs.enqueue()
        found = await explained(jobs, job)
        assert found.line is not None
        assert (found.line.before.number, found.line.before.more) == (COUNTED, True)
        assert "1,000 or more jobs are before it in the group without a key" in str(found)

    async def test_all_slots_are_taken(self, jobs: Jobs) -> None:
        await live(jobs, concurrency=2)
        await jobs.enqueue_many(2)
        await jobs.claim(2)
        found = await explained(jobs, await jobs.enqueue(), knowing(jobs))
        assert whys(found) == [Why.SLOTS]
        assert found.workers is not None
        assert (found.workers.slots, found.workers.free) == (2, 0)

    async def test_over_its_limits(self, jobs: Jobs) -> None:
        async def free() -> int:
            return 1

        limits = [
            Concurrency("gpu", 0),
            Concurrency("tenant", 5, key="tenant"),
            RateLimit("api", 0, per=60),
            Budget("tokens", 10, per=3600),
            Capacity("memory", free),
        ]
        scheduler = knowing(jobs, limits=limits)
        await live(jobs)
        found = await explained(jobs, await scheduler.enqueue("work"), scheduler)
        assert [limit.name for limit in found.limits if limit.full] == ["gpu", "api"]
        assert whys(found) == [Why.LIMIT, Why.LIMIT, Why.CAPACITY]
        assert [reason.text for reason in found.reasons] == [
            "The limit 'gpu' has no room: it allows 0 at a time; 0 are used. There is room when a "
            "job under it ends.",
            "The limit 'api' has no room: it allows 0 starts per 1 min. There is room not before "
            "it is changed.",
            "The capacity 'memory' guards it; only workers know whether that has room.",
        ]

    async def test_limits_that_only_its_handler_knows(self, jobs: Jobs) -> None:
        await live(jobs)
        found = await explained(
            jobs, await jobs.enqueue(), jobs.another(limits=[Concurrency("a", 0)])
        )
        assert whys(found) == [Why.LIMIT, Why.LIMITS_UNKNOWN]
        assert (found.limits_known, found.max_attempts, found.attempts_left) == (False, None, None)

    async def test_that_has_failed_before(self, jobs: Jobs) -> None:
        await live(jobs)
        claimed = await jobs.leased(max_attempts=3)
        await jobs.finish(claimed, outcome=failed("broken\x1b[31m", retry_after=0))
        found = await explained(jobs, claimed.lease.job_id, knowing(jobs))
        assert (found.job.state, found.attempts_left) == (State.READY, 2)
        assert found.reasons[-1].why == Why.RETRY
        assert found.reasons[-1].text == (
            "Attempt 1 did not succeed: broken\\x1b[31m. 2 attempts are left."
        )


class TestScheduled:
    async def test_its_time_comes(self, jobs: Jobs) -> None:
        await live(jobs)
        job = await jobs.enqueue(run_after=90)
        found = await explained(jobs, job)
        assert whys(found) == [Why.TIME]
        assert found.due_in is not None
        assert 80 < found.due_in <= 90
        assert "Its time comes in 1 min" in str(found)

    async def test_its_time_has_come(self, jobs: Jobs) -> None:
        job = await jobs.enqueue(run_after=60)
        jobs.later(70)
        found = await explained(jobs, job)
        assert whys(found) == [Why.TIME, Why.NO_WORKER]
        assert "It has been due for 10" in str(found)


class TestBlocked:
    async def test_by_upstreams(self, jobs: Jobs) -> None:
        await live(jobs)
        first = await jobs.enqueue(name="first")
        running = await jobs.enqueue(priority=1)
        await jobs.claim(1)
        done = await jobs.enqueue(priority=0)
        await jobs.finish(*await jobs.claim(1))
        job = await jobs.enqueue(depends_on=[done, after(running, on_failure="run"), first])
        await jobs.settle()
        found = await explained(jobs, job)
        assert whys(found) == [Why.UPSTREAMS]
        assert [one.upstream.id for one in found.upstreams] == [first.id, running.id]
        assert (found.upstreams_open.number, found.upstreams_open.more) == (2, False)
        assert found.reasons[0].text == (
            f"It depends on 2 jobs not done: job {first.id} ('first'), ready, job {running.id} "
            "('work'), leased (it runs also if that fails)."
        )

    async def test_by_many(self, jobs: Jobs) -> None:
        upstreams = await jobs.enqueue_many(NAMED + 3)
        job = await jobs.enqueue(depends_on=upstreams)
        found = await explained(jobs, job)
        assert len(found.upstreams) == NAMED
        assert found.upstreams_open.number == NAMED + 3
        assert "It depends on 10 of 13 jobs not done: " in str(found)

    async def test_unsettled_without_a_worker(self, jobs: Jobs) -> None:
        job = await jobs.enqueue(depends_on=[await jobs.enqueue()])
        jobs.later(5)
        found = await explained(jobs, job)
        assert not found.settled
        assert found.unsettled_for >= 5
        assert whys(found)[-1] == Why.UNSETTLED
        assert "and none is live" in found.reasons[-1].text

    async def test_by_what_it_is_in(self, jobs: Jobs) -> None:
        await live(jobs)
        first = await jobs.enqueue()
        async with jobs.scheduler.workflow("outer", depends_on=[first]) as outer:
            inner = outer.container("inner")
            node = inner.add(spec())
        await jobs.settle()
        found = await explained(jobs, node.id)
        assert whys(found) == [Why.PARENT]
        assert found.parent is not None
        assert found.parent.id == inner.id
        assert [(one.upstream.id, one.waiting_id) for one in found.upstreams] == [
            (first.id, outer.id)
        ]
        assert f"It is in job {inner.id} ('inner'), which is blocked" in str(found)
        assert whys(await explained(jobs, outer.id)) == [Why.UPSTREAMS]


class TestLeased:
    async def test_by_whom_and_until_when(self, jobs: Jobs) -> None:
        await live(jobs)
        claimed = await jobs.leased(max_attempts=3, timeout=100)
        jobs.later(10)
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.LEASED]
        lease = found.lease
        assert lease is not None
        assert (lease.worker, lease.worker_live) == ("worker", True)
        assert 10 <= lease.runs_for < 15
        assert lease.ends_in is not None
        assert 85 < lease.ends_in <= 90
        assert 15 < lease.expires_in <= 20
        assert "It runs in the worker 'worker' for 1" in str(found)
        assert "attempt 1 of 3" in str(found)
        assert found.attempts_left == 2

    async def test_over(self, jobs: Jobs) -> None:
        await live(jobs, "gone")
        claimed = await jobs.leased("gone")
        jobs.later(40)
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.LEASE_OVER]
        assert found.lease is not None
        assert found.lease.worker_live is False
        assert "the worker 'gone' (not seen lately), whose lease is over for 10" in str(found)

    async def test_by_a_worker_without_a_row(self, jobs: Jobs) -> None:
        found = await explained(jobs, (await jobs.leased("unknown", timeout=None)).lease.job_id)
        assert found.lease is not None
        assert (found.lease.worker_live, found.lease.ends_in) == (None, None)

    async def test_and_to_be_cancelled(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.scheduler.cancel(claimed.lease.job_id)
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.LEASED, Why.CANCELLING, Why.UNSETTLED]
        await jobs.settle()
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.LEASED, Why.CANCELLING]


class TestWaiting:
    async def test_for_its_children(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("all") as workflow:
            nodes = [workflow.add(spec()) for _ in range(NAMED + 2)]
        await jobs.settle()
        found = await explained(jobs, workflow.id)
        assert whys(found) == [Why.CHILDREN]
        assert found.children_open.number == len(nodes)
        assert len(found.children) == NAMED
        assert str(found).startswith(f"Container {workflow.id} ('all', ")
        assert "It waits for 10 of 12 jobs in it: job " in str(found)


class TestEnded:
    async def test_done(self, jobs: Jobs) -> None:
        job = await jobs.enqueue()
        await jobs.run_all()
        found = await explained(jobs, job)
        assert whys(found) == [Why.DONE]
        assert (found.workers, found.attempts_left) == (None, None)

    async def test_failed(self, jobs: Jobs) -> None:
        claimed = await jobs.leased(max_attempts=1)
        await jobs.finish(claimed, outcome=failed("no\x1b[0msuch [bold]thing"))
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.FAILED]
        assert "no\\x1b[0msuch [bold]thing." in found.reasons[0].text

    async def test_failed_with_a_traceback(self, jobs: Jobs) -> None:
        claimed = await jobs.leased(max_attempts=1)
        text = 'Traceback (most recent call last):\n  File "x"\nOSError: no such file\n'
        await jobs.finish(claimed, outcome=failed(text))
        found = await explained(jobs, claimed.lease.job_id)
        assert found.reasons[0].text.endswith(" UTC: OSError: no such file.")

    async def test_cancelled_because_of_what(self, jobs: Jobs) -> None:
        first = await jobs.enqueue(name="first", max_attempts=1)
        second = await jobs.enqueue(depends_on=[first])
        third = await jobs.enqueue(depends_on=[second])
        await jobs.settle()
        await jobs.run_all(failed("no such file"))
        await jobs.settle()
        found = await explained(jobs, third)
        assert whys(found) == [Why.CANCELLED, Why.CAUSE]
        assert [one.id for one in found.cause] == [second.id, first.id]
        assert found.reasons[-1].text.startswith(f"That was because of job {second.id} ('work')")
        assert f"job {first.id} ('first'), failed (no such file)" in found.reasons[-1].text

    async def test_whose_cause_is_pruned_or_goes_round(self, jobs: Jobs) -> None:
        one, two = await jobs.enqueue_many(2)
        for job, cause in ((one, two.id), (two, one.id)):
            await jobs.spoil(job, state=State.CANCELLED, cause=cause)
        assert [cause.id for cause in (await explained(jobs, one)).cause] == [two.id]
        await jobs.spoil(one, cause=987654)
        found = await explained(jobs, one)
        assert (found.cause[0].id, found.cause[0].state) == (987654, None)
        assert "job 987654, which is gone" in str(found)

    async def test_and_nobody_was_told(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        await jobs.enqueue(depends_on=[claimed.lease.job_id])
        await jobs.finish(claimed)
        await jobs.spoil(claimed, settled=False)
        found = await explained(jobs, claimed.lease.job_id)
        assert whys(found) == [Why.DONE, Why.UNSETTLED]


async def test_in_the_callers_transaction(jobs: Jobs, session: Any) -> None:
    job: Job[Any] = await jobs.scheduler.enqueue("work", session=session)
    assert (await jobs.scheduler.explain(job, session=session)).job.id == job.id
    assert await jobs.scheduler.workers(session=session) == []
    await session.rollback()


async def test_costs_the_same_among_many(jobs: Jobs) -> None:
    """A bounded number of rows is read, by as good as the same number of statements."""
    few = await _statements(jobs, await jobs.enqueue(group_key="a"))
    await jobs.do(_add_many)
    many = await _statements(jobs, await jobs.enqueue(group_key="a"))
    assert few <= many <= few + 2 < 20  # the scan of lanes may take one more


async def _statements(jobs: Jobs, job: Job[Any]) -> int:
    seen: list[str] = []
    await live(jobs)

    def explain(connection: Connection, backend: Backend) -> None:
        from asyncjobq.explain import explain_job

        def note(*args: Any) -> None:
            seen.append(args[2])

        event.listen(connection, "before_cursor_execute", note)
        explain_job(connection, backend, job.id, jobs.scheduler._limit_rules())
        event.remove(connection, "before_cursor_execute", note)

    await jobs.do(explain)
    return len(seen)


def _add_many(connection: Connection, backend: Backend) -> None:
    row = {
        "queue": "default", "type": "work", "args": {}, "state": "ready",
        "created_at": backend.read_clock(connection), "updated_at": backend.read_clock(connection),
    }  # fmt: skip
    for state in ("ready", "done", "blocked"):
        rows = [{**row, "state": state, "group_key": f"g{n % 50}"} for n in range(1500)]
        connection.execute(insert(backend.tables.jobs), rows)


async def test_durations() -> None:
    assert [duration(s) for s in (0, 9.94, 59.6, 61, 3600, 90_061)] == [
        "0.0 s", "9.9 s", "1 min", "1 min 1 s", "1 h", "1 d 1 h",
    ]  # fmt: skip
