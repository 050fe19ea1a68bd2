"""One attempt: whatever a handler does becomes an outcome, a value, and never an exception here.

Without a database: `run.py` knows none.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from asyncjobq import Cancel, Fail, Retry, Snooze, constant, none
from asyncjobq.outcomes import Ending
from asyncjobq.states import State
from conformance.runs import outcome_of, raising, raising_in_a_thread, wait_for_ever


class Unspeakable(Exception):
    """An error whose own text raises."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


ERRORS: list[BaseException] = [
    ValueError("broken"),
    TimeoutError("the HTTP client's own"),
    asyncio.CancelledError("of its own"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    StopIteration(1),
    StopAsyncIteration(),
    MemoryError(),
    RecursionError(),
    ExceptionGroup("several", [ValueError("one"), KeyError("two")]),
    BaseExceptionGroup("several", [KeyboardInterrupt(), SystemExit()]),
    Unspeakable(),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    ValueError("a lone \ud800 and a \x00"),
    ValueError("x" * 1_000_000),
]


class TestErrors:
    @pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
    @pytest.mark.parametrize("kind", [raising, raising_in_a_thread])
    async def test_fail_the_attempt_and_nothing_else(
        self, kind: Callable[[BaseException], Any], error: BaseException
    ) -> None:
        outcome = await outcome_of(kind(error))
        assert outcome.ending == Ending.FAILED
        assert (outcome.state, outcome.retry_after) == (State.SCHEDULED, 7.0)
        assert outcome.costs_attempt
        assert outcome.error
        assert "\x00" not in outcome.error
        outcome.error.encode()
        assert len(outcome.error) < 20_000
        last = await outcome_of(kind(error), attempt=3)
        assert (last.state, last.retry_after) == (State.FAILED, None)

    async def test_are_told_with_their_place_and_not_ours(self) -> None:
        outcome = await outcome_of(raising(ValueError("broken")))
        assert outcome.error is not None
        assert outcome.error.splitlines()[-1] == "ValueError: broken"
        assert "in handler" in outcome.error
        assert "asyncjobq/run.py" not in outcome.error

    async def test_with_their_causes(self) -> None:
        async def handler() -> None:
            raise ValueError("second") from KeyError("first")

        error = (await outcome_of(handler)).error or ""
        assert "KeyError: 'first'" in error
        assert error.endswith("ValueError: second")

    async def test_a_handler_that_cancels_itself(self) -> None:
        async def handler() -> None:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)

        assert (await outcome_of(handler)).ending == Ending.FAILED

    async def test_a_handler_whose_child_task_is_cancelled(self) -> None:
        async def handler() -> None:
            child = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(child.cancel)
            await child

        assert (await outcome_of(handler)).ending == Ending.FAILED


class TestControlFlow:
    @pytest.mark.parametrize("after", [0, 1.5, timedelta(minutes=1)])
    async def test_snooze_costs_no_attempt(self, after: Any) -> None:
        outcome = await outcome_of(raising(Snooze(after)), attempt=3)
        assert (outcome.ending, outcome.costs_attempt) == (Ending.SNOOZED, False)
        assert outcome.retry_after == Snooze(after).after
        assert outcome.state == (State.SCHEDULED if outcome.retry_after else State.READY)

    @pytest.mark.parametrize(
        ("retry", "after"), [(Retry(), 7.0), (Retry(after=1), 1.0), (Retry(after=0), 0.0)]
    )
    async def test_retry(self, retry: Retry, after: float) -> None:
        outcome = await outcome_of(raising(retry))
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, after)
        assert (await outcome_of(raising(retry), attempt=3)).state == State.FAILED

    async def test_fail_ends_it_whatever_attempts_are_left(self) -> None:
        outcome = await outcome_of(raising(Fail("no such file")))
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert "no such file" in (outcome.error or "")

    async def test_cancel_ends_it_as_cancelled(self) -> None:
        outcome = await outcome_of(raising(Cancel("not needed")))
        assert (outcome.ending, outcome.state) == (Ending.CANCELLED, State.CANCELLED)
        assert "not needed" in (outcome.error or "")

    @pytest.mark.parametrize("after", [float("nan"), float("inf"), "soon", True])
    @pytest.mark.parametrize("end", [Snooze, lambda after: Retry(after=after)])
    async def test_a_delay_that_is_none_fails_the_attempt(self, end: Any, after: Any) -> None:
        async def handler() -> None:
            raise end(after)

        outcome = await outcome_of(handler)
        assert (outcome.ending, outcome.retry_after) == (Ending.FAILED, 7.0)
        assert "seconds or a timedelta" in (outcome.error or "")

    @pytest.mark.parametrize("after", [1e300, timedelta.max])
    async def test_a_delay_beyond_the_calendar_is_cut(self, after: Any) -> None:
        for end in (Snooze(after), Retry(after=after)):
            outcome = await outcome_of(raising(end))
            assert outcome.retry_after is not None
            assert timedelta(days=365) < timedelta(seconds=outcome.retry_after)
            assert datetime.now(UTC) + timedelta(seconds=outcome.retry_after)

    async def test_a_delay_in_the_past_is_now(self) -> None:
        assert (await outcome_of(raising(Snooze(-5)))).retry_after == 0.0
        assert (await outcome_of(raising(Retry(after=-5)))).retry_after == 0.0


