"""Blocks, waiting for a task that is stopped in order and not cut off, and signals for scripts."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from itertools import chain, repeat
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Block(AbstractAsyncContextManager[T_co]):
    """What `async with` enters; used in any other way, it says so."""

    def __init__(self, name: str, manager: AbstractAsyncContextManager[T_co]) -> None:
        self._name = name
        self._manager = manager

    async def __aenter__(self) -> T_co:
        return await self._manager.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # what copying and inspecting look for
            raise AttributeError(name)
        raise AttributeError(f"{self._usage} Outside, there is no {name!r}.")

    def __enter__(self) -> NoReturn:
        raise TypeError(self._usage)

    def __exit__(self, *_: object) -> None: ...

    def __await__(self) -> NoReturn:
        raise TypeError(self._usage)

    @property
    def _usage(self) -> str:
        return (
            f"Write `async with ….{self._name}(…) as variable:` and use the variable in its block."
        )


def block(function: Callable[P, AsyncIterator[T]]) -> Callable[P, Block[T]]:
    """Make a method whose calls are to be entered with `async with` of a generator."""
    manager = asynccontextmanager(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Block[T]:
        return Block(function.__name__, manager(*args, **kwargs))

    return made


async def ended(
    task: asyncio.Task[Any], stop: Callable[[], None], hurry: Callable[[], None]
) -> None:
    """Wait for a task; a cancellation of the waiter becomes a call of `stop` and is raised later.

    The task is never cancelled. Each further cancellation calls `hurry`.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            (stop if cancelled is None else hurry)()
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen; what counts for the caller is the cancellation
        raise cancelled
    await task


@contextmanager
def signals_handled(stop: Callable[[], None], hurry: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at the first SIGINT or SIGTERM, `hurry` at each further, in the running loop."""
    loop = asyncio.get_running_loop()
    calls = chain([stop], repeat(hurry))

    def told() -> None:
        next(calls)()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, told)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
