"""Handlers: the functions that run jobs, and the registries that find them by type.

A registry exists without a scheduler, so modules of handlers import nothing else:

    images = Handlers()

    @images.handler(timeout=60)
    async def resize(path: str, width: int = 800) -> dict[str, int]: ...

    resize.job(path="a.png")          # a job to be enqueued
    await resize(path="a.png")        # the function itself
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from asyncjobq import codec
from asyncjobq.addresses import address_of
from asyncjobq.arguments import Arguments
from asyncjobq.backoff import ErrorTypes, RetryPolicy
from asyncjobq.errors import AsyncJobQError, HandlerError, InvalidJobError
from asyncjobq.handler_options import HandlerOptions
from asyncjobq.job import Job
from asyncjobq.limits import Limit
from asyncjobq.middleware import M, Middleware, checked_middleware
from asyncjobq.options import JobSpec
from asyncjobq.recurrence import Declarations
from asyncjobq.results import Results, result_of
from asyncjobq.signatures import calls_of, is_async, underlying

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping, Sequence
    from datetime import timedelta
    from typing import Concatenate, Literal

    from asyncjobq.context import JobContext
    from asyncjobq.injection import Injected

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
F_co = TypeVar("F_co", bound=Callable[..., Any], covariant=True)


class Handler(Generic[F_co]):
    """A registered function: callable as itself, and what makes and checks its jobs."""

    def __init__(
        self,
        function: F_co,
        type_name: str | None,
        options: HandlerOptions,
        around: Sequence[Middleware] = (),
    ) -> None:
        _check_callable(function)
        functools.update_wrapper(self, function)
        self.function = function
        name = _name_of(function) if type_name is None else type_name
        self.types = tuple(dict.fromkeys(map(_checked_type, (name, *options.aliases))))
        self.type = self.types[0]
        self.options = options
        self.is_async = is_async(function)
        self.around = around
        """The middleware of the registry that it was made with."""
        self._arguments = Arguments(self.type, function)
        self._check_limits()
        self._check_place()
        self.results = Results(self.type, function)

    def __call__(self: Handler[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    # The kinds of functions are told apart here and not in `Handlers.handler`: an Any in the
    # function's own types would match several overloads there, and mypy then answers Any.
    @overload
    def job(
        self: Handler[Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> JobSpec[R]: ...
    @overload
    def job(
        self: Handler[Callable[Concatenate[JobContext, P], R]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> JobSpec[R]: ...
    @overload
    def job(
        self: Handler[Callable[P, Coroutine[Any, Any, R]]], /, *args: P.args, **kwargs: P.kwargs
    ) -> JobSpec[R]: ...
    @overload
    def job(self: Handler[Callable[P, R]], /, *args: P.args, **kwargs: P.kwargs) -> JobSpec[R]: ...
    def job(self, /, *args: Any, **kwargs: Any) -> JobSpec[Any]:
        """Return a job with these arguments, to be enqueued; the context is not among them."""
        stored = self._arguments.encode(args, kwargs)
        return JobSpec(self.type, stored, default_queue=self.options.queue)

    def _check_limits(self) -> None:
        for limit in self.options.limits:
            if not isinstance(limit, Limit):
                raise HandlerError(
                    f"limits takes Concurrency, RateLimit, Budget or Capacity, not {limit!r}."
                )
            if limit.argument is not None and not self._arguments.takes(limit.argument):
                raise HandlerError(
                    f"The limit {limit.name!r} is keyed by {limit.argument!r}, which is no "
                    f"argument of {self.type!r}: it takes {self._arguments.signature}. For the "
                    "job's group, write key='group_key'."
                )

    def _check_place(self) -> None:
        place = self.options.run_in
        if place is not None and self.is_async:
            raise HandlerError(
                f"Handler {self.type!r} is an `async def`, which runs on the event loop; run_in="
                f"{place!r} is for a `def`."
            )
        if not self.runs_in_process:
            return
        address_of(self.function, self.type)
        if self.takes_context or self.injected:
            raise HandlerError(
                f"Handler {self.type!r} runs in a process of its own, where there is no JobContext "
                "and nothing that the worker injects. Pass what it needs as arguments, or leave "
                'run_in="process" out.'
            )

    @property
    def runs_in_process(self) -> bool:
        """Whether the function is called in a process of its own."""
        return self.options.run_in == "process"

    def encode(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as they are stored: checked, as JSON values, without defaults."""
        return self._arguments.encode((), args)

    def decode(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored arguments as keyword arguments for the function."""
        return self._arguments.decode(stored)

    @overload
    def result_of(self: Handler[Callable[..., Coroutine[Any, Any, R]]], job: Job[Any], /) -> R: ...
    @overload
    def result_of(self: Handler[Callable[..., R]], job: Job[Any], /) -> R: ...
    def result_of(self, job: Job[Any], /) -> Any:
        """Return the result of one of this handler's jobs that has ended, as it was returned.

        Models and dataclasses are rebuilt from the JSON in `job.result`. Raises JobFailed,
        JobCancelled, or StoredResultError where the stored result no longer fits.
        """
        if job.type not in self.types or not job.ended:
            reason = f"it is {job.state}" if job.type in self.types else f"it is a {job.type!r}"
            raise InvalidJobError(
                f"Job {job.id} has no result of {self.type!r}: {reason}. Take one that has ended, "
                "e.g. from as_completed() or ctx.upstreams()."
            )
        return result_of(job, self.results)

    def encode_result(self, value: Any) -> Any:
        """Return what the function returned as JSON values."""
        return self.results.encode(value)

    def argument_as_text(self, name: str, stored: Mapping[str, Any]) -> str:
        """Return a job's argument, or its default, as the text by which limits are keyed."""
        value = self._arguments.value_of(name, stored)
        if value is None:
            return ""
        return value if isinstance(value, str) else codec.encode(value)

    @property
    def takes_context(self) -> bool:
        """Whether the function's first parameter is the JobContext."""
        return self._arguments.takes_context

    @property
    def injected(self) -> Mapping[str, Injected]:
        """What the worker fills in, by the parameter's name."""
        return self._arguments.injected

    @property
    def place(self) -> str:
        """Where the function is defined, for messages."""
        code = getattr(underlying(self.function), "__code__", None)
        return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(self.function)

    def __repr__(self) -> str:
        return f"<Handler {self.type!r} at {self.place}>"


AnyHandler = Handler[Callable[..., Any]]


class Handlers(Declarations):
    """A registry of handlers, and of the times at which some of them run."""

    def __init__(self) -> None:
        super().__init__()
        self._by_type: dict[str, AnyHandler] = {}
        self._around: list[Middleware] = []
        self._included: dict[Handlers, int] = {}

    @overload
    def handler(self, function: F, /) -> Handler[F]: ...
    @overload
    def handler(
        self,
        type_name: str | None = None,
        /,
        *,
        timeout: float | timedelta | None = ...,
        max_attempts: int = ...,
        retry: RetryPolicy = ...,
        retry_on: ErrorTypes | None = ...,
        fail_on: ErrorTypes = ...,
        queue: str | None = ...,
        limits: Iterable[Limit] = ...,
        cost: float = ...,
        aliases: Iterable[str] = ...,
        run_in: Literal["thread", "process"] | None = ...,
    ) -> Callable[[F], Handler[F]]: ...
    def handler(self, given: Any = None, /, **options: Any) -> Any:
        """Register the decorated function as the handler of a type: the name given, or its own.

        For the options see `HandlerOptions`.
        """
        if given is None or isinstance(given, str):
            return functools.partial(self._register, given, HandlerOptions.of(options))
        return self._register(None, HandlerOptions.of(options), given)

    def around(self, function: M, /) -> M:
        """Wrap each run of the handlers registered here: `async def around(job, call)`.

        Those of a scheduler are outside of these; of several, the first one is outermost.
        """
        self._around.append(checked_middleware(function))
        return function

    def include(self, *others: Handlers) -> None:
        """Take over the handlers and schedules that other registries have now."""
        for other in others:
            if self._included.get(other) == other.revision:  # asked for each job that is enqueued
                continue
            for handler in other:
                self._add(handler)
            for definition in other.definitions.values():
                self._define(definition)
            self._included[other] = other.revision

    def find(self, type_name: str, /) -> AnyHandler | None:
        """Return the handler of a type, also by alias."""
        return self._by_type.get(type_name)

    def __getitem__(self, type_name: str, /) -> AnyHandler:
        return self._by_type[type_name]

    @property
    def types(self) -> tuple[str, ...]:
        """All types that have a handler, aliases included, sorted."""
        return tuple(sorted(self._by_type))

    def __iter__(self) -> Iterator[AnyHandler]:
        return iter(dict.fromkeys(self._by_type.values()))

    def __len__(self) -> int:
        return len(set(self._by_type.values()))

    def _register(self, type_name: str | None, options: HandlerOptions, function: F) -> Handler[F]:
        handler = Handler(function, type_name, options, self._around)
        self._add(handler)
        return handler

    def _handler_of(self, given: Any) -> AnyHandler:
        if not isinstance(given, Handler):
            return self._register(None, HandlerOptions(), given)
        self._add(given)
        return given

    def _add(self, handler: AnyHandler) -> None:
        if self._by_type.get(handler.type) is handler:
            return
        for name in handler.types:
            known = self._by_type.get(name, handler)
            if known is not handler:
                raise HandlerError(
                    f"{name!r} has two handlers, at {known.place} and at {handler.place}. Give "
                    'one another name: @handlers.handler("name").'
                )
        self._by_type |= dict.fromkeys(handler.types, handler)
        self.revision += 1


def _check_callable(function: Any) -> None:
    if inspect.isclass(function) or not callable(function):
        raise HandlerError(f"A handler is a def or an async def, not {function!r}.")
    if any(
        inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in calls_of(function)
    ):
        raise HandlerError(
            f"{function!r} yields, and nobody would iterate over it. Return a list instead, or "
            "report what happens on the way with the context's progress()."
        )


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", "<lambda>")
    if name == "<lambda>":
        raise HandlerError(
            f'{function!r} has no name of its own; give it one: handlers.handler("name")(...).'
        )
    return str(name)


def _checked_type(name: str) -> str:
    try:
        return JobSpec[Any](name).type
    except AsyncJobQError as error:
        raise HandlerError(str(error)) from error
