"""Handlers that fork: the new process must not go on as a second worker.

It has copies of the worker's connections, and of what the worker was about to do. It may do what
its handler makes it do; once it would leave the handler's code, it ends.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

FORKED: Final = (
    "asyncjobq: a process that a handler has forked came back from the handler, and ends. End it "
    "there, with os._exit(), or start it with subprocess or multiprocessing.\n"
)


class InOneProcess(Generic[T]):
    """Awaits something, and ends a process that was forked in it where that would go on."""

    def __init__(self, awaitable: Awaitable[T]) -> None:
        self._awaitable = awaitable

    def __await__(self) -> Generator[Any, Any, T]:
        """Pass on what is yielded and sent, as `yield from` does, with a look in between."""
        pid = os.getpid()
        steps: Any = self._awaitable.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                end_if_forked(pid)
                yielded = step()
                end_if_forked(pid)
            except StopIteration as end:
                end_if_forked(pid)
                value: T = end.value
                return value
            except BaseException as error:
                end_if_forked(pid, error)
                raise
            try:
                step = partial(steps.send, (yield yielded))
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as error:
                step = partial(steps.throw, error)


def end_if_forked(pid: int, error: BaseException | None = None) -> None:
    """End this process, if it is not the one with this id; at once, and with nothing undone."""
    if os.getpid() == pid:
        return
    with suppress(BaseException):
        if isinstance(error, SystemExit):
            os._exit(_code_of(error))
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.write(FORKED)
        sys.stderr.flush()
    os._exit(1)


def _code_of(error: SystemExit) -> int:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
