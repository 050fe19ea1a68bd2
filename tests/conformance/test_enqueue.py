"""Rows and edges in: what is stored, in which state, and what is refused before anything is."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from asyncjobq import (
    ArgumentsError,
    InvalidJobError,
    Job,
    JobSpec,
    State,
    UnknownUpstreamError,
)
from asyncjobq.options import NO_TIMEOUT
from conformance.kit import Jobs
from conformance.steps import enqueuing, ids_of, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 4_500
"""Rows whose parameters are more than any of the four databases takes in one statement."""


async def count(jobs: Jobs) -> int:
    return len(await jobs.scheduler.find(limit=100_000))


class TestWhatIsStored:
    async def test_only_a_type(self, jobs: Jobs) -> None:
        job = await jobs.scheduler.enqueue("work")
        assert job == await jobs.scheduler.get(job)
        assert (job.type, job.queue, job.state, job.args) == ("work", "default", "ready", {})
        assert (job.attempt, job.max_attempts, job.timeout) == (0, None, None)

    async def test_every_option(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        moment = datetime.now(UTC) + timedelta(hours=1)
        job = await jobs.scheduler.enqueue(
            "work",
            {"a": 1},
            queue="media",
            name="the first",
            group_key="acme",
            weight=2.5,
            priority=-5,
            run_after=moment,
            timeout=timedelta(minutes=1),
            max_attempts=3,
            depends_on=[upstream],
            cost=0.5,
            meta={"by": "me"},
        )
        stored = await jobs.scheduler.get(job)
        assert stored == job
        assert (stored.queue, stored.name, stored.group_key) == ("media", "the first", "acme")
        assert (stored.weight, stored.priority, stored.cost) == (2.5, -5, 0.5)
        assert (stored.run_after, stored.timeout, stored.max_attempts) == (moment, 60, 3)
        assert (stored.args, stored.meta, stored.state) == ({"a": 1}, {"by": "me"}, "blocked")

    async def test_created_by_the_clock_of_the_database(self, jobs: Jobs) -> None:
        jobs.later(7200)
        before = await jobs.now()
        job = await jobs.scheduler.enqueue("work")
        assert job.created_at is not None
        assert before <= job.created_at <= await jobs.now()
        assert job.created_at - datetime.now(UTC) > timedelta(hours=1)

    async def test_no_deadline_is_not_the_default_deadline(self, jobs: Jobs) -> None:
        assert (await jobs.enqueue(timeout=None)).timeout == NO_TIMEOUT
        assert (await jobs.claim_one()).timeout == NO_TIMEOUT

    async def test_the_longest_keys(self, jobs: Jobs) -> None:
        longest: dict[str, Any] = {"queue": "ü" * 64, "group_key": "🙂" * 255, "name": "é" * 255}
        job = await jobs.enqueue("t" * 128, **longest)
        stored = await jobs.scheduler.get(job)
        assert (stored.queue, stored.group_key, stored.name) == tuple(longest.values())

    async def test_large_arguments(self, jobs: Jobs) -> None:
        job = await jobs.scheduler.enqueue("work", {"text": "ä" * 1_000_000})
        assert (await jobs.scheduler.get(job)).args == {"text": "ä" * 1_000_000}

    async def test_the_arguments_as_the_handler_will_see_them(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(queue="images")
        async def resize(path: str, width: int = 800) -> None: ...

        job = await jobs.scheduler.enqueue(resize.job("a.png"))
        assert (job.type, job.args, job.queue) == ("resize", {"path": "a.png"}, "images")
        named = await jobs.scheduler.enqueue("resize", {"path": "a.png"}, queue="other")
        assert (named.args, named.queue) == ({"path": "a.png"}, "other")


DUE_TIMES: list[tuple[Any, State]] = [
    (None, State.READY),
    (timedelta(0), State.READY),
    (-3600, State.READY),
    (0.5, State.SCHEDULED),
    (timedelta(days=400), State.SCHEDULED),
    (datetime(2001, 1, 1, tzinfo=UTC), State.READY),
    (datetime(2101, 1, 1, tzinfo=timezone(timedelta(hours=-11))), State.SCHEDULED),
]


class TestFirstState:
    async def test_follows_the_due_time(self, jobs: Jobs) -> None:
        for run_after, state in DUE_TIMES:
            job = await jobs.enqueue(run_after=run_after)
            assert job.state == state, run_after
            assert await jobs.state(job) == state, run_after

    async def test_is_decided_by_the_clock_of_the_database(self, jobs: Jobs) -> None:
        soon = datetime.now(UTC) + timedelta(hours=1)
        jobs.later(7200)
        assert (await jobs.enqueue(run_after=soon)).state == State.READY

    async def test_with_upstreams_is_blocked_until_settled(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        made = []
        for state in (State.READY, State.DONE, State.FAILED):
            await jobs.spoil(upstream, state=state)
            made.append(await jobs.enqueue(depends_on=[upstream]))
        assert await jobs.states(*made) == [State.BLOCKED] * 3
        assert await jobs.unsettled() == ids_of(made)


class TestMany:
    async def test_in_order_with_few_statements(self, jobs: Jobs) -> None:
        specs = [spec(args={"n": n}, group_key=f"g{n % 3}") for n in range(20)]
        made = await jobs.scheduler.enqueue_many(specs)
        assert [job.args["n"] for job in made] == list(range(20))
        stored = await jobs.scheduler.find()
        assert stored == made
        assert sorted(ids_of(made)) == ids_of(made)

    async def test_beyond_the_parameters_of_one_statement(self, jobs: Jobs) -> None:
        made = await jobs.scheduler.enqueue_many(spec(args={"n": n}) for n in range(MANY))
        last = await jobs.enqueue(depends_on=made)
        stored = await jobs.scheduler.find(limit=MANY + 1)
        assert ids_of(stored) == [*ids_of(made), last.id]
        assert [job.args["n"] for job in stored[:-1]] == list(range(MANY))

    async def test_large_ones_together(self, jobs: Jobs) -> None:
        specs = [spec(args={"n": n, "text": "x" * 600_000}) for n in range(12)]
        made = await jobs.scheduler.enqueue_many(specs)
        stored = await jobs.scheduler.find()
        assert [(job.id, job.args["n"]) for job in stored] == [
            (job.id, job.args["n"]) for job in made
        ]

    async def test_whose_bytes_are_more_than_their_characters(self, jobs: Jobs) -> None:
        """Or whose bulk is not in their arguments."""
        many = 400
        for bulk in (
            {"args": {"text": "漢" * 900}},
            {"args": {"text": "'\"\\" * 320}},
            {"args": {"a": 1}, "meta": {"text": "x" * 4000}},
        ):
            specs = [spec(**bulk)] * many
            made = await jobs.scheduler.enqueue_many(specs)
            stored = await jobs.scheduler.find(after=made[0].id - 1, limit=many)
            assert [(job.id, job.args, job.meta) for job in stored] == [
                (job.id, job.args, job.meta) for job in made
            ]

    async def test_of_none_is_none(self, jobs: Jobs) -> None:
        assert await jobs.scheduler.enqueue_many([]) == []

    async def test_one_bad_one_refuses_all(self, jobs: Jobs) -> None:
        specs: list[JobSpec[Any]] = [spec(), JobSpec("work", {"a": {1, 2}})]
        with pytest.raises(ArgumentsError):
            await jobs.scheduler.enqueue_many(specs)
        assert await count(jobs) == 0


class TestUpstreams:
    async def test_the_same_one_twice_counts_once(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        await jobs.enqueue(depends_on=[upstream, upstream.id, upstream])
        await jobs.run_all()
        assert len(await jobs.claim()) == 1

    async def test_unknown_ones_are_named_and_nothing_is_written(self, jobs: Jobs) -> None:
        known = await jobs.enqueue()
        with pytest.raises(UnknownUpstreamError, match=f"{known.id + 7}") as caught:
            await jobs.do(enqueuing(spec(), spec(depends_on=[known, known.id + 7])))
        assert caught.value.job_ids == [known.id + 7]
        assert await count(jobs) == 1

    async def test_an_enqueue_waits_for_no_lock_on_its_upstream(self, jobs: Jobs) -> None:
        """And takes none that its upstream's worker would wait for."""
        upstream = await jobs.leased()
        made = await jobs.enqueue(depends_on=[upstream.lease.job_id])
        renewal = await jobs.renew(upstream)
        assert renewal.renewed == {upstream.lease}
        assert made.state == State.BLOCKED


