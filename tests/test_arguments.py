"""Arguments and results of handlers: refused with a reason, or stored as JSON and rebuilt."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    computed_field,
    field_serializer,
    field_validator,
)

from asyncjobq.context import JobContext
from asyncjobq.errors import ArgumentsError, HandlerError, ResultError
from asyncjobq.handlers import Handler, Handlers
from asyncjobq.options import JobSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from elsewhere import Later  # type: ignore[import-not-found]


@dataclasses.dataclass
class Line:
    article: str
    count: int = 1
    due: date | None = None


class Order(BaseModel):
    """Strict, with an alias on the way in only: what a plain dump does not survive."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: uuid.UUID
    placed: datetime = Field(validation_alias=AliasChoices("placed_at", "at"))
    lines: list[Line] = []

    @computed_field
    def total(self) -> int:
        return sum(line.count for line in self.lines)


ORDER = Order.model_validate(
    {
        "id": uuid.UUID(int=7),
        "placed_at": datetime(2026, 1, 2, tzinfo=UTC),
        "lines": [Line("pen", 2)],
    }
)
STORED_ORDER = {
    "id": "00000000-0000-0000-0000-000000000007",
    "placed": "2026-01-02T00:00:00Z",
    "lines": [{"article": "pen", "count": 2, "due": None}],
}


class OneWay(BaseModel):
    day: date

    @field_serializer("day")
    def _write(self, day: date) -> str:
        return f"{day:%d.%m.%Y}"


class Broken(BaseModel):
    value: int

    @field_validator("value")
    @classmethod
    def _check(cls, value: int) -> int:
        raise LookupError(value)


class Unstorable: ...


@dataclasses.dataclass
class Holder:
    value: Unstorable


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


class TestArguments:
    def test_jobs_of_a_handler(self, handlers: Handlers) -> None:
        @handlers.handler
        async def work(context: JobContext, path: str, width: int = 800) -> None: ...

        assert work.job("a", width=3) == JobSpec("work", {"path": "a", "width": 3})

    def test_defaults_are_not_stored(self, handlers: Handlers) -> None:
        handler = handlers.handler(_function(is_async=False))
        assert handler.job("a").args == {"path": "a"}
        assert handler.decode({"path": "a"}) == {"path": "a"}

    def test_extra_arguments_pass(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(context: JobContext, path: str, **more: int) -> None: ...

        args: Any = {"path": "a", "more": 1, "self": 2, "args": 3}
        assert work.job(**args).args == work.encode(args) == work.decode(args) == args
        with pytest.raises(ArgumentsError, match="'context' is filled in by the worker"):
            work.encode({"path": "a", "context": 1})

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({}, "missing a required argument: 'path'"),
            ({"path": "a", "widht": 3}, "there is no parameter 'widht', but there is 'width'"),
            ({"pat": "a"}, "there is no parameter 'pat', but there is 'path'"),
            ({"path": "a", "zzz": 3}, "there is no parameter 'zzz'. "),
            ({"path": {1}}, r"the value at \['path'\] is a set"),
            ({"path": float("nan")}, r"the value at \['path'\] is the float nan"),
            ({"path": "\ud800"}, "lone surrogate"),
            ({1: 2}, "keywords must be strings"),
            ([1], "must be a mapping"),
        ],
    )
    def test_arguments_that_do_not_fit(self, handlers: Handlers, args: Any, message: str) -> None:
        handler = handlers.handler("resize")(_function(is_async=True))
        with pytest.raises(ArgumentsError, match=message) as caught:
            handler.encode(args)
        assert str(caught.value).startswith("Handler 'resize' cannot take these arguments: ")
        assert str(caught.value).endswith("It takes (path: str, width: int = 800).")

    def test_jobs_that_do_not_fit(self, handlers: Handlers) -> None:
        handler: Any = handlers.handler(_function(is_async=True))
        with pytest.raises(ArgumentsError, match="too many positional arguments"):
            handler.job("a", 1, 2)
        with pytest.raises(ArgumentsError, match="multiple values for argument 'path'"):
            handler.job("a", path="b")

    def test_stored_arguments_of_another_release(self, handlers: Handlers) -> None:
        handler = handlers.handler(_function(is_async=True))
        with pytest.raises(ArgumentsError, match="there is no parameter 'height'"):
            handler.decode({"path": "a", "height": 3})

    @given(args=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.booleans())))
    def test_any_arguments_are_bound_or_refused(self, args: dict[str, Any]) -> None:
        handler = Handlers().handler("work")(lambda **more: more)
        try:
            stored = handler.encode(args)
        except ArgumentsError:
            return
        assert handler.decode(stored) == args


