"""What a handler returns: stored as JSON values, and rebuilt as its return annotation says."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from asyncjobq import codec
from asyncjobq.arguments import resolved, underlying
from asyncjobq.codec import Encoded
from asyncjobq.conversion import Converter, json_values, needs_conversion, reason_of
from asyncjobq.errors import JobCancelled, JobFailed, ResultError, StoredResultError
from asyncjobq.job import Job
from asyncjobq.states import State


class Results:
    """The results of one handler."""

    def __init__(self, type_name: str, function: Callable[..., Any]) -> None:
        self._type = type_name
        self._function = function
        self._looked_up = False
        self._converter: Converter | None = None

    def encode(self, value: Any) -> Any:
        """Return what the function returned as JSON values; raises ResultError."""
        try:
            return json_values(value)
        except Exception as error:  # also whatever the user's own serializers raise
            raise ResultError(
                f"The result of {self._type!r} cannot be stored: {reason_of(error)}. "
                "Return JSON values, pydantic models or dataclasses."
            ) from error

    def decode(self, job_id: int, stored: Any) -> Any:
        """Return a stored result as the function returned it; raises StoredResultError."""
        hint = self._hint()
        try:
            if not self._looked_up:
                self._converter = Converter(hint) if needs_conversion(hint) else None
                self._looked_up = True
            return stored if self._converter is None else self._converter.decode(stored)
        except Exception as error:  # also whatever the user's own validators raise
            name = getattr(hint, "__name__", None) or str(hint)
            reason = reason_of(error)
            raise StoredResultError(job_id, self._type, name, reason, stored) from error

    def _hint(self) -> Any:
        names = getattr(underlying(self._function), "__globals__", {})
        return resolved(inspect.signature(self._function).return_annotation, names)


def result_of(job: Job[Any], results: Results | None) -> Any:
    """Return the result of a job that has ended, rebuilt where its handler is known here.

    Raises JobFailed, JobCancelled or StoredResultError.
    """
    if job.state == State.FAILED:
        raise JobFailed(job.id, job.error)
    if job.state == State.CANCELLED:
        raise JobCancelled(job.id, job.error, job.cause)
    return job.result if results is None else results.decode(job.id, job.result)


def storable(value: Any, what: str, most: int) -> Encoded:
    """Return a value as JSON text of at most so many bytes; raises ResultError."""
    try:
        text = codec.encode(json_values(value))
        codec.check_size(text, most)
    except Exception as error:  # also whatever the user's own serializers raise
        raise ResultError(f"{what} cannot be stored: {reason_of(error)}.") from error
    return text
