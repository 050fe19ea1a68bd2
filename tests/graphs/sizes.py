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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
    def per_edge(self) -> float:
        """Seconds for one edge, or for one job where there are none."""
        return self.running / (self.edges or self.jobs)

    def __str__(self) -> str:
        each = "edge" if self.edges else "job"
        return (
            f"{self.name:<24} {self.jobs:>6} jobs {self.edges:>6} edges  written in "
            f"{self.writing:6.2f} s, run in {self.running:7.2f} s: "
            f"{self.jobs / self.running:7.0f} jobs/s, {self.per_edge * 1000:6.2f} ms an {each}"
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
    own = table.c.parent_id == workflow.id
    tries = select(table.c.state, table.c.attempt, func.count()).where(own)
    left = select(func.count()).where(~table.c.settled)
    rows = await database.read(
        lambda c: c.execute(tries.group_by(table.c.state, table.c.attempt)).all()
    )
    assert [tuple(row) for row in rows] == [(State.DONE, 1, jobs)], rows
    assert (await scheduler.get(workflow)).state == State.DONE
    assert await database.read(lambda c: c.scalar(left)) == 0


def scaled(number: int, scale: float) -> int:
    return max(2, round(number * scale))


async def measure(url: str, scale: float, names: Sequence[str]) -> list[str]:
    """Run all sizes on an empty database, printing each; return what is too slow."""
    async with Scheduler(url, handlers=[handlers], concurrency=SLOTS) as scheduler:
        await scheduler.create_schema()
        await run_plain(scheduler, scaled(1000, scale))  # warms connections and caches up
        wide, narrow = scaled(10_000, scale), scaled(500, scale)
        root = scaled(100, scale**0.5)
        runs: dict[str, Any] = {
            "plain": lambda: run_plain(scheduler, wide),
            "apart": lambda: run_graph(scheduler, "in one container", apart(wide)),
            "chain": lambda: run_graph(scheduler, "chain", chain(scaled(1000, scale))),
            "fan-500": lambda: run_graph(scheduler, "fan-out, 1,000 edges", fan_out(narrow)),
            "fan-5000": lambda: run_graph(scheduler, "fan-out, 10,000 edges", fan_out(10 * narrow)),
            "fan-10000": lambda: run_graph(scheduler, "fan-out, 20,000 edges", fan_out(wide)),
            "diamond-10": lambda: run_graph(
                scheduler, "diamond, 1,000 edges", diamond(root, scaled(10, scale**0.5))
            ),
            "diamond-100": lambda: run_graph(
                scheduler, "diamond, 10,000 edges", diamond(root, root)
            ),
        }
        sizes = {}
        for name, run in runs.items():
            if not names or name in names:
                sizes[name] = await run()
                print(f"  {sizes[name]}", flush=True)
        return list(_ratios(sizes))


def _ratios(sizes: dict[str, Size]):
    for small, large in (("fan-500", "fan-5000"), ("diamond-10", "diamond-100")):
        if small in sizes and large in sizes:
            times = sizes[large].running / sizes[small].running
            edges = sizes[large].edges / sizes[small].edges
            print(f"  {large}: {times:.1f} × the time of {small} for {edges:.1f} × its edges")
            if times > 1.2 * edges:
                yield f"{large} takes more than 1.2 × the time for an edge of {small}"
    if "plain" in sizes and "fan-10000" in sizes:
        plain, fan = sizes["plain"], sizes["fan-10000"]
        rate = (fan.jobs / fan.running) / (plain.jobs / plain.running)
        print(f"  fan-10000: {rate:.2f} × the rate of plain jobs")


@asynccontextmanager
async def _urls(given: Sequence[str], backends: Sequence[str]) -> AsyncIterator[dict[str, str]]:
    yield {url: url for url in given}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--url", action="append", default=[])
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    slow: list[str] = []
    for url in given.url:
        print(url)
        slow += asyncio.run(measure(url, given.scale, given.names))
    if not given.url:
        servers = Servers(os.environ)
        with tempfile.TemporaryDirectory() as folder:
            databases = Databases(servers, Path(folder))
            try:
                for backend in given.backend or BACKENDS:
                    try:
                        with databases.fresh(backend) as url:
                            print(f"{backend} {servers.get(backend).version}")
                            slow += asyncio.run(measure(url, given.scale, given.names))
                    except MissingServerError as error:
                        print(f"left out: {error}")
            finally:
                databases.close()
                servers.close()
    raise SystemExit("\n".join(slow) or 0)


if __name__ == "__main__":
    main()
