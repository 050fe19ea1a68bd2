"""What a handler takes: bound to its signature, stored as JSON values, rebuilt for the call."""

from __future__ import annotations

import functools
import inspect
import re
from inspect import Parameter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ForwardRef, get_type_hints

from asyncjobq import codec
from asyncjobq.conversion import Converter, needs_conversion, parts_of, reason_of
from asyncjobq.errors import ArgumentsError, HandlerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Injected:
    """The default of a parameter that the worker fills in, so that no job has to."""


class Arguments:
    """The parameters of a handler that its jobs fill in."""

    def __init__(self, type_name: str, function: Callable[..., Any]) -> None:
        self._type = type_name
        self._function = function
        parameters = self._parameters()
        self.takes_context = _starts_with_context(parameters)
        named = parameters[1:] if self.takes_context else parameters
        for parameter in named:
            self._check(parameter)
        filled_in = [p for p in named if not isinstance(p.default, Injected)]
        self.signature = inspect.Signature(filled_in)
        self._reserved = {p.name for p in parameters} - self.signature.parameters.keys()
        self._extra = next((p.name for p in filled_in if p.kind is Parameter.VAR_KEYWORD), None)
        self._converters: dict[str, Converter] | None = None
        if all(map(_is_resolved, filled_in)):
            self._converters = self._make_converters()

    def encode(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as they are stored: by name, as JSON values, without defaults."""
        args = self._convert(self._bind(positional, named), Converter.encode)
        try:
            stored: dict[str, Any] = codec.decode(codec.encode(args))
        except ValueError as error:
            raise self._refusal(error) from error
        return stored

    def decode(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored arguments as the function takes them, by keyword."""
        return self._convert(self._bind((), stored), Converter.decode)

    def takes(self, name: str) -> bool:
        """Tell whether jobs may have an argument of this name."""
        return name in self.signature.parameters or self._extra is not None

    def value_of(self, name: str, stored: Mapping[str, Any]) -> Any:
        """Return a stored argument, or the parameter's default as it would be stored."""
        if name in stored:
            return stored[name]
        parameter = self.signature.parameters.get(name)
        if parameter is None or parameter.default is Parameter.empty:
            return None
        return self._convert({name: parameter.default}, Converter.encode)[name]

    def _parameters(self) -> list[Parameter]:
        """Return all parameters, with their type hints resolved where the names exist by now."""
        try:
            signature = inspect.signature(self._function)
        except (TypeError, ValueError, NameError) as error:
            raise HandlerError(f"Handler {self._type!r} has no signature: {error}") from error
        names = getattr(underlying(self._function), "__globals__", {})
        return [
            parameter.replace(annotation=resolved(parameter.annotation, names))
            for parameter in signature.parameters.values()
        ]

    def _check(self, parameter: Parameter) -> None:
        owner = f"Handler {self._type!r}: the parameter {parameter.name!r}"
        if _is_context(parameter):
            raise HandlerError(f"{owner} is a JobContext; make it the first positional one.")
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise HandlerError(f"{owner} cannot be passed by name; remove the '/' behind it.")
        if parameter.kind is Parameter.VAR_POSITIONAL:
            raise HandlerError(
                f"{owner} takes any number of values without a name, but arguments are stored by "
                "name. Take a list instead; if this is a decorator's, use functools.wraps there."
            )

    def _bind(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        try:
            args = dict(self.signature.bind(*positional, **named).arguments)
        except TypeError as error:
            raise self._refusal(error) from error
        extra = args.pop(self._extra, {}) if self._extra else {}
        for name in self._reserved & extra.keys():
            raise self._refusal(f"{name!r} is filled in by the worker")
        return args | extra

    def _convert(
        self, args: dict[str, Any], convert: Callable[[Converter, Any], Any]
    ) -> dict[str, Any]:
        if self._converters is None:
            self._converters = self._make_converters()
        for name in filter(args.__contains__, self._converters):
            try:
                args[name] = convert(self._converters[name], args[name])
            except Exception as error:  # also whatever the user's own validators raise
                raise self._refusal(f"{name!r} does not fit ({reason_of(error)})") from error
        return args

    def _make_converters(self) -> dict[str, Converter]:
        return {
            parameter.name: self._converter_of(parameter)
            for parameter in self._parameters()
            if parameter.name in self.signature.parameters.keys() - {self._extra}
            and needs_conversion(parameter.annotation)
        }

    def _converter_of(self, parameter: Parameter) -> Converter:
        try:
            return Converter(parameter.annotation)
        except Exception as error:  # also whatever the type's own schema code raises
            raise HandlerError(
                f"Handler {self._type!r}: values for '{parameter}' cannot be stored: "
                f"{reason_of(error)}"
            ) from error

    def _refusal(self, reason: object) -> ArgumentsError:
        return ArgumentsError(
            f"Handler {self._type!r} cannot take these arguments: {reason}. "
            f"It takes {self.signature}."
        )


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


def _is_resolved(parameter: Parameter) -> bool:
    return not any(isinstance(part, str | ForwardRef) for part in parts_of(parameter.annotation))


def _starts_with_context(parameters: list[Parameter]) -> bool:
    by_position = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return bool(parameters) and parameters[0].kind in by_position and _is_context(parameters[0])


def _is_context(parameter: Parameter) -> bool:
    return any(map(_names_context, parts_of(parameter.annotation)))


def _names_context(hint: Any) -> bool:
    from asyncjobq.context import JobContext  # noqa: PLC0415  it may import this module's users

    if isinstance(hint, str | ForwardRef):  # imported for type checkers only
        return re.search(r"\bJobContext\b", str(hint)) is not None
    return isinstance(hint, type) and issubclass(hint, JobContext)
