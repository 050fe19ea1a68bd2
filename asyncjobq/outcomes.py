"""How an attempt ended: what handlers raise to say it, `run.py` yields and `finalize.py` writes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from asyncjobq.clock import seconds
from asyncjobq.codec import Encoded
from asyncjobq.states import State


class Ending(StrEnum):
    """What happened to an attempt."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    SNOOZED = "snoozed"
    INTERRUPTED = "interrupted"  # by shutdown
    LEASE_LOST = "lease_lost"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attempt's end; `retry_after` in seconds, None where the job is not to run again."""

    ending: Ending
    result: Encoded | None = None
    error: str | None = None
    retry_after: float | None = None
    summary: str | None = None
    """The error in one line, for logs."""

    @property
    def state(self) -> State:
        """The state that the job moves to."""
        if self.retry_after is not None:
            return State.SCHEDULED if self.retry_after > 0 else State.READY
        return _STATES.get(self.ending, State.FAILED)

    @property
    def costs_attempt(self) -> bool:
        """Whether the attempt counts towards the job's limit."""
        return self.ending not in (Ending.SNOOZED, Ending.INTERRUPTED)


_STATES = {Ending.SUCCEEDED: State.DONE, Ending.CANCELLED: State.CANCELLED}


class AttemptEnd(Exception):
    """How a handler ends its own attempt; see the subclasses."""


class Retry(AttemptEnd):
    """Run this job again, after a delay in seconds (default: the handler's retry policy)."""

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        self.reason = reason
        self.after = None if after is None else seconds(after, "after")
        super().__init__(reason or "the handler asked for a retry")


class Snooze(AttemptEnd):
    """Run this job again after a delay in seconds; costs no attempt."""

    def __init__(self, after: float | timedelta) -> None:
        self.after = seconds(after, "after")
        super().__init__(f"the handler snoozed for {self.after:g} s")


class Fail(AttemptEnd):
    """End this job as failed now, whatever attempts are left."""


class Cancel(AttemptEnd):
    """End this job as cancelled now."""
