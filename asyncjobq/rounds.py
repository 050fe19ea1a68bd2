"""When a worker looks at all lanes again, where there are many that it can take nothing from.

A lane that is closed by a limit of its own costs a look, unlike those that are closed together. So
once a long round has found nothing, only what has opened meanwhile is looked at, for as long as the
round took.
"""

from __future__ import annotations

from math import inf
from typing import Final

from asyncjobq.clock import monotonic

LONG: Final = 4
"""Pages from which on a round is not made again at every wake."""


class Rounds:
    """The rounds of one worker's scan."""

    def __init__(self, pause: float) -> None:
        """Make a long round again after `pause` seconds, or as long as it took if that is more."""
        self._pause = pause
        self._begun: float | None = None
        self._pages = self._started = 0
        self._resumed = self._news = False
        self._over_at = self._took = 0.0
        self._rests_until = 0.0

    @property
    def rests(self) -> bool:
        """Whether a long round has found nothing a short time ago."""
        return monotonic() < self._rests_until

    @property
    def next(self) -> float:
        """Seconds until the round that something new waits for."""
        return max(0.0, self._rests_until - monotonic()) if self._news and self.rests else inf

    def wake(self) -> None:
        """Note that there may be something new: do not rest longer than the last round took."""
        self._rests_until = min(self._rests_until, self._over_at + self._took)
        self._news = True

    def page(self, started: int, *, resumed: bool, rekeyed: bool = False) -> None:
        """Note a page that was looked at, and how many jobs were started from it.

        What comes before it is looked at once more if the page was the first of this round and not
        of its lanes, or jobs were given another key.
        """
        if self._begun is None:
            self._begun, self._pages, self._resumed = monotonic(), 0, resumed
            self._started = 0
            self._news = False
        self._pages += 1
        self._resumed |= rekeyed
        self._started += started

    def last_page(self) -> bool:
        """Note that there are no more lanes; tell whether the first ones were looked at too."""
        if self._resumed:
            self._resumed = False
            return False
        now = monotonic()
        if self._begun is not None and self._pages > LONG and not self._started:
            self._over_at, self._took = now, now - self._begun
            self._rests_until = now + (self._took if self._news else max(self._pause, self._took))
        self._begun = None
        return True

    def full(self) -> None:
        """Note that the slots are full: the round is over, and the next one goes on from there."""
        self._begun = None
        self._rests_until = 0.0
