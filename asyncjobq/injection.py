"""Resources for handlers: opened by providers, given as parameters, closed in reverse order.

    async def get_http() -> AsyncIterator[Http]:
        async with Http() as http:
            yield http

    @scheduler.handler
    async def fetch(url: str, http: Http = inject(get_http)) -> int: ...

A provider is called once for a worker, when a job first needs it, and what it opened is closed when
serving stops; with `scope="job"` it is called for each run, and told of the handler's error.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Hashable,
    Iterator,
    Mapping,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from contextvars import Context
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from asyncjobq.errors import HandlerError, SchedulerStateError
from asyncjobq.signatures import is_context, parameters_of

if TYPE_CHECKING:
    from asyncjobq.context import JobContext

T = TypeVar("T")
Provider = Callable[..., Any]
Values = dict[str, Any]

logger = logging.getLogger("asyncjobq.injection")

CLOSING: Final = 5.0
"""Seconds for one resource to close when serving stops."""


class Scope(StrEnum):
    """How long what a provider opened is kept."""

    SCHEDULER = "scheduler"
    JOB = "job"


class Injected:
    """The default of a parameter that the worker fills in, so that no job has to."""

    def __init__(self, provider: Provider, scope: Scope) -> None:
        self.provider = provider
        self.scope = scope
        self.name = getattr(provider, "__qualname__", repr(provider))
        self.takes_context: str | None = None
        self.needs: dict[str, Injected] = {}

    def __repr__(self) -> str:
        return f"inject({self.name})"

    def check(self, owner: str, above: tuple[Injected, ...] = ()) -> None:
        """Raise HandlerError unless all that the provider takes can be given to it."""
        if any(one.provider == self.provider for one in above):
            way = " → ".join(one.name for one in (*above, self))
            raise HandlerError(f"{owner} needs providers that need each other: {way}.")
        try:
            parameters = parameters_of(self.provider)
        except (TypeError, ValueError, NameError):  # hidden, as that of some classes in C
            parameters = []
        for parameter in parameters:
            self._take(parameter, owner)
        for needed in self.needs.values():
            needed.check(owner, (*above, self))

    def _take(self, parameter: Parameter, owner: str) -> None:
        """Note how a parameter of the provider is to be filled in, if it is."""
        problem = ""
        if isinstance(parameter.default, Injected):
            self.needs[parameter.name] = parameter.default
            outlived = parameter.default.scope is Scope.JOB
        elif is_context(parameter):
            self.takes_context = parameter.name
            outlived = True
        elif parameter.default is not Parameter.empty or parameter.kind in _VARIABLE:
            return
        else:
            outlived, problem = False, "has no default; give it one, such as inject(...)"
        if outlived and self.scope is Scope.SCHEDULER:
            problem = 'is there for one job only; say scope="job" for this provider too'
        elif parameter.kind is Parameter.POSITIONAL_ONLY:
            problem = "cannot be passed by name; remove the '/' behind it"
        if problem:
            raise HandlerError(
                f"{owner} comes from {self.name}, whose parameter {parameter.name!r} {problem}."
            )


_VARIABLE: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_Scope = Literal["scheduler", "job"]


@overload
def inject(provider: Callable[..., AsyncIterator[T]], *, scope: _Scope = ...) -> T: ...
@overload
def inject(provider: Callable[..., Iterator[T]], *, scope: _Scope = ...) -> T: ...
@overload
def inject(
    provider: Callable[..., AbstractAsyncContextManager[T]], *, scope: _Scope = ...
) -> T: ...
@overload
def inject(provider: Callable[..., AbstractContextManager[T]], *, scope: _Scope = ...) -> T: ...
@overload
def inject(provider: Callable[..., Awaitable[T]], *, scope: _Scope = ...) -> T: ...
@overload
def inject(provider: Callable[..., T], *, scope: _Scope = ...) -> T: ...
def inject(provider: Provider, *, scope: _Scope = "scheduler") -> Any:
    """Fill in a handler's parameter: `http: Http = inject(get_http)`.

    `provider` is a generator (asynchronous or not) that yields once, a function that returns a
    context manager, a coroutine function or a plain function. Plain ones are called on the event
    loop and must not block. It may take a JobContext, if its scope is "job", and parameters that
    are injected in their turn. Raises HandlerError.
    """
    if not callable(provider) or not isinstance(provider, Hashable):
        raise HandlerError(
            f"inject() takes a function that opens the resource, not {provider!r}; pass the "
            "function itself, without calling it."
        )
    try:
        return Injected(provider, Scope(scope))
    except ValueError as error:
        raise HandlerError(f'scope is "scheduler" or "job", not {scope!r}.') from error


@dataclass
class _Opening:
    """Where resources are being opened, and what was opened there: for a job, or for all."""

    stack: AsyncExitStack
    context: JobContext | None = None
    values: dict[Provider, Any] = field(default_factory=dict)


class Resources:
    """What providers opened for one worker: each once, however many jobs need it."""

    def __init__(self) -> None:
        self._kept: dict[Provider, _Kept] = {}
        self._opened: list[_Kept] = []
        self._closed = False

    async def call(
        self,
        wanted: Mapping[str, Injected],
        context: JobContext,
        function: Callable[[Values], Awaitable[Any]],
    ) -> Any:
        """Call a handler with what it wants; errors go through what was opened for this job."""
        if not wanted:
            return await function({})
        raised: list[BaseException] = []
        stack: AsyncExitStack[bool] = AsyncExitStack()
        async with stack:
            try:
                place = _Opening(stack, context)
                return await function(await self._values(wanted, place))
            except BaseException as error:
                raised.append(error)
                raise
        raise raised[0]  # a provider swallowed it, which must not look like success

    async def aclose(self) -> None:
        """Close what is open, last opened first; errors are logged."""
        self._closed = True
        for kept in list(self._kept.values()):
            if not kept.opened.done():
                await kept.cancel()
        while self._opened:
            await self._opened.pop().close()

    async def _values(self, wanted: Mapping[str, Injected], place: _Opening) -> Values:
        return {name: await self._value(one, place) for name, one in wanted.items()}

    async def _value(self, wanted: Injected, place: _Opening) -> Any:
        if wanted.scope is Scope.SCHEDULER:
            return await self._shared(wanted)
        if wanted.provider not in place.values:
            place.values[wanted.provider] = await self.open(wanted, place)
        return place.values[wanted.provider]

    async def _shared(self, wanted: Injected) -> Any:
        kept = self._kept.get(wanted.provider)
        if kept is None:
            if self._closed:
                raise SchedulerStateError(f"{wanted.name} is not opened any more: serving ends.")
            kept = self._kept[wanted.provider] = _Kept(self, wanted)
        value, error = await asyncio.shield(kept.opened)
        if error is not None:
            raise error
        return value

    async def open(self, wanted: Injected, place: _Opening) -> Any:
        """Call a provider and open what it gives."""
        given = await self._values(wanted.needs, place)
        if wanted.takes_context is not None:
            given[wanted.takes_context] = place.context
        made = _as_context_manager(wanted.provider(**given))
        if isinstance(made, AbstractAsyncContextManager):
            return await place.stack.enter_async_context(made)
        if isinstance(made, AbstractContextManager):
            return place.stack.enter_context(made)
        return await made if inspect.isawaitable(made) else made

    def note_opened(self, kept: _Kept) -> None:
        """Remember in which order to close."""
        self._opened.append(kept)

    def forget(self, wanted: Injected) -> None:
        """Let the next job try to open it again."""
        self._kept.pop(wanted.provider, None)


def _as_context_manager(made: Any) -> Any:
    """Return a generator as a context manager, anything else as it is."""
    if isinstance(made, AsyncGenerator):
        return asynccontextmanager(lambda: made)()
    if isinstance(made, Generator):
        return contextmanager(lambda: made)()
    return made


class _Kept:
    """One resource for all jobs, opened and closed in a task of its own.

    So no job's cancellation cuts its opening off, nothing of a job's context stays in it, and what
    has to be left by the task that entered it, such as a task group, is.
    """

    def __init__(self, resources: Resources, wanted: Injected) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        self._resources = resources
        self._wanted = wanted
        self._end = asyncio.Event()
        name = f"asyncjobq resource {wanted.name}"
        self._task = loop.create_task(self._keep(), name=name, context=Context())

    async def close(self) -> None:
        """End it in order, or after a while by force."""
        self._end.set()
        _, late = await asyncio.wait({self._task}, timeout=CLOSING)
        if late:
            logger.error("%s did not close within %g s; it is cancelled.", self._wanted, CLOSING)
            await self.cancel()

    async def cancel(self) -> None:
        """End it by force."""
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=1.0)

    async def _keep(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                value = await self._resources.open(self._wanted, _Opening(stack))
                self._resources.note_opened(self)
                self.opened.set_result((value, None))
                await self._end.wait()
        except BaseException as error:  # a value: it must reach the jobs and not the loop
            if self.opened.done():
                logger.exception("%s failed to close.", self._wanted)
            else:
                self._resources.forget(self._wanted)
                self.opened.set_result((None, error))