class TestRetryPolicy:
    async def test_is_given_the_attempt_and_the_error(self) -> None:
        seen: list[tuple[int, BaseException]] = []

        def policy(attempt: int, error: BaseException) -> float:
            seen.append((attempt, error))
            return 3.0

        error = ValueError("broken")
        outcome = await outcome_of(raising(error), attempt=2, retry=policy)
        assert outcome.retry_after == 3.0
        assert seen == [(2, error)]

    async def test_may_give_up(self) -> None:
        outcome = await outcome_of(raising(ValueError()), retry=none())
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)

    async def test_that_raises_ends_the_job(self) -> None:
        def policy(_attempt: int, _error: BaseException) -> float:
            raise LookupError("\ud800\x00")

        outcome = await outcome_of(raising(ValueError("broken")), retry=policy)
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert "ValueError: broken" in (outcome.error or "")
        assert "LookupError" in (outcome.error or "")
        assert "\x00" not in (outcome.error or "")
        (outcome.error or "").encode()

    @pytest.mark.parametrize("answer", ["soon", float("nan"), float("inf"), True, [1]])
    async def test_that_answers_nonsense_ends_the_job(self, answer: Any) -> None:
        outcome = await outcome_of(raising(ValueError("x")), retry=lambda *_: answer)
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert "retry policy" in (outcome.error or "")

    async def test_that_answers_far_too_much_is_cut(self) -> None:
        outcome = await outcome_of(raising(ValueError("x")), retry=constant(1e300))
        assert outcome.retry_after is not None
        assert datetime.now(UTC) + timedelta(seconds=outcome.retry_after)


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="clean")


async def test_no_job_sees_the_context_of_another_or_of_who_started_it() -> None:
    async def look() -> str:
        before = VARIABLE.get()
        VARIABLE.set("a job's")
        return before

    def look_in_a_thread() -> str:
        before = VARIABLE.get()
        VARIABLE.set("a job's")
        return before

    VARIABLE.set("the web request's")
    for function in [look, look_in_a_thread] * 5:
        assert (await outcome_of(function)).result == '"clean"'
    assert VARIABLE.get() == "the web request's"


async def test_a_value_set_in_a_job_reaches_its_own_tasks_and_threads() -> None:
    async def handler() -> list[str]:
        VARIABLE.set("mine")

        async def child() -> str:
            return VARIABLE.get()

        return [await asyncio.create_task(child()), await asyncio.to_thread(VARIABLE.get)]

    assert (await outcome_of(handler)).result == '["mine","mine"]'


async def test_nothing_of_an_ended_attempt_is_left_running() -> None:
    before = asyncio.all_tasks()
    for function in (wait_for_ever, raising(ValueError())):
        await outcome_of(function, timeout=0.01)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


async def test_errors_are_no_log_of_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for error in ERRORS:
            await outcome_of(raising(error))
    assert caplog.text == ""
