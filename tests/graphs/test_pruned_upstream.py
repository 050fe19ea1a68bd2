"""An upstream that pruning deletes while somebody depends on it: as if it had never been there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import StaleSnapshotError, State, UnknownUpstreamError, after
from asyncjobq.backends.base import Backend
from asyncjobq.prune import prune_once
from conformance.steps import Step, enqueuing, spec
from graphs.kit import Graphs, Named, adding, number, workflow, writing
from graphs.test_edges import ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY, BLOCKED = State.READY, State.BLOCKED
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED
PATIENCE = 0.2
"""Seconds after which what has not happened is taken to wait."""


def pruning(job: Named) -> Step[int]:
    """Delete a job that has ended, unless something holds it."""
    ages = dict.fromkeys((DONE, FAILED, CANCELLED), 0.0)
    return lambda connection, backend: prune_once(connection, backend, [number(job)], ages).deleted


def trying(step: Step[Any], instead: Step[Any]) -> Step[Any]:
    """Take another step in the same transaction where one is refused."""

    def work(connection: Connection, backend: Backend) -> Any:
        try:
            return step(connection, backend)
        except UnknownUpstreamError:
            instead(connection, backend)
            return None

    return work


def inserting(**options: Any) -> Step[Any]:
    """Write a workflow with one job."""
    described = workflow()
    described.add(spec(**options))
    return writing(described)


@pytest.mark.requires("row_locks")
class TestAtAnyMoment:
    @pytest.mark.parametrize("end", [DONE, FAILED])
    @pytest.mark.parametrize("rule", ["cancel", "run"])
    async def test_of_an_enqueue(self, graphs: Graphs, rule: str, end: State) -> None:
        """Refused with nothing written, or let go, or cancelled: never an error of the database."""
        answers = set()
        async for moment in graphs.moments():
            upstream = await ended(graphs, end)
            dependant = inserting(depends_on=[after(upstream, on_failure=rule)])
            made = await moment.of(trying(dependant, inserting()), meanwhile=pruning(upstream))
            await graphs.settle()
            gone = bool(moment.other)
            assert await graphs.count() == (2 if gone else 3)
            if made is None:
                assert gone
                answers.add("refused")
                continue
            state, cause = await graphs.why(made[-1])
            expected = CANCELLED if gone or (end is FAILED and rule == "cancel") else READY
            assert state == expected
            if state is CANCELLED:
                assert cause == upstream.id
                reason = "does not exist any more" if gone else "failed"
                assert reason in ((await graphs.row(made[-1])).error or "")
                answers.add("cancelled" if gone else "failed")
            else:
                answers.add("let go")
        assert "refused" in answers
        assert moment.number > 2
        if graphs.backend_name == "postgresql":
            assert "cancelled" not in answers

    async def test_of_adding_a_child(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            upstream = await ended(graphs, DONE)
            parent = await graphs.leased()
            child = adding(parent, depends_on=[upstream])
            made = await moment.of(trying(child, adding(parent)), meanwhile=pruning(upstream))
            await graphs.settle()
            if made is not None:
                assert await graphs.state(made) == (CANCELLED if moment.other else READY)
            await graphs.end(parent)
            await graphs.run_to_the_end()
            assert await graphs.open() == []

    async def test_of_pruning_somebody_depends_on_it(self, graphs: Graphs) -> None:
        """Nobody waits for what is gone."""
        async for moment in graphs.moments():
            upstream = await ended(graphs, DONE)
            dependant = trying(inserting(depends_on=[upstream]), inserting())
            if graphs.backend_name == "postgresql":  # it would wait for the very step it is in
                dependant = impatient(dependant)
            await moment.of(pruning(upstream), meanwhile=dependant)
            await graphs.settle()
            await graphs.run_to_the_end()
            assert await graphs.open() == []


def impatient(step: Step[Any]) -> Step[Any]:
    """Take a step unless it would have to wait for a lock."""

    def work(connection: Connection, backend: Backend) -> Any:
        savepoint = connection.begin_nested()
        connection.exec_driver_sql("SET LOCAL lock_timeout = '50ms'")
        try:
            return step(connection, backend)
        except OperationalError:
            savepoint.rollback()
            return None

    return work


@pytest.mark.requires("row_locks")
async def test_of_which_the_commit_comes_after_the_question(
    graphs: Graphs, session: AsyncSession
) -> None:
    """The caller waits for the answer, or learns it from the job; the session stays usable."""
    upstream = await ended(graphs, DONE)
    async with graphs.limited_time(), graphs.transaction() as take:
        assert await take(pruning(upstream)) == 1
        asked = asyncio.ensure_future(
            graphs.scheduler.enqueue("work", depends_on=[upstream], session=session)
        )
        await asyncio.wait({asked}, timeout=PATIENCE)
    if graphs.backend_name == "postgresql":
        with pytest.raises(UnknownUpstreamError, match=str(upstream.id)):
            await asked
        other = await graphs.scheduler.enqueue("work", session=session)
        await session.commit()
        assert await graphs.state(other) == READY
    else:
        job = await asked
        await session.commit()
        await graphs.settle()
        assert await graphs.state(job) == CANCELLED
        error = f"upstream job {upstream.id} does not exist any more"
        assert (await graphs.row(job)).error == error


@pytest.mark.requires("row_locks")
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_that_an_old_snapshot_still_shows(
    graphs: Graphs, session: AsyncSession, level: str
) -> None:
    """A clear error or a clear end, and a session that goes on."""
    upstream = await ended(graphs, DONE)
    await session.connection(execution_options={"isolation_level": level})
    assert (await graphs.scheduler.get(upstream, session=session)).state == DONE
    if graphs.backend_name != "postgresql" and level == "SERIALIZABLE":
        assert await graphs.do(pruning(upstream)) == 0  # what is read there is locked
        return
    assert await graphs.do(pruning(upstream)) == 1
    if graphs.backend_name == "postgresql":
        with pytest.raises(StaleSnapshotError, match="depends_on") as caught:
            await graphs.scheduler.enqueue("work", depends_on=[upstream], session=session)
        assert caught.value.keys == []
        job, expected = await graphs.scheduler.enqueue("work", session=session), READY
    else:
        job = await graphs.scheduler.enqueue("work", depends_on=[upstream], session=session)
        expected = CANCELLED
    await session.commit()
    await graphs.settle()
    assert await graphs.state(job) == expected


@pytest.mark.requires("file_database")
async def test_comes_too_late_once_somebody_has_asked_for_it(graphs: Graphs) -> None:
    """Drivers begin a transaction with its first write, so the look must come after one."""
    upstream = await ended(graphs, DONE)
    refused = []
    impatient = create_engine(graphs.kept.elsewhere.url, connect_args={"timeout": 0})

    def prune(_connection: Any, _cursor: object, statement: str, *_: object) -> None:
        if not refused and statement.startswith("INSERT"):
            with (
                pytest.raises(OperationalError, match="locked"),
                impatient.begin() as another,
            ):
                pruning(upstream)(another, graphs.backend)
            refused.append(statement)

    with graphs.kept.elsewhere.begin() as connection:
        event.listen(connection, "before_cursor_execute", prune)
        made = enqueuing(spec(depends_on=[upstream]))(connection, graphs.backend)
    impatient.dispose()
    assert refused
    await graphs.settle()
    assert await graphs.states(upstream, *made) == [DONE, READY]
