"""Settling beside other transactions, at every moment of each: nothing waits for ever."""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import CycleError, InvalidJobError, ParentError, State, Workflow, after
from asyncjobq.lease import Claimed
from asyncjobq.services import HandlerServices
from asyncjobq.settle import settle_once
from conformance.steps import both, enqueuing, failed, finishing, settling, spec
from graphs.kit import Graphs, adding, cancelling, retrying, workflow, writing

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.requires("row_locks")]

BLOCKED, READY, WAITING = State.BLOCKED, State.READY, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED
PATIENCE = 0.2
"""Seconds after which what has not happened is taken to wait."""


async def started(graphs: Graphs, wf: Workflow) -> list[Claimed]:
    """Write a workflow and lease what is ready in it, by id."""
    await graphs.write(wf)
    claimed = await graphs.start()
    return [claimed[number] for number in sorted(claimed)]


class TestTwoLastUpstreams:
    @pytest.mark.parametrize("rule", ["cancel", "run"])
    @pytest.mark.parametrize("end", [DONE, FAILED])
    async def test_a_job_and_a_container(self, graphs: Graphs, end: State, rule: str) -> None:
        outcome = failed() if end is FAILED else None
        async for moment in graphs.moments():
            wf = workflow()
            inner = wf.container("inner")
            upstreams = [after(wf.add(spec()), on_failure=rule), after(inner, on_failure=rule)]
            inner.add(spec())
            last = wf.add(spec(), depends_on=upstreams)
            first, second = await started(graphs, wf)
            await graphs.finish(first)
            ending = both(finishing(second, outcome=outcome), settling)
            await moment.of(settle_once, meanwhile=ending)
            await graphs.settle()
            expected = CANCELLED if (end, rule) == (FAILED, "cancel") else READY
            assert await graphs.state(last) == expected
            await graphs.assert_settled()


class TestTwoLastChildren:
    async def test_settle_in_overlapping_transactions(self, graphs: Graphs) -> None:
        wf = workflow()
        inner = wf.container("inner")
        inner.add(spec())
        wf.add(spec())
        first, second = await started(graphs, wf)
        await graphs.finish(first)
        async with graphs.limited_time(), graphs.transaction() as take:
            await take(settle_once)
            await graphs.end(second)
        await graphs.settle()
        assert await graphs.states(inner, wf) == [DONE, DONE]
        await graphs.assert_settled()

    @pytest.mark.parametrize("end", [DONE, FAILED])
    async def test_at_any_moment_of_settling_one_the_other_ends(
        self, graphs: Graphs, end: State
    ) -> None:
        outcome = failed() if end is FAILED else None
        async for moment in graphs.moments():
            wf = workflow()
            inner = wf.container("inner")
            follower = wf.container("follower", depends_on=[after(inner, on_failure="run")])
            for _ in range(2):
                inner.add(spec())
            first, second = await started(graphs, wf)
            await graphs.finish(first)
            ending = both(finishing(second, outcome=outcome), settling)
            await moment.of(settle_once, meanwhile=ending)
            await graphs.settle()
            assert await graphs.states(inner, follower, wf) == [end, DONE, end]
            await graphs.assert_settled()

    async def test_fail_fast_at_any_moment_of_settling_another_failure(
        self, graphs: Graphs
    ) -> None:
        async for moment in graphs.moments():
            wf = workflow(fail_fast=True)
            jobs = [wf.add(spec()) for _ in range(2)]
            deep = wf.container("inner").add(spec(), run_after=3600.0)
            first, second = await started(graphs, wf)
            await graphs.finish(first, outcome=failed())
            ending = both(finishing(second, outcome=failed()), settling)
            await moment.of(settle_once, meanwhile=ending)
            await graphs.settle()
            assert await graphs.states(*jobs, deep, wf) == [FAILED, FAILED, CANCELLED, FAILED]
            await graphs.assert_settled()


