"""The library's own transactions: what is repeated, what is reported, and what each error means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from asyncpg import InternalClientError
from sqlalchemy import Connection, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.util import await_only

from asyncjobq import CommitUnknownError, DatabaseUnavailableError
from asyncjobq.transactions import ATTEMPTS, Fault, retrying
from conformance.breaking import kill, own_engine
from conformance.kit import Jobs
from conformance.running import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLASSES = {
    "conflict": Fault.CONFLICT,
    "away": Fault.UNAVAILABLE,
    "data": Fault.DATA,
    "other": Fault.OTHER,
}


class Failing:
    """A transaction that meets these errors, one each time, and then succeeds."""

    def __init__(self, *names: str) -> None:
        self._errors: list[Exception] = [LookupError(name) for name in names]
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "committed"

    async def retried(self) -> str:
        return await retrying(self, lambda error: CLASSES[str(error.args[0])])


class TestRetrying:
    async def test_conflicts_up_to_a_number(self) -> None:
        good = Failing(*["conflict"] * (ATTEMPTS - 1))
        assert await good.retried() == "committed"
        bad = Failing(*["conflict"] * 100)
        with pytest.raises(LookupError):
            await bad.retried()
        assert bad.calls == ATTEMPTS

    async def test_a_stale_connection_once(self) -> None:
        assert await Failing("away").retried() == "committed"
        bad = Failing("away", "away")
        with pytest.raises(DatabaseUnavailableError) as caught:
            await bad.retried()
        assert isinstance(caught.value.__cause__, LookupError)
        assert bad.calls == 2

    @pytest.mark.parametrize("name", ["data", "other"])
    async def test_nothing_else(self, name: str) -> None:
        bad = Failing(name)
        with pytest.raises(LookupError):
            await bad.retried()
        assert bad.calls == 1

    async def test_never_a_commit_of_which_nothing_is_known(self) -> None:
        calls = []

        async def transaction() -> None:
            calls.append(1)
            raise CommitUnknownError("cut")

        with pytest.raises(CommitUnknownError):
            await retrying(transaction, lambda _: Fault.CONFLICT)
        assert len(calls) == 1


async def fault_of(jobs: Jobs, work: Callable[[Connection], Any]) -> Fault:
    """Return what the backend makes of the error that `work` meets."""

    def caught(connection: Connection) -> Fault:
        with connection.begin_nested():
            try:
                work(connection)
            except Exception as error:
                faults.append(jobs.backend.fault_of(error))
                raise
        raise AssertionError("no error")

    faults: list[Fault] = []
    with pytest.raises((DBAPIError, DatabaseUnavailableError)):
        await jobs.database.run(caught)
    return faults[0]


async def test_a_read_that_failed_leaves_transactions_whole(jobs: Jobs) -> None:
    """What lets a read do without BEGIN is not there for the next one on its connection."""
    table = jobs.backend.tables.jobs

    def broken(connection: Connection) -> None:
        connection.execute(text("SELECT nothing FROM nowhere"))

    def undone(connection: Connection) -> None:
        connection.execute(table.update().values(name="written"))
        raise LookupError

    job = await jobs.enqueue()
    for _ in range(5):  # whichever connection it is
        with pytest.raises(DBAPIError):
            await jobs.database.read(broken)
        with pytest.raises(LookupError):
            await jobs.database.run(undone)
    assert (await jobs.row(job)).name is None


class TestFaults:
    async def test_of_data(self, jobs: Jobs) -> None:
        version, table = jobs.tables.version, jobs.tables.jobs
        job = await jobs.enqueue()
        for work in (
            lambda c: c.execute(version.insert().values(id=1, version=1)),
            lambda c: c.execute(table.update().values(state="nonsense")),
            lambda c: c.execute(table.update().values(queue=None)),
        ):
            assert await fault_of(jobs, work) is Fault.DATA
        assert job.id

    async def test_of_values_outside_their_types(self, jobs: Jobs) -> None:
        table = jobs.tables.jobs
        job = await jobs.enqueue()
        statements = {
            "sqlite": ["SET id = 'high'"],
            "postgresql": ["SET priority = priority * 2000000000 * 2", "SET run_after = 'soon'"],
        }.get(
            jobs.backend_name,
            [
                "SET priority = 18446744073709551615 * 2",
                "SET priority = 'high'",
                "SET run_after = 'soon'",
                "SET state = REPEAT('x', 200)",
                "SET name = X'ff'",
            ],
        )
        for change in statements:
            query = text(f"UPDATE {table.name} {change} WHERE id = {job.id}")
            found = await fault_of(jobs, lambda c, query=query: c.execute(query))  # type: ignore[misc]
            assert found is Fault.DATA, change

    async def test_of_a_driver_that_lost_its_place(self, jobs: Jobs) -> None:
        """What asyncpg raises when a connection ends in the middle of a message."""
        if jobs.backend_name != "postgresql":
            return
        error = DBAPIError("SELECT 1", {}, Exception("cannot switch to state 12"))
        assert error.orig is not None
        error.orig.__cause__ = InternalClientError("cannot switch to state 12")
        assert jobs.backend.fault_of(error) is Fault.UNAVAILABLE

    async def test_of_statements_that_are_wrong(self, jobs: Jobs) -> None:
        for statement in ("SELEC 1", "SELECT * FROM no_such_table"):
            query = text(statement)
            found = await fault_of(jobs, lambda c, query=query: c.execute(query))  # type: ignore[misc]
            assert found is Fault.OTHER

    @pytest.mark.requires("server")
    async def test_of_a_connection_that_was_killed(self, jobs: Jobs) -> None:
        """It is noticed once, and the transaction is repeated on a new connection."""
        killed: list[int] = []

        def work(connection: Connection) -> int:
            if not killed:
                killed.append(kill(jobs, connection))
            return int(connection.execute(text("SELECT 1")).scalar_one())

        async with jobs.limited_time():
            assert await jobs.database.run(work) == 1
        assert len(killed) == 1

    @pytest.mark.requires("server")
    async def test_of_a_connection_that_was_killed_before_its_commit(self, jobs: Jobs) -> None:
        """Repeating what enqueues might do it twice, so the caller is told that nobody knows."""
        engine = await own_engine(jobs)

        def kill_it(connection: Connection) -> None:
            kill(jobs, connection)

        event.listen(engine, "commit", kill_it)
        try:
            async with jobs.limited_time():
                with pytest.raises(CommitUnknownError, match="whether it happened is unknown"):
                    await jobs.scheduler.enqueue("work")
        finally:
            event.remove(engine, "commit", kill_it)
        assert not issubclass(CommitUnknownError, DatabaseUnavailableError)
        assert len(await jobs.scheduler.find()) <= 1
        assert (await jobs.scheduler.enqueue("work")).id

    @pytest.mark.requires("row_locks")
    async def test_of_a_deadlock(self, jobs: Jobs) -> None:
        """One of the two is repeated, and both are committed."""
        first, second = [job.id for job in await jobs.enqueue_many(2)]
        table = jobs.tables.jobs
        holding = {first: asyncio.Event(), second: asyncio.Event()}

        def locking(mine: int, theirs: int) -> Callable[[Connection], None]:
            def work(connection: Connection) -> None:
                def lock(job_id: int) -> None:
                    row = select(table.c.id).where(table.c.id == job_id)
                    connection.execute(row.with_for_update())

                lock(mine)
                holding[mine].set()
                await_only(holding[theirs].wait())
                lock(theirs)
                raised = table.update().where(table.c.id == mine)
                connection.execute(raised.values(priority=table.c.priority + 1))

            return work

        async with jobs.limited_time(15):
            await asyncio.gather(
                jobs.database.run(locking(first, second)),
                jobs.database.run(locking(second, first)),
            )
        assert {(await jobs.row(job)).priority for job in (first, second)} == {101}

    @pytest.mark.requires("file_database")
    async def test_of_a_file_that_another_process_is_writing_to(self, jobs: Jobs) -> None:
        with jobs.kept.elsewhere.connect() as other:
            other.exec_driver_sql("BEGIN IMMEDIATE")
            writing = asyncio.create_task(jobs.enqueue())
            await asyncio.sleep(0.05)
            assert not writing.done()
            other.exec_driver_sql("COMMIT")

        async def written() -> bool:
            return writing.done()

        await until(written)
        assert (await writing).id
