"""Deleting what ended long ago: all of it, and nothing that something else still needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Row, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from asyncjobq import ConfigurationError, Job, JobNotFoundError, State, after, prune, retention
from asyncjobq.control import retry_job
from asyncjobq.prune import find_once, prune_once
from asyncjobq.retention import Pruning, Retention
from conformance.kit import ISOLATION_LEVELS, Jobs, assert_nothing_is_stranded
from conformance.meanwhile import moments_of_a_caller
from conformance.steps import enqueuing, failed, holding, ids_of, spec, succeeded

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED
BLOCKED, READY = State.BLOCKED, State.READY
NOW = dict.fromkeys((DONE, FAILED, CANCELLED), 0.0)


async def left(jobs: Jobs) -> list[int]:
    """Return the ids of all rows that are left."""
    query = select(jobs.tables.jobs.c.id).order_by(jobs.tables.jobs.c.id)
    return list(await jobs.do(lambda c, _: c.scalars(query).all()))


async def rest(jobs: Jobs) -> tuple[int, int]:
    """Count the edges and attempts that are left."""
    deps, attempts = jobs.tables.deps, jobs.tables.attempts
    tables = [select(func.count()).select_from(table) for table in (deps, attempts)]
    edges, kept = [await jobs.do(lambda c, _, q=q: c.scalar(q)) for q in tables]
    return edges, kept


async def pruned(jobs: Jobs, **how: Any) -> int:
    return await jobs.scheduler.prune(**{"older_than": 0.0, **how})


async def ended(jobs: Jobs, *bad: Any, **options: Any) -> Job[Any]:
    job = await jobs.enqueue(**options)
    await jobs.run_all(failed() if "bad" in bad else succeeded(1))
    return job


class TestWhatGoes:
    async def test_by_age_and_state(self, jobs: Jobs) -> None:
        old, old_bad = await ended(jobs), await ended(jobs, "bad")
        jobs.later(3600)
        young, open_ = await ended(jobs), await jobs.enqueue()
        assert await pruned(jobs, older_than=timedelta(hours=2)) == 0
        assert await pruned(jobs, older_than=1800.0, states="done") == 1
        assert await left(jobs) == ids_of([old_bad, young, open_])
        assert await pruned(jobs, older_than=timedelta(minutes=30)) == 1
        assert await pruned(jobs) == 1
        assert await left(jobs) == [open_.id]
        with pytest.raises(JobNotFoundError):
            await jobs.scheduler.get(old)

    async def test_with_edges_and_attempts(self, jobs: Jobs) -> None:
        first = await jobs.enqueue()
        await jobs.enqueue(depends_on=[first])
        await jobs.settle()
        await jobs.run_all(failed())
        assert await rest(jobs) == (1, 1)
        assert await pruned(jobs) == 2
        assert (await left(jobs), await rest(jobs)) == ([], (0, 0))

    async def test_long_chains_at_once(self, jobs: Jobs) -> None:
        upstream: list[Any] = []
        for _ in range(10):
            upstream = [await jobs.enqueue(depends_on=upstream)]
        await jobs.run_all(failed())
        for _ in range(10):
            await jobs.settle()
        assert await pruned(jobs) == 10

    async def test_containers_with_all_that_is_in_them(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("outer") as outer:
            first = outer.add(spec())
            inner = outer.container("inner", depends_on=[first])
            second = inner.add(spec())
            inner.add(spec(), depends_on=[second])
        await jobs.run_all()
        assert await pruned(jobs) == 0
        jobs.later(3600)
        for _ in range(2):
            await jobs.run_all()
        assert await jobs.state(outer.id) == DONE
        assert await pruned(jobs, older_than=1800.0) == 0  # however old its first jobs are
        assert await pruned(jobs, states=["failed"]) == 0
        assert await pruned(jobs) == 5

    async def test_no_more_than_asked_at_once(self, jobs: Jobs) -> None:
        made = await jobs.enqueue_many(5)
        await jobs.run_all()
        assert await pruned(jobs, limit=2) == 2
        assert await left(jobs) == ids_of(made[2:])
        assert await pruned(jobs) == 3

    async def test_nothing_is_asked_wrongly(self, jobs: Jobs) -> None:
        for wrong in (
            {"older_than": -1},
            {"older_than": "a week"},
            {"states": ["ready"]},
            {"states": "bogus"},
            {"states": []},
            {"states": 5},
            {"limit": -1},
            {"limit": "all"},
        ):
            with pytest.raises(ConfigurationError):
                await pruned(jobs, **wrong)


class TestWhatStays:
    async def test_upstreams_of_what_has_not_ended(self, jobs: Jobs) -> None:
        """A failed one too: its dependant runs anyway, later, and looks at it."""
        bad, good = await ended(jobs, "bad"), await ended(jobs)
        delayed = await jobs.enqueue(depends_on=[after(bad, on_failure="run")], run_after=60.0)
        behind = await jobs.enqueue(depends_on=[good, delayed])
        for _ in range(2):
            assert await pruned(jobs) == 0
            await jobs.settle()
        assert await jobs.states(delayed, behind) == [State.SCHEDULED, BLOCKED]
        jobs.later(61)
        await jobs.promote()
        (claimed,) = await jobs.claim()
        assert await pruned(jobs) == 0
        await jobs.finish(claimed)
        await jobs.settle()
        assert await pruned(jobs) == 1  # what is done asks for its upstreams no more
        assert await left(jobs) == ids_of([good, delayed, behind])
        await jobs.run_all()
        assert await pruned(jobs) == 3

    async def test_upstreams_of_what_may_be_run_again(self, jobs: Jobs) -> None:
        first = await ended(jobs)
        second = await jobs.enqueue(depends_on=[first])
        await jobs.settle()
        await jobs.run_all(failed())
        assert await pruned(jobs, states="done") == 0
        await jobs.scheduler.retry(second)
        assert [job.id for job in await self.upstreams(jobs, second)] == [first.id]

    @staticmethod
    async def upstreams(jobs: Jobs, job: Job[Any]) -> list[Job[Any]]:
        from asyncjobq.inspection import upstreams_of

        return await jobs.do(partial(upstreams_of, job_id=job.id))

    async def test_upstreams_of_upstreams_that_stay(self, jobs: Jobs) -> None:
        chain = [await jobs.enqueue()]
        for _ in range(3):
            chain.append(await jobs.enqueue(depends_on=[chain[-1]]))
        await jobs.run_all(failed())
        for _ in range(3):
            await jobs.settle()
        assert await jobs.states(*chain) == [FAILED, CANCELLED, CANCELLED, CANCELLED]
        await jobs.spoil(chain[-1], settled=False)
        assert await pruned(jobs) == 0
        await jobs.spoil(chain[-1], settled=True)
        assert await pruned(jobs) == 4

    async def test_what_is_not_settled(self, jobs: Jobs) -> None:
        claimed = await jobs.leased()
        behind = await jobs.enqueue(depends_on=[claimed.lease.job_id])
        await jobs.settle()
        await jobs.finish(claimed)
        assert await pruned(jobs) == 0
        await jobs.settle()
        await jobs.run_all()
        assert await jobs.state(behind) == DONE
        assert await pruned(jobs) == 2

    async def test_what_is_in_a_container_that_is_open(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("nightly") as nightly:
            bad = nightly.add(spec())
            last = nightly.add(spec(), depends_on=[after(bad, on_failure="run")])
        await jobs.run_all(failed())
        assert await pruned(jobs) == 0
        await jobs.run_all()
        assert await jobs.states(last.id, nightly.id) == [DONE, FAILED]
        await jobs.scheduler.retry(nightly)
        assert await pruned(jobs) == 0
        await jobs.settle()
        await jobs.run_all()
        assert await jobs.state(nightly.id) == DONE
        assert await pruned(jobs) == 3

    async def test_families_in_which_one_is_needed(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("nightly") as nightly:
            inside, _ = nightly.add(spec()), nightly.add(spec())
        await jobs.run_all()
        late = await jobs.enqueue(depends_on=[inside], run_after=60.0)
        await jobs.settle()
        assert await pruned(jobs) == 0
        assert len(await left(jobs)) == 4
        await jobs.scheduler.cancel(late)
        await jobs.settle()
        assert await pruned(jobs) == 4

    async def test_holders_of_unique_keys_whose_time_is_not_over(self, jobs: Jobs) -> None:
        job = await ended(jobs)
        until = await jobs.now() + timedelta(seconds=60)
        await jobs.spoil(job, unique_held="key", unique_until=until)
        assert await pruned(jobs) == 0
        jobs.later(61)
        assert await pruned(jobs) == 1


class TestRetry:
    async def chain(self, jobs: Jobs) -> list[Job[Any]]:
        """Return three jobs in a chain, of which the first failed."""
        first = await jobs.enqueue()
        second = await jobs.enqueue(depends_on=[first])
        third = await jobs.enqueue(depends_on=[second])
        await jobs.run_all(failed())
        await jobs.settle()
        assert await jobs.states(first, second, third) == [FAILED, CANCELLED, CANCELLED]
        return [first, second, third]

    async def test_that_is_not_settled_yet(self, jobs: Jobs) -> None:
        """What it is to revive stays, at whatever distance."""
        chain = await self.chain(jobs)
        await jobs.scheduler.retry(chain[0])
        assert await pruned(jobs) == 0
        await jobs.settle()
        assert await jobs.states(*chain) == [READY, BLOCKED, BLOCKED]

    @pytest.mark.requires("row_locks")
    async def test_at_any_moment(self, jobs: Jobs) -> None:
        async for moment in jobs.moments():
            chain = await self.chain(jobs)
            page = await jobs.do(partial(find_once, ages=NOW))

            def retry(connection: Any, backend: Any, job: Job[Any] = chain[0]) -> str:
                try:
                    retry_job(connection, backend, job.id)
                except JobNotFoundError:
                    return "gone"
                except Exception as error:
                    if "lock" in str(error).lower():  # it waits for the pruning
                        return "waits"
                    raise
                return "retried"

            step = partial(prune_once, roots=page.roots, ages=NOW)
            done = await moment.of(step, meanwhile=retry)
            await jobs.settle()
            if moment.other == "retried":
                assert done.deleted == 0
                assert await jobs.states(*chain) == [READY, BLOCKED, BLOCKED]
            else:
                assert (done.deleted, await left(jobs)) == (3, [])
            if moment.other == "waits":
                break  # so it will from here on

    @pytest.mark.requires("row_locks")
    async def test_of_what_somebody_holds(self, jobs: Jobs) -> None:
        held = await jobs.leased()
        free = await jobs.leased()
        await jobs.finish(held, free)
        async with jobs.limited_time():
            async with jobs.transaction() as take:
                await take(holding(held))
                assert await pruned(jobs) == 1
            assert await left(jobs) == [held.lease.job_id]
            assert await pruned(jobs) == 1


class TestCallers:
    @pytest.mark.requires("key_locks")
    async def test_open_edge_keeps_its_upstream(self, jobs: Jobs, application: AsyncEngine) -> None:
        job = await ended(jobs)
        async with jobs.limited_time(), AsyncSession(application) as session:
            await jobs.scheduler.enqueue("work", depends_on=[job], session=session)
            assert await pruned(jobs) == 0
            await session.commit()
        assert await pruned(jobs) == 0
        await jobs.settle()
        await jobs.run_all()
        assert await pruned(jobs) == 2

    async def test_edge_to_what_was_pruned_strands_nothing(self, jobs: Jobs) -> None:
        job = await ended(jobs)
        behind = await jobs.enqueue(depends_on=[job])
        await jobs.do(partial(_tear_out, job_id=job.id))
        await jobs.settle()
        assert await jobs.state(behind) in (CANCELLED, READY)
        await assert_nothing_is_stranded(jobs)


@pytest.fixture
def committed(jobs: Jobs, application: AsyncEngine) -> AsyncEngine:
    """Give the application's engine, at READ COMMITTED where there are levels."""
    if jobs.backend_name == "sqlite":
        return application
    return application.execution_options(isolation_level="READ COMMITTED")