def handled(path: str, width: int = 800) -> None: ...


CIRCULAR: dict[str, Any] = {}
CIRCULAR["again"] = [CIRCULAR]
BAD_ARGUMENTS: list[tuple[Any, str]] = [
    ({}, "missing a required argument: 'path'"),
    ({"path": "a", "height": 1}, "height"),
    ({"path": {1, 2}}, "set"),
    ({"path": float("nan")}, "nan"),
    ({"path": float("inf")}, "inf"),
    ({"path": b"bytes"}, "bytes"),
    ({"path": datetime.now(UTC)}, "datetime"),
    ({"path": "\ud800"}, "surrogate"),
    ({"path": [1, {"a": object()}]}, r"\['path'\]\[1\]\['a'\]"),
    ({"path": CIRCULAR}, "contains itself"),
]


async def test_bad_arguments_are_refused_before_anything_is_written(jobs: Jobs) -> None:
    handler = jobs.scheduler.handler("resize")(handled)
    for args, says in BAD_ARGUMENTS:
        with pytest.raises(ArgumentsError, match=says):
            await jobs.scheduler.enqueue("resize", args)
        with pytest.raises(ArgumentsError, match=says):
            await jobs.scheduler.enqueue(handler.job(**args))
    assert await count(jobs) == 0


