"""What type checkers know about handlers; checked by mypy and pyright, never run.

`type: ignore` marks what must be an error: both checkers complain where it has nothing to ignore.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# ruff: noqa: ARG001  a handler's parameters are what is checked

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

from asyncjobq.backoff import constant
from asyncjobq.context import JobContext
from asyncjobq.handlers import Handler, Handlers
from asyncjobq.job import Job
from asyncjobq.options import JobSpec
from asyncjobq.scheduler import Scheduler

handlers = Handlers()


@dataclass
class Order:
    lines: list[str]


@handlers.handler
async def bare(path: str, width: int = 800) -> dict[str, Any]:
    return {path: width}


@handlers.handler()
async def called(path: str, width: int = 800) -> list[int]:
    return [width, len(path)]


@handlers.handler("another-name", timeout=timedelta(minutes=1), retry=constant(5), aliases=["old"])
async def named(order: Order) -> str:
    return order.lines[0]


@handlers.handler
async def with_context(context: JobContext, path: str, *, options: dict[str, Any]) -> int:
    return len(path) + len(options)


@handlers.handler(timeout=None, max_attempts=3, queue="media")
async def only_context(context: JobContext) -> None: ...


@handlers.handler
def plain(path: str) -> float:
    return float(path)


@handlers.handler()
def plain_called(path: str) -> float:
    return float(path)


@handlers.handler
def plain_with_context(context: JobContext, count: int) -> bytes:
    return bytes(count)


@handlers.handler
def without_parameters() -> int:
    return 1


@handlers.handler
async def first_is_any(payload: Any, count: int = 1) -> int:
    return count


@handlers.handler
async def first_is_object(payload: object) -> int:
    return 1


@handlers.handler
async def with_extra(context: JobContext, /, path: str, **extra: int) -> int:
    return len(extra)


@handlers.cron("0 4 * * *", timezone="Europe/Berlin")
async def nightly(path: str = "a.png") -> int:
    return len(path)


@handlers.every(timedelta(hours=1), name="hourly", args={"path": "a.png"}, priority=5)
@handlers.cron("@daily")
@handlers.handler(timeout=60)
def recurring(path: str) -> float:
    return float(path)


async def recurring_handlers_are_handlers() -> None:
    assert_type(nightly.job(path="a.png"), JobSpec[int])
    assert_type(await nightly("a.png"), int)
    assert_type(recurring.job("a.png"), JobSpec[float])
    assert_type(recurring("a.png"), float)
    nightly.job(3)  # type: ignore[call-overload]
    handlers.every(60, run_after=3)  # type: ignore[call-arg]
    handlers.every(60, catch_up=3)  # type: ignore[arg-type]


def jobs_are_typed(unknown: Any, order: Order) -> None:
    assert_type(bare.job("a.png", 3), JobSpec[dict[str, Any]])
    assert_type(bare.job(path="a.png"), JobSpec[dict[str, Any]])
    assert_type(bare.job(unknown), JobSpec[dict[str, Any]])
    assert_type(bare.job("a.png").options(weight=2), JobSpec[dict[str, Any]])
    assert_type(called.job(path="a.png", width=3), JobSpec[list[int]])
    assert_type(named.job(order), JobSpec[str])
    assert_type(with_context.job("a.png", options={}), JobSpec[int])
    assert_type(with_context.job(path=unknown, options=unknown), JobSpec[int])
    assert_type(only_context.job(), JobSpec[None])
    assert_type(plain.job("a.png"), JobSpec[float])
    assert_type(plain_called.job(path="a.png"), JobSpec[float])
    assert_type(plain_with_context.job(count=3), JobSpec[bytes])
    assert_type(without_parameters.job(), JobSpec[int])
    assert_type(first_is_any.job(payload=3, count=3), JobSpec[int])
    assert_type(first_is_object.job(payload=3), JobSpec[int])
    assert_type(with_extra.job(path="a.png", more=3), JobSpec[int])


def results_are_typed(job: Job[Any], context: JobContext) -> None:
    assert_type(bare.result_of(job), dict[str, Any])
    assert_type(with_context.result_of(job), int)
    assert_type(only_context.result_of(job), None)
    assert_type(plain.result_of(job), float)
    assert_type(plain_with_context.result_of(job), bytes)
    bare.result_of(1)  # type: ignore[call-overload]
    context.progress("1")  # type: ignore[arg-type]


async def ends_are_typed(scheduler: Scheduler, order: Order) -> None:
    job = await scheduler.enqueue(named.job(order))
    assert_type(await scheduler.wait(job), str)
    async for ended in scheduler.as_completed([job]):
        assert_type(ended, Job[str])
    async for any_job in scheduler.as_completed([1, 2]):
        assert_type(any_job, Job[Any])


def wrong_jobs_are_errors() -> None:
    bare.job()  # type: ignore[call-overload]
    bare.job(3)  # type: ignore[call-overload]
    bare.job(pth="a.png")  # type: ignore[call-overload]
    bare.job("a.png", widht=3)  # type: ignore[call-overload]
    called.job(path=None)  # type: ignore[call-overload]
    named.job("order")  # type: ignore[call-overload]
    with_context.job("a.png")  # type: ignore[call-overload]
    with_context.job(3, options={})  # type: ignore[call-overload]
    only_context.job(3)  # type: ignore[call-overload]
    plain.job()  # type: ignore[call-arg]
    plain.job(3)  # type: ignore[arg-type]
    plain_called.job(pth="a.png")  # type: ignore[call-arg]
    plain_with_context.job("3")  # type: ignore[call-overload]
    without_parameters.job(3)  # type: ignore[call-arg]
    with_extra.job("a.png", more="3")  # type: ignore[call-overload]


async def functions_stay_themselves(context: JobContext, order: Order) -> None:
    assert_type(await bare("a.png", width=3), dict[str, Any])
    assert_type(await named(order), str)
    assert_type(await with_context(context, "a.png", options={}), int)
    assert_type(plain("a.png"), float)
    assert_type(plain_with_context(context, 3), bytes)
    assert_type(plain.function("a.png"), float)
    await bare(3)  # type: ignore[arg-type]
    await with_context("a.png", options={})  # type: ignore[call-arg, arg-type]
    plain()  # type: ignore[call-arg]


def handlers_are_callables() -> Callable[[str], float]:
    functools.partial(plain, "a.png")()
    _wrong: Callable[[int], float] = plain  # type: ignore[assignment]
    return plain


def handlers_are_found_by_name() -> None:
    found = handlers.find("plain")
    assert_type(found, Handler[Callable[..., Any]] | None)
    assert found
    assert_type(found.job(1, anything=2), JobSpec[Any])
    for handler in handlers:
        handler.encode({})


def wrong_options_are_errors() -> None:
    handlers.handler(timout=3)  # type: ignore[call-overload]
    handlers.handler("name", max_attempts="3")  # type: ignore[call-overload]
    handlers.handler(3)  # type: ignore[call-overload]
