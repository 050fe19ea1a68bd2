"""The jobs of a run: a mixture drawn from the seed, with the states in which each may end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

from asyncjobq import (
    Cancelled,
    CommitUnknownError,
    DatabaseUnavailableError,
    InvalidJobError,
    JobRow,
    JobSpec,
    Scheduler,
    State,
    after,
)

PAUSE: Final = 0.4
"""Seconds between two batches."""
BATCH: Final = 5
BACKLOG: Final = 300
"""Jobs that wait at most: with more, the producer rests."""
CALL_SECONDS: Final = 8.0
"""Seconds after which a call is given up: its connection may be half open."""

DONE: Final = frozenset({State.DONE})
FAILED: Final = frozenset({State.FAILED})
CANCELLED: Final = frozenset({State.CANCELLED})
WEIGHTS: Final = {
    "plain": 30,
    "flaky": 10,
    "hopeless": 5,
    "later": 6,
    "lift": 10,
    "grow": 8,
    "complete": 10,
    "unique": 6,
    "cancel": 6,
    "flow": 4,
    "broken_flow": 4,
    "crash": 1,
    "think": 6,
    "block": 0.3,
    "retry": 4,
}


def spec(type_name: str, name: str, **args: Any) -> JobSpec[Any]:
    """Return a job whose label and name are the same."""
    return JobSpec[Any](type_name, {"label": name, **args}).options(name=name)


@dataclass
class Load:
    """What is enqueued, and what is expected of it."""

    scheduler: Scheduler
    """Enqueues, over connections that are cut now and then."""
    engine: AsyncEngine
    """Looks, over connections that nobody cuts."""
    draw: random.Random
    expected: dict[str, frozenset[State]] = field(default_factory=dict)
    """By name, the states in which a job may end."""
    counts: dict[str, int] = field(default_factory=dict)
    answers: dict[str, Cancelled] = field(default_factory=dict)
    """What cancelling answered, by name."""
    repeated: int = 0
    """Calls that were made again, for the connection broke."""
    unknown: int = 0
    """Calls whose COMMIT may have happened: looked up before they are made again."""
    retried: Counter[str] = field(default_factory=Counter)
    """How often jobs may have been run again, by name."""
    _later_calls: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, over: asyncio.Event) -> None:
        """Enqueue batches until the event is set."""
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
        while not over.is_set():
            for kind in self.draw.choices(kinds, weights, k=BATCH):
                number = self.counts.get(kind, 0)
                self.counts[kind] = number + 1
                await getattr(self, f"_{kind}")(f"{kind}-{number}")
            await asyncio.sleep(PAUSE)
            while not over.is_set() and await self._open() > BACKLOG:
                await asyncio.sleep(PAUSE)
        await asyncio.gather(*self._later_calls)

    async def add_fresh(self) -> None:
        """Enqueue one more job, after all faults."""
        await self._put(DONE, spec("work", "fresh"))

    # -- kinds ----------------------------------------------------------------------------------

    async def _plain(self, name: str) -> None:
        await self._put(DONE, spec("work", name, seconds=self.draw.choice([0.0, 0.0, 0.1, 1.0])))

    async def _flaky(self, name: str) -> None:
        await self._put(DONE, spec("flaky", name, fails=self.draw.randint(1, 3)))

    async def _hopeless(self, name: str) -> None:
        await self._put(FAILED, spec("hopeless", name))

    async def _crash(self, name: str) -> None:
        await self._put(FAILED, spec("crash", name))

    async def _later(self, name: str) -> None:
        delay = timedelta(seconds=self.draw.uniform(0.2, 3.0))
        await self._put(DONE, spec("work", name).options(run_after=delay))

    async def _lift(self, name: str) -> None:
        await self._put(DONE, spec("lift", name, seconds=0.1))

    async def _grow(self, name: str) -> None:
        await self._put(DONE, spec("grow", name, children=self.draw.randint(1, 4)))

    async def _complete(self, name: str) -> None:
        await self._put(DONE, spec("complete", name))

    async def _unique(self, name: str) -> None:
        """Of those that ask for a key while another holds it, nothing is expected."""
        key = f"key {self.draw.randrange(4)}"
        while_ = self.draw.choice(["live", "waiting"])
        job = spec("work", name, seconds=0.2).options(unique_key=key, unique_while=while_)
        await self._put(DONE, job, may_be_another=True)

    async def _cancel(self, name: str) -> None:
        either = frozenset({State.DONE, State.CANCELLED})
        job_id = await self._put(either, spec("work", name, seconds=self.draw.choice([0.3, 4.0])))
        dependant = spec("work", f"{name}-after").options(depends_on=[job_id])
        await self._put(either, dependant)

        async def cancel() -> None:
            self.answers[name] = await self._surely(lambda: self.scheduler.cancel(job_id))

        self._call_later(self.draw.uniform(0.0, 2.0), cancel)

    async def _retry(self, name: str) -> None:
        """Run a job again that has failed, if it has by then, and with it what it had cancelled."""
        job_id = await self._put(FAILED, spec("hopeless", name))
        dependant = f"{name}-after"
        await self._put(CANCELLED, spec("work", dependant).options(depends_on=[job_id]))

        async def run_again() -> None:
            self.retried.update([name, dependant])
            with suppress(InvalidJobError):  # it has not failed yet, or runs again already
                await self.scheduler.retry(job_id)

        self._call_later(self.draw.uniform(0.5, 6.0), lambda: self._surely(run_again))

    def _call_later(self, wait: float, call: Callable[[], Awaitable[None]]) -> None:
        async def after_a_while() -> None:
            await asyncio.sleep(wait)
            await call()

        task = asyncio.create_task(after_a_while())
        self._later_calls.add(task)
        task.add_done_callback(self._later_calls.discard)

    async def _think(self, name: str) -> None:
        await self._put(DONE, spec("think", name))

    async def _block(self, name: str) -> None:
        """Block the event loop of its worker for longer than a lease."""
        await self._put(DONE, spec("block", name, seconds=4.0))

    async def _flow(self, name: str) -> None:
        await self._workflow(name, bad=False)

    async def _broken_flow(self, name: str) -> None:
        await self._workflow(name, bad=True)

    async def _workflow(self, name: str, *, bad: bool) -> None:
        """Write a workflow: a job, a container of three, one more, and one that tidies up."""

        async def write() -> None:
            async with self.scheduler.workflow(name) as flow:
                first = flow.add(spec("work", f"{name}-first"))
                part = flow.container(f"{name}-part", depends_on=[first])
                inner = [part.add(spec("work", f"{name}-{n}", seconds=0.1)) for n in range(2)]
                third = spec("hopeless" if bad else "work", f"{name}-2")
                part.add(third, depends_on=[] if bad else inner)
                last = flow.add(spec("work", f"{name}-last"), depends_on=[part])
                tidy = spec("work", f"{name}-tidy")
                flow.add(tidy, depends_on=[after(last, on_failure="run")])

        outcome = FAILED if bad else DONE
        expected = {name: outcome, f"{name}-part": outcome, f"{name}-2": outcome}
        expected |= dict.fromkeys([f"{name}-{n}" for n in ("first", "0", "1", "tidy")], DONE)
        expected[f"{name}-last"] = CANCELLED if bad else DONE
        await self._write(list(expected), write)
        self.expected |= expected

    # -- calls that may break -------------------------------------------------------------------

    async def _put(
        self, states: frozenset[State], job: JobSpec[Any], *, may_be_another: bool = False
    ) -> int:
        """Enqueue one job, and return its id."""
        name = job.chosen.name
        assert name is not None
        made: list[int] = []

        async def enqueue() -> None:
            made.append((await self.scheduler.enqueue(job)).id)

        found = await self._write([name], enqueue)
        ids = found or made[-1:]
        if not may_be_another or await self._find([name]):
            self.expected[name] = states
        return ids[0]

    async def _write(self, names: Sequence[str], write: Callable[[], Awaitable[None]]) -> list[int]:
        """Write until it is written; return the ids if that had happened unbeknown to us."""
        while True:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await write()
            except DatabaseUnavailableError:
                self.repeated += 1
                await asyncio.sleep(0.2)
            except (CommitUnknownError, TimeoutError):
                self.unknown += 1
                await asyncio.sleep(1.0)  # for a COMMIT that is under way
                if found := await self._surely(lambda: self._find(names)):
                    assert len(found) == len(names), f"half of it was written: {names}, {found}"
                    return found
            else:
                return []

    async def _surely(self, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a call that may be repeated, until it answers."""
        while True:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    return await call()
            except Exception:
                self.repeated += 1
                await asyncio.sleep(0.2)

    async def _find(self, names: Sequence[str]) -> list[int]:
        async def find() -> list[int]:
            async with self.engine.connect() as connection:
                query = select(JobRow.id).where(JobRow.name.in_(names))
                return list(await connection.scalars(query))

        found: list[int] = await self._surely(find)
        return found

    async def _open(self) -> int:
        async def count() -> int:
            async with self.engine.connect() as connection:
                query = select(JobRow.id).where(JobRow.finished_at.is_(None)).limit(BACKLOG + 1)
                return len((await connection.execute(query)).all())

        found: int = await self._surely(count)
        return found
