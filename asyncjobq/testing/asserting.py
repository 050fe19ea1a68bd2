"""Which jobs match what a test expects, and what to say if none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final

from asyncjobq import codec
from asyncjobq.handlers import AnyHandler, Handler
from asyncjobq.job import Job

SHOWN: Final = 10
"""Jobs that a message names one by one."""
VALUE_LENGTH: Final = 200

_OPTIONS: Final = {one.name for one in fields(Job)} - {"id", "type", "args", "existing"}


@dataclass(frozen=True)
class Expected:
    """What a test expects of a job: its type, and some of its arguments and other values."""

    types: tuple[str, ...]
    args: Mapping[str, Any]
    others: Mapping[str, Any]

    @classmethod
    def of(
        cls, job: str | AnyHandler, args: Mapping[str, Any] | None, others: Mapping[str, Any]
    ) -> Expected:
        """Raise TypeError for what no job has."""
        types = job.types if isinstance(job, Handler) else (job,)
        if not all(isinstance(name, str) for name in types):
            raise TypeError(f"A type is the name of one, or a handler, not {job!r}.")
        for name in others:
            if name not in _OPTIONS:
                raise TypeError(f"A job has no {name!r}; it has {', '.join(sorted(_OPTIONS))}.")
        return cls(types, dict(args or {}), dict(others))

    def differences(self, job: Job[Any]) -> list[str]:
        """Return in what a job of this type differs; nothing if it matches."""
        found = [
            f"{name} is {_shown(job.args[name])}" if name in job.args else f"{name} is not given"
            for name, value in self.args.items()
            if name not in job.args or not _same(value, job.args[name])
        ]
        return found + [
            f"{name} is {_shown(getattr(job, name))}"
            for name, value in self.others.items()
            if not _same(value, getattr(job, name))
        ]

    def matching(self, jobs: Sequence[Job[Any]]) -> list[Job[Any]]:
        """Return the jobs that match."""
        return [job for job in jobs if job.type in self.types and not self.differences(job)]

    def __str__(self) -> str:
        given = [f"args={dict(self.args)!r}"] if self.args else []
        given += [f"{name}={value!r}" for name, value in self.others.items()]
        return repr(self.types[0]) + (f" with {', '.join(given)}" if given else "")


def missing(expected: Expected, jobs: Sequence[Job[Any]], known: Sequence[str]) -> str:
    """Say that no job matches, and what there is instead."""
    similar = [job for job in jobs if job.type in expected.types]
    lines = [f"No job {expected} was enqueued."]
    if similar:
        lines.append("Of that type there are:")
        lines += _listed([f"{_named(j)}: {', '.join(expected.differences(j))}" for j in similar])
        return "\n".join(lines)
    name = expected.types[0]
    others = Counter(job.type for job in jobs)
    if others:
        told = ", ".join(f"{count} of {type_!r}" for type_, count in sorted(others.items()))
        lines.append(f"There is none of that type; there are {told}.")
    else:
        lines.append("There are no jobs at all.")
    if close := get_close_matches(name, {*others, *known} - {name}, n=1):
        lines.append(f"Did you mean {close[0]!r}?")
    lines.append(
        "What was enqueued with session= is there once that has committed; to look into its open "
        "transaction, pass the same session= here."
    )
    return "\n".join(lines)


def unexpected(expected: Expected, found: Sequence[Job[Any]], count: int) -> str:
    """Say that there are more or fewer jobs than there should be."""
    wanted = "None was" if count == 0 else f"{count} were"
    lines = [f"{wanted} expected of {expected}, {len(found)} were enqueued:"]
    return "\n".join(lines + _listed([_named(job) for job in found]))


def nothing_to_run(jobs: Sequence[Job[Any]], what: str) -> str:
    """Say that no job could be run, and what the open ones wait for."""
    lines = [f"There is no {what} that could run now."]
    if jobs:
        lines.append("These have not ended:")
        lines += _listed([_named(job) for job in jobs])
    else:
        lines.append("All jobs have ended, if there were any.")
    return "\n".join(lines)


def _named(job: Job[Any]) -> str:
    due = f" for {job.run_after:%Y-%m-%d %H:%M:%S} UTC" if job.state == "scheduled" else ""
    return f"job {job.id} ({job.type}, {job.state}{due}, queue {job.queue!r}) {_shown(job.args)}"


def _listed(lines: Sequence[str]) -> list[str]:
    left = len(lines) - SHOWN
    return [f"  {line}" for line in lines[:SHOWN]] + ([f"  and {left} more"] if left > 0 else [])


def _shown(value: Any) -> str:
    return codec.printable(repr(value), VALUE_LENGTH)


def _same(expected: Any, stored: Any) -> bool:
    """Tell whether a value is what is stored: as it is, or once it has become JSON."""
    if expected == stored:
        return True
    try:
        return bool(codec.decode(codec.encode(expected)) == stored)
    except (TypeError, ValueError):
        return False
