"""Seeing a graph: its nodes and edges with states, and drawings of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from asyncjobq import Edge, Graph, Job, JobNotFoundError, Kind, State, after
from conformance.steps import spec
from graphs.kit import Graphs, workflow

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKED, READY, WAITING = State.BLOCKED, State.READY, State.WAITING
DONE, FAILED, CANCELLED = State.DONE, State.FAILED, State.CANCELLED


class TestGraph:
    async def test_has_all_of_a_workflow_from_any_of_its_jobs(self, graphs: Graphs) -> None:
        wf = workflow("nightly")
        a = wf.add(spec(name="a"))
        inner = wf.container("inner", depends_on=[a])
        b = inner.add(spec(name="b"))
        c = wf.add(spec(name="c"), depends_on=[after(inner, on_failure="run"), a])
        await graphs.write(wf)
        await graphs.run(a)
        for job in (wf, a, inner, b, c):
            graph = await graphs.scheduler.graph(job)
            assert [(job.id, job.name, job.state) for job in graph.jobs] == sorted(
                [
                    (wf.id, "nightly", FAILED),
                    (a.id, "a", FAILED),
                    (inner.id, "inner", CANCELLED),
                    (b.id, "b", CANCELLED),
                    (c.id, "c", CANCELLED),
                ]
            )
            assert set(graph.edges) == {
                Edge(inner.id, a.id, satisfied=False, on_failure="cancel"),
                Edge(c.id, inner.id, satisfied=False, on_failure="run"),
                Edge(c.id, a.id, satisfied=False, on_failure="cancel"),
            }
        kinds = {job.id: job.kind for job in graph.jobs}
        assert (kinds[inner.id], kinds[a.id]) == (Kind.CONTAINER, Kind.JOB)

    async def test_follows_edges_and_children_in_both_directions(self, graphs: Graphs) -> None:
        parent = await graphs.leased()
        child = await graphs.add_child(parent)
        before = await graphs.enqueue()
        last = await graphs.enqueue(depends_on=[child, before])
        alone = await graphs.enqueue()
        linked = [parent.lease.job_id, child.id, before.id, last.id]
        for job in linked:
            assert [found.id for found in (await graphs.scheduler.graph(job)).jobs] == linked
        graph = await graphs.scheduler.graph(alone)
        assert ([job.id for job in graph.jobs], graph.edges) == ([alone.id], ())

    async def test_reads_no_more_than_about_its_limit(self, graphs: Graphs) -> None:
        chain = [await graphs.enqueue()]
        for _ in range(9):
            chain.append(await graphs.enqueue(depends_on=chain[-1:]))
        graph = await graphs.scheduler.graph(chain[0], limit=5)
        assert [job.id for job in graph.jobs] == [job.id for job in chain[:5]]
        assert len(graph.edges) == 4

    async def test_says_where_its_limit_has_cut_it(self, graphs: Graphs) -> None:
        """What is nearest is there, and edges only between what is."""
        wf = workflow()
        first = wf.add(spec())
        jobs = [wf.add(spec(), depends_on=[first]) for _ in range(6)]
        await graphs.write(wf)
        for limit, cut in ((1, True), (2, True), (4, True), (7, True), (8, False), (9, False)):
            graph = await graphs.scheduler.graph(wf, limit=limit)
            assert (len(graph.jobs), graph.cut) == (min(limit, 8), cut)
            there = {job.id for job in graph.jobs}
            assert wf.id in there
            assert all({edge.job_id, edge.depends_on_id} <= there for edge in graph.edges)
        assert len(graph.edges) == len(jobs)

    async def test_of_what_does_not_exist_is_refused(self, graphs: Graphs) -> None:
        with pytest.raises(JobNotFoundError):
            await graphs.scheduler.graph(10**12)


async def drawn(graphs: Graphs) -> tuple[dict[str, int], str, str]:
    """Return the ids by name, and both drawings, of a graph with all there is in one."""
    wf = workflow('the "nightly" <one>')
    a = wf.add(spec(name="a"))
    inner = wf.container("inner", depends_on=[a])
    b = inner.add(spec(name="line\nbreak \\"))
    c = wf.add(spec(), depends_on=[after(inner, on_failure="run")])
    await graphs.write(wf)
    await graphs.run()
    graph = await graphs.scheduler.graph(wf)
    ids = {"w": wf.id, "a": a.id, "i": inner.id, "b": b.id, "c": c.id}
    return ids, graph.to_mermaid(), graph.to_dot()


class Counted(tuple[Job[Any], ...]):  # noqa: SLOT001  it has a count of its own
    """Jobs that count how often somebody has gone through all of them."""

    times = 0

    def __iter__(self) -> Iterator[Job[Any]]:
        self.times += 1
        return super().__iter__()


def job(number: int, parent: int | None, kind: Kind) -> Job[Any]:
    return Job(number, "default", "work", kind, State.DONE, {}, parent_id=parent)


class TestDrawing:
    @pytest.mark.parametrize("draw", [Graph.to_mermaid, Graph.to_dot])
    async def test_goes_through_the_jobs_a_few_times_however_many(
        self, draw: Callable[[Graph], str]
    ) -> None:
        wide = Counted(job(n, 1 if n > 1 else None, Kind.CONTAINER) for n in range(1, 50))
        assert len(draw(Graph(wide, ())).splitlines()) > 2 * 49
        assert wide.times < 5

    @pytest.mark.parametrize("draw", [Graph.to_mermaid, Graph.to_dot])
    async def test_of_containers_in_containers_however_deep(
        self, draw: Callable[[Graph], str]
    ) -> None:
        deep = tuple(job(n, n - 1 if n > 1 else None, Kind.CONTAINER) for n in range(1, 3001))
        assert "3000" in draw(Graph(deep, ()))

    async def test_for_mermaid(self, graphs: Graphs) -> None:
        ids, mermaid, _ = await drawn(graphs)
        expected = """flowchart LR
  subgraph jw ["the 'nightly' (one> · waiting"]
    ja["a · done"]
    subgraph ji ["inner · waiting"]
      jb["line break \\ · ready"]
    end
    jc["work · blocked"]
  end
  ja --> ji
  ji -.-> jc
  style ja fill:#b7e1cd
"""
        for name, job_id in ids.items():
            expected = expected.replace(f"j{name}", f"j{job_id}")
        # Containers have lower ids than jobs, and come first.
        assert sorted(mermaid.splitlines()) == sorted(expected.splitlines())

    async def test_for_graphviz(self, graphs: Graphs) -> None:
        ids, _, dot = await drawn(graphs)
        assert f'subgraph cluster_{ids["i"]} {{ label="inner · waiting";' in dot
        assert f'j{ids["a"]} [label="a · done", fillcolor="#b7e1cd"];' in dot
        assert f'j{ids["b"]} [label="line break \\\\ · ready"' in dot
        assert f"j{ids['a']} -> j{ids['i']}" in dot
        assert f"j{ids['i']} -> j{ids['c']} [style=dashed" in dot
        assert dot.count("{") == dot.count("}")
