"""Pruning from its first step to its last, on demand and as a rare chore of every worker."""

from __future__ import annotations

import logging
import random
from typing import Final, Protocol, TypeVar

from asyncjobq.backends.base import Backend, Database, Work, chunked
from asyncjobq.callers import AsyncCaller, in_transaction_of
from asyncjobq.clock import seconds
from asyncjobq.errors import ConfigurationError
from asyncjobq.prune import (
    MEMBERS,
    ROOTS,
    Ages,
    find_once,
    parts_of,
    prune_once,
    prune_part_once,
)
from asyncjobq.settings import Duration, ended_states

T = TypeVar("T")

logger = logging.getLogger("asyncjobq.retention")

BETWEEN_STEPS: Final = 0.5
"""Seconds between two steps of a worker, which leave the database to others."""
BETWEEN_ROUNDS: Final = 300.0


def ages_of(older_than: Duration, states: object) -> Ages:
    """Return the age for each state; raises ConfigurationError saying what is wrong."""
    age = seconds(older_than, "older_than")
    if age < 0:
        raise ConfigurationError(f"older_than must not be negative: {older_than!r}.")
    ended = ended_states(states, "states")
    if not ended:
        raise ConfigurationError("states is empty: nothing would be deleted.")
    return dict.fromkeys(ended, age)


class Transactions(Protocol):
    """Where steps are taken: each in a short transaction of its own, or all in a caller's."""

    @property
    def backend(self) -> Backend:
        """The database's way of doing things."""
        ...

    async def run(self, work: Work[T]) -> T:
        """Run what writes."""
        ...

    async def read(self, work: Work[T]) -> T:
        """Run what only reads."""
        ...


class InCallers:
    """A caller's transaction, in which steps are taken that might be transactions of ours."""

    def __init__(self, backend: Backend, caller: AsyncCaller) -> None:
        self.backend = backend
        self._caller = caller

    async def run(self, work: Work[T]) -> T:
        return await in_transaction_of(self._caller, work)

    async def read(self, work: Work[T]) -> T:
        return await in_transaction_of(self._caller, work)


class Pruning:
    """One going through all old jobs, step by step, each a short transaction or a few."""

    def __init__(self, database: Transactions, ages: Ages) -> None:
        self._database = database
        self._ages = ages
        self._begin_at(0)

    def _begin_at(self, after: int) -> None:
        self._after = after
        self.over = False
        self._deleted = 0
        self._held: list[int] = []

    async def run(self, limit: int | None = None) -> int:
        """Go to the end, or until so many jobs are deleted; returns how many were."""
        total = 0
        while not self.over and (limit is None or total < limit):
            total += await self.step(ROOTS if limit is None else min(ROOTS, limit - total))
        return total

    async def step(self, roots: int) -> int:
        """Take the next families, at most so many; returns how many jobs were deleted.

        What is held by jobs that go only later is taken again at the end.
        """
        backend, ages, after = self._database.backend, self._ages, self._after
        page = await self._database.read(lambda c: find_once(c, backend, ages, after, roots))
        deleted = 0
        left = page.roots
        while left:
            deleted, left = await self._prune(left, deleted)
        self._after, self.over = page.after, page.over
        self._deleted += deleted
        if self.over and self._held and self._deleted:
            self._begin_at(min(self._held) - 1)
        return deleted

    async def _prune(self, roots: list[int], deleted: int) -> tuple[int, list[int]]:
        backend, ages = self._database.backend, self._ages
        pruned = await self._database.run(lambda c: prune_once(c, backend, roots, ages))
        self._held += pruned.held
        if pruned.too_large is not None:
            deleted += await self._prune_large(pruned.too_large)
        return deleted + pruned.deleted, list(pruned.left)

    async def _prune_large(self, root: int) -> int:
        """Delete a family part by part; again from its beginning while that still frees some."""
        backend = self._database.backend
        # Not by read(): what the planner is told holds for a transaction.
        rest = await self._database.run(lambda c: parts_of(c, backend, root))
        if not rest:
            self._held.append(root)
        total, before = 0, -1
        while rest and total > before:
            before = total
            for part in chunked(rest, MEMBERS):
                gone = await self._prune_part(root, part)
                if gone is None:
                    return total
                total += len(gone)
                rest = [job_id for job_id in rest if job_id not in gone]
        return total

    async def _prune_part(self, root: int, part: list[int]) -> set[int] | None:
        backend, ages = self._database.backend, self._ages
        gone = await self._database.run(lambda c: prune_part_once(c, backend, root, part, ages))
        return None if gone is None else set(gone)


class Retention:
    """Prunes what is older than each state's age, for ever, a step at a time."""

    def __init__(self, database: Database, ages: Ages) -> None:
        self._database = database
        self._ages = ages
        self._pruning: Pruning | None = None
        # At random, so that the workers of a fleet do not all go through the same rows at once.
        self.pause = random.uniform(0.1, 1.0) * BETWEEN_ROUNDS / 5

    async def prune_once(self) -> int:
        """Take the next step, and say in `pause` when to come again; returns how many went."""
        if self._pruning is None:
            self._pruning = Pruning(self._database, self._ages)
        deleted = await self._pruning.step(ROOTS)
        self.pause = BETWEEN_STEPS
        if self._pruning.over:
            self._pruning = None
            self.pause = random.uniform(0.5, 1.5) * BETWEEN_ROUNDS
        if deleted:
            logger.info("%s jobs were pruned: they ended long ago.", deleted)
        return deleted