class TestAnEdge:
    async def test_to_a_container_at_any_moment_of_its_closing(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            wf = workflow()
            wf.add(spec())
            (last,) = await started(graphs, wf)
            await graphs.finish(last)
            edge = both(enqueuing(spec(depends_on=[wf])), settling)
            await moment.of(settle_once, meanwhile=edge)
            (made,) = moment.other[0]
            await graphs.settle()
            assert await graphs.states(wf, made) == [DONE, READY]
            await graphs.assert_settled()

    async def test_of_a_workflow_at_any_moment_of_its_upstreams_end(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            upstream = await graphs.leased()
            wf = workflow(depends_on=[upstream.lease.job_id])
            inside = wf.container("inner").add(spec())
            await moment.of(finishing(upstream), meanwhile=both(writing(wf), settling))
            await graphs.settle()
            assert await graphs.states(wf, inside) == [WAITING, READY]
            await graphs.assert_settled()

    async def test_at_any_moment_of_writing_a_workflow_its_upstream_ends(
        self, graphs: Graphs
    ) -> None:
        async for moment in graphs.moments():
            upstream = await graphs.leased()
            wf = workflow(depends_on=[upstream.lease.job_id])
            inside = wf.container("inner").add(spec())
            await moment.of(writing(wf), meanwhile=both(finishing(upstream), settling))
            await graphs.settle()
            assert await graphs.states(wf, inside) == [WAITING, READY]

    async def test_in_a_transaction_that_stays_open_stalls_nobody(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        """Its upstream is claimed, renewed, finished and settled meanwhile; it is let go after."""
        upstream = await graphs.enqueue()
        wf = await graphs.write(workflow(depends_on=[upstream]))
        job = await graphs.scheduler.enqueue("work", depends_on=[upstream, wf], session=session)
        async with graphs.limited_time():
            claimed = await graphs.claim_one()
            assert (await graphs.renew(claimed)).renewed == {claimed.lease}
            await graphs.end(claimed)
            assert await graphs.states(upstream, wf) == [DONE, DONE]
            assert await graphs.unsettled() == []
            await session.commit()
            await graphs.settle()
        assert await graphs.state(job) == READY

    async def test_of_a_job_that_somebody_holds_is_waited_for_by_nobody(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        """The caller cancels one of two dependants, and thinks about it for long."""
        upstream = await graphs.leased()
        held, other = [await graphs.enqueue(depends_on=[upstream.lease.job_id]) for _ in range(2)]
        await graphs.settle()
        await graphs.scheduler.cancel(held, session=session)
        async with graphs.limited_time():
            await graphs.end(upstream)
            assert await graphs.states(held, other) == [BLOCKED, READY]
            assert await graphs.unsettled() == [upstream.lease.job_id]
            await session.rollback()
            await graphs.settle()
        assert await graphs.state(held) == READY
        await graphs.assert_settled()


class TestTwoHalvesOfACircle:
    @pytest.mark.parametrize("kind", ["jobs", "workflows"])
    async def test_are_found_when_they_settle(self, graphs: Graphs, kind: str) -> None:
        """None of them sees the other; one of them has to go, and the rest ends."""
        a, b = await graphs.write(workflow("a")), await graphs.write(workflow("b"))
        others = await graphs.do(enqueuing(spec(parent=a), spec(parent=b)))
        halves = [half(kind, a, b), half(kind, b, a)]
        async with graphs.limited_time(), graphs.transaction() as one:
            async with graphs.transaction() as other:
                made = [(await one(halves[0]))[0], (await other(halves[1]))[0]]
        await graphs.settle()
        states = await graphs.states(*made)
        assert states.count(CANCELLED) == 1
        error = (await graphs.row(made[states.index(CANCELLED)])).error
        assert "would wait for itself" in error
        assert str(a.id) in error
        assert str(b.id) in error
        await graphs.run_to_the_end()
        assert await graphs.open() == []
        assert await graphs.states(*others) == [DONE, DONE]
        await graphs.assert_settled()

    async def test_are_found_where_each_is_many(self, graphs: Graphs) -> None:
        """All of one half have to go, and nothing else."""
        a, b = await graphs.write(workflow("a")), await graphs.write(workflow("b"))
        async with graphs.limited_time(), graphs.transaction() as one:
            async with graphs.transaction() as other:
                first = await one(enqueuing(*[spec(parent=a, depends_on=[b])] * 3))
                second = await other(enqueuing(*[spec(parent=b, depends_on=[a])] * 3))
        others = await graphs.do(enqueuing(spec(parent=a), spec(parent=b)))
        await graphs.settle()
        assert await graphs.states(*first) == [CANCELLED] * 3
        assert CANCELLED not in await graphs.states(*second, *others)
        await graphs.run_to_the_end()
        assert await graphs.open() == []
        await graphs.assert_settled()

    async def test_are_found_whoever_settles_first(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            a, b = await graphs.write(workflow("a")), await graphs.write(workflow("b"))
            await graphs.do(enqueuing(spec(parent=a), spec(parent=b)))
            other = both(enqueuing(spec(parent=b, depends_on=[a])), settling)
            one = enqueuing(spec(parent=a, depends_on=[b]))
            with suppress(CycleError):  # it saw the other half
                (made,) = await moment.of(one, meanwhile=other)
                await graphs.settle()
                second = moment.other[0][0]
                assert (await graphs.states(made, second)).count(CANCELLED) == 1
            await graphs.run_to_the_end()
            assert await graphs.open() == []
        assert moment.number > 4


def half(kind: str, into: Workflow, behind: Workflow) -> Any:
    """Return the step that puts something into one container that depends on the other."""
    if kind == "jobs":
        return enqueuing(spec(parent=into, depends_on=[behind]))
    wf = workflow(parent=into, depends_on=[behind])
    wf.add(spec())
    return writing(wf)


class TestAChildUnderAClosingContainer:
    async def test_that_is_committed_in_time_is_not_missed(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            wf = workflow()
            wf.add(spec())
            (last,) = await started(graphs, wf)
            await graphs.finish(last)
            try:
                (child,) = await moment.of(enqueuing(spec(parent=wf)), meanwhile=settling)
            except ParentError:  # it had closed before anybody looked
                assert await graphs.state(wf) == DONE
            else:
                await graphs.settle()
                assert await graphs.states(wf, child) == [WAITING, READY]
            await graphs.assert_settled()
        assert moment.number > 2

    async def test_that_is_not_committed_yet_keeps_it_open(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = workflow()
        wf.add(spec())
        (last,) = await started(graphs, wf)
        child = await graphs.scheduler.enqueue("work", parent=wf, session=session)
        async with graphs.limited_time():
            await graphs.end(last)
            assert await graphs.state(wf) == WAITING
            await session.commit()
            await graphs.settle()
            assert await graphs.states(wf, child) == [WAITING, READY]
            await graphs.run()
        assert await graphs.state(wf) == DONE

    async def test_that_is_rolled_back_keeps_it_open_no_longer(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = workflow()
        wf.add(spec())
        (last,) = await started(graphs, wf)
        await graphs.scheduler.enqueue("work", parent=wf, session=session)
        await graphs.end(last)
        await session.rollback()
        await graphs.settle()
        assert await graphs.state(wf) == DONE

    async def test_that_comes_too_late_waits_and_is_refused(self, graphs: Graphs) -> None:
        wf = workflow()
        wf.add(spec())
        (last,) = await started(graphs, wf)
        await graphs.finish(last)
        async with graphs.limited_time():
            async with graphs.transaction() as take:
                await take(settle_once)
                adding_late = asyncio.ensure_future(graphs.enqueue(parent=wf))
                assert not (await asyncio.wait({adding_late}, timeout=PATIENCE))[0]
            with pytest.raises(ParentError, match="is done"):
                await adding_late

    async def test_at_any_moment_of_the_end_of_its_parent(self, graphs: Graphs) -> None:
        """Added by what the handler has left behind: the parent may miss it, but all ends."""
        seen = set()
        async for moment in graphs.moments():
            parent = await graphs.leased()
            await moment.of(finishing(parent), meanwhile=both(adding(parent), settling))
            await graphs.settle()
            seen.add(tuple(await graphs.states(parent, moment.other[0])))
            await graphs.run_to_the_end()
            assert await graphs.open() == []
            await graphs.assert_settled()
        assert seen == {(WAITING, READY), (DONE, READY)}


class TestTheSameKeyAtOnce:
    async def test_names_one_child(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        services = HandlerServices(
            graphs.database, graphs.scheduler._spec, graphs.scheduler.enqueue
        )
        lease: Any = parent.lease
        async with graphs.limited_time():
            async with graphs.transaction() as take:
                first = await take(adding(parent, "a"))
                again = asyncio.ensure_future(services.add_child(lease, spec(), None, "a", None))
                assert not (await asyncio.wait({again}, timeout=PATIENCE))[0]
            assert (await again).id == first.id


class TestCancelling:
    async def test_a_container_with_a_child_that_is_not_committed_yet(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = workflow()
        inside = wf.add(spec())
        await graphs.write(wf)
        child = await graphs.scheduler.enqueue("work", parent=wf, session=session)
        async with graphs.limited_time():
            cancel = asyncio.ensure_future(graphs.cancel(wf))
            assert not (await asyncio.wait({cancel}, timeout=PATIENCE))[0]
            await session.commit()
            await cancel
            await graphs.settle()
        assert await graphs.states(wf, inside, child) == [CANCELLED] * 3

    async def test_a_container_before_a_child_comes(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        wf = await graphs.write(workflow())
        await graphs.scheduler.cancel(wf, session=session)
        async with graphs.limited_time():
            late = asyncio.ensure_future(graphs.enqueue(parent=wf))
            assert not (await asyncio.wait({late}, timeout=PATIENCE))[0]
            await session.commit()
            with pytest.raises(ParentError, match="being cancelled"):
                await late

    async def test_a_parent_at_any_moment_of_adding_a_child(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            parent = await graphs.leased()
            try:
                child = await moment.of(
                    adding(parent), meanwhile=both(cancelling(parent), settling)
                )
            except ParentError:
                child = None
            await graphs.settle()
            assert child is None or await graphs.state(child) == CANCELLED
            await graphs.end(parent)
            assert await graphs.open() == []

    async def test_at_any_moment_of_it_what_is_below_settles(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            wf = workflow()
            first = wf.container("inner").add(spec())
            second = wf.add(spec(), depends_on=[first])
            (claimed,) = await started(graphs, wf)
            await moment.of(cancelling(wf), meanwhile=both(finishing(claimed), settling))
            await graphs.settle()
            assert await graphs.states(first, second, wf) == [DONE, CANCELLED, CANCELLED]
            await graphs.assert_settled()

    async def test_at_any_moment_of_its_settling_what_is_below_ends(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            wf = workflow()
            first = wf.container("inner").add(spec())
            second = wf.add(spec(), depends_on=[first])
            (claimed,) = await started(graphs, wf)
            await graphs.do(cancelling(wf))
            ending = finishing(claimed)
            await moment.of(settle_once, meanwhile=both(ending, settling))
            if moment.other[0].held:
                await graphs.do(ending)
            await graphs.settle()
            assert await graphs.states(first, second, wf) == [DONE, CANCELLED, CANCELLED]
            await graphs.assert_settled()


class TestRetrying:
    async def test_at_any_moment_of_it_the_failure_settles(self, graphs: Graphs) -> None:
        async for moment in graphs.moments():
            wf = workflow()
            bad = wf.add(spec())
            behind = wf.container("inner", depends_on=[bad]).add(spec())
            (claimed,) = await started(graphs, wf)
            await graphs.finish(claimed, outcome=failed())
            await moment.of(retrying(bad), meanwhile=settling)
            await graphs.settle()
            assert await graphs.states(wf, bad, behind) == [WAITING, READY, BLOCKED]
            await graphs.assert_settled()
            assert await graphs.run_to_the_end() == [bad.id, behind.id]

    async def test_at_any_moment_of_settling_the_retry_somebody_else_settles(
        self, graphs: Graphs
    ) -> None:
        async for moment in graphs.moments():
            bad = await graphs.leased()
            wf = workflow(depends_on=[bad.lease.job_id])
            inside = wf.container("inner").add(spec())
            await graphs.write(wf)
            await graphs.end(bad, outcome=failed())
            await graphs.do(retrying(bad))
            await moment.of(settle_once, meanwhile=settling)
            await graphs.settle()
            assert await graphs.states(bad, wf, inside) == [READY, BLOCKED, BLOCKED]
            await graphs.assert_settled()

    async def test_at_any_moment_of_settling_a_child_that_its_end_had_missed(
        self, graphs: Graphs
    ) -> None:
        """The child is cancelled with its parent, and revived with it, in whichever order."""
        async for moment in graphs.moments():
            parent = await graphs.leased()
            async with graphs.transaction() as handler:
                child = await handler(adding(parent))
                await graphs.finish(parent, outcome=failed())
            await moment.of(settle_once, meanwhile=both(retrying(parent), settling))
            await graphs.settle()
            assert await graphs.states(parent, child) == [READY, READY]
            await graphs.assert_settled()

    async def test_waits_for_no_container_that_somebody_holds(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        """What is revived is in a container that a caller has locked, and must open again."""
        bad = await graphs.leased()
        wf = workflow()
        behind = wf.add(spec(), depends_on=[bad.lease.job_id])
        await graphs.write(wf)
        await graphs.end(bad, outcome=failed())
        assert await graphs.states(wf, behind) == [FAILED, CANCELLED]
        await graphs.scheduler.cancel(wf, session=session)  # it has ended: nothing but a lock
        async with graphs.limited_time():
            await graphs.retry(bad)
            assert await graphs.states(bad, behind) == [READY, CANCELLED]
            await session.rollback()
            await graphs.settle()
        assert await graphs.states(wf, behind) == [WAITING, BLOCKED]
        await graphs.assert_settled()

    @pytest.mark.parametrize("container_first", [True, False])
    async def test_a_container_and_what_is_in_it_at_once_deadlocks_nobody(
        self, graphs: Graphs, container_first: bool
    ) -> None:
        """The second waits for the first, and is refused: it has been done."""
        for number in itertools.count():
            wf = workflow()
            bad = wf.add(spec())
            await graphs.write(wf)
            await graphs.run(bad)
            first, second = (wf, bad) if container_first else (bad, wf)
            refused: list[InvalidJobError] = []

            def retry_second(job: Any = second, refused: list[Any] = refused) -> None:
                try:
                    graphs.elsewhere(retrying(job))
                except InvalidJobError as error:
                    refused.append(error)

            with ThreadPoolExecutor() as pool:
                others: list[Future[None]] = []
                statements = itertools.count()

                def interrupt(
                    *_: object, at: int = number, others: Any = others, statements: Any = statements
                ) -> None:
                    if next(statements) == at:
                        others.append(pool.submit(retry_second))
                        wait(others, timeout=PATIENCE / 4)

                with graphs.kept.elsewhere.begin() as connection:
                    event.listen(connection, "before_cursor_execute", interrupt)
                    with suppress(InvalidJobError):  # the other was there before
                        retrying(first)(connection, graphs.backend)
                for other in others:
                    other.result()
            await graphs.settle()
            assert await graphs.states(wf, bad) == [WAITING, READY]
            await graphs.assert_settled()
            await graphs.run()
            if not others:
                return
