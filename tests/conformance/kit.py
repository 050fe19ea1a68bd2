"""A database with the library's tables, and the steps of a job's path on it, in a line each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    Row,
    create_engine,
    delete,
    event,
    exists,
    make_url,
    select,
    update,
)
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from asyncjobq import Job, Scheduler
from asyncjobq.backends.base import Backend
from asyncjobq.finalize import Written
from asyncjobq.lease import Claimed, Lease, Renewal, reclaim_once
from asyncjobq.outcomes import Outcome
from asyncjobq.ready import promote_once
from asyncjobq.settle import Sweep, settle_once
from asyncjobq.states import TERMINAL, State
from conformance.steps import (
    PATIENCE,
    TTL,
    Step,
    claiming,
    enqueuing,
    finishing,
    id_of,
    renewing,
    spec,
)

T = TypeVar("T")

ISOLATION_LEVELS: Final = {
    "sqlite": ["SERIALIZABLE", "READ UNCOMMITTED"],
    "postgresql": ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
    "mysql": ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
    "mariadb": ["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
}
SYNC_DRIVERS: Final = {
    "sqlite": "sqlite+pysqlite",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
# A step that waits for a lock would wait for the very test that it is part of.
LOCK_WAITS: Final[dict[str, dict[str, Any]]] = {
    "sqlite": {"timeout": 3},
    "postgresql": {"options": "-c lock_timeout=3s"},
    "mysql": {"init_command": "SET SESSION innodb_lock_wait_timeout = 3"},
    "mariadb": {"init_command": "SET SESSION innodb_lock_wait_timeout = 3"},
}


class Moment:
    """One place between the statements of a step, at which something else happens."""

    def __init__(self, jobs: Jobs, number: int) -> None:
        self._jobs = jobs
        self.number = number
        self.last = False
        """Whether it lay between the step's last statement and its COMMIT."""
        self.other: Any = None
        """What the other step returned."""

    async def of(self, step: Step[T], meanwhile: Step[Any]) -> T:
        """Take a step, and at this moment of it another, committed, on another connection."""

        def work(connection: Connection, backend: Backend) -> T:
            statements = itertools.count()

            def interrupt(*_: object) -> None:
                if next(statements) == self.number:
                    self.other = self._jobs.elsewhere(meanwhile)

            event.listen(connection, "before_cursor_execute", interrupt)
            result = step(connection, backend)
            event.remove(connection, "before_cursor_execute", interrupt)
            if next(statements) <= self.number:
                self.last = True
                self.other = self._jobs.elsewhere(meanwhile)
            return result

        return await self._jobs.do(work)


class Kept:
    """A backend's database and the connections to it, for one test after the other."""

    def __init__(self, url: str, backend_name: str) -> None:
        self.url = url
        self.backend_name = backend_name
        self.owner = Scheduler(url)
        self.database = self.owner._database
        self.application = create_async_engine(url)
        self.elsewhere = self.sync_engine()

    def sync_engine(self) -> Engine:
        """Return an engine with the synchronous driver; the library's isolation level."""
        url = make_url(self.url).set(drivername=SYNC_DRIVERS[self.backend_name])
        waits = LOCK_WAITS[self.backend_name]
        if self.backend_name == "sqlite":
            return create_engine(url, poolclass=NullPool, connect_args=waits)
        return create_engine(url, isolation_level="READ COMMITTED", connect_args=waits)

    async def close(self) -> None:
        self.elsewhere.dispose()
        await self.application.dispose()
        await self.owner.aclose()


