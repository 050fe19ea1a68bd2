"""Writing a workflow: all of it at once or nothing, in a few statements."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import (
    ArgumentsError,
    CycleError,
    InvalidJobError,
    Kind,
    ParentError,
    SchedulerStateError,
    State,
    UnknownUpstreamError,
    after,
)
from conformance.steps import enqueuing, spec
from graphs.kit import Graphs, workflow, writing

pytestmark = pytest.mark.asyncio(loop_scope="module")


class TestWriting:
    async def test_gives_ids_when_the_block_ends(self, graphs: Graphs) -> None:
        async with graphs.scheduler.workflow("nightly", group_key="acme", meta={"a": 1}) as wf:
            job = wf.add(spec(), priority=3)
            inner = wf.container("inner", meta={"b": 2})
            deep = inner.add(spec(), name="deep")
            for node in (wf, job, inner, deep):
                with pytest.raises(InvalidJobError, match="block ends"):
                    _ = node.id
        found = {job.id: job for job in await graphs.scheduler.find()}
        assert set(found) == {wf.id, job.id, inner.id, deep.id}
        outer = found[wf.id]
        assert (outer.kind, outer.name, outer.group_key) == (Kind.CONTAINER, "nightly", "acme")
        assert (outer.meta, found[inner.id].meta) == ({"a": 1}, {"b": 2})
        assert (found[job.id].parent_id, found[job.id].priority) == (wf.id, 3)
        assert (found[deep.id].parent_id, found[deep.id].name) == (inner.id, "deep")

    async def test_does_not_happen_if_the_block_raises(self, graphs: Graphs) -> None:
        with pytest.raises(RuntimeError, match="stop"):
            async with graphs.scheduler.workflow("nightly") as wf:
                wf.add(spec())
                raise RuntimeError("stop")
        assert await graphs.count() == 0

    async def test_is_a_part_of_the_callers_transaction(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        for commit in (False, True):
            async with graphs.scheduler.workflow("nightly", session=session) as wf:
                job = wf.add(spec())
            assert session.in_transaction()
            assert await graphs.count() == 0
            await (session.commit() if commit else session.rollback())
        assert await graphs.run_to_the_end() == [job.id]
        assert await graphs.state(wf) == State.DONE

    async def test_is_described_in_a_block(self, graphs: Graphs) -> None:
        described: Any = graphs.scheduler.workflow("nightly")
        with pytest.raises(AttributeError, match=r"async with ….workflow\(…\).*'add'"):
            described.add(spec())
        with pytest.raises(TypeError, match="async with"), described:
            pass
        with pytest.raises(TypeError, match="async with"):
            await described
        async with described as wf:
            wf.add(spec())
        assert await graphs.count() == 2

    async def test_below_a_container_that_exists(self, graphs: Graphs) -> None:
        outer = await graphs.write(workflow("outer"))
        first = await graphs.enqueue()
        async with graphs.scheduler.workflow("inner", parent=outer, depends_on=[first]) as wf:
            job = wf.add(spec())
        assert await graphs.run_to_the_end() == [first.id, job.id]
        assert await graphs.states(wf, outer) == [State.DONE] * 2

    async def test_takes_a_few_statements_however_large(self, graphs: Graphs) -> None:
        """1,000 jobs in 20 containers, and 2,000 edges."""
        counts = []
        for size in (10, 1000):
            wf = workflow()
            inner = [wf.container(f"part {number}") for number in range(20)]
            jobs: list[Any] = []
            for number in range(size):
                upstreams = [jobs[number // 2], jobs[number - 1]] if number > 1 else []
                jobs.append(inner[number % 20].add(spec(), depends_on=upstreams))
            counts.append(await graphs.statements_of(writing(wf)))
        assert counts[1] - counts[0] < 12
        assert await graphs.count() == 1010 + 42


class TestRefusal:
    @pytest.mark.parametrize(
        ("error", "options"),
        [
            (UnknownUpstreamError, {"depends_on": [10**12]}),
            (InvalidJobError, {"weight": -1}),
            (InvalidJobError, {"colour": "red"}),
        ],
    )
    async def test_writes_nothing(
        self, graphs: Graphs, error: type[Exception], options: dict[str, Any]
    ) -> None:
        with pytest.raises(error):
            async with graphs.scheduler.workflow("nightly") as wf:
                wf.add(spec())
                wf.add(spec(), **options)
        assert await graphs.count() == 0

    async def test_of_arguments_that_do_not_fit_their_handler(self, graphs: Graphs) -> None:
        @graphs.scheduler.handler
        async def work(number: int) -> None: ...

        with pytest.raises(ArgumentsError):
            async with graphs.scheduler.workflow("nightly") as wf:
                wf.add(work.job(number=1))
                wf.add(spec("work", {"size": 2}))
        assert await graphs.count() == 0

    async def test_of_a_parent_that_is_over(self, graphs: Graphs) -> None:
        outer = await graphs.write(workflow("outer"))
        await graphs.settle()
        with pytest.raises(ParentError, match="is done"):
            async with graphs.scheduler.workflow("inner", parent=outer) as wf:
                wf.add(spec())
        assert await graphs.count() == 1

    async def test_of_a_parent_option_in_a_container(self, graphs: Graphs) -> None:
        wf, other = workflow(), workflow()
        with pytest.raises(InvalidJobError, match="parent="):
            wf.add(spec(), parent=other)
        job: Any = "work"
        with pytest.raises(InvalidJobError, match="is not a job"):
            wf.add(job)

    async def test_of_what_is_added_after_the_block(self, graphs: Graphs) -> None:
        async with graphs.scheduler.workflow("w") as wf:
            inner = wf.container("inner")
        for container in (wf, inner):
            with pytest.raises(SchedulerStateError, match="block of this workflow is over"):
                container.add(spec())
            with pytest.raises(SchedulerStateError, match="block of this workflow is over"):
                container.container("late")
        assert await graphs.count() == 2

    async def test_of_a_time_that_no_calendar_has_leaves_nothing_behind(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        with pytest.raises(InvalidJobError, match="century"):
            async with graphs.scheduler.workflow("w", session=session) as wf:
                wf.add(spec(), run_after=timedelta.max)
        await session.commit()
        assert await graphs.count() == 0

    async def test_of_a_job_of_another_workflow_that_is_not_written(self, graphs: Graphs) -> None:
        wf, other = workflow(), workflow()
        wf.add(spec(), depends_on=[other.add(spec())])
        with pytest.raises(InvalidJobError, match="another workflow"):
            await graphs.write(wf)
        await graphs.do(writing(other))
        await graphs.do(writing(wf))
        assert await graphs.count() == 4


class TestCircles:
    """Written, they would wait for ever; so they are refused, and the error shows the way round."""

    async def test_of_containers_that_gate_each_other(self, graphs: Graphs) -> None:
        wf = workflow("w")
        a = wf.container("a")
        b = wf.container("b", depends_on=[a])
        a.add(spec(name="j"), depends_on=[b])
        with pytest.raises(CycleError) as refused:
            await graphs.write(wf)
        path = refused.value.path
        assert path[0] == path[-1]
        assert set(path) == {"a", "b", "j"}
        assert " → ".join(path) in str(refused.value)
        assert await graphs.count() == 0

    async def test_of_three_jobs(self, graphs: Graphs) -> None:
        """A after B's container, B after C's, C after A's."""
        wf = workflow("w")
        boxes = [wf.container(name) for name in "abc"]
        for box, upstream in zip(boxes, boxes[1:] + boxes[:1], strict=True):
            box.add(spec(name=f"in {box.name}"), depends_on=[upstream])
        with pytest.raises(CycleError) as refused:
            await graphs.write(wf)
        assert {"in a", "in b", "in c"} <= set(refused.value.path)

    @pytest.mark.parametrize("depth", [0, 1, 3])
    async def test_of_what_is_in_the_container_it_depends_on(
        self, graphs: Graphs, depth: int
    ) -> None:
        wf = workflow("w")
        above: Any = wf
        for level in range(depth):
            above = above.container(f"level {level}")
        above.add(spec(name="j"), depends_on=[wf])
        with pytest.raises(CycleError):
            await graphs.write(wf)

    async def test_through_what_exists_already(self, graphs: Graphs) -> None:
        wf = workflow("w")
        a = wf.container("a")
        b = wf.container("b", depends_on=[a])
        c = wf.container("c", depends_on=[b])
        a.add(spec(), run_after=60.0)
        await graphs.write(wf)
        for upstream, way in ((a, [a]), (b, [b, a]), (c, [c, b, a]), (wf, [wf])):
            with pytest.raises(CycleError) as refused:
                await graphs.enqueue(parent=a, depends_on=[upstream])
            assert refused.value.path[1:] == [str(node.id) for node in way]
        with pytest.raises(CycleError):
            async with graphs.scheduler.workflow("inner", parent=a) as inner:
                inner.container("deep").add(spec(), depends_on=[c])
        assert await graphs.enqueue(parent=c, depends_on=[a])

    async def test_between_jobs_of_one_call(self, graphs: Graphs) -> None:
        a, b = await graphs.write(workflow("a")), await graphs.write(workflow("b"))
        into_a, into_b = spec(parent=a, depends_on=[b]), spec(parent=b, depends_on=[a])
        with pytest.raises(CycleError):
            await graphs.do(enqueuing(into_a, into_b))
        made = await graphs.do(enqueuing(into_a, spec(parent=b), spec(depends_on=[a])))
        assert await graphs.run_to_the_end() == [made[1].id, made[0].id, made[2].id]

    async def test_are_none_where_a_job_follows_the_container_of_another(
        self, graphs: Graphs
    ) -> None:
        wf = await graphs.write(workflow())
        inside, behind = await graphs.do(enqueuing(spec(parent=wf), spec(depends_on=[wf])))
        assert await graphs.run_to_the_end() == [inside.id, behind.id]

    async def test_are_none_where_what_would_close_them_has_ended(self, graphs: Graphs) -> None:
        wf = workflow()
        wf.add(spec())
        await graphs.write(wf)
        gone = await graphs.enqueue(depends_on=[wf])
        await graphs.cancel(gone)
        anyway = await graphs.enqueue(parent=wf, depends_on=[after(gone, on_failure="run")])
        await graphs.run_to_the_end()
        assert await graphs.states(anyway, wf) == [State.DONE] * 2

    async def test_leave_the_callers_transaction_usable(
        self, graphs: Graphs, session: AsyncSession
    ) -> None:
        scheduler = graphs.scheduler
        first = await scheduler.enqueue("work", session=session)
        with pytest.raises(CycleError):
            async with scheduler.workflow("w", session=session) as wf:
                a = wf.container("a")
                a.add(spec(), depends_on=[wf.container("b", depends_on=[a])])
        async with scheduler.workflow("w", session=session) as wf:
            second = wf.add(spec(), depends_on=[first])
        await session.commit()
        assert await graphs.run_to_the_end() == [first.id, second.id]
        assert await graphs.count() == 3
