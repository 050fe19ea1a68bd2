"""Errors as texts: of what users wrote, without the frames of the library that led there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from traceback import FrameSummary, TracebackException
from typing import Final

import anyio

from asyncjobq import codec

TOLD: Final = "_asyncjobq_told"
"""Where an error that comes from another process has its text."""


def described(error: BaseException) -> str:
    """Return the error with its traceback, without the frames that led to what users wrote."""
    try:
        told = getattr(error, TOLD, None)
        if isinstance(told, str):
            return told
        report = TracebackException.from_exception(error)
        _keep_users_frames(report)
        return codec.printable("".join(report.format()).strip())
    except Exception:  # an error whose own text raises
        return type(error).__name__


def summary(error: BaseException) -> str:
    """Return the error's type and the first line of its text."""
    try:
        lines = codec.printable(str(error).strip(), 200).splitlines()
    except Exception:  # an error whose own text raises
        lines = []
    return ": ".join([type(error).__name__, *lines[:1]])


def _users_frames(frames: Iterable[FrameSummary]) -> Iterator[FrameSummary]:
    """Yield the frames that are not ours, nor those of anyio below ours."""
    ours = False
    for frame in frames:
        ours = frame.filename in _OURS or (ours and frame.filename.startswith(_ANYIO))
        if not ours:
            yield frame


def innermost_frames(frames: Sequence[FrameSummary]) -> list[FrameSummary]:
    """Return the frames of what users wrote, without all that led there; all, if none is ours."""
    last = max((n for n, frame in enumerate(frames) if frame.filename in _OURS), default=-1)
    return list(frames[last + 1 :])


def _keep_users_frames(report: TracebackException) -> None:
    """Take our frames out, and those of anyio below them; of what is linked to the error too."""
    found: list[TracebackException | None] = [report]
    while found:
        one = found.pop()
        if one is not None:
            one.stack[:] = _users_frames(one.stack)
            found += [one.__cause__, one.__context__, *(one.exceptions or ())]


_ANYIO: Final = anyio.__path__[0]
_PARTS: Final = (
    "run.py",
    "middleware.py",
    "injection.py",
    "threads.py",
    "forks.py",
    "process_program.py",
)
_OURS: Final = {str(Path(__file__).with_name(name)) for name in _PARTS}
