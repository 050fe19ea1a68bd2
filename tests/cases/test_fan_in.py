"""Parents that end at the same moment, in several processes, and the children behind them.

Each end must not see the other parent as open and leave the child to it: every child starts once,
after the last of its parents, and none waits.
"""

from __future__ import annotations

import random
from typing import Any

from asyncjobq import Job, JobSpec
from cases.log import by_label
from cases.workers import FULL, Case

PAIRS, JOINS, PARENTS, DIAMONDS = (200, 20, 50, 10) if FULL else (30, 3, 20, 2)
WORKERS = 4 if FULL else 2
DEPTH = 4

Waits = dict[str, list[str]]


class Drafts:
    """Jobs that are written layer by layer, each layer in one transaction."""

    def __init__(self) -> None:
        self.waits: Waits = {}
        self._layers: list[list[str]] = []
        self._jobs: dict[str, Job[Any]] = {}

    def add(self, label: str, upstreams: list[str]) -> str:
        """Note a job that waits for these."""
        depth = 1 + max((self._depth(upstream) for upstream in upstreams), default=-1)
        while len(self._layers) <= depth:
            self._layers.append([])
        self._layers[depth].append(label)
        self.waits[label] = upstreams
        return label

    async def write(self, case: Case) -> None:
        """Write all of them, those that wait for nothing at last."""
        first, *others = self._layers
        parked = [JobSpec[Any]("work", {"label": label}).options(run_after=0.2) for label in first]
        for label, job in zip(first, await case.scheduler.enqueue_many(parked), strict=True):
            self._jobs[label] = job
        for layer in others:
            specs = [
                JobSpec[Any]("work", {"label": label}).options(
                    depends_on=[self._jobs[upstream] for upstream in self.waits[label]]
                )
                for label in layer
            ]
            made = await case.scheduler.enqueue_many(specs)
            self._jobs |= dict(zip(layer, made, strict=True))

    def _depth(self, label: str) -> int:
        return next(depth for depth, layer in enumerate(self._layers) if label in layer)


async def test_every_child_starts_once_after_its_last_parent(case: Case) -> None:
    drafts, chance = Drafts(), random.Random(23)
    parents = [drafts.add(f"parent {number}", []) for number in range(max(PARENTS, 2 * PAIRS))]
    for number in range(PAIRS):
        drafts.add(f"pair {number}", parents[2 * number : 2 * number + 2])
    for number in range(JOINS):
        drafts.add(f"join {number}", chance.sample(parents, PARENTS))
    for number in range(DIAMONDS):
        last = drafts.add(f"diamond {number}", [])
        for depth in range(DEPTH):
            sides = [drafts.add(f"side {number} {depth} {side}", [last]) for side in range(2)]
            last = drafts.add(f"diamond {number} {depth}", sides)
    workers = [case.start_worker(name, concurrency=10) for name in "ABCD"[:WORKERS]]
    await case.up(*workers)
    await drafts.write(case)
    counts = await case.all_ended(within=60.0 if FULL else 20.0)
    assert counts == {"done": len(drafts.waits)}
    starts, ends = by_label(case.log.starts()), by_label(case.log.ends())
    for label, upstreams in drafts.waits.items():
        (start,) = starts[label]
        assert all(end.at < start.at for upstream in upstreams for end in ends[upstream]), label
    await case.check_alive(*workers)
