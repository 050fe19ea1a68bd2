"""How far a job is, as its handler reports it; kept here until a renewal carries it along."""

from __future__ import annotations

from typing import Any, Final

from asyncjobq import codec
from asyncjobq.clock import is_finite
from asyncjobq.codec import Encoded
from asyncjobq.errors import InvalidJobError

LONGEST_MESSAGE: Final = 1000


class Progress:
    """What a handler has reported last, and what of it is stored; told from any thread."""

    def __init__(self) -> None:
        self._reported: Encoded | None = None
        self._stored: Encoded | None = None

    @property
    def pending(self) -> Encoded | None:
        """What has been reported and is not stored yet."""
        reported = self._reported
        return None if reported is self._stored else reported

    def report(self, done: float, total: float | None, message: str | None) -> None:
        """Take a report; of several, the last one counts."""
        self._reported = _encoded(done, total, message)

    def note_stored(self, value: Encoded) -> None:
        """Say that what was pending is stored."""
        self._stored = value


def _encoded(done: Any, total: Any, message: Any) -> Encoded:
    _check("done", done)
    if total is not None:
        _check("total", total)
    if message is not None:
        if not isinstance(message, str):
            raise InvalidJobError(f"progress() takes a str as its message, not {message!r}.")
        message = codec.printable(message, LONGEST_MESSAGE)
    return codec.encode({"done": done, "total": total, "message": message})


def _check(name: str, value: Any) -> None:
    if not is_finite(value) or value < 0:
        raise InvalidJobError(
            f"progress() takes a finite number of at least 0 as {name}, not {value!r}."
        )