async def test_bad_arguments_without_a_handler(jobs: Jobs) -> None:
    bad: list[Any] = [{"a": {1}}, {"a": float("nan")}, CIRCULAR, {1: 2}, [1], "text"]
    for args in bad:
        with pytest.raises(ArgumentsError):
            await jobs.scheduler.enqueue("work", args)
    assert await count(jobs) == 0


BAD_OPTIONS: list[dict[str, Any]] = [
    {"quue": "media"},
    {"queue": ""},
    {"queue": "q" * 65},
    {"group_key": None},
    {"group_key": "a\x00b"},
    {"group_key": "\ud800"},
    {"weight": 0},
    {"weight": float("inf")},
    {"priority": 1.5},
    {"priority": 2**31},
    {"max_attempts": 0},
    {"max_attempts": True},
    {"cost": -1},
    {"cost": 10**400},
    {"timeout": 10**400},
    {"timeout": 0},
    {"timeout": -1},
    {"timeout": float("nan")},
    {"timeout": "soon"},
    {"run_after": datetime(2031, 1, 1)},  # noqa: DTZ001  without a zone
    {"run_after": "tomorrow"},
    {"run_after": float("nan")},
    {"run_after": 1e300},
    {"run_after": timedelta.max},
    {"run_after": timedelta.min},
    {"run_after": datetime.max.replace(tzinfo=timezone(timedelta(hours=-11)))},
    {"depends_on": 1},
    {"meta": {"a": {1}}},
    {"meta": 1},
]


async def test_bad_options_are_refused_before_anything_is_written(jobs: Jobs) -> None:
    for options in BAD_OPTIONS:
        with pytest.raises(InvalidJobError, match=next(iter(options))):
            await jobs.scheduler.enqueue("work", **options)
    with pytest.raises(InvalidJobError, match="'1'"):
        await jobs.scheduler.enqueue("work", depends_on=["1"])  # type: ignore[list-item]
    assert await count(jobs) == 0


async def test_the_end_of_the_calendar_is_kept(jobs: Jobs) -> None:
    job = await jobs.scheduler.enqueue("work", run_after=datetime.max.replace(tzinfo=UTC))
    assert await jobs.scheduler.get(job) == job


NO_JOBS: list[Callable[[Any], Any]] = [
    lambda s: s.enqueue(JobSpec("work"), {"a": 1}),
    lambda s: s.enqueue(None),
    lambda s: s.enqueue(lambda: None),
    lambda s: s.enqueue_many(["work"]),
    lambda s: s.enqueue(""),
    lambda s: s.enqueue("t" * 129),
]


async def test_what_is_no_job_is_refused(jobs: Jobs) -> None:
    for call in NO_JOBS:
        with pytest.raises(InvalidJobError):
            await call(jobs.scheduler)
    assert await count(jobs) == 0


async def test_the_job_that_is_returned_is_plain_values(jobs: Jobs) -> None:
    job = await jobs.scheduler.enqueue("work", {"a": 1})
    assert isinstance(job, Job)
    assert job == await jobs.scheduler.get(job.id)
