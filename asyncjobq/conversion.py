"""Values that are not JSON but can be stored as JSON: pydantic models and dataclasses.

pydantic does the work and is optional: it is imported when a handler names such a type.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from asyncjobq import codec

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator
    from types import ModuleType

OLDEST_PYDANTIC: Final = (2, 11)  # the first that can validate by field name despite aliases


class Converter:
    """Turns values of one type into JSON values and back."""

    def __init__(self, hint: Any) -> None:
        self._adapter = _pydantic().TypeAdapter(hint)

    def encode(self, value: Any) -> Any:
        """Return the JSON values of `value`, which is of this type or has its JSON values."""
        stored = self._adapter.dump_python(
            self._validate(value), mode="json", by_alias=False, round_trip=True, warnings="error"
        )
        self.decode(stored)  # a custom serializer may write what validation refuses
        return stored

    def decode(self, stored: Any) -> Any:
        """Return the value of this type that has these JSON values."""
        # As JSON text, because in strict models only JSON may have a string for a date.
        return self._adapter.validate_json(codec.encode(stored), by_alias=True, by_name=True)

    def dump(self, value: Any) -> Any:
        """Return the JSON values of `value` without checking it first."""
        return self._adapter.dump_python(value, mode="json", by_alias=False, warnings=False)

    def _validate(self, value: Any) -> Any:
        try:
            text = codec.encode(value)
        except ValueError:
            return self._adapter.validate_python(value, by_alias=True, by_name=True)
        return self._adapter.validate_json(text, by_alias=True, by_name=True)


def needs_conversion(hint: Any) -> bool:
    """Tell whether a type hint is or contains a pydantic model or a dataclass."""
    return any(isinstance(part, type) and _is_convertible(part) for part in parts_of(hint))


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield a type hint and the hints that it is made of."""
    yield hint
    origin = get_origin(hint)
    if origin is Annotated:
        yield from parts_of(hint.__origin__)
    elif origin is not None and origin is not Literal:
        yield origin
        for part in get_args(hint):
            yield from parts_of(part)


def json_values(value: Any) -> Any:
    """Return `value` with JSON values in place of models and dataclasses.

    What cannot be stored raises an error that says why, usually a ValueError.
    """
    try:
        codec.encode(value)
    except ValueError:
        value = _dump_all(value)
        codec.encode(value)
    return value


def reason_of(error: Any) -> str:
    """Return what an error says, in one line."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(error, pydantic.ValidationError):
        first_paragraph = str(error).partition("\n\n")[0]
        return " ".join(first_paragraph.split()).rstrip(".") or repr(error)
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in faults)


def _dump_all(value: Any) -> Any:
    try:
        return _dump_parts(value)
    except RecursionError as error:
        raise ValueError("it contains itself or is nested too deeply for JSON") from error


def _dump_parts(value: Any) -> Any:
    if _is_convertible(type(value)):
        return _dump(value)
    if isinstance(value, dict):
        return {key: _dump_parts(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_dump_parts(part) for part in value]
    return value


def _dump(value: Any) -> Any:
    try:
        return _converter_of(value.__class__).dump(value)
    except ImportError:
        return dataclasses.asdict(value)


@functools.lru_cache(maxsize=256)
def _converter_of(kind: Hashable) -> Converter:
    return Converter(kind)


def _is_convertible(kind: type) -> bool:
    if dataclasses.is_dataclass(kind):
        return True
    pydantic = sys.modules.get("pydantic")  # there is no model before somebody imported it
    return pydantic is not None and issubclass(kind, pydantic.BaseModel)


def _pydantic() -> ModuleType:
    advice = f'pip install "pydantic>={".".join(map(str, OLDEST_PYDANTIC))}"'
    try:
        import pydantic  # noqa: PLC0415  optional
    except ImportError as error:
        raise ImportError(f"models and dataclasses need pydantic: {advice}") from error
    if tuple(map(int, pydantic.VERSION.split(".")[:2])) < OLDEST_PYDANTIC:
        raise ImportError(f"pydantic {pydantic.VERSION} is too old: {advice}")
    return pydantic
