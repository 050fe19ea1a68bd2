"""The parameters of the functions that users hand in, with their type hints resolved."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, ForwardRef, get_type_hints

from asyncjobq.conversion import parts_of


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """Return all parameters, with their type hints resolved where the names exist by now.

    Raises what `inspect.signature` raises.
    """
    parameters = inspect.signature(function).parameters.values()
    names = getattr(underlying(function), "__globals__", {})
    return [p.replace(annotation=resolved(p.annotation, names)) for p in parameters]


def is_async(function: Any) -> bool:
    """Tell whether calling it gives an awaitable, also through a plain decorator's wrapper."""
    return any(map(inspect.iscoroutinefunction, (*calls_of(function), inspect.unwrap(function))))


def calls_of(function: Any) -> tuple[Any, Any]:
    """Return what may be the function that a call runs: itself, or its type's `__call__`."""
    return function, function.__call__


def underlying(function: Any) -> Any:
    """Return the `def` behind partials, well-made decorators and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.isroutine(function):
            return function
        else:
            function = type(function).__call__


def resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """Return a type hint with the names in it looked up, or as it is if one is unknown."""
    holder = SimpleNamespace(__annotations__={"hint": annotation})
    try:
        return get_type_hints(holder, globalns=names, include_extras=True)["hint"]
    except Exception:  # a hint may be any expression, and only helps
        return annotation


def is_resolved(parameter: Parameter) -> bool:
    """Tell whether a parameter's type hint names nothing that is unknown."""
    return not any(isinstance(part, str | ForwardRef) for part in parts_of(parameter.annotation))


def starts_with_context(parameters: list[Parameter]) -> bool:
    """Tell whether the first parameter is the JobContext, given by position."""
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return bool(parameters) and parameters[0].kind in by_position and is_context(parameters[0])


def is_context(parameter: Parameter) -> bool:
    """Tell whether a parameter is annotated as the JobContext."""
    return any(map(_names_context, parts_of(parameter.annotation)))


def _names_context(hint: Any) -> bool:
    from asyncjobq.context import JobContext  # noqa: PLC0415  it may import this module's users

    if isinstance(hint, str | ForwardRef):  # imported for type checkers only
        return re.search(r"\bJobContext\b", str(hint)) is not None
    return isinstance(hint, type) and issubclass(hint, JobContext)
