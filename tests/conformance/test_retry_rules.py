"""Which failures are retried and when: policies, rules by the kind of error, and what wins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from asyncjobq import Cancel, Fail, Handlers, JobContext, Retry, Snooze, constant, exponential, none
from asyncjobq.backoff import RetryRules, delay_of
from asyncjobq.errors import HandlerError
from asyncjobq.outcomes import Ending
from asyncjobq.run import Stop
from asyncjobq.states import State
from conformance.kit import Jobs
from conformance.running import Latch, serving
from conformance.runs import (
    ended,
    outcome_of,
    raising,
    raising_in_a_thread,
    run_of,
    wait_for_ever,
)

in_the_tables = pytest.mark.asyncio(loop_scope="module")


class TestPolicies:
    @pytest.mark.parametrize("attempt", [-(10**9), -1, 0, 1, 2, 10**3, 10**9, 10**30])
    @pytest.mark.parametrize(
        "policy",
        [
            exponential(),
            exponential(base=2, factor=2, cap=7),
            exponential(base=0, factor=10**6),
            exponential(base=1e-300, factor=1e300, jitter=1),
            exponential(base=timedelta(minutes=1), cap=timedelta(hours=2), jitter=0),
            constant(7),
            constant(timedelta(seconds=7)),
        ],
    )
    def test_answer_at_any_attempt(self, policy: Any, attempt: int) -> None:
        assert 0 <= policy(attempt, ValueError()) <= 7200

    def test_exponential_grows_to_its_cap(self) -> None:
        policy = exponential(base=1, factor=3, cap=20, jitter=0)
        assert [policy(attempt, ValueError()) for attempt in range(1, 6)] == [1, 3, 9, 20, 20]
        assert delay_of(10**9, base=0.0, factor=2.0, cap=20.0) == 0.0

    def test_jitter_only_shortens(self) -> None:
        policy = exponential(base=10, jitter=0.5)
        delays = {policy(1, ValueError()) for _ in range(50)}
        assert all(5 <= delay <= 10 for delay in delays)
        assert len(delays) > 1

    def test_none_gives_up(self) -> None:
        assert none()(1, ValueError()) is None

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: exponential(base=-1), "base must not be negative"),
            (lambda: exponential(base=float("nan")), "base must be seconds"),
            (lambda: exponential(cap=float("inf")), "cap must be seconds"),
            (lambda: exponential(cap=timedelta(-1)), "cap must not be negative"),
            (lambda: exponential(factor=0.5), "factor must be a number at least 1"),
            (lambda: exponential(factor=float("inf")), "factor must be a number"),
            (lambda: exponential(jitter=1.5), "jitter must be a number from 0 to 1"),
            (lambda: exponential(jitter=float("nan")), "jitter must be a number"),
            (lambda: exponential(base="1"), "base must be seconds"),  # type: ignore[arg-type]
            (lambda: exponential(factor=True), "factor must be a number"),
            (lambda: exponential(factor=10**400), "factor must be a number"),
            (lambda: exponential(base=10**400), "base must be seconds"),
            (lambda: constant(-1), "must not be negative"),
            (lambda: constant(None), "must be seconds"),  # type: ignore[arg-type]
        ],
    )
    def test_bad_values_are_refused(self, make: Callable[[], Any], message: str) -> None:
        with pytest.raises(HandlerError, match=message):
            make()

    @pytest.mark.parametrize("answer", [-5, -1e300, timedelta(seconds=-5)])
    async def test_a_negative_answer_is_now(self, answer: Any) -> None:
        outcome = await outcome_of(raising(ValueError()), retry=lambda *_: answer)
        assert (outcome.state, outcome.retry_after) == (State.READY, 0.0)

    @pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
    async def test_one_that_raises_anything_fails_its_job_only(self, error: BaseException) -> None:
        def policy(_attempt: int, _error: BaseException) -> float:
            raise error

        outcome = await outcome_of(raising(ValueError("broken")), retry=policy)
        assert (outcome.state, outcome.retry_after) == (State.FAILED, None)
        assert "The retry policy failed" in (outcome.error or "")


class Upstream(ConnectionError):
    """An error of a kind of its own."""


class TestRules:
    @pytest.mark.parametrize("kind", [raising, raising_in_a_thread])
    @pytest.mark.parametrize(
        ("options", "error", "retried"),
        [
            ({"retry_on": (ConnectionError,)}, Upstream(), True),
            ({"retry_on": ConnectionError}, Upstream(), True),
            ({"retry_on": [OSError, KeyError]}, KeyError("x"), True),
            ({"retry_on": (ConnectionError,)}, ValueError(), False),
            ({"retry_on": (ConnectionError,)}, SystemExit(1), False),
            ({"retry_on": (BaseException,)}, SystemExit(1), True),
            ({"fail_on": (ValueError,)}, UnicodeError(), False),
            ({"fail_on": ValueError}, KeyError("x"), True),
            ({"retry_on": OSError, "fail_on": FileNotFoundError}, PermissionError(), True),
            ({"retry_on": OSError, "fail_on": FileNotFoundError}, FileNotFoundError(), False),
            ({"retry_on": OSError, "fail_on": FileNotFoundError}, ValueError(), False),
            ({}, ValueError(), True),
        ],
    )
    async def test_say_what_is_retried(
        self, kind: Any, options: dict[str, Any], error: BaseException, retried: bool
    ) -> None:
        outcome = await outcome_of(kind(error), options=options)
        assert outcome.ending == Ending.FAILED
        assert outcome.retry_after == (7.0 if retried else None)
        assert outcome.state == (State.SCHEDULED if retried else State.FAILED)
        assert outcome.error
        assert outcome.summary

    async def test_of_what_they_leave_the_policy_decides(self) -> None:
        options = {"retry_on": (KeyError,), "retry": none()}
        assert (await outcome_of(raising(KeyError()), options=options)).state == State.FAILED

    async def test_do_not_raise_the_number_of_attempts(self) -> None:
        last = await outcome_of(raising(KeyError()), options={"retry_on": KeyError}, attempt=3)
        assert last.state == State.FAILED

    @pytest.mark.parametrize(
        ("errors", "retried"),
        [
            ([KeyError(), KeyError()], True),
            ([KeyError(), ValueError()], False),
            ([KeyError(), ExceptionGroup("inner", [KeyError(), LookupError()])], False),
            ([KeyError(), ExceptionGroup("inner", [KeyError()])], True),
            ([KeyError(), OSError()], True),
            ([KeyError(), FileExistsError()], False),
        ],
    )
    async def test_judge_a_group_by_its_members(
        self, errors: list[Exception], retried: bool
    ) -> None:
        options = {"retry_on": (KeyError, OSError), "fail_on": (FileExistsError,)}
        outcome = await outcome_of(raising(ExceptionGroup("several", errors)), options=options)
        assert (outcome.retry_after is not None) == retried

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"retry_on": ()}, r"say retry=none\(\)"),
            ({"retry_on": "ValueError"}, "types of exceptions"),
            ({"retry_on": (ValueError(),)}, "types of exceptions"),
            ({"retry_on": 3}, "types of exceptions"),
            ({"fail_on": (int,)}, "fail_on takes types of exceptions"),
            ({"fail_on": None}, "fail_on takes types of exceptions"),
            ({"fail_on": (Fail,)}, "decides by itself"),
            ({"retry_on": (Retry,)}, "decides by itself"),
            ({"retry_on": (ValueError,), "fail_on": (ValueError,)}, "it is never retried"),
            ({"retry_on": (FileNotFoundError,), "fail_on": (OSError,)}, "it is never retried"),
            ({"retry": lambda: 3}, "cannot be called so"),
            ({"retry": lambda attempt: 3}, "cannot be called so"),
        ],
    )
    def test_bad_ones_are_refused(self, options: dict[str, Any], message: str) -> None:
        handlers = Handlers()
        with pytest.raises(HandlerError, match=message):
            handlers.handler("work", **options)(lambda: None)
        assert handlers.types == ()

    def test_an_asynchronous_policy_is_refused(self) -> None:
        async def policy(_attempt: int, _error: BaseException) -> float:
            return 1.0

        with pytest.raises(HandlerError, match="plain function"):
            Handlers().handler("work", retry=policy)  # type: ignore[call-overload]

    def test_a_policy_that_hides_its_signature_is_taken(self) -> None:
        assert RetryRules(policy=type("", (), {"__call__": max})()).policy


class TestPrecedence:
    @pytest.mark.parametrize("rule", [{"fail_on": Exception}, {"retry_on": KeyError}])
    async def test_what_a_handler_raises_comes_before_rules(self, rule: dict[str, Any]) -> None:
        assert (await outcome_of(raising(Retry(after=3)), options=rule)).retry_after == 3.0
        assert (await outcome_of(raising(Retry()), options=rule)).retry_after == 7.0
        snoozed = await outcome_of(raising(Snooze(5)), options=rule)
        assert (snoozed.ending, snoozed.retry_after) == (Ending.SNOOZED, 5.0)
        assert (await outcome_of(raising(Cancel("x")), options=rule)).state == State.CANCELLED

    async def test_fail_comes_before_retry_on(self) -> None:
        outcome = await outcome_of(raising(Fail("x")), options={"retry_on": BaseException})
        assert outcome.state == State.FAILED

    @pytest.mark.parametrize(
        ("rule", "retried"),
        [
            ({}, True),
            ({"retry_on": KeyError}, True),
            ({"fail_on": (OSError,)}, True),
            ({"fail_on": (Exception,)}, True),
            ({"fail_on": (TimeoutError,)}, False),
            ({"retry_on": OSError, "fail_on": [KeyError, TimeoutError]}, False),
        ],
    )
    async def test_a_timeout_is_retried_unless_it_is_named(
        self, rule: dict[str, Any], retried: bool
    ) -> None:
        outcome = await outcome_of(wait_for_ever, timeout=0.01, options=rule)
        assert outcome.ending == Ending.TIMED_OUT
        assert outcome.retry_after == (7.0 if retried else None)

    async def test_the_handlers_own_timeout_error_is_an_error_like_others(self) -> None:
        rule = {"retry_on": KeyError}
        assert (await outcome_of(raising(TimeoutError()), options=rule)).state == State.FAILED


async def _makes_another_error() -> None:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("the connection was cut") from None


def _makes_another_error_in_a_thread(ctx: JobContext) -> None:
    import threading

    while not ctx.cancel_requested:
        threading.Event().wait(0.001)
    raise RuntimeError("told to stop")


class TestInterruption:
    @staticmethod
    async def stopped(function: Callable[..., Any], reason: Stop, **how: Any) -> Any:
        run = run_of(function, **how)
        outcome = asyncio.ensure_future(ended(run))
        await asyncio.sleep(0.01)
        run.stop(reason)
        async with asyncio.timeout(5):
            return await outcome

    @pytest.mark.parametrize("function", [_makes_another_error, _makes_another_error_in_a_thread])
    async def test_that_is_turned_into_another_error_costs_no_attempt(self, function: Any) -> None:
        for attempt in (1, 3):
            outcome = await self.stopped(function, Stop.INTERRUPTED, attempt=attempt)
            assert outcome.ending == Ending.INTERRUPTED
            assert (outcome.state, outcome.costs_attempt) == (State.READY, False)

    @pytest.mark.parametrize("function", [_makes_another_error, _makes_another_error_in_a_thread])
    async def test_a_request_that_is_turned_into_another_error_is_heeded(
        self, function: Any
    ) -> None:
        outcome = await self.stopped(function, Stop.CANCELLED, attempt=3)
        assert (outcome.ending, outcome.state) == (Ending.CANCELLED, State.CANCELLED)

    @pytest.mark.parametrize(
        ("end", "ending"),
        [(Snooze(5), Ending.SNOOZED), (Fail("broken"), Ending.FAILED), (Retry(), Ending.FAILED)],
    )
    async def test_what_the_handler_says_itself_counts(
        self, end: Exception, ending: Ending
    ) -> None:
        async def handler() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise end from None

        assert (await self.stopped(handler, Stop.INTERRUPTED)).ending == ending


@in_the_tables
class TestInTheTables:
    async def test_rules_end_a_job_at_its_first_attempt(self, jobs: Jobs) -> None:
        @jobs.scheduler.handler(fail_on=(LookupError,), retry=constant(0))
        async def work(error: str) -> None:
            raise {"key": KeyError, "value": ValueError}[error]("bad")

        final = await jobs.scheduler.enqueue(work.job("key"))
        retried = await jobs.scheduler.enqueue(work.job("value"))
        await jobs.scheduler.drain()
        rows = [await jobs.row(job) for job in (final, retried)]
        assert [(row.state, row.attempt) for row in rows] == [("failed", 1), ("failed", 5)]

    async def test_a_deploy_is_no_attempt_whatever_handlers_make_of_it(self, jobs: Jobs) -> None:
        scheduler = jobs.another(poll_interval=0.1, stop_timeout=0)
        started = asyncio.Event()

        @scheduler.handler(max_attempts=1)
        async def work() -> None:
            started.set()
            await _makes_another_error()

        job = await scheduler.enqueue(work.job())
        async with serving(scheduler):
            await started.wait()
        row = await jobs.row(job)
        assert (row.state, row.attempt, row.in_flight) == (State.READY, 0, False)

    async def test_five_attempts_unless_something_else_is_said(self, jobs: Jobs) -> None:
        latch = Latch(jobs.scheduler)
        latch.go_on.set()
        job = await jobs.scheduler.enqueue(latch.handler.job())
        await jobs.scheduler.drain()
        assert (await jobs.row(job)).max_attempts == 5
