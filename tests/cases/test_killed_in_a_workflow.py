"""Workers are killed at random moments while they run a large graph, and started again.

Whatever they were about to write, nothing may be left waiting: every job and container has to end,
each job done once by its state, and run again only where the process that ran it was killed.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from sqlalchemy import func, select

from asyncjobq import Job, JobRow, JobSpec, Workflow
from cases.log import Entry, by_label
from cases.workers import FULL, Case, WorkerProcess, wait_until

CONTAINERS, JOBS, GROWING, CHILDREN = (20, 42, 4, 2) if FULL else (4, 10, 2, 2)
"""Containers, jobs in each, how many of these add children, and how many each of them adds."""
TOTAL = CONTAINERS * (JOBS + GROWING * CHILDREN)
KILLS, WORKERS = (40, 4) if FULL else (4, 2)
SETTINGS: dict[str, Any] = {"concurrency": 8, "lease_ttl": 3.0, "poll_interval": 0.1}


class Graph:
    """Containers behind and in each other, with jobs that wait for jobs, and add children.

    `waits` says of each job, by its label, the labels of all that has to end before it starts.
    """

    def __init__(self, workflow: Workflow, chance: random.Random) -> None:
        self.waits: dict[str, set[str]] = {}
        self._chance = chance
        self._nodes: dict[str, Any] = {}
        behind: list[tuple[Any, set[str]]] = []
        gated: set[str] = set()
        for number in range(CONTAINERS):
            if number % 4 == 3:  # in the last one, behind what that is behind
                into, inside = behind[-1]
                self._fill(into.container(f"c{number}"), f"c{number}", gated, inside)
            else:
                gates = chance.sample(behind, min(len(behind), 2)) if number % 2 else []
                gated = {label for _, inside in gates for label in inside}
                nodes = [node for node, _ in gates]
                container, inside = workflow.container(f"c{number}", depends_on=nodes), set[str]()
                self._fill(container, f"c{number}", gated, inside)
                behind.append((container, inside))

    def _fill(self, container: Any, name: str, gated: set[str], inside: set[str]) -> None:
        """Put jobs into a container, and their labels and those of their children into `inside`."""
        for place in range(JOBS):
            label, known = f"{name}-{place}", sorted(self._nodes)
            upstreams = self._chance.sample(known, min(len(known), self._chance.randrange(3)))
            self.waits[label] = gated.union(*(with_children(upstream) for upstream in upstreams))
            after = [self._nodes[upstream] for upstream in upstreams]
            self._nodes[label] = container.add(spec_of(label), depends_on=after, max_attempts=100)
            inside |= with_children(label)


def spec_of(label: str) -> JobSpec[int]:
    """Return a job that adds children, or one that takes a moment."""
    if grows(label):
        return JobSpec("grow", {"label": label, "children": CHILDREN})
    return JobSpec("work", {"label": label, "seconds": 0.01})


def grows(label: str) -> bool:
    return int(label.partition("-")[2]) < GROWING


def with_children(label: str) -> set[str]:
    children = range(CHILDREN if grows(label) else 0)
    return {label, *(f"{label}.{number}" for number in children)}


async def test_every_job_of_it_is_done_once(case: Case) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with case.scheduler.workflow("large") as workflow:
        graph = Graph(workflow, chance)
    workers = {name: case.start_worker(name, **SETTINGS) for name in "ABCD"[:WORKERS]}
    await case.up(*workers.values())
    killed = await kill_at_random(case, workers, chance)
    await wait_until(lambda: nothing_is_open(case), 60.0 if FULL else 30.0, "every job has ended")

    assert await states(case) == {("container", "done"): CONTAINERS + 1, ("job", "done"): TOTAL}
    jobs = [*await case.scheduler.find(type="work", limit=10**6)]
    jobs += await case.scheduler.find(type="grow", limit=10**6)
    again = check_log(case, {job.args["label"]: job for job in jobs}, killed, graph)
    print(f"{TOTAL} jobs, {len(killed)} workers killed, {again} attempts cut short")
    await case.check_alive(*workers.values())


async def states(case: Case) -> dict[tuple[str, str], int]:
    """Count jobs and containers by state."""
    kinds = select(JobRow.kind, JobRow.state, func.count()).group_by(JobRow.kind, JobRow.state)
    return {(row[0], row[1]): row[2] for row in await case.rows(kinds)}


async def kill_at_random(
    case: Case, workers: dict[str, WorkerProcess], chance: random.Random
) -> set[int]:
    """Kill workers one after the other, each followed by another of its name."""
    killed: set[int] = set()
    while len(killed) < KILLS and not await nothing_is_open(case):
        await asyncio.sleep(chance.uniform(0.05, 0.6))
        name = chance.choice(sorted(workers))
        workers[name].kill()
        killed.add(workers[name].pid)
        workers[name] = case.start_worker(name, **SETTINGS)
    return killed


async def nothing_is_open(case: Case) -> bool:
    ended = JobRow.state.in_(["done", "failed", "cancelled"])
    rows = await case.rows(select(JobRow.id).where(~ended | ~JobRow.settled).limit(1))
    return not rows


def check_log(case: Case, ended: dict[str, Job[Any]], killed: set[int], graph: Graph) -> int:
    """Check what the handlers wrote; return how many attempts were cut short."""
    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    last_end: dict[str, Entry] = {}
    cut_short = 0
    for label, job in ended.items():
        *others, last = sorted(starts[label], key=lambda entry: entry.attempt)
        assert len({entry.attempt for entry in starts[label]}) == len(starts[label]), label
        assert job.attempt == job.result == last.attempt, label
        assert {entry.pid for entry in others} <= killed, label
        (last_end[label],) = (entry for entry in ends[label] if entry.attempt == last.attempt)
        cut_short += len(others)
    for label, upstreams in graph.waits.items():
        for upstream in upstreams:
            began, over = starts[label][0].at, last_end[upstream].at
            assert began > over, f"{label} did not wait for {upstream}"
    return cut_short
