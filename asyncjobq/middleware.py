"""What wraps the runs of jobs: functions that do something before and after the handler.

@scheduler.around
async def timed(job: JobContext, call: Call) -> Any:
    begun = monotonic()
    try:
        return await call()
    finally:
        print(job.type, monotonic() - begun)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from asyncjobq.errors import HandlerError
from asyncjobq.signatures import is_async

if TYPE_CHECKING:
    from asyncjobq.context import JobContext

Call = Callable[[], Awaitable[Any]]
"""Goes on with the run: to the next middleware, and at last to the handler. Returns its result."""

Middleware = Callable[["JobContext", Call], Awaitable[Any]]
"""Takes the running job and the call that goes on; what it returns is the job's result, and what
it raises is the job's error."""

M = TypeVar("M", bound=Middleware)


def checked_middleware(function: M) -> M:
    """Return the function; raises HandlerError unless it can wrap a run."""
    try:
        inspect.signature(function).bind(None, None)
        fits = is_async(function)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise HandlerError(
            f"around takes an `async def` of the job's context and of the call that goes on, such "
            f"as `async def around(job, call): return await call()`; {function!r} is none."
        )
    return function


async def surrounded(layers: Sequence[Middleware], context: JobContext, call: Call) -> Any:
    """Make the call inside of these layers, the first of them outermost."""
    for layer in reversed(layers):
        call = partial(layer, context, call)
    return await call()