class TestConvertedArguments:
    def test_models_and_dataclasses(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(order: Order, line: Line) -> None: ...

        line = Line("ink", due=date(2026, 1, 2))
        stored = work.job(ORDER, line=line).args
        assert stored == {
            "order": STORED_ORDER,
            "line": {"article": "ink", "count": 1, "due": "2026-01-02"},
        }
        assert work.decode(stored) == {"order": ORDER, "line": line}
        assert work.encode(stored) == stored

    @pytest.mark.parametrize(
        ("hint", "value", "stored"),
        [
            (list[Line], [Line("a")], [{"article": "a", "count": 1, "due": None}]),
            (Order | None, None, None),
            (Order | None, ORDER, STORED_ORDER),
            (dict[str, Order], {"first": ORDER}, {"first": STORED_ORDER}),
            (tuple[Order, int], (ORDER, 1), [STORED_ORDER, 1]),
            (Annotated[Order, Field(description="what to send")], ORDER, STORED_ORDER),
            (Annotated[list["Order"], Field(min_length=1)], [ORDER], [STORED_ORDER]),
            ("Order | Line", ORDER, STORED_ORDER),
        ],
    )
    def test_inside_other_types(
        self, handlers: Handlers, hint: Any, value: Any, stored: Any
    ) -> None:
        def work(value: Any) -> None: ...

        work.__annotations__["value"] = hint
        handler = handlers.handler(work)
        assert handler.encode({"value": value}) == {"value": stored}
        assert handler.decode({"value": stored}) == {"value": value}

    def test_json_values_given_by_name_are_checked_and_completed(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(line: Line) -> None: ...

        assert work.encode({"line": {"article": "a"}})["line"]["count"] == 1
        with pytest.raises(ArgumentsError, match=r"'line' does not fit .count: Input should be"):
            work.encode({"line": {"article": "a", "count": "many"}})
        with pytest.raises(ArgumentsError, match=r"'line' does not fit .article: Field required"):
            work.decode({"line": {}})

    def test_an_instance_with_values_of_other_types(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(line: Line) -> None: ...

        with pytest.raises(ArgumentsError, match="Expected `int`"):
            work.job(Line("a", "many"))  # type: ignore[arg-type]

    def test_a_serializer_that_validation_refuses(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(model: OneWay) -> None: ...

        with pytest.raises(ArgumentsError, match="valid date"):
            work.job(OneWay(day=date(2026, 1, 2)))

    def test_a_validator_that_fails_in_its_own_way(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(model: Broken) -> None: ...

        with pytest.raises(ArgumentsError, match="'model' does not fit"):
            work.encode({"model": {"value": 1}})

    def test_types_defined_after_the_handler(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(value: Later) -> None: ...

        globals()["Later"] = Line
        try:
            assert work.decode(work.job(Line("a")).args) == {"value": Line("a")}
        finally:
            del globals()["Later"]

    def test_types_that_pydantic_cannot_store(self, handlers: Handlers) -> None:
        def work(holder: Holder) -> None: ...

        with pytest.raises(HandlerError, match=r"values for 'holder: .*' cannot be stored: Unable"):
            handlers.handler(work)

    def test_plain_types_are_left_alone(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(count: int, anything: Any) -> None: ...

        args = {"count": "not an int", "anything": [1, 2]}
        assert work.encode(args) == work.decode(args) == args

    def test_jobs_have_the_values_that_the_handler_will_get(self, handlers: Handlers) -> None:
        @handlers.handler
        def work(value: Any) -> None: ...

        value: Any = {1: (2, [3])}
        job = work.job(value)
        value[1][1].append(4)
        assert job.args == {"value": {"1": [2, [3]]}}

    def test_without_pydantic(self, handlers: Handlers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pydantic", None)

        def work(line: Line) -> None: ...

        with pytest.raises(HandlerError, match=r'pip install "pydantic>=2\.11"'):
            handlers.handler(work)
        plain = handlers.handler(_function(is_async=True))
        assert plain.job("a").args == {"path": "a"}

    def test_with_an_old_pydantic(
        self, handlers: Handlers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pydantic.VERSION", "2.10.6")

        def work(line: Line) -> None: ...

        with pytest.raises(HandlerError, match=r"pydantic 2\.10\.6 is too old: pip install"):
            handlers.handler(work)


class TestResults:
    @pytest.mark.parametrize(
        ("value", "stored"),
        [
            (None, None),
            ({"a": [1, "b", None, 1.5]}, {"a": [1, "b", None, 1.5]}),
            (Line("a"), {"article": "a", "count": 1, "due": None}),
            (
                [Line("a", due=date(2026, 1, 2))],
                [{"article": "a", "count": 1, "due": "2026-01-02"}],
            ),
            ({"order": (ORDER, 1)}, {"order": [STORED_ORDER | {"total": 2}, 1]}),
        ],
    )
    def test_results(self, handler: Handler[Callable[..., Any]], value: Any, stored: Any) -> None:
        assert handler.encode_result(value) == stored

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ({"a": {1}}, r"the value at \['a'\] is a set"),
            (object(), "it is a object"),
            (float("inf"), "it is the float inf"),
            ([Line("a"), b"b"], r"the value at \[1\] is a bytes"),
            (Line(object()), "Unable to serialize unknown type"),  # type: ignore[arg-type]
        ],
    )
    def test_results_that_cannot_be_stored(
        self, handler: Handler[Callable[..., Any]], value: Any, message: str
    ) -> None:
        with pytest.raises(ResultError, match=message) as caught:
            handler.encode_result(value)
        assert str(caught.value).startswith("The result of 'work' cannot be stored: ")

    @pytest.mark.parametrize("first", [[], [Line("a")]])
    def test_a_result_that_contains_itself(
        self, handler: Handler[Callable[..., Any]], first: list[Any]
    ) -> None:
        first.append(first)
        with pytest.raises(ResultError, match="it contains itself or is nested too deeply"):
            handler.encode_result(first)

    def test_dataclasses_without_pydantic(
        self, handler: Handler[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pydantic", None)
        point = dataclasses.make_dataclass("Point", ["x", "y"])
        assert handler.encode_result([point(1, 2)]) == [{"x": 1, "y": 2}]
        with pytest.raises(ResultError, match="is a set"):
            handler.encode_result(point(1, {2}))

    @pytest.fixture
    def handler(self, handlers: Handlers) -> Handler[Callable[..., Any]]:
        return handlers.handler("work")(_function(is_async=True))


def _function(is_async: bool) -> Callable[..., Any]:
    async def async_work(path: str, width: int = 800) -> int:
        return len(path) + width

    def work(path: str, width: int = 800) -> int:
        return len(path) + width

    return async_work if is_async else work
