"""Arguments in, results out: what of them can be stored, and what becomes of a job if not.

Without a database: `run.py` knows none.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from asyncjobq import JobContext
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.states import State
from conformance.runs import outcome_of


class TestArguments:
    @pytest.mark.parametrize(
        "args", ["{", "[1]", "null", '{"b": 1}', '{"a": 1, "c": 2}', '"text"', "{}"]
    )
    async def test_that_do_not_fit_fail_the_job_before_it_starts(self, args: str) -> None:
        started: list[int] = []

        async def handler(a: int) -> None:
            started.append(a)

        outcome = await outcome_of(handler, args=args)
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert outcome.error
        assert started == []


class TestSuccess:
    async def test_the_result_as_json(self) -> None:
        async def add(a: int, b: int = 1) -> dict[str, int]:
            return {"sum": a + b}

        outcome = await outcome_of(add, args='{"a": 2}')
        assert outcome == Outcome(Ending.SUCCEEDED, result=outcome.result)
        assert outcome.result == '{"sum":3}'
        assert outcome.state == State.DONE

    async def test_in_a_thread_of_its_own(self) -> None:
        def name() -> str:
            return threading.current_thread().name

        outcome = await outcome_of(name)
        assert json.loads(outcome.result or "") != threading.current_thread().name

    @pytest.mark.parametrize("value", [None, True, 1.5, "ä🙂\u0000", [1, [2]], {"a": None}, 2**70])
    async def test_every_json_value(self, value: Any) -> None:
        async def give() -> Any:
            return value

        assert json.loads((await outcome_of(give)).result or "") == value

    async def test_with_its_context(self) -> None:
        async def look(ctx: JobContext, a: int) -> Any:
            return [ctx.job_id, ctx.attempt, ctx.max_attempts, ctx.args, a]

        outcome = await outcome_of(look, args='{"a": 5}', attempt=2)
        assert json.loads(outcome.result or "") == [1, 2, 3, {"a": 5}, 5]

    async def test_of_a_job_without_a_deadline(self) -> None:
        async def give() -> int:
            return 1

        assert (await outcome_of(give, timeout=0.0)).ending == Ending.SUCCEEDED


class Spiteful:
    """A result whose conversion raises."""

    def __repr__(self) -> str:
        raise RuntimeError("not even this")


@dataclasses.dataclass
class Holder:
    value: Any


CIRCULAR: list[Any] = []


CIRCULAR.append(CIRCULAR)


RESULTS: list[Any] = [
    object(),
    {1, 2},
    b"bytes",
    datetime.now(UTC),
    float("nan"),
    float("-inf"),
    10**5000,
    "\ud800",
    CIRCULAR,
    {(1, 2): 3},
    Spiteful(),
    Holder(object()),
    Holder(CIRCULAR),
    [{"a": [1j]}],
]


class TestUnserialisableResult:
    @pytest.mark.parametrize("value", RESULTS, ids=lambda value: type(value).__name__)
    async def test_fails_the_job_once_and_says_why(self, value: Any) -> None:
        async def give() -> Any:
            return value

        outcome = await outcome_of(give)
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert "The handler succeeded, but" in (outcome.error or "")
        (outcome.error or "").encode()

    async def test_or_one_too_large(self) -> None:
        async def give() -> str:
            return "ä" * 600

        assert (await outcome_of(give, max_result_bytes=1202)).state == State.DONE
        outcome = await outcome_of(give, max_result_bytes=1201)
        assert outcome.state == State.FAILED
        assert "1,202 bytes" in (outcome.error or "")

    async def test_a_dataclass_is_none(self) -> None:
        async def give() -> Holder:
            return Holder([1, {"a": None}])

        assert (await outcome_of(give)).result == '{"value":[1,{"a":null}]}'
