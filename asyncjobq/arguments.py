"""What a handler takes: bound to its signature, stored as JSON values, rebuilt for the call."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from asyncjobq import codec
from asyncjobq.conversion import Converter, needs_conversion, reason_of
from asyncjobq.errors import ArgumentsError, HandlerError
from asyncjobq.injection import Injected
from asyncjobq.signatures import is_context, is_resolved, parameters_of, starts_with_context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Arguments:
    """The parameters of a handler that its jobs fill in."""

    def __init__(self, type_name: str, function: Callable[..., Any]) -> None:
        self._type = type_name
        self._function = function
        parameters = self._parameters()
        self.takes_context = starts_with_context(parameters)
        named = parameters[1:] if self.takes_context else parameters
        for parameter in named:
            self._check(parameter)
        self.injected = {p.name: p.default for p in named if isinstance(p.default, Injected)}
        """What the worker fills in, by the parameter's name."""
        for name, wanted in self.injected.items():
            wanted.check(f"Handler {type_name!r}: the parameter {name!r}")
        filled_in = [p for p in named if p.name not in self.injected]
        self.signature = inspect.Signature(filled_in)
        self._reserved = {p.name for p in parameters} - self.signature.parameters.keys()
        self._extra = next((p.name for p in filled_in if p.kind is Parameter.VAR_KEYWORD), None)
        self._required = {p.name for p in filled_in if p.default is Parameter.empty}
        self._converters: dict[str, Converter] | None = None
        if all(map(is_resolved, filled_in)):
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
        try:
            return parameters_of(self._function)
        except (TypeError, ValueError, NameError) as error:
            raise HandlerError(f"Handler {self._type!r} has no signature: {error}") from error

    def _check(self, parameter: Parameter) -> None:
        owner = f"Handler {self._type!r}: the parameter {parameter.name!r}"
        if is_context(parameter):
            raise HandlerError(f"{owner} is a JobContext; make it the first positional one.")
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            raise HandlerError(f"{owner} cannot be passed by name; remove the '/' behind it.")
        if parameter.kind is Parameter.VAR_POSITIONAL:
            raise HandlerError(
                f"{owner} takes any number of values without a name, but arguments are stored by "
                "name. Take a list instead; if this is a decorator's, use functools.wraps there."
            )

    def _bind(self, positional: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        known = self.signature.parameters
        if not positional and self._extra is None and self._has_all_of(named):
            return {name: named[name] for name in known if name in named}  # as bind() would
        try:
            for name in sorted(self._reserved.intersection(named)):
                raise self._refusal(f"{name!r} is filled in by the worker")
            args = dict(self.signature.bind(*positional, **named).arguments)
        except TypeError as error:
            raise self._refusal(self._unknown(named) or error) from error
        extra = args.pop(self._extra, {}) if self._extra else {}
        return args | extra

    def _has_all_of(self, named: Any) -> bool:
        """Tell whether these are a dict's names, none too many and none missing."""
        known = self.signature.parameters.keys()
        return isinstance(named, dict) and self._required <= named.keys() <= known

    def _unknown(self, named: Mapping[str, Any]) -> str | None:
        """Say which name is not one of the parameters, and which of them is like it."""
        known = self.signature.parameters
        name = next((name for name in named if name not in known), None)
        if self._extra is not None or not isinstance(name, str):
            return None
        if name in self._reserved:
            return f"{name!r} is filled in by the worker"
        like = get_close_matches(name, known, 1)
        hint = f", but there is {like[0]!r}" if like else ""
        return f"there is no parameter {codec.printable(repr(name), 100)}{hint}"

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
