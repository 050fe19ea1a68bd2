"""How an attempt ended, as a value: what `run.py` yields and `finalize.py` writes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from asyncjobq.codec import Encoded, printable
from asyncjobq.states import State

LONGEST_MESSAGE: Final = 2000
LONGEST_NAME: Final = 200


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
class Failure:
    """What an attempt ended with instead of a result, as its history keeps it."""

    type: str | None = None
    """The name of the error's class, if there was an error."""
    message: str | None = None
    traceback: str | None = None

    @classmethod
    def of(cls, error: BaseException, traceback: str | None = None) -> Self:
        """Describe an error, in texts that any database stores."""
        try:
            message = printable(str(error), LONGEST_MESSAGE)
        except Exception:  # an error whose own text raises
            message = None
        return cls(printable(type(error).__name__, LONGEST_NAME), message, traceback)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attempt's end; `retry_after` in seconds, None where the job is not to run again."""

    ending: Ending
    result: Encoded | None = None
    error: str | None = None
    retry_after: float | None = None
    summary: str | None = None
    """The error in one line, for logs."""
    failure: Failure | None = None

    @property
    def state(self) -> State:
        """The state that the job moves to."""
        if self.retry_after is not None:
            return State.SCHEDULED if self.retry_after > 0 else State.READY
        return _STATES.get(self.ending, State.FAILED)

    @property
    def kept_failure(self) -> Failure:
        """What the history of attempts says about it."""
        return self.failure or Failure(message=self.error and self.error[:LONGEST_MESSAGE])

    @property
    def costs_attempt(self) -> bool:
        """Whether the attempt counts towards the job's limit."""
        return self.ending not in (Ending.SNOOZED, Ending.INTERRUPTED)


_STATES = {Ending.SUCCEEDED: State.DONE, Ending.CANCELLED: State.CANCELLED}
