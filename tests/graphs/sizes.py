"""Run large graphs on each database, and print how long they take.

    python tests/graphs/sizes.py [--url URL]... [--backend NAME]... [--scale FRACTION] [NAME]...

Without a URL, on a new database of each of the tests' servers. `--scale 0.1` makes all graphs
smaller. Each graph has to end with every job done, once, or the program fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import func, select

sys.path.insert(0, str(Path(__file__).parents[1]))

from asyncjobq import Handlers, Scheduler, State, Workflow
from databases import Databases
from servers import BACKENDS, Servers
from throwaway import MissingServerError

SLOTS: Final = 50

handlers: Final = Handlers()


@handlers.handler(max_attempts=1)
async def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Size:
    """One graph that was run."""

    name: str
    jobs: int
    edges: int
    writing: float
    running: float

    @property
    def per_second(self) -> float:
        """How many jobs were run in a second."""
        return self.jobs / self.running

    def __str__(self) -> str:
        each = self.edges or self.jobs
        return (
            f"{self.name:<26} {self.jobs:>6} jobs {self.edges:>6} edges, written in "
            f"{self.writing:6.2f} s, run in {self.running:7.2f} s: {self.per_second:6.0f} jobs/s, "
            f"{self.running / each * 1000:6.2f} ms for each {'edge' if self.edges else 'job'}"
        )


Describe = Callable[[Workflow], None]


def chain(length: int) -> Describe:
    """Describe jobs of which each waits for the one before."""

    def describe(workflow: Workflow) -> None:
        last = workflow.add(nothing.job())
        for _ in range(length - 1):
            last = workflow.add(nothing.job(), depends_on=[last])

    return describe


def diamond(upper: int, lower: int) -> Describe:
    """Describe two layers between a first and a last job, each lower job behind all upper ones."""

    def describe(workflow: Workflow) -> None:
        first = workflow.add(nothing.job())
        above = [workflow.add(nothing.job(), depends_on=[first]) for _ in range(upper)]
        below = [workflow.add(nothing.job(), depends_on=above) for _ in range(lower)]
        workflow.add(nothing.job(), depends_on=below)

    return describe


def fan_out(width: int) -> Describe:
    """Describe jobs that wait for one, and one that waits for all of them."""

    def describe(workflow: Workflow) -> None:
        first = workflow.add(nothing.job())
        middle = [workflow.add(nothing.job(), depends_on=[first]) for _ in range(width)]
        workflow.add(nothing.job(), depends_on=middle)

    return describe


def apart(count: int) -> Describe:
    """Describe jobs that wait for nothing."""

    def describe(workflow: Workflow) -> None:
        for _ in range(count):
            workflow.add(nothing.job())

    return describe


async def run_graph(scheduler: Scheduler, name: str, describe: Describe) -> Size:
    """Write a graph and run it to its end; raises AssertionError if anything in it is not done."""
    begun = time.perf_counter()
    async with scheduler.workflow(name) as workflow:
        describe(workflow)
    written = time.perf_counter()
    await scheduler.drain()
    ended = time.perf_counter()
    jobs = len(workflow.drafts) - 1
    edges = sum(len(draft.upstreams) for draft in workflow.drafts)
    await check(scheduler, workflow, jobs)
    return Size(name, jobs, edges, written - begun, ended - written)


async def run_plain(scheduler: Scheduler, count: int) -> Size:
    """Run jobs that are in no graph at all."""
    begun = time.perf_counter()
    await scheduler.enqueue_many([nothing.job() for _ in range(count)])
    written = time.perf_counter()
    counts = await scheduler.drain()
    assert counts[State.DONE] == count, counts
    return Size("plain jobs", count, 0, written - begun, time.perf_counter() - written)


async def check(scheduler: Scheduler, workflow: Workflow, jobs: int) -> None:
    """Assert that all in a workflow was done in one attempt, and that nothing is left to settle."""
    database = scheduler._database
    table = database.backend.tables.jobs
    tries = select(table.c.state, table.c.attempt, func.count()).group_by(
        table.c.state, table.c.attempt
    )
    own = tries.where(table.c.parent_id == workflow.id)
    left = select(func.count()).where(~table.c.settled)
    rows = await database.read(lambda c: c.execute(own).all())
    assert [tuple(row) for row in rows] == [(State.DONE, 1, jobs)], rows
    assert (await scheduler.get(workflow)).state == State.DONE
    assert await database.read(lambda c: c.scalar(left)) == 0


def graphs_of(scale: float) -> dict[str, tuple[str, Describe]]:
    """Return the graphs that are run, by the names by which they are chosen."""

    def scaled(number: int, power: float = 1.0) -> int:
        return max(2, round(number * scale**power))

    wide, root = scaled(10_000), scaled(100, 0.5)
    return {
        "apart": ("in one container", apart(wide)),
        "chain": ("chain", chain(scaled(1000))),
        "fan-small": ("fan-out and join, small", fan_out(scaled(500))),
        "fan-tenfold": ("fan-out and join, tenfold", fan_out(scaled(5000))),
        "fan": ("fan-out and join", fan_out(wide)),
        "diamond-small": ("diamond, small", diamond(root, scaled(10, 0.5))),
        "diamond-tenfold": ("diamond, tenfold", diamond(root, root)),
    }


async def measure(url: str, scale: float, names: Sequence[str]) -> list[str]:
    """Run all sizes on an empty database, printing each; return what is too slow."""
    sizes: dict[str, Size] = {}
    async with Scheduler(url, handlers=[handlers], concurrency=SLOTS) as scheduler:
        await scheduler.create_schema()
        await run_plain(scheduler, 500)  # warms connections and caches up
        sizes["plain"] = await run_plain(scheduler, max(100, round(10_000 * scale)))
        print(f"  {sizes['plain']}", flush=True)
        for name, (title, describe) in graphs_of(scale).items():
            if not names or name in names:
                sizes[name] = await run_graph(scheduler, title, describe)
                print(f"  {sizes[name]}", flush=True)
    return list(too_slow(sizes))


def too_slow(sizes: dict[str, Size]) -> Iterator[str]:
    """Print how the sizes compare, and yield what costs more than it may."""
    for graph in ("fan", "diamond"):
        small, large = sizes.get(f"{graph}-small"), sizes.get(f"{graph}-tenfold")
        if small and large:
            times, edges = large.running / small.running, large.edges / small.edges
            compared = f"{large.name}: {times:.1f} times as long for {edges:.1f} times the edges"
            print(f"  {compared}")
            if times > 1.2 * edges:
                yield compared
    if fan := sizes.get("fan"):
        rate = fan.per_second / sizes["plain"].per_second
        print(f"  {fan.name}: {rate:.2f} of the rate of plain jobs")


def urls_of(wanted: Sequence[str], servers: Servers, databases: Databases) -> Iterator[str]:
    """Yield the URL of a new database on each of the tests' servers."""
    for backend in wanted:
        try:
            with databases.fresh(backend) as url:
                print(f"{backend} {servers.get(backend).version}")
                yield url
        except MissingServerError as error:
            print(f"left out: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Run large graphs, and print how long they take.")
    parser.add_argument("names", nargs="*", help="only these graphs: chain, fan, diamond-small …")
    parser.add_argument("--url", action="append", help="on this empty database")
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--scale", type=float, default=1.0, help="0.1: a tenth of the jobs")
    given = parser.parse_args()
    servers, slow = Servers(os.environ), []
    with tempfile.TemporaryDirectory() as folder:
        databases = Databases(servers, Path(folder))
        try:
            for url in given.url or urls_of(given.backend or BACKENDS, servers, databases):
                slow += asyncio.run(measure(url, given.scale, given.names))
        finally:
            databases.close()
            servers.close()
    raise SystemExit("\n".join(slow) or 0)


if __name__ == "__main__":
    main()