class Jobs:
    """The tables of one scheduler, and the steps on them, each in a transaction of its own."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.url = kept.url
        self.backend_name = kept.backend_name
        self.database = kept.database
        self.backend = self.database.backend
        self.tables = self.backend.tables
        self.scheduler = Scheduler(kept.url, concurrency=4, poll_interval=0.1, stop_timeout=5)
        self.scheduler._database = self.database
        self._others: list[Scheduler] = []

    async def close(self) -> None:
        """Leave the tables empty and the clock right, for the next test."""
        for scheduler in self._others:
            await scheduler.aclose()
        self.scheduler.stop()
        if self.scheduler._worker is not None:
            await self.scheduler._worker.stopped.wait()
        self.backend.clock_offset = 0.0
        await self.do(_clear)

    def another(self, **settings: Any) -> Scheduler:
        """Return one more scheduler on the same tables."""
        scheduler = Scheduler(self.url, **settings)
        self._others.append(scheduler)
        return scheduler

    # -- steps ----------------------------------------------------------------------------------

    async def do(self, step: Step[T]) -> T:
        """Take a step in a transaction of the library's own."""
        return await self.database.run(lambda connection: step(connection, self.backend))

    def elsewhere(self, step: Step[T]) -> T:
        """Take a step on a connection that this scheduler knows nothing of, as a process would."""
        with self.kept.elsewhere.begin() as connection:
            return step(connection, self.backend)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Callable[[Step[Any]], Awaitable[Any]]]:
        """Hold a transaction like the library's open, to take steps in; commit it at the end."""
        pool: Any = self.database
        async with (await pool._pool.get()).begin() as connection:

            async def take(step: Step[Any]) -> Any:
                return await connection.run_sync(lambda sync: step(sync, self.backend))

            yield take

    async def moments(self) -> AsyncIterator[Moment]:
        """Give each moment of a step in turn, on empty tables, until it has no more."""
        for number in itertools.count():
            await self.do(_clear)
            moment = Moment(self, number)
            yield moment
            if moment.last:
                return

    @asynccontextmanager
    async def limited_time(self, seconds: float = PATIENCE) -> AsyncIterator[None]:
        """Fail what should be over long before."""
        async with asyncio.timeout(seconds):
            yield

    def later(self, seconds: float) -> None:
        """Move the database's clock."""
        self.backend.clock_offset += seconds

    async def enqueue(
        self, type_name: str = "work", /, args: dict[str, Any] | None = None, **options: Any
    ) -> Job[Any]:
        return (await self.do(enqueuing(spec(type_name, args, **options))))[0]

    async def enqueue_many(self, count: int, **options: Any) -> list[Job[Any]]:
        return await self.do(enqueuing(*[spec(**options)] * count))

    async def claim(self, count: int = 1, owner: str = "worker", **how: Any) -> list[Claimed]:
        return await self.do(claiming(count, owner, **how))

    async def claim_one(self, owner: str = "worker", **how: Any) -> Claimed:
        (claimed,) = await self.claim(1, owner, **how)
        return claimed

    async def leased(self, owner: str = "worker", **options: Any) -> Claimed:
        """Enqueue a job and lease it."""
        await self.enqueue(**options)
        return await self.claim_one(owner)

    async def renew(self, *leases: Claimed | Lease, ttl: float = TTL) -> Renewal:
        return await self.do(renewing(*leases, ttl=ttl))

    async def finish(self, *leases: Claimed | Lease, outcome: Outcome | None = None) -> Written:
        return await self.do(finishing(*leases, outcome=outcome))

    async def run_all(self, outcome: Outcome | None = None) -> list[int]:
        """Claim and finish what is ready, and settle; return the ids."""
        claimed = await self.claim(1000)
        await self.finish(*claimed, outcome=outcome)
        await self.settle()
        return [job.lease.job_id for job in claimed]

    async def settle(self) -> None:
        """Settle all that can be."""
        sweep = Sweep()
        while not sweep.over:
            sweep.note(await self.do(partial(settle_once, after=sweep.after)))

    async def reclaim(self) -> list[int]:
        return [item.row.id for item in await self.do(reclaim_once)]

    async def promote(self) -> int:
        return await self.do(promote_once)

    # -- looking --------------------------------------------------------------------------------

    async def row(self, job: Job[Any] | Claimed | int) -> Row[Any]:
        """Return a job's row, with the columns that no `Job` shows."""
        jobs = self.tables.jobs
        columns = [c for c in jobs.c if c.name != "args"]
        query = select(*columns).where(jobs.c.id == id_of(job))
        return await self.do(lambda connection, _: connection.execute(query).one())

    async def state(self, job: Job[Any] | Claimed | int) -> State:
        return State((await self.row(job)).state)

    async def states(self, *jobs: Job[Any] | Claimed | int) -> list[State]:
        return [await self.state(job) for job in jobs]

    async def unsettled(self) -> list[int]:
        jobs = self.tables.jobs
        query = select(jobs.c.id).where(~jobs.c.settled).order_by(jobs.c.id)
        return list(await self.do(lambda connection, _: connection.scalars(query).all()))

    async def spoil(self, job: Job[Any] | Claimed | int, **values: Any) -> None:
        """Write what no code of the library would."""
        jobs = self.tables.jobs
        statement = update(jobs).where(jobs.c.id == id_of(job)).values(**values)
        await self.do(lambda connection, _: connection.execute(statement))

    async def now(self) -> Any:
        """Return the database's time."""
        return await self.do(lambda connection, backend: backend.read_clock(connection))


async def assert_nothing_is_stranded(jobs: Jobs) -> None:
    """Assert that every row is settled, and that what is blocked waits for somebody."""
    table, deps = jobs.tables.jobs, jobs.tables.deps
    upstream = table.alias("upstream")
    waits = (
        exists()
        .where(deps.c.job_id == table.c.id, ~deps.c.satisfied)
        .where(upstream.c.id == deps.c.depends_on_id, upstream.c.state.not_in(TERMINAL))
    )
    blocked = select(table.c.id).where(table.c.state == State.BLOCKED, ~waits.correlate(table))
    assert await jobs.do(lambda c, _: c.scalars(blocked).all()) == []
    assert await jobs.unsettled() == []


def _clear(connection: Connection, backend: Backend) -> None:
    tables = backend.tables
    for table in reversed(tables.all):
        if table is not tables.version:
            connection.execute(delete(table))
