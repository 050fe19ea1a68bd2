"""What type checkers know about resources, middleware and events; checked, never run.

`type: ignore` marks what must be an error: both checkers complain where it has nothing to ignore.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# ruff: noqa: ARG001  the parameters are what is checked

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self, assert_type

from asyncjobq import Handlers, JobContext, JobSpec, Scheduler, events, inject

handlers = Handlers()
scheduler = Scheduler("sqlite+aiosqlite:///jobs.db")


class Http:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def get(self, url: str) -> int:
        return len(url)


class Settings: ...


async def get_http() -> AsyncIterator[Http]:
    yield Http()


@asynccontextmanager
async def opened_http(ctx: JobContext, http: Http = inject(get_http)) -> AsyncGenerator[Http, None]:
    yield http


@contextmanager
def opened_settings() -> Generator[Settings, None, None]:
    yield Settings()


def generated_settings() -> Iterator[Settings]:
    yield Settings()


async def read_settings() -> Settings:
    return Settings()


def get_settings() -> Settings:
    return Settings()


def providers_give_what_they_yield() -> None:
    assert_type(inject(get_http), Http)
    assert_type(inject(opened_http, scope="job"), Http)
    assert_type(inject(Http), Http)
    assert_type(inject(opened_settings), Settings)
    assert_type(inject(generated_settings), Settings)
    assert_type(inject(read_settings), Settings)
    assert_type(inject(get_settings), Settings)
    assert_type(inject(Settings, scope="scheduler"), Settings)


@handlers.handler
async def fetch(url: str, http: Http = inject(get_http)) -> int:
    return await http.get(url)


@handlers.handler(retry_on=(ConnectionError, KeyError), fail_on=ValueError)
def with_context(
    ctx: JobContext, url: str, *, settings: Settings = inject(get_settings, scope="job")
) -> str:
    return url


async def injected_parameters_may_be_left_out(ctx: JobContext) -> None:
    assert_type(fetch.job("a"), JobSpec[int])
    assert_type(fetch.job(url="a"), JobSpec[int])
    assert_type(with_context.job("a"), JobSpec[str])
    assert_type(await fetch("a", http=Http()), int)
    assert_type(with_context(ctx, "a", settings=Settings()), str)
    fetch.job()  # type: ignore[call-overload]
    fetch.job(3)  # type: ignore[call-overload]


def wrong_injections_are_errors() -> None:
    inject(get_http, scope="request")  # type: ignore[call-overload]

    async def wrong(http: Http = inject(get_settings)) -> None: ...  # type: ignore[assignment]

    handlers.handler(retry_on=ValueError())  # type: ignore[call-overload]


@scheduler.around
async def timed(job: JobContext, call: Callable[[], Awaitable[Any]]) -> Any:
    return await call()


@handlers.around
async def of_registry(job: JobContext, call: Callable[[], Awaitable[Any]]) -> int:
    return len(await call())


@scheduler.on(events.Succeeded, events.Failed)
async def note(event: events.Succeeded | events.Failed) -> None:
    assert_type(event.duration, float | None)


@scheduler.on()
def note_all(event: events.Event) -> None:
    assert_type(event.job_id, int)


@scheduler.meta_from
def trace() -> dict[str, str]:
    return {"trace": "x"}


async def hooks_stay_themselves(
    ctx: JobContext, call: Callable[[], Awaitable[Any]], event: events.Failed
) -> None:
    assert_type(await timed(ctx, call), Any)
    assert_type(await of_registry(ctx, call), int)
    await note(event)
    assert_type(trace(), dict[str, str])
    end = scheduler.subscribe(note_all, events.Leased)
    assert_type(end, Callable[[], None])
    assert_type(ctx.meta, dict[str, Any])


def wrong_hooks_are_errors() -> None:
    scheduler.around(get_settings)  # type: ignore[type-var]
    scheduler.on("failed")  # type: ignore[arg-type]
    scheduler.subscribe(note, ValueError)  # type: ignore[arg-type]
    scheduler.meta_from(get_settings)  # type: ignore[type-var]