class TestInACallersTransaction:
    async def test_all_goes_or_stays_with_it(self, jobs: Jobs, committed: AsyncEngine) -> None:
        first = await ended(jobs)
        await jobs.enqueue(depends_on=[first])
        await jobs.settle()
        await jobs.run_all(failed())
        async with jobs.scheduler.workflow("nightly") as nightly:
            nightly.add(spec())
        await jobs.run_all()
        open_ = await jobs.enqueue()
        async with AsyncSession(committed) as session:
            assert await pruned(jobs, session=session) == 4
            await session.rollback()
            assert len(await left(jobs)) == 5
            assert await pruned(jobs, session=session, states="done") == 2
            assert await pruned(jobs, session=session, limit=1) == 1
            assert await pruned(jobs, session=session) == 1
            await session.commit()
        assert await left(jobs) == [open_.id]

    async def test_of_a_connection(self, jobs: Jobs, committed: AsyncEngine) -> None:
        await ended(jobs)
        async with committed.begin() as connection:
            assert await pruned(jobs, session=connection) == 1
        assert await left(jobs) == []

    async def test_however_many_steps_it_takes(
        self, jobs: Jobs, committed: AsyncEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "ROOTS", 2)
        for module in (prune, retention):
            monkeypatch.setattr(module, "MEMBERS", 3)
        async with jobs.scheduler.workflow("large") as large:
            for _ in range(6):
                large.add(spec())
        await jobs.enqueue_many(5)
        await jobs.run_all()
        async with AsyncSession(committed) as session:
            assert await pruned(jobs, session=session) == 12
            await session.commit()
        assert await left(jobs) == []

    @pytest.mark.requires("server")
    async def test_at_another_level_is_refused(self, jobs: Jobs, application: AsyncEngine) -> None:
        """An old snapshot does not show the edge that was committed meanwhile."""
        job = await ended(jobs)
        for level in ISOLATION_LEVELS[jobs.backend_name]:
            engine = application.execution_options(isolation_level=level)
            async with AsyncSession(engine) as session:
                await session.execute(select(jobs.tables.pauses))
                await jobs.enqueue(depends_on=[job])
                await jobs.settle()
                if level == "READ COMMITTED":
                    assert await pruned(jobs, session=session) == 0
                else:
                    with pytest.raises(ConfigurationError, match="READ COMMITTED"):
                        await pruned(jobs, session=session)
                await session.execute(select(jobs.tables.pauses))  # it is usable still
                await session.commit()
        assert job.id in await left(jobs)

    async def test_edge_at_any_moment_keeps_its_upstream(
        self, jobs: Jobs, committed: AsyncEngine
    ) -> None:
        def enqueue_behind(connection: Any, backend: Any) -> Any:
            return enqueuing(spec(depends_on=[job]))(connection, backend)

        job = await ended(jobs)
        async for moment in moments_of_a_caller(jobs, committed, enqueue_behind):
            gone = await pruned(jobs, session=moment.session)
            await moment.session.commit()
            await jobs.settle()
            await assert_nothing_is_stranded(jobs)
            assert (job.id in await left(jobs)) == (gone == 0)
            await jobs.run_all()
            await pruned(jobs)
            job = await ended(jobs)

    @pytest.mark.requires("server")
    async def test_leaves_its_settings_as_they_were(
        self, jobs: Jobs, committed: AsyncEngine
    ) -> None:
        if jobs.backend_name != "postgresql":
            return
        await ended(jobs)
        async with committed.begin() as connection:
            await pruned(jobs, session=connection)
            assert (await connection.exec_driver_sql("SHOW enable_seqscan")).scalar() == "on"


