"""Attempts that are ended from outside: by deadline, request, shutdown, or a lost lease.

Without a database: `run.py` knows none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from anyio import CapacityLimiter

from asyncjobq import JobContext
from asyncjobq.clock import monotonic
from asyncjobq.outcomes import Ending, Outcome
from asyncjobq.run import Stop
from asyncjobq.states import State
from conformance.runs import ended, outcome_of, raising, run_of, wait_for_ever


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Give an event for threads to wait for, which is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def stubborn() -> AsyncIterator[Callable[[], Awaitable[str]]]:
    """Give a handler that ends only with the test, however often it is cancelled."""
    end, ended = asyncio.Event(), asyncio.Event()

    async def handler() -> str:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue
        ended.set()
        return "late"

    yield handler
    end.set()
    await ended.wait()


class TestTimeout:
    async def test_cancels_the_handler(self) -> None:
        cleaned_up = []

        async def handler() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cleaned_up.append(True)

        outcome = await outcome_of(handler, timeout=0.02)
        assert outcome.ending == Ending.TIMED_OUT
        assert (outcome.error, outcome.retry_after) == ("timed out after 0.02 s", 7.0)
        assert cleaned_up == [True]
        last = await outcome_of(handler, timeout=0.02, attempt=3)
        assert (last.ending, last.state) == (Ending.TIMED_OUT, State.FAILED)

    async def test_is_not_the_handlers_own_timeout_error(self) -> None:
        outcome = await outcome_of(raising(TimeoutError("upstream is slow")))
        assert outcome.ending == Ending.FAILED
        assert "upstream is slow" in (outcome.error or "")

    async def test_is_told_apart_by_the_retry_policy(self) -> None:
        def policy(_attempt: int, error: BaseException) -> float | None:
            return 3.0 if isinstance(error, TimeoutError) else None

        outcome = await outcome_of(wait_for_ever, timeout=0.01, retry=policy)
        assert outcome.retry_after == 3.0

    @pytest.mark.parametrize("end", ["return", "raise"])
    async def test_counts_although_the_handler_swallows_it(self, end: str) -> None:
        async def handler() -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if end == "raise":
                    raise ValueError("clean-up") from None
            return "late"

        outcome = await outcome_of(handler, timeout=0.02)
        assert (outcome.ending, outcome.result) == (Ending.TIMED_OUT, None)

    async def test_waits_only_so_long_for_cleaning_up(
        self, stubborn: Callable[[], Awaitable[str]], caplog: pytest.LogCaptureFixture
    ) -> None:
        begun = monotonic()
        outcome = await outcome_of(stubborn, timeout=0.02)
        assert monotonic() - begun < 5
        assert (outcome.ending, outcome.result) == (Ending.TIMED_OUT, None)
        assert "does not end although it was cancelled" in caplog.text

    async def test_leaves_a_thread_behind(self, released: threading.Event) -> None:
        told = threading.Event()

        def handler(ctx: JobContext) -> str:
            released.wait(10)
            if ctx.cancel_requested:
                told.set()
            return "late"

        outcome = await outcome_of(handler, timeout=0.02)
        assert (outcome.ending, outcome.result) == (Ending.TIMED_OUT, None)
        released.set()
        assert await asyncio.to_thread(told.wait, 10)

    async def test_of_a_thread_that_waits_for_a_free_one(self, released: threading.Event) -> None:
        runs = [run_of(lambda: released.wait(10), timeout=0.05) for _ in range(3)]
        crowded = CapacityLimiter(1)
        for run in runs:
            run.threads = crowded
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*(ended(run) for run in runs))
        assert {outcome.ending for outcome in outcomes} == {Ending.TIMED_OUT}


class TestStop:
    @staticmethod
    async def stopped(
        function: Callable[..., Any], *reasons: Stop, begun: threading.Event | None = None
    ) -> Outcome:
        """Run a handler until it waits, or has `begun`, then stop it."""
        run = run_of(function)
        outcome = asyncio.ensure_future(ended(run))
        await (asyncio.sleep(0.01) if begun is None else asyncio.to_thread(begun.wait, 10))
        for reason in reasons:
            run.stop(reason)
        async with asyncio.timeout(5):
            return await outcome

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [
            (Stop.INTERRUPTED, Outcome(Ending.INTERRUPTED, retry_after=0.0)),
            (Stop.CANCELLED, Outcome(Ending.CANCELLED, error="cancelled on request")),
            (Stop.LEASE_LOST, Outcome(Ending.LEASE_LOST)),
        ],
    )
    async def test_says_why(self, reason: Stop, expected: Outcome) -> None:
        assert await self.stopped(wait_for_ever, reason) == expected

    async def test_interrupted_is_not_an_attempt(self) -> None:
        outcome = await self.stopped(wait_for_ever, Stop.INTERRUPTED)
        assert (outcome.state, outcome.costs_attempt) == (State.READY, False)

    async def test_the_first_reason_counts(self) -> None:
        outcome = await self.stopped(wait_for_ever, Stop.LEASE_LOST, Stop.INTERRUPTED)
        assert outcome.ending == Ending.LEASE_LOST

    async def test_before_the_start_starts_nothing(self) -> None:
        started: list[bool] = []

        async def handler() -> None:
            started.append(True)

        run = run_of(handler)
        run.stop(Stop.INTERRUPTED)
        assert (await ended(run)).ending == Ending.INTERRUPTED
        assert started == []

    async def test_what_is_done_in_spite_of_shutdown_is_done(self) -> None:
        async def handler() -> str:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return "saved"
            return ""

        outcome = await self.stopped(handler, Stop.INTERRUPTED)
        assert (outcome.ending, outcome.result) == (Ending.SUCCEEDED, '"saved"')
        lost = await self.stopped(handler, Stop.LEASE_LOST)
        assert lost == Outcome(Ending.LEASE_LOST)

    async def test_of_a_stubborn_handler_keeps_its_lease(
        self, stubborn: Callable[[], Awaitable[str]]
    ) -> None:
        """Released, its job would run twice at the same time."""
        outcome = await self.stopped(stubborn, Stop.INTERRUPTED)
        assert outcome.ending == Ending.LEASE_LOST

    async def test_of_a_thread_keeps_its_lease(self, released: threading.Event) -> None:
        begun = threading.Event()

        def handler() -> None:
            begun.set()
            released.wait(10)

        outcome = await self.stopped(handler, Stop.INTERRUPTED, begun=begun)
        assert outcome.ending == Ending.LEASE_LOST

    async def test_of_a_thread_that_heeds_it(self) -> None:
        def handler(ctx: JobContext) -> str:
            while not ctx.cancel_requested:
                threading.Event().wait(0.001)
            return "saved"

        outcome = await self.stopped(handler, Stop.INTERRUPTED)
        assert (outcome.ending, outcome.result) == (Ending.SUCCEEDED, '"saved"')

    async def test_tells_the_context(self) -> None:
        seen: list[bool] = []

        async def handler(ctx: JobContext) -> None:
            seen.append(ctx.cancel_requested)
            try:
                await asyncio.sleep(60)
            finally:
                seen.append(ctx.cancel_requested)

        await self.stopped(handler, Stop.CANCELLED)
        assert seen == [False, True]


async def test_overdue_after_the_deadline() -> None:
    assert not run_of(wait_for_ever).overdue
    assert not run_of(wait_for_ever, timeout=0.0).overdue
    run = run_of(wait_for_ever, timeout=1e-9)
    assert run.overdue
