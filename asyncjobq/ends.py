"""What handlers raise to say how their attempt ends."""

from __future__ import annotations

from datetime import timedelta

from asyncjobq.clock import seconds


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
