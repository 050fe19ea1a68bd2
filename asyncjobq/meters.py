"""How much room a limit has left, and when there is more. Pure: rows in, rows out.

A meter is made of a limit and of what its row says, is asked and told of each job that starts, and
gives back what the row is to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from asyncjobq.limits import Budget, Concurrency, Limit, RateLimit

BUSY: Final = 0.02
"""Seconds after which to look again at a limit whose row another worker has locked."""

_STEP: Final = 0.05
"""Seconds' worth of a rate that are waited for, so that fast rates do not make a worker spin."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPSILON: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Level:
    """What the row of a limit says: tokens left or cost spent, as of a moment."""

    amount: float | None = None
    moment: datetime | None = None


class Meter:
    """The room under one limit, for one value of its key; this one has none."""

    used = 0.0
    """How much of the limit is taken."""

    def room(self) -> float:
        """Return how many jobs may start at most."""
        return 0

    def fits(self, cost: float) -> bool:
        """Tell whether a job of this cost may start."""
        return False

    def take(self, cost: float) -> None:
        """Note that a job of this cost starts."""

    def wait(self) -> float | None:
        """Return after how many seconds there may be room; None: when a job ends."""
        return BUSY

    def level(self, started_at: datetime) -> Level | None:
        """Return what the row is to say once the jobs have started; None: what it says."""
        return None


class ConcurrencyMeter(Meter):
    """So many permits, less those that are out."""

    def __init__(self, limit: Concurrency, live: int) -> None:
        self._room = limit.most - live
        self.used = live

    def room(self) -> float:
        return max(0, self._room)

    def fits(self, cost: float) -> bool:
        return self._room > 0

    def take(self, cost: float) -> None:
        self._room -= 1

    def wait(self) -> float | None:
        return None


class RateMeter(Meter):
    """A token bucket on the database's clock."""

    def __init__(self, limit: RateLimit, level: Level, now: datetime) -> None:
        self._rate = limit.amount / float(limit.per)  # type: ignore[arg-type]
        self._burst = float(limit.burst)
        self._before = level
        self._taken = 0
        self._held = self._tokens_at(now)
        self.used = self._burst - self._held

    def room(self) -> float:
        return math.floor(self._held - self._taken + _EPSILON)

    def fits(self, cost: float) -> bool:
        return self.room() >= 1

    def take(self, cost: float) -> None:
        self._taken += 1

    def wait(self) -> float | None:
        if self._rate == 0:
            return math.inf
        wanted = min(self._burst, max(1.0, self._rate * _STEP))
        return max(0.0, wanted - self._held + self._taken) / self._rate

    def level(self, started_at: datetime) -> Level | None:
        # As of the start and not of the decision: else two starts could be closer than that.
        moment = started_at
        if self._before.moment is not None:
            moment = max(moment, self._before.moment)
        return Level(self._tokens_at(moment) - self._taken, moment)

    def _tokens_at(self, moment: datetime) -> float:
        tokens, since = self._before.amount, self._before.moment
        if self._rate == 0:
            return 0.0
        if tokens is None or since is None:
            return self._burst
        # A clock that was set back gives nothing twice.
        passed = max(0.0, (moment - since).total_seconds())
        return min(self._burst, tokens + passed * self._rate)


class BudgetMeter(Meter):
    """What a window of fixed length allows, less what was spent in it.

    What was spent beyond it, because a job cost more than was expected, is taken from the windows
    that follow.
    """

    def __init__(self, limit: Budget, level: Level, now: datetime) -> None:
        self._amount = limit.amount
        self._period = float(limit.per)  # type: ignore[arg-type]
        self._now = now
        self._begin = begin_of_window(now, self._period)
        self._spent = 0.0
        if level.amount is not None and level.moment is not None:
            self._begin = max(self._begin, level.moment)
            windows = round((self._begin - level.moment).total_seconds() / self._period)
            over = level.amount - self._amount * windows
            self._spent = over if windows == 0 else max(0.0, over)
        self.used = self._spent

    def room(self) -> float:
        return math.inf if self._spent < self._amount else 0

    def fits(self, cost: float) -> bool:
        alone = self._spent <= 0 and cost > self._amount  # or it would never start
        return alone or self._spent + cost <= self._amount + _EPSILON

    def take(self, cost: float) -> None:
        self._spent += cost

    def correct(self, difference: float, started_at: datetime) -> None:
        """Note that a job which started then costs so much more than was expected.

        What it cost less is given back to its own window only.
        """
        if difference > 0 or started_at >= self._begin:
            self._spent += difference

    def wait(self) -> float | None:
        end = self._begin + timedelta(seconds=self._period)
        return max(0.0, (end - self._now).total_seconds())

    def level(self, started_at: datetime) -> Level:
        return Level(self._spent, self._begin)


def meter_of(limit: Limit, level: Level, live: int, now: datetime) -> Meter:
    """Return the meter of a limit, given its row, its permits that are out, and the time."""
    match limit:
        case Concurrency():
            return ConcurrencyMeter(limit, live)
        case RateLimit():
            return RateMeter(limit, level, now)
        case Budget():
            return BudgetMeter(limit, level, now)
        case _:
            raise TypeError(f"{limit!r} is not kept in the database")


def begin_of_window(moment: datetime, period: float) -> datetime:
    """Return when the window of so many seconds began that holds this moment."""
    passed = (moment - _EPOCH).total_seconds()
    return _EPOCH + timedelta(seconds=math.floor(passed / period) * period)
