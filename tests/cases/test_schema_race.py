"""Several processes create the tables in an empty database at the same moment, and serve.

"If not exists" does not make that safe: the loser would crash, wait for ever, or find tables that
are half made. And where the tables are up to date, creating them must change and lock nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from sqlalchemy import inspect, select, text, update

import asyncjobq
from asyncjobq import JobRow
from asyncjobq.models import SCHEMA_VERSION, SchemaVersionRow
from cases.application import Application, Order
from cases.workers import FULL, SLACK, Case, wait_until

PROCESSES = 8
ROUNDS = 20 if FULL else 2


@pytest.mark.parametrize("turn", range(ROUNDS))
async def test_eight_processes_at_once(empty_case: Case, tmp_path: Path, turn: int) -> None:
    """Every other round is beside an idle transaction."""
    case, start = empty_case, tmp_path / "start"
    names = [f"worker {turn}.{number}" for number in range(PROCESSES)]
    workers = [
        case.start_worker(name, create_schema=True, start_when=str(start), lease_ttl=10.0)
        for name in names
    ]
    await wait_until(lambda: len(case.log.entries("waiting")) == PROCESSES, 20.0, "all wait")
    async with case.engine.connect() as connection:
        if turn % 2:
            await connection.run_sync(Application.metadata.create_all)
            await connection.commit()
            await connection.execute(text("BEGIN"))
            await connection.execute(select(Order))
        start.touch()
        if turn % 2 and case.engine.dialect.name == "sqlite":
            await asyncio.sleep(0.5)  # whoever reads a file that is not yet in WAL mode holds it up
            await connection.rollback()
        await case.up(*workers)
    await case.check_alive(*workers)
    assert await case.rows(select(SchemaVersionRow.version)) == [(SCHEMA_VERSION,)]
    async with case.engine.connect() as connection:
        tables = await connection.run_sync(lambda c: inspect(c).get_table_names())
    ours = {table.name for table in asyncjobq.metadata.sorted_tables}
    assert ours == set(tables) - {"orders"}


async def test_again_changes_nothing_and_waits_for_nobody(case: Case) -> None:
    await case.add("job")
    before = await case.rows(select(JobRow.id, JobRow.state, JobRow.updated_at))
    async with case.engine.connect() as connection:
        await connection.execute(update(JobRow).values(name="an open transaction's"))
        begun = time.monotonic()
        async with asyncio.timeout(SLACK):
            await case.scheduler.create_schema()
        assert time.monotonic() - begun < 2.0
        await connection.rollback()
    assert await case.rows(select(JobRow.id, JobRow.state, JobRow.updated_at)) == before
