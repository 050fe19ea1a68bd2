"""The one JSON encoder: what it accepts, every supported database stores and returns unchanged.

JSON's own rules hold: tuples come back as lists and the keys of objects as strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

MAX_BYTES: Final = 8_000_000
"""What arguments and results may have: MariaDB takes 16 MiB a statement, and escaping may double
a text."""

_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Encoded(str):
    """JSON text that `encode` made, so that it need not be made twice."""

    __slots__ = ()


_NULL: Final = Encoded("null")


def encode(value: Any) -> Encoded:
    """Return `value` as JSON text; raise ValueError saying which part cannot be stored."""
    if isinstance(value, Encoded):
        return value
    if value is None:
        return _NULL
    try:
        text = _ENCODER.encode(value)
        text.encode()  # a lone surrogate is legal in a str and in no database
    except Exception as error:
        raise ValueError(_explain(value, error)) from error
    return Encoded(text)


def check_size(text: str, most: int) -> None:
    """Raise ValueError if JSON text is longer than so many bytes."""
    size = len(text) if text.isascii() else len(text.encode())
    if size > most:
        raise ValueError(f"it has {size:,} bytes as JSON; {most:,} are allowed")


def decode(text: str) -> Any:
    """Return the value that `encode` was given."""
    return json.loads(text)


def printable(text: str, limit: int = 10_000) -> str:
    """Return `text` such that any database stores it: no NUL, no lone surrogates, bounded."""
    safe = text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
    return safe if len(safe) <= limit else f"{safe[:limit]}… ({len(safe) - limit} more characters)"


def one_line(text: str, limit: int = 500) -> str:
    """Return the first line of `text` for logs, with what would act on a terminal written out."""
    first = next(iter(text.strip().splitlines()), "")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in first)
    return shown if len(shown) <= limit else f"{shown[:limit]}…"


def gist(error: str, limit: int = 500) -> str:
    """Return the line of an error's text that says what it is: of a traceback, the last one."""
    lines = error.strip().splitlines()
    if lines[:1] != ["Traceback (most recent call last):"]:
        return one_line(error, limit)
    worded = (line for line in reversed(lines) if any(map(str.isalpha, line)))
    return one_line(next(worded).strip(" |+-"), limit)


def _explain(value: Any, error: Exception) -> str:
    if isinstance(error, RecursionError) or "Circular" in str(error):
        return "it contains itself or is nested too deeply for JSON"
    where, culprit = next(_culprits(value, ""), ("", value))
    place = f"the value at {where}" if where else "it"
    return f"{place} is {_describe(culprit)} ({printable(str(error), 200)})"


def _culprits(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the innermost parts that cannot be encoded on their own."""
    parts: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        parts = iter(value.items())
    elif isinstance(value, list | tuple):
        parts = iter(enumerate(value))
    for key, part in parts:
        yield from _culprits(part, f"{path}[{key!r}]")
    try:
        _ENCODER.encode(value).encode()
    except Exception:
        yield path, value


def _describe(value: Any) -> str:
    if isinstance(value, float):
        return f"the float {value!r}, which JSON does not have"
    if isinstance(value, str):
        return "a str with a lone surrogate, which no database stores"
    if isinstance(value, int):
        return "an int with more digits than JSON parsers read"
    return f"a {type(value).__name__}, which JSON does not have"
