"""Small versions of the graphs that `sizes.py` runs at full size, and what one link costs."""

from __future__ import annotations

from functools import partial

import pytest

from asyncjobq import State
from asyncjobq.settle import settle_once
from conformance.steps import spec
from graphs import sizes
from graphs.kit import Graphs, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("name", ["chain", "fan", "diamond-tenfold", "apart"])
async def test_a_graph_is_run_to_its_end(graphs: Graphs, name: str) -> None:
    scheduler = graphs.another(handlers=[sizes.handlers], concurrency=sizes.SLOTS)
    title, describe = sizes.graphs_of(0.02)[name]
    async with graphs.limited_time(60):
        size = await sizes.run_graph(scheduler, title, describe)
    assert size.jobs > 10
    await graphs.assert_settled()


class TestStatements:
    async def test_of_a_link_of_a_chain(self, graphs: Graphs) -> None:
        """Its own lock and mark, its dependant's edge, lock, state and promotion."""
        first = await graphs.enqueue()
        second = await graphs.enqueue(depends_on=[first])
        await graphs.enqueue(depends_on=[second])
        await graphs.settle()
        assert await self._of_an_end(graphs) == 7

    async def test_of_a_link_in_a_container(self, graphs: Graphs) -> None:
        """Two more, to lock the container and to see whether it is over."""
        wf = workflow()
        first = wf.add(spec())
        wf.add(spec(), depends_on=[first])
        await graphs.write(wf)
        assert await self._of_an_end(graphs) == 9

    @pytest.mark.parametrize("width", [3, 60])
    async def test_of_a_fan_out_are_as_few_as_those_of_one_link(
        self, graphs: Graphs, width: int
    ) -> None:
        first = await graphs.enqueue()
        for _ in range(width):
            await graphs.enqueue(depends_on=[first])
        await graphs.settle()
        assert await self._of_an_end(graphs) == 7

    @pytest.mark.parametrize("awaited", [False, True])
    async def test_to_look_for_circles_are_as_many_for_one_job_as_for_many(
        self, graphs: Graphs, awaited: bool
    ) -> None:
        """Each waits for a container with as many jobs, and for one of these by itself."""
        counts = []
        for width in (3, 40):
            first, second, third = workflow("first"), workflow("second"), workflow("third")
            jobs = [first.add(spec()) for _ in range(width)]
            for job in jobs:
                second.add(spec(), depends_on=[first, job])
            await graphs.write(first)
            if awaited:
                third.add(spec(), depends_on=[second])
            await graphs.write(second)
            if awaited:
                await graphs.write(third)
            counts.append(await graphs.statements_of(settle_once))
            states = await graphs.states(*(draft.node for draft in second.drafts if draft.node))
            assert states == [State.WAITING] + [State.BLOCKED] * width
            await graphs.settle()
        assert counts[0] == counts[1]

    async def _of_an_end(self, graphs: Graphs) -> int:
        """Run what is ready, one job, and count the statements of its settling."""
        (claimed,) = (await graphs.start()).values()
        await graphs.finish(claimed)
        settle = partial(settle_once, job_ids=[claimed.lease.job_id])
        return await graphs.statements_of(settle)
