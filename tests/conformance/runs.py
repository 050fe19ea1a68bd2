"""Attempts of jobs without a worker, and handlers for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from anyio import CapacityLimiter

from asyncjobq import Handlers, JobContext, constant
from asyncjobq.context import LeaseRef
from asyncjobq.finalize import Finished
from asyncjobq.lease import Claimed, Lease
from asyncjobq.outcomes import Outcome
from asyncjobq.run import JobRun
from asyncjobq.states import State
from asyncjobq.writer import OutcomeWriter

GRACE = 0.05


def run_of(
    function: Callable[..., Any],
    *,
    args: str = "{}",
    timeout: float = 60.0,
    attempt: int = 1,
    max_attempts: int = 3,
    retry: Any = None,
    options: dict[str, Any] | None = None,
    **how: Any,
) -> JobRun:
    """Return a run of a handler, as the worker would make it of a claimed job."""
    options = {"retry": retry or constant(7.0), **(options or {})}
    handler = Handlers().handler("work", **options)(function)
    now = datetime.now(UTC)
    lease = Lease(1, "worker", 1)
    claimed = Claimed(
        lease=lease,
        queue="default",
        type="work",
        limit_key="",
        args=args,
        group_key="",
        weight=1.0,
        attempt=attempt,
        max_attempts=max_attempts,
        timeout=timeout,
        created_at=now,
        started_at=now,
    )
    services: Any = SimpleNamespace()
    lease = LeaseRef(1, "worker", 1)
    context = JobContext(1, "work", attempt, max_attempts, None, args, lease, services)
    return JobRun(claimed, handler, context, CapacityLimiter(4), GRACE, **how)


def given(writer: OutcomeWriter, item: Finished) -> asyncio.Future[State | None]:
    """Give an outcome to a writer, and return what it will tell of it."""
    told: asyncio.Future[State | None] = asyncio.get_running_loop().create_future()
    writer.write(item, told.set_result)
    return told


async def ended(run: JobRun) -> Outcome:
    """Let a run begin, and return how it ended."""
    outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    run.begin(outcome.set_result)
    return await outcome


async def outcome_of(function: Callable[..., Any], **how: Any) -> Outcome:
    async with asyncio.timeout(10):
        return await ended(run_of(function, **how))


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def handler() -> None:
        raise error

    return handler


def raising_in_a_thread(error: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise error

    return handler


async def wait_for_ever() -> None:
    await asyncio.sleep(60)
