"""A night's sales over real files: one with a bad line, one that is no CSV, mended afterwards.

On every database at full length; otherwise on two, for each run takes several interpreters.
"""

from __future__ import annotations

import asyncio
import csv
import os
import shutil
import signal
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from asyncjobq import Scheduler
from examples.programs import COMMAND, EXAMPLES, Place

EXAMPLE = str(EXAMPLES / "nightly_sales.py")
FULL = bool(os.environ.get("ASYNCJOBQ_TEST_FULL"))
DATABASES = ("sqlite", "postgresql", "mysql", "mariadb") if FULL else ("sqlite", "postgresql")


def sums(day: Path) -> list[str]:
    """Return what the report should say, from the files themselves."""
    lines = ["region,sales,euros"]
    for region in ("north", "south", "west"):
        cents = []
        for path in sorted((day / region).glob("*.csv")):
            with path.open(newline="") as file:
                rows = [row["cents"] for row in csv.DictReader(file)]
            cents += [int(value) for value in rows if value.isdigit()]
        lines.append(f"{region},{len(cents)},{sum(cents) / 100:.2f}")
    return lines


async def stored(url: str) -> int:
    """Return how many sales are in the table."""
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        number = (await connection.execute(text("SELECT count(*) FROM sales"))).scalar_one()
    await engine.dispose()
    return int(number)


@pytest.mark.parametrize("backend_name", DATABASES, indirect=True)
async def test_a_night_that_is_mended(place: Place, database_url: str) -> None:
    folder = place.folder / "sales"
    day = folder / "2026-11-29"
    failed = place.run(EXAMPLE, str(folder), DATABASE_URL=database_url)
    assert failed.returncode == 0, failed.stderr
    assert failed.stdout.splitlines() == [
        "west: not read: shop3.csv",
        "The night is failed: 17 done, 2 failed, 1 cancelled.",
    ]
    assert "shop3.csv has the columns ['%PDF-1.7']" in failed.stderr
    assert (day / "north" / "shop1.set-aside").read_text().count("four euros") == 1

    shutil.copy(day / "west" / "shop0.csv", day / "west" / "shop3.csv")
    mended = place.run(EXAMPLE, str(folder), DATABASE_URL=database_url)
    assert (mended.returncode, mended.stderr) == (0, "")
    expected = sums(day)
    assert mended.stdout.splitlines() == [*expected, "The night is done: 20 done."]
    assert not (day / "problems.txt").exists()
    again = place.run(EXAMPLE, str(folder), DATABASE_URL=database_url)
    assert again.stdout == mended.stdout
    assert await stored(database_url) == sum(int(line.split(",")[1]) for line in expected[1:])
    assert place.left_behind == []


async def test_its_worker_runs_each_night(place: Place) -> None:
    url = f"sqlite+aiosqlite:///{place.folder / 'sales.db'}"
    async with Scheduler(url) as scheduler:
        await scheduler.create_schema()
        worker = (*COMMAND, "worker", "nightly_sales:scheduler", "--app-dir", str(EXAMPLES))
        with place.running(*worker, DATABASE_URL=url) as program:
            program.wait_for_output("serves the queues default")
            async with asyncio.timeout(30):
                while not (schedules := await scheduler.schedules()):
                    await asyncio.sleep(0.02)
            program.signal(signal.SIGTERM)
            assert program.exit_code() == 0, program.output
            program.check_output()
        assert [(one.name, one.cron) for one in schedules] == [("start_night", "0 2 * * *")]
