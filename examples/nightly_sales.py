"""Each night, the day's sales of all shops: read from their files, added up by region, reported.

    python examples/nightly_sales.py sales [DAY]
    asyncjobq worker nightly_sales:scheduler --app-dir examples

The first runs one night now, and makes files for it if there are none; run again, it takes a night
that failed up where it failed. The second runs each night at two.

The shops of a region put their files into FOLDER/DAY/REGION; how many there are is known only when
a job has looked. A file is read in one transaction with its job's end, so that a night whose worker
is killed counts nothing twice. A line that cannot be read is set aside; a file without the right
columns fails, and with it the sum of its region: there is no report then, but a list of problems.

The database is DATABASE_URL, or else the file sales.db in the current directory; SALES is the
folder of the worker, or else sales.
"""

import asyncio
import csv
import os
import random
import sys
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Final, TypedDict

import anyio
from sqlalchemy import String, func, insert, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from asyncjobq import Fail, JobContext, Scheduler, UniqueConflictError, after

REGIONS: Final = ("north", "south", "west")
COLUMNS: Final = ["time", "product", "cents"]

engine = create_async_engine(os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///sales.db"))
scheduler = Scheduler(engine)


class Base(DeclarativeBase):
    """The tables of the sales."""


class Sale(Base):
    __tablename__ = "sales"

    id: Mapped[int] = mapped_column(primary_key=True)
    file: Mapped[str] = mapped_column(String(200), index=True)
    product: Mapped[str] = mapped_column(String(50))
    cents: Mapped[int]


class Loaded(TypedDict):
    """What became of a file's lines."""

    rows: int
    set_aside: int


class Total(TypedDict):
    """What a region has sold."""

    region: str
    sales: int
    cents: int


@scheduler.cron("0 2 * * *")
@scheduler.handler
async def start_night() -> int:
    """Plan the night for the day that is over, for this folder."""
    yesterday = datetime.now(UTC).date() - timedelta(days=1)
    return await plan_night(Path(os.environ.get("SALES", "sales")), yesterday)


async def plan_night(folder: Path, day: date) -> int:
    """Write the graph of a night, and return its id; a night that was planned before is that one.

    The regions go on side by side. The report waits for all, and is not written if one has failed;
    problems are looked for in any case.
    """
    name = f"sales of {day}"
    try:
        async with scheduler.workflow(
            name, unique_key=name, unique_for=timedelta(days=7), on_conflict="raise"
        ) as night:
            place, regions, totals = folder / str(day), night.container("regions"), []
            for region in REGIONS:
                inner = regions.container(region)
                files = inner.add(load_files.job(str(place / region)))
                totals.append(inner.add(add_up.job(region), depends_on=[files]))
            night.add(report.job(str(place)), depends_on=totals)
            whatever = [after(total, on_failure="run") for total in totals]
            night.add(list_problems.job(str(place)), depends_on=whatever)
    except UniqueConflictError as planned:
        if planned.job_id is None:
            raise
        return planned.job_id
    return night.id


@scheduler.handler
async def load_files(ctx: JobContext, folder: str) -> int:
    """Have each file of a region read by a job; this one is over when they are."""
    paths = sorted([path async for path in anyio.Path(folder).glob("*.csv")])
    for path in paths:
        # With the key, an attempt that comes after a crash finds the child and makes no second one.
        await ctx.add_child(load_file.job(str(path)), key=path.name)
    return len(paths)


@scheduler.handler(fail_on=ValueError)  # a file is no better a second time
async def load_file(ctx: JobContext, path: str) -> Loaded:
    """Put a file's sales into the table: all of them, and this job's end, in one commit."""
    sales, others = await asyncio.to_thread(read_sales, Path(path))
    loaded = Loaded(rows=len(sales), set_aside=others)
    async with ctx.session() as session, session.begin():
        if sales:
            await session.execute(insert(Sale), sales)
        await ctx.complete(session, loaded)
    return loaded


def read_sales(path: Path) -> tuple[list[dict[str, str | int]], int]:
    """Return a file's sales, and how many lines are none; those are kept in a file beside it."""
    sales: list[dict[str, str | int]] = []
    others: list[str] = []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if (columns := next(rows, None)) != COLUMNS:
            raise ValueError(f"{path.name} has the columns {columns}, not {COLUMNS}.")
        for row in rows:
            try:
                _, product, cents = row
                sales.append({"file": str(path), "product": product, "cents": int(cents)})
            except ValueError:
                others.append(f"line {rows.line_num}: {row}\n")
    path.with_suffix(".set-aside").write_text("".join(others), encoding="utf-8")
    return sales, len(others)


@scheduler.handler
async def add_up(ctx: JobContext, region: str) -> Total:
    """Add up what a region has sold, unless one of its files could not be read."""
    (loading,) = await ctx.upstreams()
    jobs = await scheduler.find(parent=loading, limit=10_000)
    if failed := [Path(job.args["path"]).name for job in jobs if job.state != "done"]:
        raise Fail(f"not read: {', '.join(failed)}")
    mine = [job.args["path"] for job in jobs]
    query = select(func.count(), func.coalesce(func.sum(Sale.cents), 0)).where(Sale.file.in_(mine))
    async with ctx.session() as session:
        sales, cents = (await session.execute(query)).one()
    return {"region": region, "sales": sales, "cents": int(cents)}


@scheduler.handler
async def report(ctx: JobContext, folder: str) -> list[Total]:
    """Write the report, a line for each region; whatever problems there were are over."""
    totals = [add_up.result_of(job) for job in await ctx.upstreams()]
    lines = [f"{one['region']},{one['sales']},{one['cents'] / 100:.2f}" for one in totals]
    text = "\n".join(["region,sales,euros", *lines, ""])
    await anyio.Path(folder, "report.csv").write_text(text, encoding="utf-8")
    await anyio.Path(folder, "problems.txt").unlink(missing_ok=True)
    return totals


@scheduler.handler
async def list_problems(ctx: JobContext, folder: str) -> int:
    """List the regions that have no sum, and why, for whoever comes in the morning."""
    lines = []
    for job in [job for job in await ctx.upstreams() if job.state != "done"]:
        attempts = await scheduler.attempts(job)
        lines.append(f"{job.args['region']}: {attempts[-1].message if attempts else job.state}\n")
    if lines:
        await anyio.Path(folder, "problems.txt").write_text("".join(lines), encoding="utf-8")
    return len(lines)


def make_files(folder: Path, day: date) -> None:
    """Make files as shops might send them, the same for the same day: two of them with mistakes."""
    chance = random.Random(str(day))
    for region, shops in zip(REGIONS, (5, 3, 4), strict=True):
        place = folder / str(day) / region
        place.mkdir(parents=True)
        for shop in range(shops):
            with (place / f"shop{shop}.csv").open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(COLUMNS)
                for _ in range(chance.randint(200, 400)):
                    minute = f"{chance.randint(8, 19):02}:{chance.randint(0, 59):02}"
                    product = chance.choice(["tea", "cup", "pot"])
                    rows.writerow([minute, product, chance.randint(100, 5000)])
                if (region, shop) == ("north", 1):
                    rows.writerow(["19:59", "tea", "four euros"])
    (folder / str(day) / "west" / "shop3.csv").write_text("%PDF-1.7\n", encoding="utf-8")


async def one_night(folder: Path, day: date) -> None:
    """Run one night to its end, and print its report."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with scheduler:
        await scheduler.create_schema()
        night = await plan_night(folder, day)
        if (await scheduler.get(night)).state == "failed":  # by now, the files are mended
            await scheduler.retry_many(type="load_file")
            await scheduler.drain(scheduled=True)
            await scheduler.retry(night)  # what failed for want of them, and what waits for that
        await scheduler.drain(scheduled=True)  # what has to be tried again, too
        for name in ("report.csv", "problems.txt"):
            with suppress(FileNotFoundError):
                print((folder / str(day) / name).read_text(encoding="utf-8"), end="")
        counts = await scheduler.progress(night)
        told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
        print(f"The night is {(await scheduler.get(night)).state}: {told}.")
    await engine.dispose()


if __name__ == "__main__":
    sales = Path(sys.argv[1] if sys.argv[1:] else "sales")
    of_day = date.fromisoformat(sys.argv[2] if sys.argv[2:] else "2026-11-29")
    if not (sales / str(of_day)).exists():
        make_files(sales, of_day)
    asyncio.run(one_night(sales, of_day))
