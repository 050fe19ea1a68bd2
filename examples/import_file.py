"""Import a long file, have the worker killed half way, and find every row there exactly once.

    python examples/import_file.py [URL OF A DATABASE]

The file lists the characters of the world's alphabets, some 11,000 rows of CSV. Each portion of it
is one transaction of the import's own: the rows, and the checkpoint that says how far they go.
Either both are there or neither, so whoever takes over goes on behind the last row that is.
"""

from __future__ import annotations

import asyncio
import csv
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from sqlalchemy import Column, Integer, MetaData, String, Table, distinct, func, select
from sqlalchemy.ext.asyncio import create_async_engine

from asyncjobq import Handlers, Job, JobContext, Scheduler

PORTION: Final = 250
LAST_CODE: Final = 0x2FFF
"""Behind it come Chinese characters, which have numbers and no names."""

metadata = MetaData()
characters = Table(
    "characters",
    metadata,
    # No unique key: it would hide that a row was written twice.
    Column("code", Integer, index=True),
    Column("category", String(2)),
    Column("name", String(100)),
)
imports = Table("imports", metadata, Column("file", String(500)), Column("number", Integer))

handlers = Handlers()


@handlers.handler(timeout=600)
async def import_characters(ctx: JobContext, path: str, rows: int) -> int:
    """Import the rows behind the last checkpoint; list the import when it is complete."""
    done = ctx.checkpointed or 0
    print(f"Attempt {ctx.attempt} begins at row {done:,}.", flush=True)
    with Path(path).open(newline="", encoding="utf-8") as file:  # noqa: ASYNC230  a local file
        left = islice(csv.reader(file), done, None)
        while portion := [parsed(row) for row in islice(left, PORTION)]:
            async with ctx.session() as session, session.begin():
                await session.execute(characters.insert(), portion)
                done += len(portion)
                # Last, because it locks the job's row, which the scheduler wants to renew.
                await ctx.checkpoint(done, session)
            ctx.progress(done, rows, f"{PORTION} rows at a time")
            await asyncio.sleep(0.03)  # real sources are slower than a local file
    async with ctx.session() as session, session.begin():
        await session.execute(imports.insert().values(file=path, number=done))
        await ctx.complete(session, done)  # listed once: the same commit makes the job done
    return done


def parsed(row: list[str]) -> dict[str, Any]:
    """Return a row of the file as the table has it."""
    code, category, name = row
    return {"code": int(code, 16), "category": category, "name": name}


def all_characters() -> Iterator[tuple[str, str, str]]:
    """Yield code, category and name of the characters that are assigned."""
    for code in range(LAST_CODE + 1):
        if name := unicodedata.name(chr(code), ""):
            yield f"{code:04X}", unicodedata.category(chr(code)), name


def make_scheduler(url: str) -> Scheduler:
    """Make the scheduler, with a short lease: a killed worker's job is soon another's."""
    return Scheduler(url, handlers=[handlers], lease_ttl=2, poll_interval=0.2)


async def import_with_a_kill(url: str, file: Path, rows: int) -> None:
    """Start the import, kill its worker half way, and let a second one finish."""
    async with make_scheduler(url) as scheduler:
        await scheduler.create_schema()
        job = await scheduler.enqueue(import_characters.job(str(file), rows))
        with worker(url) as first:
            stored = await half_way(scheduler, job, rows)
            first.kill()  # -9: it cleans up nothing and says goodbye to nobody
        print(f"Killed behind row {stored:,} or later.", flush=True)
        with worker(url) as second:
            number = await scheduler.wait(job, timeout=60)
            second.terminate()
        print(f"Done in attempt {(await scheduler.get(job)).attempt}: {number:,} rows.")


async def half_way(scheduler: Scheduler, job: Job[int], rows: int) -> int:
    """Wait until half of the rows are stored, and return how many are."""
    stored = 0
    while stored < rows / 2:
        await asyncio.sleep(0.02)
        stored = (await scheduler.get(job)).checkpoint or 0
    return stored


def worker(url: str) -> subprocess.Popen[bytes]:
    """Start a worker as a process of its own."""
    return subprocess.Popen([sys.executable, __file__, url, "worker"])  # noqa: S603  ourselves


async def counts(url: str) -> tuple[int, int, int]:
    """Return how many rows there are, how many different ones, and how often they are listed."""
    engine = create_async_engine(url)
    code = characters.c.code
    async with engine.connect() as connection:
        query = select(func.count(code), func.count(distinct(code)))
        number, different = (await connection.execute(query)).one()
        listed = await connection.scalar(select(func.count()).select_from(imports))
    await engine.dispose()
    return number, different, listed or 0


async def main(url: str, folder: Path) -> None:
    """Write the file, import it, and count."""
    file = folder / "characters.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        csv.writer(opened).writerows(all_characters())
    rows = sum(1 for _ in all_characters())
    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)
    await engine.dispose()
    await import_with_a_kill(url, file, rows)
    number, different, listed = await counts(url)
    print(f"The file has {rows:,} rows, the table {number:,}, of which {different:,} differ.")
    print(f"Imports listed: {listed}.")


if __name__ == "__main__":
    if sys.argv[2:] == ["worker"]:
        make_scheduler(sys.argv[1]).run()
    else:
        with TemporaryDirectory() as place:
            default = f"sqlite+aiosqlite:///{place}/characters.db"
            asyncio.run(main(sys.argv[1] if sys.argv[1:] else default, Path(place)))
