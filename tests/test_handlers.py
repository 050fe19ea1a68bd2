"""Registering handlers: what is accepted, what is refused and why, and how registries merge."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest

from asyncjobq.arguments import Injected
from asyncjobq.backoff import constant, exponential, none
from asyncjobq.context import JobContext
from asyncjobq.errors import ArgumentsError, HandlerError
from asyncjobq.handlers import HandlerOptions, Handlers
from asyncjobq.limits import Concurrency
from asyncjobq.options import NO_TIMEOUT, UNSET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elsewhere import Unknown  # type: ignore[import-not-found]


HTTP = Injected()
GPU = Concurrency("gpu", 2)


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


class TestRegistration:
    def test_bare(self, handlers: Handlers) -> None:
        @handlers.handler
        async def resize(path: str) -> int:
            """Make it smaller."""
            return len(path)

        assert resize.type == "resize"
        assert resize.options == HandlerOptions(retry=resize.options.retry)
        assert resize.__doc__ == "Make it smaller."
        assert inspect.signature(resize) == inspect.signature(resize.function)
        assert handlers.find("resize") is resize

    def test_called_with_options(self, handlers: Handlers) -> None:
        @handlers.handler(timeout=timedelta(minutes=1), max_attempts=2, queue="media", limits=[GPU])
        def resize(path: str) -> int:
            return len(path)

        assert resize.type == "resize"
        assert resize.options.timeout == 60
        assert resize.options.max_attempts == 2
        assert resize.options.limits == (GPU,)
        assert resize.job("a").queue == "media"

    def test_name_and_aliases(self, handlers: Handlers) -> None:
        @handlers.handler("images.resize", aliases=["resize", "resize"])
        def _resize() -> None: ...

        assert handlers.types == ("images.resize", "resize")
        assert handlers.find("resize") is handlers.find("images.resize") is _resize
        assert handlers.find("_resize") is None
        assert _resize.job().type == "images.resize"
        assert (len(handlers), list(handlers)) == (1, [_resize])

    @pytest.mark.parametrize(
        ("options", "stored"), [({}, UNSET), ({"timeout": None}, NO_TIMEOUT), ({"timeout": 3}, 3.0)]
    )
    def test_timeout_left_out_is_not_none(
        self, handlers: Handlers, options: dict[str, Any], stored: Any
    ) -> None:
        assert handlers.handler("x", **options)(lambda: None).options.timeout == stored

    def test_the_function_stays_callable_as_itself(self, handlers: Handlers) -> None:
        @handlers.handler
        def add(left: int, right: int = 1) -> int:
            return left + right

        assert add(1) == 2
        assert add(1, right=2) == 3

    async def test_an_async_function_stays_awaitable(self, handlers: Handlers) -> None:
        @handlers.handler
        async def add(left: int, right: int = 1) -> int:
            return left + right

        assert await add(1) == 2

    def test_attributes_of_the_function_do_not_hide_those_of_the_handler(
        self, handlers: Handlers
    ) -> None:
        def work() -> None: ...

        vars(work).update(type="other", function=None)
        handler = handlers.handler(work)
        assert (handler.type, handler.function) == ("work", work)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"timeout": 0}, "timeout must be greater than 0"),
            ({"timeout": "soon"}, "timeout must be seconds"),
            ({"max_attempts": 0}, "max_attempts must be an int from 1"),
            ({"max_attempts": None}, "max_attempts must be an int"),
            ({"retry": 3}, r"retry takes a policy such as exponential\(\)"),
            ({"retry": exponential}, r"retry takes a policy such as exponential\(\)"),
            ({"queue": ""}, "queue must not be empty"),
            ({"queue": "q" * 65}, "queue may have 64 characters"),
            ({"limits": 3}, "limits takes a tuple"),
            ({"limits": ["gpu"]}, "limits takes Concurrency, RateLimit, Budget or Capacity"),
            ({"aliases": "old"}, "aliases takes a tuple"),
            ({"aliases": [""]}, "type must not be empty"),
            ({"timout": 3}, "Unknown handler option 'timout'; the options are timeout, "),
        ],
    )
    def test_bad_options(self, handlers: Handlers, options: dict[str, Any], message: str) -> None:
        with pytest.raises(HandlerError, match=message):
            handlers.handler("x", **options)(lambda: None)
        assert handlers.types == ()

    @pytest.mark.parametrize("policy", [exponential(), constant(3), none(), lambda n, error: n])
    def test_retry_policies(self, handlers: Handlers, policy: Any) -> None:
        assert handlers.handler("x", retry=policy)(lambda: None).options.retry is policy

    @pytest.mark.parametrize(
        ("name", "message"),
        [("", "must not be empty"), ("x" * 129, "128 characters"), ("a\x00", "do not store")],
    )
    def test_bad_names(self, handlers: Handlers, name: str, message: str) -> None:
        with pytest.raises(HandlerError, match=message):
            handlers.handler(name)(lambda: None)

    @pytest.mark.parametrize("function", [lambda: None, functools.partial(print)])
    def test_nameless_functions(self, handlers: Handlers, function: Any) -> None:
        with pytest.raises(HandlerError, match="has no name of its own; give it one"):
            handlers.handler(function)

    @pytest.mark.parametrize("thing", [3, [], str, HandlerOptions])
    def test_what_is_no_function(self, handlers: Handlers, thing: Any) -> None:
        with pytest.raises(HandlerError, match="A handler is a def or an async def"):
            handlers.handler(thing)


class TestSignatures:
    def test_positional_only(self, handlers: Handlers) -> None:
        def work(path: str, /) -> None: ...

        with pytest.raises(HandlerError, match="'path' cannot be passed by name; remove the '/'"):
            handlers.handler(work)

    def test_any_number_of_positional_ones(self, handlers: Handlers) -> None:
        def work(path: str, *more: str) -> None: ...

        with pytest.raises(HandlerError, match=r"'more' takes any number .* Take a list"):
            handlers.handler(work)

    def test_generators(self, handlers: Handlers) -> None:
        def work() -> Iterator[int]:
            yield 1

        async def async_work() -> Any:
            yield 1

        class Work:
            def __call__(self) -> Iterator[int]:
                yield 1

        for function in (work, async_work, Work(), functools.partial(work)):
            with pytest.raises(HandlerError, match="Return a list"):
                handlers.handler("work")(function)

    def test_without_a_readable_signature(self, handlers: Handlers) -> None:
        with pytest.raises(HandlerError, match="Handler 'x' has no signature"):
            handlers.handler("x")(dict.pop)

    @pytest.mark.parametrize("annotation", [JobContext, "JobContext", "x.JobContext"])
    def test_context_in_another_place(self, handlers: Handlers, annotation: Any) -> None:
        def second(path: str, context: Any) -> None: ...

        def by_name(*, context: Any) -> None: ...

        for function in (second, by_name):
            function.__annotations__["context"] = annotation
            with pytest.raises(HandlerError, match="'context' is a JobContext; make it the first"):
                handlers.handler(function)

    @pytest.mark.parametrize(
        "annotation",
        [
            JobContext,
            "JobContext",
            "asyncjobq.JobContext",
            JobContext | None,
            "JobContext | None",
            "asyncjobq.JobContext | Unknown",
            Annotated[JobContext, "for the worker"],
            Annotated["JobContext", "for the worker"],
            type("ExtendedContext", (JobContext,), {}),
        ],
    )
    def test_the_context_is_known_by_its_annotation(
        self, handlers: Handlers, annotation: Any
    ) -> None:
        def work(context: Any, /, path: str) -> None: ...

        work.__annotations__["context"] = annotation
        handler = handlers.handler(work)
        assert handler.takes_context
        assert handler.encode({"path": "a"}) == {"path": "a"}

    @pytest.mark.parametrize(
        "annotation",
        [Any, "Unknown", "MyJobContexts", Literal["JobContext"], Annotated[str, "no JobContext"]],
    )
    def test_what_is_no_context(self, handlers: Handlers, annotation: Any) -> None:
        def work(context: Any, path: str = "") -> None: ...

        work.__annotations__["context"] = annotation
        assert not handlers.handler(work).takes_context

    def test_names_that_only_type_checkers_know(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(value: Unknown, values: list[Unknown]) -> Unknown: ...

        assert work.job(1, [2]).args == {"value": 1, "values": [2]}
        assert not work.takes_context

    def test_injected_parameters_are_no_arguments(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(path: str, http: Any = HTTP, width: int = 1, **more: Any) -> None: ...

        assert work.job("a", 3).args == {"path": "a", "width": 3}
        with pytest.raises(ArgumentsError, match="'http' is filled in by the worker"):
            work.encode({"path": "a", "http": 1})


class TestKindsOfFunctions:
    @pytest.mark.parametrize("is_async", [True, False])
    def test_functions(self, handlers: Handlers, is_async: bool) -> None:
        assert handlers.handler("work")(_function(is_async)).is_async is is_async

    @pytest.mark.parametrize("is_async", [True, False])
    def test_partials(self, handlers: Handlers, is_async: bool) -> None:
        handler = handlers.handler("x")(functools.partial(_function(is_async), width=3))
        assert handler.is_async is is_async
        assert handler.encode({"path": "a"}) == {"path": "a"}

    @pytest.mark.parametrize("is_async", [True, False])
    def test_wrapped_by_a_plain_decorator(self, handlers: Handlers, is_async: bool) -> None:
        function = _function(is_async)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        handler = handlers.handler(wrapper)
        assert handler.is_async is is_async
        assert handler.job("a", 3).args == {"path": "a", "width": 3}

    def test_callable_objects(self, handlers: Handlers) -> None:
        class Resizer:
            async def __call__(self, context: JobContext, path: str) -> None: ...

            def resize(self, path: str) -> None: ...

        callable_object = handlers.handler("object")(Resizer())
        assert callable_object.is_async
        assert callable_object.takes_context
        method = handlers.handler(Resizer().resize)
        assert method.type == "resize"
        assert method.job("a").args == {"path": "a"}


class TestRegistries:
    def test_include(self, handlers: Handlers) -> None:
        images, reports = Handlers(), Handlers()
        first = images.handler("b")(lambda: None)
        second = reports.handler("c", aliases=["a"])(lambda: None)
        handlers.include(images, reports)
        handlers.include(images, handlers)
        assert handlers.types == ("a", "b", "c")
        assert list(handlers) == [first, second]
        assert (len(images), len(reports)) == (1, 1)

    @pytest.mark.parametrize(
        "second",
        [{"type_name": "new"}, {"type_name": "x", "aliases": ["new"]}, {"type_name": "old"}],
    )
    def test_one_type_twice(self, handlers: Handlers, second: dict[str, Any]) -> None:
        handlers.handler("new", aliases=["old"])(lambda: 1)
        other = Handlers()
        other.handler(second.pop("type_name"), **second)(lambda: 2)
        here = rf"{__file__}:\d+"
        with pytest.raises(HandlerError, match=f"has two handlers, at {here} and at {here}"):
            handlers.include(other)
        assert handlers.types == ("new", "old")

    def test_one_name_twice(self, handlers: Handlers) -> None:
        handlers.handler("x")(lambda: 1)
        with pytest.raises(HandlerError, match="Give one another name"):
            handlers.handler("x")(lambda: 2)

    def test_one_function_under_two_names(self, handlers: Handlers) -> None:
        handler = handlers.handler("fast")(_function(is_async=True))
        assert handlers.handler("slow", timeout=None)(handler).is_async
        assert handlers.types == ("fast", "slow")


def _function(is_async: bool) -> Callable[..., Any]:
    async def async_work(path: str, width: int = 800) -> int:
        return len(path) + width

    def work(path: str, width: int = 800) -> int:
        return len(path) + width

    return async_work if is_async else work
