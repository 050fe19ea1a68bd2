"""Words for tests of graphs: workflows, children, and running what is ready, on a database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, event, func, select

from asyncjobq import Cancelled, Job, JobOptions, Kind, Node, State, Workflow
from asyncjobq.backends.base import Backend
from asyncjobq.children import add_child
from asyncjobq.control import cancel_job, retry_job
from asyncjobq.enqueue import insert_drafts
from asyncjobq.lease import Claimed, Lease
from asyncjobq.outcomes import Outcome
from asyncjobq.states import OPEN, TERMINAL
from conformance.kit import Jobs
from conformance.steps import Step, failed, finishing, id_of, lease_of, spec
from graphs.model import Item, Model

Named = Job[Any] | Claimed | Node[Any] | int
"""How tests call a job."""


def number(job: Named) -> int:
    """Return the id of a job, however it is at hand."""
    return job.id if isinstance(job, Node) else id_of(job)


def workflow(name: str = "workflow", *, fail_fast: bool = False, **options: Any) -> Workflow:
    """Return a workflow to be described, which nothing writes by itself."""
    return Workflow(name, JobOptions.of({**options, "name": name}), fail_fast=fail_fast)


def writing(described: Workflow) -> Step[list[Job[Any]]]:
    """Write a workflow, and give its nodes their ids."""

    def step(connection: Connection, backend: Backend) -> list[Job[Any]]:
        drafts = described.drafts
        jobs = insert_drafts(connection, backend, drafts)
        for draft, job in zip(drafts, jobs, strict=True):
            if draft.node is not None:
                draft.node.write(job.id)
        return jobs

    return step


def adding(to: Claimed | Lease, key: str | None = None, **options: Any) -> Step[Job[Any]]:
    """Add a child to a leased job."""
    child = spec(**options)
    return lambda connection, backend: add_child(connection, backend, lease_of(to), child, key)


def cancelling(job: Named) -> Step[Cancelled]:
    return lambda connection, backend: cancel_job(connection, backend, number(job))


def retrying(job: Named) -> Step[None]:
    return lambda connection, backend: retry_job(connection, backend, number(job))


def item_of(row: Row[Any], edges: dict[int, set[tuple[int, str]]]) -> Item:
    """Return what a row says, but not where it is in the line."""
    state = State(row.state)
    own_end = State.FAILED if row.error else State.DONE
    waits = state is State.WAITING and row.kind == Kind.JOB
    return Item(
        row.id,
        row.parent_id,
        container=row.kind == Kind.CONTAINER,
        fail_fast=bool(row.fail_fast),
        edges=frozenset(edges.get(row.id, ())),
        expires=1.0 if row.in_flight else None,
        over=own_end if waits else None,
        ended=state if state in TERMINAL else None,
        cause=row.cause,
        cancelling=bool(row.cancel_requested),
    )


class Graphs(Jobs):
    """The tables of one scheduler, with the steps that graphs take."""

    async def write(self, described: Workflow) -> Workflow:
        await self.do(writing(described))
        return described

    async def add_child(
        self, to: Claimed | Lease, key: str | None = None, **options: Any
    ) -> Job[Any]:
        return await self.do(adding(to, key, **options))

    async def cancel(self, job: Named) -> Cancelled:
        """Cancel, and settle what follows from it."""
        answer = await self.do(cancelling(job))
        await self.settle()
        return answer

    async def retry(self, job: Named) -> None:
        """Run again, and settle what follows from it."""
        await self.do(retrying(job))
        await self.settle()

    async def end(self, *claimed: Claimed, outcome: Outcome | None = None) -> None:
        """End attempts, and settle what follows from it."""
        await self.do(finishing(*claimed, outcome=outcome))
        await self.settle()

    async def start(self) -> dict[int, Claimed]:
        """Settle, and lease all that is ready; by id."""
        await self.settle()
        return {job.lease.job_id: job for job in await self.claim(10_000)}

    async def run(self, *bad: Named) -> set[int]:
        """Run all that is ready now, `bad` ones to their failure; returns the ids."""
        failing = {number(job) for job in bad}
        claimed = await self.start()
        good = [job for job_id, job in claimed.items() if job_id not in failing]
        await self.finish(*good)
        broken = [job for job_id, job in claimed.items() if job_id in failing]
        await self.finish(*broken, outcome=failed())
        await self.settle()
        return set(claimed)

    async def run_to_the_end(self, *bad: Named) -> list[int]:
        """Run what is ready until nothing is; returns the ids in the order of their rounds."""
        order: list[int] = []
        while ids := await self.run(*bad):
            order += sorted(ids)
        return order

    async def row(self, job: Named) -> Row[Any]:
        return await super().row(number(job))

    async def state(self, job: Named) -> State:
        return State((await self.row(job)).state)

    async def states(self, *jobs: Named) -> list[State]:
        return [await self.state(job) for job in jobs]

    async def why(self, job: Named) -> tuple[State, int | None]:
        """Return a job's state and the job that is the cause of it."""
        row = await self.row(job)
        return State(row.state), row.cause

    async def assert_settled(self) -> None:
        """Assert that nothing is left to settle, and that each state is what the model says."""
        assert (await self.scheduler.check()).findings == ()
        rows, edges = await self.database.read(self._snapshot)
        model = Model({row.id: item_of(row, edges) for row in rows})
        assert [row.id for row in rows if not row.settled] == []
        assert next(model.possible_changes(), None) is None
        unlike = {State.RUNNING: State.LEASED, State.SCHEDULED: State.READY}
        states = {row.id: unlike.get(State(row.state), row.state) for row in rows}
        assert states == {item.id: model.state(item) for item in model.items.values()}

    def _snapshot(self, connection: Connection) -> tuple[Any, dict[int, set[tuple[int, str]]]]:
        jobs, deps = self.tables.jobs, self.tables.deps
        edges: dict[int, set[tuple[int, str]]] = {}
        names = ("job_id", "depends_on_id", "on_failure")
        query = select(*(deps.c[name] for name in names)).where(~deps.c.satisfied)
        for job_id, upstream, rule in connection.execute(query):
            edges.setdefault(job_id, set()).add((upstream, rule))
        columns = [column for column in jobs.c if column.name not in ("args", "result")]
        return connection.execute(select(*columns)).all(), edges

    async def open(self) -> list[int]:
        """Return the ids of all that has not ended."""
        found = await self.scheduler.find(state=sorted(OPEN), limit=100_000)
        return [job.id for job in found]

    async def count(self) -> int:
        """Count all rows."""
        query = select(func.count()).select_from(self.tables.jobs)
        return int(await self.database.read(lambda connection: connection.scalar(query)) or 0)

    async def statements_of(self, step: Step[Any]) -> int:
        """Take a step, and count its statements."""
        counted: list[str] = []

        def work(connection: Connection, backend: Backend) -> None:
            def note(*details: Any) -> None:
                counted.append(details[2])

            event.listen(connection, "before_cursor_execute", note)
            step(connection, backend)
            event.remove(connection, "before_cursor_execute", note)

        await self.do(work)
        return len(counted)
