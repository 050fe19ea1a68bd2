"""Errors on their way from a handler's process to the worker: as JSON values, and back.

Back there, they are of the nearest class that is known without importing anything, so that rules
for retries apply; their texts are those that they had.
"""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any, Final, cast

from asyncjobq import codec
from asyncjobq.addresses import PROGRAM
from asyncjobq.ends import AttemptEnd, Cancel, Fail, Retry, Snooze
from asyncjobq.error_texts import TOLD, described

MEMBERS: Final = 100


class FromProcess:
    """Part of every error that was raised in another process."""

    message: str

    def __str__(self) -> str:
        return self.message


def values_of(error: BaseException) -> dict[str, Any]:
    """Return an error as JSON values."""
    values: dict[str, Any] = {
        "classes": [[kind.__module__, kind.__qualname__] for kind in type(error).__mro__],
        "message": _message(error),
        "text": described(error),
    }
    if isinstance(error, AttemptEnd):
        values["end"] = next(k.__name__ for k in type(error).__mro__ if k in _ENDS.values())
        values["after"] = getattr(error, "after", None)
    if isinstance(error, BaseExceptionGroup):
        values["members"] = [values_of(member) for member in error.exceptions[:MEMBERS]]
    return values


def error_of(values: dict[str, Any]) -> BaseException:
    """Return the error that has these values."""
    error = _made_of(values)
    setattr(error, TOLD, codec.printable(values["text"]))
    return error


def _made_of(values: dict[str, Any]) -> BaseException:
    message = values["message"]
    if "end" in values:
        return _end(values["end"], message, values["after"])
    if "members" in values:
        return BaseExceptionGroup(message, [error_of(member) for member in values["members"]])
    for module, name in values["classes"]:
        kind = _known("__main__" if module == PROGRAM else module, name)
        if kind is not None and (error := _instance(kind, values)) is not None:
            return error
    return Exception(message)


def _end(name: str, message: str, after: float | None) -> BaseException:
    if name == "Retry":
        return Retry(message, after=after)
    if name == "Snooze":
        return Snooze(after or 0.0)
    return Fail(message) if name == "Fail" else Cancel(message)


def _known(module: str, name: str) -> type[BaseException] | None:
    """Return a class of errors that has been imported here."""
    try:
        kind: Any = reduce(getattr, name.split("."), cast("Any", sys.modules[module]))
    except (KeyError, AttributeError):
        return None
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None


def _instance(kind: type[BaseException], values: dict[str, Any]) -> BaseException | None:
    """Return an error of a class, without what its initialization would want; None if it cannot."""
    name = values["classes"][0][1].rpartition(".")[2]
    try:
        made: Any = type(name, (FromProcess, kind), {})
        error = made.__new__(made)
        error.message = values["message"]
    except Exception:  # whatever a class makes of being subclassed
        return None
    return error if isinstance(error, BaseException) else None


def _message(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return str(error.message)
    try:
        return str(error)
    except Exception:  # an error whose own text raises
        return ""


_ENDS: Final[dict[str, Any]] = {kind.__name__: kind for kind in (Retry, Snooze, Fail, Cancel)}
