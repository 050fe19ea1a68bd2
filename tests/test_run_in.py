"""Where handlers may run, as it is checked when they are registered."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from asyncjobq import HandlerError, Handlers, JobContext, inject
from conformance import computing


async def coroutine() -> None: ...


def takes_context(ctx: JobContext) -> None: ...


def takes_injected(n: int = inject(int)) -> None: ...


def refused() -> list[Any]:
    def inner() -> None: ...

    return [
        pytest.param(lambda: None, "top level", id="lambda"),
        pytest.param(inner, "top level", id="closure"),
        pytest.param(coroutine, "async def", id="async"),
        pytest.param(takes_context, "no JobContext", id="context"),
        pytest.param(takes_injected, "nothing that the worker injects", id="injected"),
        pytest.param(functools.partial(computing.add, 1), "not found by name", id="partial"),
        pytest.param(computing.Tools().method, "not found by name", id="method"),
    ]


@pytest.mark.parametrize(("function", "told"), refused())
def test_what_no_other_process_can_run_is_refused(function: Any, told: str) -> None:
    with pytest.raises(HandlerError, match=told):
        Handlers().handler("work", run_in="process")(function)


def test_run_in_is_checked() -> None:
    with pytest.raises(HandlerError, match="run_in is 'thread' or 'process', not 'fork'"):
        Handlers().handler("work", run_in="fork")  # type: ignore[call-overload]
    with pytest.raises(HandlerError, match="async def"):
        Handlers().handler("work", run_in="thread")(coroutine)
    assert not Handlers().handler("work", run_in="thread")(computing.add).runs_in_process
