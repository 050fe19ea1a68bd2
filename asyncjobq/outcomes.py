"""How an attempt ended, as a value: what `run.py` yields and `finalize.py` writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
