"""Arguments and results that cannot be stored as JSON, or not by every database.

Bad arguments are refused at once, and the caller's transaction stays usable. A bad result ends its
job as failed with a reason, and its handler is not run again. What is stored comes back whole.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final

import pytest
from pydantic import BaseModel, field_serializer
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from asyncjobq import ArgumentsError, Scheduler, enqueue
from cases.application import Order
from cases.workers import POLL, SLACK, MakeEngine

MEGABYTE: Final = 1_000_000


class Hooked(BaseModel):
    """A model whose own serializer fails."""

    value: int = 1

    @field_serializer("value")
    def serialize(self, value: int) -> int:
        """Fail."""
        raise RuntimeError("the hook is broken")


class Unspeakable:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


def endless() -> list[Any]:
    """Return a list that contains itself."""
    made: list[Any] = []
    made.append(made)
    return made


def deep() -> list[Any]:
    """Return a list nested deeper than Python's stack."""
    made: list[Any] = []
    for _ in range(10 * sys.getrecursionlimit()):
        made = [made]
    return made


BAD: Final[dict[str, Callable[[], Any]]] = {
    "object": object,
    "set": lambda: {1, 2},
    "bytes": lambda: b"bytes",
    "datetime": lambda: datetime.now(UTC),
    "decimal": lambda: Decimal("0.1"),
    "nan": lambda: float("nan"),
    "infinity": lambda: [{"deep": float("inf")}],
    "too_many_digits": lambda: 10**5000,
    "endless": endless,
    "deep": deep,
    "surrogate": lambda: "half a pair: \ud800",
    "tuple_as_key": lambda: {(1, 2): 3},
    "hooked": Hooked,
    "unspeakable": Unspeakable,
    "nine_megabytes": lambda: "x" * (9 * MEGABYTE),
}
GOOD: Final = {
    "big_integers": ([2**63, -(10**400)], None),
    "floats": ([0.1, 1e308, 5e-324, -0.0, 1.0], None),
    "characters": ("nul \x00, quotes \"'`, \\ % :name ?, \U0001f600, \u2028, e\u0301", None),
    "null": (None, None),
    "tuple": ((1, (2, 3)), [1, [2, 3]]),
    "keys": ({1: "one", False: "no", None: 0}, {"1": "one", "false": "no", "null": 0}),
    "order_of_keys": ({"b": 1, "a": 2, "aa": 3}, None),
    "five_megabytes": ("é" * (MEGABYTE * 5 // 2), None),
    "much_to_escape": ("\"\\'\n" * (MEGABYTE * 3 // 4), None),
}


@pytest.fixture
async def scheduler(prepared_url: str) -> AsyncIterator[Scheduler]:
    """Give a scheduler with handlers for good and bad values."""
    async with Scheduler(prepared_url, poll_interval=POLL) as scheduler:
        scheduler.handler("produce")(produce)
        scheduler.handler("echo")(echo)
        yield scheduler


starts: list[str] = []


async def produce(name: str) -> Any:
    """Return a bad value."""
    starts.append(name)
    return BAD[name]()


async def echo(value: Any = None) -> Any:
    """Return what was given."""
    return value


async def test_bad_results_end_their_jobs_once(scheduler: Scheduler) -> None:
    starts.clear()
    async with scheduler.serving():
        jobs = {name: await scheduler.enqueue("produce", {"name": name}) for name in BAD}
        for name, job in jobs.items():
            with pytest.raises(Exception, match=r"result cannot be stored|into JSON raised"):
                await scheduler.wait(job, timeout=30)
            ended = await scheduler.get(job)
            assert (ended.state, ended.attempt, ended.result) == ("failed", 1, None), name
            assert "The handler succeeded" in (ended.error or ""), name
        await check_fresh(scheduler)
    assert sorted(starts) == sorted(BAD)


async def test_bad_arguments_spoil_no_transaction(
    scheduler: Scheduler, prepared_url: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(prepared_url)
    async with AsyncSession(engine) as session:
        session.add(Order(id=1, amount=1))
        await session.flush()
        for name, make in BAD.items():
            for type_ in ("echo", "of_another_program"):
                with pytest.raises(ArgumentsError, match=type_):
                    await scheduler.enqueue(type_, {"value": make()}, session=session)
                with pytest.raises(ArgumentsError, match=type_):
                    await enqueue(session, type_, {"value": make()})
            assert session.in_transaction(), name
        session.add(Order(id=2, amount=2))
        job = await scheduler.enqueue("echo", {"value": 3}, session=session)
        await session.commit()
        assert (await session.scalars(select(Order.amount).order_by(Order.id))).all() == [1, 2]
    assert [found.id for found in await scheduler.find()] == [job.id]
    async with scheduler.serving():
        await check_fresh(scheduler)


async def test_good_values_come_back_whole(scheduler: Scheduler) -> None:
    async with scheduler.serving():
        for name, (value, other) in GOOD.items():
            expected = value if other is None else other
            job = await scheduler.enqueue("echo", {"value": value})
            result = await scheduler.wait(job, timeout=30)
            stored = await scheduler.get(job)
            assert result == expected, name
            assert stored.args == {"value": expected}, name
            assert repr(result) == repr(expected), name
        await check_fresh(scheduler)


async def check_fresh(scheduler: Scheduler) -> None:
    job = await scheduler.enqueue("echo", {"value": "fresh"})
    assert await scheduler.wait(job, timeout=2 * POLL + SLACK) == "fresh"