def _tear_out(connection: Any, backend: Any, job_id: int) -> None:
    """Delete a job as if the edge to it had not been seen, where that can be."""
    tables = backend.tables
    if backend.name != "mysql":  # elsewhere there is a foreign key
        connection.execute(tables.deps.delete())
    connection.execute(tables.jobs.delete().where(tables.jobs.c.id == job_id))


class TestSteps:
    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make batches so small that a few jobs go beyond them."""
        monkeypatch.setattr(prune, "WINDOW", 4)
        monkeypatch.setattr(retention, "ROOTS", 2)
        for module in (prune, retention):
            monkeypatch.setattr(module, "MEMBERS", 3)

    @pytest.mark.usefixtures("small")
    async def test_go_through_all_rows(self, jobs: Jobs) -> None:
        made = [await ended(jobs, "bad" if n % 3 == 0 else "") for n in range(11)]
        bad = ids_of(made[::3])
        assert await pruned(jobs, states=["done"]) == len(made) - len(bad)
        assert await left(jobs) == bad
        assert await pruned(jobs) == len(bad)

    @pytest.mark.usefixtures("small")
    async def test_end_at_what_is_young(self, jobs: Jobs) -> None:
        old = [await ended(jobs) for _ in range(3)]
        jobs.later(3600)
        await jobs.enqueue_many(20)
        page = await jobs.do(partial(find_once, ages={DONE: 60.0}, limit=2))
        assert (page.roots, page.over) == (ids_of(old[:2]), False)
        page = await jobs.do(partial(find_once, ages={DONE: 60.0}, after=page.after, limit=2))
        assert (page.roots, page.over) == ([old[2].id], True)

    @pytest.mark.usefixtures("small")
    async def test_come_back_to_what_was_held(self, jobs: Jobs) -> None:
        """A chain over several pages, which goes from its end."""
        chain = [await jobs.enqueue()]
        for _ in range(6):
            chain.append(await jobs.enqueue(depends_on=[chain[-1]]))
        await jobs.run_all(failed())
        for _ in range(7):
            await jobs.settle()
        assert await pruned(jobs) == 7
        assert await rest(jobs) == (0, 0)

    @pytest.mark.usefixtures("small")
    async def test_take_large_families_apart(self, jobs: Jobs) -> None:
        """From below, and dependants before what they depend on."""
        async with jobs.scheduler.workflow("large") as large:
            first = large.add(spec())
            deep = large.container("deep")
            for _ in range(4):
                deep.add(spec(), depends_on=[first])
            large.add(spec(), depends_on=[deep])
        other = await jobs.enqueue()
        late = await jobs.enqueue(depends_on=[first], run_after=60.0)
        await jobs.run_all(failed())
        await jobs.settle()
        await jobs.scheduler.retry(other)
        assert await jobs.state(large.id) == FAILED
        await jobs.spoil(late, state=State.SCHEDULED, cause=None)
        assert await pruned(jobs) == 0  # something outside of it is to run
        await jobs.spoil(late, state=CANCELLED)
        assert await pruned(jobs) == 9
        assert await left(jobs) == [other.id]

    @pytest.mark.usefixtures("small")
    async def test_stop_in_a_large_family_that_is_open_again(self, jobs: Jobs) -> None:
        async with jobs.scheduler.workflow("large") as large:
            for _ in range(6):
                large.add(spec())
        await jobs.run_all(failed())
        pruning = Pruning(jobs.database, NOW)
        part = pruning._prune_part

        async def opened(root: int, rows: list[int]) -> set[int] | None:
            gone = await part(root, rows)
            if await jobs.state(large.id) == FAILED:
                await jobs.scheduler.retry(large)
            return gone

        pruning._prune_part = opened  # type: ignore[method-assign]
        assert await pruning.run() == 3
        await jobs.settle()
        assert len(await jobs.claim(10)) == 3

    @pytest.mark.usefixtures("small")
    async def test_with_more_dependants_than_are_read(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from asyncjobq import families

        monkeypatch.setattr(families, "REFERENCES", 3)
        hub = await jobs.enqueue()
        for _ in range(5):
            await jobs.enqueue(depends_on=[hub])
        await jobs.run_all(failed())
        await jobs.settle()
        assert await pruned(jobs) == 6


class TestRetention:
    async def test_takes_steps_until_it_is_through(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "ROOTS", 2)
        for number in range(5):
            await ended(jobs, "bad" if number == 0 else "")
        jobs.later(3600)
        chore = Retention(jobs.database, {DONE: 60.0, FAILED: 86_400.0})
        counts = [await chore.prune_once() for _ in range(3)]
        assert counts[0] > 0
        assert sum(counts) == 4
        assert chore.pause > retention.BETWEEN_STEPS
        assert len(await left(jobs)) == 1

    async def test_is_a_chore_of_a_worker(
        self, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "BETWEEN_ROUNDS", 0.05)
        old = await ended(jobs)
        scheduler = jobs.another(retention={"done": 0, State.FAILED: timedelta(days=1)})
        async with serving_until_gone(jobs, scheduler, old):
            pass

    async def test_is_checked(self, jobs: Jobs) -> None:
        del jobs
        from asyncjobq import Scheduler

        for wrong in ({"ready": 1}, {"done": -1}, {"done": "long"}, {"bogus": 1}, ["done"], 5):
            with pytest.raises(ConfigurationError):
                Scheduler("sqlite+aiosqlite:///x.db", retention=wrong)  # type: ignore[arg-type]


@asynccontextmanager
async def serving_until_gone(jobs: Jobs, scheduler: Any, job: Job[Any]) -> AsyncIterator[None]:
    from conformance.running import serving, until

    async def gone() -> bool:
        return job.id not in await left(jobs)

    async with serving(scheduler):
        await until(gone)
        yield


async def test_no_plan_reads_more_than_the_window(jobs: Jobs) -> None:
    """Right after ANALYZE, on a table most of which may not go."""
    await jobs.enqueue_many(3000)
    analyze = "ANALYZE" if jobs.backend_name in ("postgresql", "sqlite") else "ANALYZE TABLE jobs"
    await jobs.do(lambda c, _: c.exec_driver_sql(analyze))
    plans = await jobs.do(_plans)
    text = "\n".join(str(tuple(row)) for row in plans)
    assert "Seq Scan" not in text
    assert "INDEX jobs_" not in text
    others = ("jobs_children", "jobs_ready", "jobs_due", "Bitmap")
    assert [name for name in others if name in text] == []
    assert "jobs_pkey" in text or "PRIMARY" in text


def _plans(connection: Any, backend: Any) -> list[Row[Any]]:
    from sqlalchemy import event, text

    found: list[Row[Any]] = []
    word = "EXPLAIN QUERY PLAN " if backend.name == "sqlite" else "EXPLAIN "
    statements: list[Any] = []

    def note(*details: Any) -> None:
        statements.append(details[1])

    event.listen(connection, "before_execute", note)
    find_once(connection, backend, NOW)
    event.remove(connection, "before_execute", note)
    for statement in statements:
        compiled = statement.compile(connection, compile_kwargs={"literal_binds": True})
        found += connection.execute(text(word + str(compiled).replace(":", "\\:"))).all()
    return found
