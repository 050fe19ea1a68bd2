"""Unique keys: one job at a time holds a key, whoever asks, in whatever transaction."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from json import loads
from typing import Any

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from asyncjobq import (
    Concurrency,
    CycleError,
    InvalidJobError,
    JobContext,
    StaleSnapshotError,
    State,
    UniqueConflictError,
    enqueue,
)
from conformance.kit import ISOLATION_LEVELS, Jobs, _clear
from conformance.steps import claiming, enqueuing, failed, ids_of, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def count(jobs: Jobs) -> int:
    return len(await jobs.scheduler.find(limit=1000))


async def ask(jobs: Jobs, key: str = "key", **options: Any) -> Any:
    return await jobs.enqueue(unique_key=key, **options)


async def ask_in(session: AsyncSession, **options: Any) -> Any:
    return await enqueue(session, "work", unique_key="key", **options)


@asynccontextmanager
async def old_snapshot(
    jobs: Jobs, application: AsyncEngine, level: str
) -> AsyncIterator[AsyncSession]:
    """Give a transaction that has read before what the block does elsewhere."""
    engine = application.execution_options(isolation_level=level)
    async with jobs.limited_time(20), AsyncSession(engine) as session:
        await session.execute(select(jobs.tables.version))
        yield session


class TestWhoComesSecond:
    async def test_is_given_the_job_that_is_there(self, jobs: Jobs) -> None:
        first = await ask(jobs, args={"a": 1})
        second = await ask(jobs, args={"a": 2}, queue="other", depends_on=[await jobs.enqueue()])
        assert (first.existing, second.existing) == (False, True)
        assert second == first == await jobs.scheduler.get(first)
        assert (first.unique_key, await count(jobs)) == ("key", 2)

    async def test_is_refused_if_it_says_so(self, jobs: Jobs, session: AsyncSession) -> None:
        first = await ask(jobs)
        await jobs.scheduler.enqueue("work", session=session)
        with pytest.raises(UniqueConflictError, match=f"'key' is held by job {first.id}") as caught:
            await jobs.scheduler.enqueue(
                "work", session=session, unique_key="key", on_conflict="raise"
            )
        assert (caught.value.job_id, caught.value.key) == (first.id, "key")
        await jobs.scheduler.enqueue("work", session=session)
        await session.commit()
        assert await count(jobs) == 3

    async def test_with_a_key_that_differs_in_a_byte(self, jobs: Jobs) -> None:
        keys = ["Acme", "acme", "acme ", "acmé", "🙂" * 255, "🙂" * 254]
        made = [await ask(jobs, key) for key in keys]
        assert [job.existing for job in made] == [False] * len(keys)
        assert ids_of([await ask(jobs, key) for key in keys]) == ids_of(made)

    async def test_from_everywhere(
        self, jobs: Jobs, session: AsyncSession, sync_engine: Engine
    ) -> None:
        first = await ask(jobs)
        assert (await enqueue(session, "work", unique_key="key")).id == first.id
        await session.commit()
        with Session(sync_engine) as other:
            assert jobs.scheduler.enqueue_sync(other, "work", unique_key="key").id == first.id
            other.commit()
        assert await count(jobs) == 1


class TestScope:
    async def test_ends_with_the_job(self, jobs: Jobs) -> None:
        first = await ask(jobs)
        claimed = await jobs.claim_one()
        assert (await ask(jobs)).id == first.id
        await jobs.finish(claimed, outcome=failed(retry_after=60))
        assert (await ask(jobs)).id == first.id
        jobs.later(61)
        await jobs.promote()
        await jobs.finish(await jobs.claim_one())
        second = await ask(jobs)
        assert (second.id != first.id, second.existing) == (True, False)
        await jobs.scheduler.cancel(second)
        assert not (await ask(jobs)).existing

    async def test_ends_with_the_start(self, jobs: Jobs) -> None:
        first = await ask(jobs, unique_while="waiting")
        assert (await ask(jobs, unique_while="waiting")).id == first.id
        claimed = await jobs.claim_one()
        second = await ask(jobs, unique_while="waiting")
        assert (second.id != first.id, second.existing) == (True, False)
        jobs.later(60)
        assert await jobs.reclaim() == [first.id]
        assert (await jobs.row(first)).unique_held is None
        assert (await jobs.finish(claimed)).lost

    async def test_ends_in_the_transaction_of_the_handler(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        """Also where a claim went by limits."""
        found: list[Any] = []

        @jobs.scheduler.handler(limits=[Concurrency("one", 1)])
        async def work(ctx: JobContext, key: str) -> None:
            if key == "live":
                async with AsyncSession(application) as session, session.begin():
                    await ctx.complete(session, 1)
            found.append(await ctx.enqueue(spec("other", unique_key=key)))

        asked = [
            await ask(jobs, key, args={"key": key}, unique_while=key) for key in ("live", "waiting")
        ]
        await jobs.scheduler.drain()
        assert [job.existing for job in found] == [False, False]
        assert not set(ids_of(asked)) & set(ids_of(found))

    @pytest.mark.parametrize("state", ["waiting", "running", "ended"])
    async def test_ends_with_its_period(self, jobs: Jobs, state: str) -> None:
        first = await ask(jobs, unique_for=timedelta(minutes=1))
        if state != "waiting":
            claimed = await jobs.claim_one(ttl=500)
            if state == "ended":
                await jobs.finish(claimed)
        jobs.later(59)
        assert (await ask(jobs)).id == first.id
        jobs.later(2)
        second = await ask(jobs, unique_for=60)
        assert (second.id != first.id, second.existing) == (True, False)
        assert (await jobs.row(first)).unique_held is None
        assert (await ask(jobs)).id == second.id
        if state == "running":
            assert (await jobs.finish(claimed)).written


class TestReplace:
    async def test_changes_a_job_that_waits(self, jobs: Jobs) -> None:
        first = await ask(jobs, args={"a": 1}, run_after=60, group_key="x")
        options: dict[str, Any] = {"queue": "media", "priority": 7, "max_attempts": 2}
        second = await ask(
            jobs, args={"a": 2}, on_conflict="replace", unique_while="waiting", **options
        )
        assert (second.id, second.existing) == (first.id, True)
        assert second == await jobs.scheduler.get(first)
        assert (second.args, second.state, second.group_key) == ({"a": 2}, State.READY, "")
        assert (second.queue, second.priority, second.max_attempts) == ("media", 7, 2)
        third = await ask(jobs, on_conflict="replace", run_after=60)
        assert (third.id, third.state, third.args) == (first.id, State.SCHEDULED, {})
        assert await count(jobs) == 1

    async def test_leaves_a_job_its_place_in_the_graph(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        first = await ask(jobs, depends_on=[upstream])
        second = await ask(jobs, args={"a": 2}, on_conflict="replace")
        assert (second.id, second.state) == (first.id, State.BLOCKED)
        assert await jobs.run_all() == [upstream.id]
        (claimed,) = await jobs.claim()
        assert (claimed.lease.job_id, claimed.args) == (first.id, '{"a":2}')

    async def test_never_changes_a_job_that_was_started(self, jobs: Jobs) -> None:
        first = await ask(jobs, args={"a": 1})
        claimed = await jobs.claim_one()
        for _ in range(2):
            second = await ask(jobs, args={"a": 2}, on_conflict="replace", run_after=60)
            assert (second.id, second.args, second.existing) == (first.id, {"a": 1}, True)
            jobs.later(60)
            await jobs.reclaim()
        await jobs.finish(claimed)
        assert (await jobs.claim_one()).args == '{"a":1}'

    async def test_never_changes_a_workflow(self, jobs: Jobs) -> None:
        """One that has yet to open looks like a job that waits for others."""
        first = await jobs.enqueue()
        async with jobs.scheduler.workflow(
            "nightly", unique_key="a", on_conflict="raise", depends_on=[first]
        ) as nightly:
            nightly.add(spec())
        before = await jobs.scheduler.get(nightly.id)
        found = await jobs.scheduler.enqueue(
            "work", {"n": 2}, unique_key="a", on_conflict="replace", priority=5
        )
        assert (found.id, found.existing) == (nightly.id, True)
        assert await jobs.scheduler.get(nightly.id) == before

    @pytest.mark.requires("row_locks")
    async def test_beside_the_start_at_any_moment(self, jobs: Jobs) -> None:
        """Either the worker gets the new arguments, or the caller the job as it is."""
        async for moment in jobs.moments():
            first = await ask(jobs, args={"a": 1})
            step = enqueuing(spec(args={"a": 2}, unique_key="key", on_conflict="replace"))
            (second,) = await moment.of(step, claiming())
            assert (second.id, second.existing) == (first.id, True)
            (claimed,) = moment.other or await jobs.claim()
            assert loads(claimed.args) == second.args


class TestBatch:
    async def test_with_one_key_twice(self, jobs: Jobs) -> None:
        specs = [spec(args={"n": n}, unique_key=f"key {n % 2}") for n in range(4)]
        made = await jobs.do(enqueuing(spec(), *specs, spec()))
        assert [job.existing for job in made] == [False, False, False, True, True, False]
        assert made[3:5] == made[1:3]
        assert ids_of(await jobs.scheduler.find()) == ids_of([*made[:3], made[5]])

    async def test_with_keys_that_are_held(self, jobs: Jobs) -> None:
        held = await ask(jobs, "key 3")
        past = await ask(jobs, "key 5", unique_for=1)
        jobs.later(2)
        made = await jobs.do(enqueuing(*(spec(unique_key=f"key {n}") for n in range(9, 0, -1))))
        assert [job.id for job in made if job.existing] == [held.id]
        assert past.id not in ids_of(made)
        assert (made[6], await count(jobs)) == (held, 10)
        new = [job.id for job in made if not job.existing]
        assert new == sorted(new)

    async def test_whose_later_ones_replace(self, jobs: Jobs) -> None:
        upstream = await jobs.enqueue()
        first, second = await jobs.do(
            enqueuing(
                spec(args={"n": 1}, unique_key="key", depends_on=[upstream]),
                spec(args={"n": 2}, unique_key="key", on_conflict="replace"),
            )
        )
        assert (first, first.existing, second.existing) == (second, False, True)
        assert (first.args, first.state) == ({"n": 2}, State.BLOCKED)
        assert await jobs.scheduler.get(first) == first

    async def test_that_is_refused_writes_nothing(self, jobs: Jobs) -> None:
        held = await ask(jobs)
        specs = [spec(), spec(unique_key="new"), spec(unique_key="key", on_conflict="raise")]
        with pytest.raises(UniqueConflictError, match=f"job {held.id}"):
            await jobs.do(enqueuing(*specs))
        with pytest.raises(UniqueConflictError, match="of this batch"):
            twice = spec(unique_key="new", on_conflict="raise")
            await jobs.do(enqueuing(twice, twice))
        replaced = spec(args={"a": 1}, unique_key="key", on_conflict="replace")
        with pytest.raises(InvalidJobError):
            await jobs.do(enqueuing(replaced, spec(depends_on=[10**9])))
        assert await jobs.scheduler.find() == [held]

    async def test_of_which_nothing_is_new(self, jobs: Jobs) -> None:
        held = await ask(jobs)
        assert await jobs.do(enqueuing(*[spec(unique_key="key")] * 3)) == [held] * 3


class TestGraph:
    async def test_depends_on_a_job_that_is_there(self, jobs: Jobs) -> None:
        held = await ask(jobs)
        async with jobs.scheduler.workflow("w") as workflow:
            first = workflow.add(spec(unique_key="key"))
            twin = workflow.add(spec(unique_key="key"))
            other = workflow.add(spec(unique_key="other"))
            other_twin = workflow.add(spec(unique_key="other"))
            last = workflow.add(spec(), depends_on=[first, twin, other_twin])
        assert (first.id, twin.id) == (held.id, held.id)
        assert other.id == other_twin.id != held.id
        await jobs.settle()
        assert set(await jobs.run_all()) == {held.id, other.id}
        assert await jobs.run_all() == [last.id]
        assert await jobs.state(workflow.id) == State.DONE

    async def test_whose_only_job_is_elsewhere_ends_at_once(self, jobs: Jobs) -> None:
        await ask(jobs)
        async with jobs.scheduler.workflow("w") as workflow:
            workflow.container("inner").add(spec(unique_key="key"))
        await jobs.settle()
        assert await jobs.state(workflow.id) == State.DONE

    async def test_must_not_become_a_circle(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("outer") as outer:
            outer.add(spec())
        held = await ask(jobs, depends_on=[outer])
        with pytest.raises(CycleError, match=str(held.id)):
            async with jobs.scheduler.workflow("inner", parent=outer) as inner:
                inner.add(spec(), depends_on=[inner.add(spec(unique_key="key"))])
        assert await count(jobs) == 3

    async def test_as_a_whole(self, jobs: Jobs) -> None:
        options: dict[str, Any] = {"unique_key": "nightly", "on_conflict": "raise"}
        async with jobs.scheduler.workflow("nightly", **options) as first:
            job = first.add(spec())
        with pytest.raises(UniqueConflictError, match=f"job {first.id}"):
            async with jobs.scheduler.workflow("nightly", **options) as second:
                second.add(spec())
        with pytest.raises(InvalidJobError, match="raise"):
            async with jobs.scheduler.workflow("nightly", unique_key="nightly"):
                pass
        assert await jobs.run_all() == [job.id]
        async with jobs.scheduler.workflow("nightly", **options) as third:
            third.add(spec())
        await jobs.settle()
        assert await jobs.state(third.id) == State.WAITING

    async def test_of_children(self, jobs: Jobs) -> None:
        held = await ask(jobs, "held", queue="nobody's")
        found: list[Any] = []

        @jobs.scheduler.handler
        async def parent(ctx: JobContext) -> None:
            found.append(await ctx.add_child(spec("child", unique_key="key")))
            found.append(await ctx.add_child(spec("child", unique_key="key")))
            found.append(await ctx.enqueue("child", unique_key="held"))

        @jobs.scheduler.handler
        async def child() -> None: ...

        job = await jobs.scheduler.enqueue("parent")
        assert await jobs.scheduler.drain() == {"done": 2, "failed": 0, "cancelled": 0}
        assert found[0] == found[1]
        assert (found[0].parent_id, found[2].id, found[2].parent_id) == (job.id, held.id, None)


class TestRunAgain:
    async def test_takes_its_key_back(self, jobs: Jobs) -> None:
        first = await ask(jobs, unique_while="waiting")
        await jobs.run_all(outcome=failed())
        await jobs.scheduler.retry(first)
        await jobs.settle()
        assert (await ask(jobs, unique_while="waiting")).id == first.id
        await jobs.run_all()
        assert not (await ask(jobs)).existing

    async def test_is_refused_while_another_holds_it(self, jobs: Jobs) -> None:
        first = await ask(jobs)
        await jobs.run_all(outcome=failed())
        second = await ask(jobs)
        with pytest.raises(UniqueConflictError, match=f"held by job {second.id}") as caught:
            await jobs.scheduler.retry(first)
        assert caught.value.job_id == second.id
        assert await jobs.state(first) == State.FAILED
        await jobs.run_all()
        await jobs.scheduler.retry(first)
        await jobs.settle()
        assert await jobs.state(first) == State.READY

    async def test_leaves_dependants_cancelled_that_lost_theirs(self, jobs: Jobs) -> None:
        cause = await jobs.enqueue()
        lost, twin, keeps, other = [
            await jobs.enqueue(depends_on=[cause]),
            await ask(jobs, "twin", depends_on=[cause]),
            await ask(jobs, "keeps", depends_on=[cause]),
            await jobs.enqueue(depends_on=[cause]),
        ]
        await jobs.spoil(lost, unique_key="twin", unique_while="live")
        await jobs.run_all(outcome=failed())
        assert await jobs.states(lost, twin, keeps, other) == [State.CANCELLED] * 4
        taken = await ask(jobs, "keeps")
        await jobs.scheduler.retry(cause)
        await jobs.settle()
        assert await jobs.states(lost, twin, keeps, other) == [
            State.BLOCKED, State.CANCELLED, State.CANCELLED, State.BLOCKED,
        ]  # fmt: skip
        assert await jobs.unsettled() == []
        assert (await ask(jobs, "twin")).id == lost.id
        await jobs.scheduler.cancel(taken)
        await jobs.scheduler.retry(keeps)
        assert (await ask(jobs, "keeps")).id == keeps.id

    async def test_of_what_is_in_a_workflow_whose_key_is_taken(self, jobs: Jobs) -> None:
        options: dict[str, Any] = {"unique_key": "nightly", "on_conflict": "raise"}
        async with jobs.scheduler.workflow("nightly", **options) as first:
            job = first.add(spec())
        await jobs.run_all(outcome=failed())
        async with jobs.scheduler.workflow("nightly", **options) as second:
            second.add(spec())
        for one in (job, first):
            with pytest.raises(UniqueConflictError, match=f"held by job {second.id}"):
                await jobs.scheduler.retry(one)
        await jobs.run_all()
        await jobs.scheduler.retry(job)
        await jobs.settle()
        assert (await jobs.row(first.id)).unique_held == "nightly"


@pytest.mark.requires("row_locks")
class TestBesideTheStart:
    async def test_of_a_job_that_holds_its_key_while_it_waits(self, jobs: Jobs) -> None:
        """Either it is started before the caller looks, or after the caller has committed."""
        async for moment in jobs.moments():
            first = await ask(jobs, unique_while="waiting")
            (second,) = await moment.of(enqueuing(spec(unique_key="key")), claiming())
            assert second.existing == (second.id == first.id)
            if not second.existing:
                assert ids_of(moment.other) == [first.id]
            elif moment.other:  # the caller had nothing written yet, and was told so in the end
                raise AssertionError("it was started before its caller committed")

    async def test_an_open_transaction_keeps_it_from_being_started(
        self, jobs: Jobs, session: AsyncSession
    ) -> None:
        first = await ask(jobs, unique_while="waiting")
        other = await ask(jobs, "other", unique_while="waiting")
        found = await jobs.scheduler.enqueue("work", session=session, unique_key="key")
        assert found.id == first.id
        async with jobs.limited_time():
            assert ids_of(await jobs.claim(2)) == [other.id]
            assert (await jobs.scheduler.enqueue("work", unique_key="other")).id != other.id
        await session.commit()
        assert first.id in ids_of(await jobs.claim(2))


@pytest.mark.requires("row_locks")
class TestOpenTransaction:
    async def test_stalls_no_worker(self, jobs: Jobs, application: AsyncEngine) -> None:
        """At most the end of the very job that it was given waits for it."""
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            first = await ask(jobs)
            alone = await jobs.enqueue()
            claimed = await jobs.claim(2)
            (held,) = [one for one in claimed if one.lease.job_id == first.id]
            engine = application.execution_options(isolation_level=level)
            async with jobs.limited_time(), AsyncSession(engine) as session:
                found = await jobs.scheduler.enqueue("work", session=session, unique_key="key")
                await jobs.scheduler.enqueue("work", session=session, unique_key="another")
                assert (found.id, found.existing) == (first.id, True)
                if level != "SERIALIZABLE":
                    assert len((await jobs.renew(*claimed)).renewed) == 2
                written = await jobs.finish(*claimed)
                assert not written.lost
                assert alone.id in {item.lease.job_id for item in written.written}
                await session.rollback()
            if written.held:
                assert (await jobs.finish(held)).written

    async def test_with_an_edge_to_a_job_that_ends(self, jobs: Jobs, session: AsyncSession) -> None:
        """Its foreign key must not hold up the write that gives the key up."""
        for scope in ("live", "waiting"):
            upstream = await ask(jobs, scope, unique_while=scope)
            async with jobs.limited_time():
                await jobs.scheduler.enqueue("work", session=session, depends_on=[upstream])
                claimed = await jobs.claim_one()
                assert (await jobs.finish(claimed)).written
                await session.commit()
        await jobs.settle()

    async def test_that_takes_a_key_again_blocks_nobody(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        """Though some database keeps the former entry of the key, and the gap before it."""
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            repeatable = application.execution_options(isolation_level="REPEATABLE READ")
            engine = application.execution_options(isolation_level=level)
            async with AsyncSession(repeatable) as reader, AsyncSession(engine) as session:
                await reader.execute(select(jobs.tables.version))
                await ask(jobs)
                await jobs.run_all()
                alone, other = await jobs.enqueue(), await ask(jobs, "other")
                assert not (await ask_in(session)).existing
                async with jobs.limited_time():
                    await jobs.enqueue()
                    await ask(jobs, "zebra")
                    claimed = await jobs.claim(4)
                    assert {alone.id, other.id} < set(ids_of(claimed))
                    assert len((await jobs.finish(*claimed)).written) == 4
                await session.rollback()
            await jobs.do(_clear)


@pytest.mark.requires("row_locks")
class TestOldSnapshot:
    """A transaction that has read before may not see who holds a key now."""

    async def test_before_the_holder(self, jobs: Jobs, application: AsyncEngine) -> None:
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            async with old_snapshot(jobs, application, level) as session:
                first = await ask(jobs)
                try:
                    found = await ask_in(session)
                except StaleSnapshotError:
                    assert level in ("REPEATABLE READ", "SERIALIZABLE")
                else:
                    assert (found.id, found.existing) == (first.id, True)
                other = await enqueue(session, "work", unique_key="other")
                await session.commit()
            assert await jobs.scheduler.find() == [first, other]
            await jobs.run_all()
            await jobs.do(_clear)

    async def test_after_the_holder(self, jobs: Jobs, application: AsyncEngine) -> None:
        """It must not be told of a job that has ended, for nothing would be done then."""
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            first = await ask(jobs)
            async with old_snapshot(jobs, application, level) as session:
                await jobs.run_all()
                try:
                    found = await ask_in(session)
                except StaleSnapshotError:
                    assert level in ("REPEATABLE READ", "SERIALIZABLE")
                else:
                    assert (found.id != first.id, found.existing) == (True, False), level
                await enqueue(session, "work", unique_key="other")
                await session.commit()
            await jobs.do(_clear)

    async def test_between_two_holders(self, jobs: Jobs, application: AsyncEngine) -> None:
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            await ask(jobs)
            async with old_snapshot(jobs, application, level) as session:
                await jobs.run_all()
                second = await ask(jobs)
                for on_conflict in ("return", "replace"):
                    try:
                        found = await ask_in(session, on_conflict=on_conflict)
                    except StaleSnapshotError:
                        assert level in ("REPEATABLE READ", "SERIALIZABLE")
                    else:
                        assert (found.id, found.existing) == (second.id, True)
                await session.commit()
            await jobs.do(_clear)


class TestAtOnce:
    async def test_with_a_transaction_that_commits_or_not(
        self, jobs: Jobs, application: AsyncEngine
    ) -> None:
        """Several wait for one, whose end decides."""
        for ends in ("commit", "rollback"):
            async with jobs.limited_time(30), AsyncSession(application) as session:
                first = await enqueue(session, "work", unique_key="key")
                others = [asyncio.create_task(ask(jobs)) for _ in range(3)]
                await asyncio.sleep(0.05)
                await getattr(session, ends)()
                found = await asyncio.gather(*others)
            (stored,) = await jobs.scheduler.find()
            assert {job.id for job in found} == {stored.id}
            assert first.id == stored.id or ends == "rollback"
            assert sum(not job.existing for job in found) == (ends == "rollback")
            await jobs.do(_clear)

    async def test_in_batches_in_every_order(self, jobs: Jobs) -> None:
        keys = [f"key {n}" for n in range(40)]
        shuffle = random.Random(1)
        for _ in range(2):
            batches = [shuffle.sample(keys, len(keys)) for _ in range(4)]
            made = await asyncio.gather(
                *(
                    jobs.scheduler.enqueue_many([spec(unique_key=key) for key in batch])
                    for batch in batches
                )
            )
            assert len({job.id for batch in made for job in batch}) == len(keys)
            assert await count(jobs) == len(keys)
            await jobs.run_all()
            await jobs.do(_clear)


BAD: list[dict[str, Any]] = [
    {"unique_key": ""},
    {"unique_key": 1},
    {"unique_key": "k" * 256},
    {"unique_key": "a\x00b"},
    {"unique_while": "waiting"},
    {"unique_for": 60},
    {"on_conflict": "raise"},
    {"unique_while": "running", "unique_key": "key"},
    {"on_conflict": "ignore", "unique_key": "key"},
    {"unique_for": 0, "unique_key": "key"},
    {"unique_for": "soon", "unique_key": "key"},
    {"unique_for": timedelta.max, "unique_key": "key"},
    {"unique_for": 60, "unique_key": "key", "unique_while": "waiting"},
    {"depends_on": [1], "unique_key": "key", "on_conflict": "replace"},
    {"parent": 1, "unique_key": "key", "on_conflict": "replace"},
]


async def test_bad_options_are_refused_before_anything_is_written(jobs: Jobs) -> None:
    for options in BAD:
        with pytest.raises(InvalidJobError, match=next(iter(options))):
            await jobs.scheduler.enqueue("work", **options)
    assert await count(jobs) == 0
