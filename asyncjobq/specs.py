"""Jobs as callers describe them, made into specs whose arguments are known to be storable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncjobq import codec
from asyncjobq.errors import ArgumentsError, InvalidJobError
from asyncjobq.options import JobSpec


def as_spec(
    job: JobSpec[Any] | str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> JobSpec[Any]:
    """Return what to enqueue, given as a spec, or as a type's name and its arguments."""
    if isinstance(job, str):
        spec: JobSpec[Any] = JobSpec(job, {} if args is None else _plain_dict(args))
    elif isinstance(job, JobSpec) and args is None:
        spec = job
    else:
        raise InvalidJobError(
            f"enqueue() takes handler.job(...), or a type's name and a dict, not {job!r}"
            + (" with a separate dict of arguments." if args is not None else ".")
        )
    return spec.options(**options) if options else spec


def _plain_dict(args: Any) -> Any:
    return dict(args) if isinstance(args, Mapping) else args  # JobSpec says what is wrong with it


def checked_args(spec: JobSpec[Any], encode: Callable[[Mapping[str, Any]], Any] | None) -> Any:
    """Return the arguments as they are stored; `encode` is the handler's, where it is known."""
    try:
        args = spec.args if encode is None else encode(spec.args)
        codec.check_size(codec.encode(args), codec.MAX_BYTES)
    except ValueError as error:
        if isinstance(error, ArgumentsError):
            raise
        raise ArgumentsError(
            f"The arguments of {spec.type!r} cannot be stored: {error}."
        ) from error
    return args
